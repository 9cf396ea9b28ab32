"""The page in a real browser: Chromium and its driver, Debian's packages chromium and chromium-driver."""

import shutil
import time

import pytest

from tests.serve.server import TOKENIZER, listening, new_app, slow

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromium-driver are not installed"),
    pytest.mark.allow_hosts(["127.0.0.1", "localhost", "::1"]),
]

SWITCHES = """headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking
disable-component-update disable-sync disable-dev-shm-usage hide-scrollbars"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a browser; each width is a window of its own."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    browsers = []

    def open_(width: int, height: int):
        options = ChromeOptions()
        options.binary_location = CHROMIUM
        for switch in SWITCHES.split():
            options.add_argument(f"--{switch}")
        options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
        options.add_argument(f"--window-size={width},{height}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        browser = Chrome(options, Service(DRIVER))
        browsers.append(browser)
        return browser

    yield open_
    for browser in browsers:
        browser.quit()


def wait_for(what, seconds: float = 20):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "the page does not get there"
        time.sleep(0.05)
    return found


def find(browser, selector: str):
    return browser.find_element("css selector", selector)


def find_all(browser, selector: str):
    return browser.find_elements("css selector", selector)


def set_slider(browser, name: str, value: float) -> None:
    browser.execute_script(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('input'))",
        name,
        value,
    )


def generate(browser, prompt: str, tokens: int) -> str:
    find(browser, "#prompt").clear()
    find(browser, "#prompt").send_keys(prompt)
    set_slider(browser, "max_tokens", tokens)
    find(browser, "#generate").click()
    wait_for(lambda: find(browser, "#generate").is_enabled())
    return find(browser, "#text").get_property("textContent")


def test_type_generate_see_the_text(start):
    with listening(new_app()) as address:
        browser = start(1100, 900)
        browser.get(address)
        find(browser, "#seed").send_keys("7")
        text = generate(browser, "Hello", 40)
        assert text.startswith("Hello") and len(text) > 20
        assert generate(browser, "Hello", 40) == text  # the seed repeats it
        assert "40 tokens" in find(browser, "#speed").text
        assert find(browser, "#model").text == "tiny"
        assert not find(browser, "#key").is_displayed()

        marks = find_all(browser, "#text .token")
        shades = {mark.get_attribute("style") for mark in marks}
        assert len(shades) > 5  # by probability

        from selenium.webdriver import ActionChains

        ActionChains(browser).move_to_element(marks[3]).perform()
        wait_for(lambda: find(browser, "#tip").is_displayed())
        rows = find(browser, "#tip").text.splitlines()
        assert 5 <= len(rows) <= 6 and all(row.endswith("%") for row in rows)
        assert find_all(browser, "#tip .own")

        marks[3].click()
        wait_for(lambda: find(browser, "#attention").is_displayed())
        cells = find_all(browser, "#grid button")
        assert len(cells) == 2 * 4  # layers times heads
        cells[5].click()
        assert find(browser, "#which").text.startswith("Layer 1, head 1")
        seen = find(browser, "#seen").get_property("textContent")
        assert text.startswith(seen) and seen.startswith("Hello")
        assert not [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]


def test_stop_ends_the_text_and_frees_the_server(start):
    app = new_app(slow(0.02))
    with listening(app) as address:
        browser = start(1100, 900)
        browser.get(address)
        find(browser, "#prompt").send_keys("Hello")
        set_slider(browser, "max_tokens", 512)
        find(browser, "#generate").click()
        wait_for(lambda: len(find_all(browser, "#text .token")) > 3)
        assert not find(browser, "#generate").is_enabled()
        find(browser, "#halt").click()
        wait_for(lambda: find(browser, "#generate").is_enabled())
        shown = len(find_all(browser, "#text .token"))
        wait_for(lambda: app.state.engine.open == 0)
        assert 3 < shown < 200
        assert len(find_all(browser, "#text .token")) == shown
        assert find(browser, "#error").text == ""


def test_an_error_is_shown_and_the_key_asked_for(start):
    with listening(new_app(api_key="secret")) as address:
        browser = start(1100, 900)
        browser.get(address)
        wait_for(lambda: "API key" in find(browser, "#error").text)
        assert find(browser, "#key").is_displayed()
        find(browser, "#key").send_keys("secret")
        assert generate(browser, "Hi", 5).startswith("Hi")
        assert find(browser, "#error").text == ""
        find(browser, "#seed").send_keys("x")
        find(browser, "#generate").click()
        wait_for(lambda: "seed" in find(browser, "#error").text)


@pytest.mark.parametrize("width", [320, 390])
def test_a_phones_width_needs_no_scrolling_sideways(start, width):
    with listening(new_app()) as address:
        browser = start(500, 800)
        # Chromium's windows are at least 500 wide; a phone is emulated.
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True},
        )
        browser.get(address)
        text = generate(browser, "word " * 20, 60)
        find_all(browser, "#text .token")[2].click()
        wait_for(lambda: find(browser, "#attention").is_displayed())
        assert len(TOKENIZER.encode(text)) > 100
        assert browser.execute_script("return document.documentElement.scrollWidth") == width
        assert browser.execute_script("return innerWidth") == width
