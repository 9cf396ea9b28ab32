"""A real browser: Chromium and its driver, Debian's packages chromium and chromium-driver."""

import shutil
import time
from pathlib import Path

import pytest

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

marks = [
    pytest.mark.slow,
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


AXE = Path(__file__).parents[1] / "node_modules" / "axe-core" / "axe.min.js"  # npm install --no-save axe-core
needs_axe = pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed")


def violations(browser) -> list[str]:
    """The rules of accessibility that axe-core sees broken on the page as it is, each with an element."""
    browser.execute_script(AXE.read_text("utf-8"))
    result = browser.execute_async_script("axe.run().then(arguments[0])")
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in result["violations"]]


def set_dark(browser) -> None:
    feature = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def wait_for(what, seconds: float = 20):
    deadline = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < deadline, "the page does not get there"
        time.sleep(0.05)
    return result


def find(browser, selector: str):
    return browser.find_element("css selector", selector)


def find_all(browser, selector: str):
    return browser.find_elements("css selector", selector)


def severe(browser) -> list[str]:
    """Errors in the browser's log since it was last read."""
    return [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]


def set_slider(browser, name: str, value: float) -> None:
    browser.execute_script(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('input'))",
        name,
        value,
    )


def begin(browser, prompt: str, tokens: int) -> None:
    """Let it write, with a seed: one in a hundred random texts ends within four tokens."""
    for field, value in (("#prompt", prompt), ("#seed", "7")):
        find(browser, field).clear()
        find(browser, field).send_keys(value)
    set_slider(browser, "max_tokens", tokens)
    find(browser, "#generate").click()


def generate(browser, prompt: str, tokens: int) -> str:
    begin(browser, prompt, tokens)
    wait_for(lambda: find(browser, "#generate").is_enabled())
    return find(browser, "#text").get_property("textContent")
