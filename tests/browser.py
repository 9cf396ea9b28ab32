"""The page in a real browser: Chromium and its driver, Debian's packages chromium and chromium-driver."""

from pathlib import Path

import pytest
from screenshots import CHROMIUM, DRIVER, open_browser

selenium = pytest.importorskip("selenium", reason="selenium is not installed")

marks = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromium-driver are not installed"),
    pytest.mark.allow_hosts(["127.0.0.1", "localhost", "::1"]),
]

AXE = Path(__file__).parents[1] / "node_modules" / "axe-core" / "axe.min.js"  # npm install --no-save axe-core
needs_axe = pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed")


class Page:
    """The page in a window. Elements are found by their CSS selectors."""

    def __init__(self, browser) -> None:
        self.browser = browser
        self.run = browser.execute_script

    def find(self, selector: str):
        return self.browser.find_element("css selector", selector)

    def all(self, selector: str):
        return self.browser.find_elements("css selector", selector)

    def tokens(self):
        return self.all("#text .token")

    def shows(self, selector: str) -> bool:
        return self.find(selector).is_displayed()

    def text(self, selector: str) -> str:
        """What is displayed of an element's text."""
        return self.find(selector).text

    def content(self, selector: str) -> str:
        """All of an element's text, with its blanks."""
        return self.find(selector).get_property("textContent")

    def wait(self, what):
        """The first true value of what is called again and again."""
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.browser, 20, 0.05).until(lambda _: what())

    def wait_for(self, selector: str) -> None:
        self.wait(lambda: self.shows(selector))

    def wait_for_text(self, selector: str, part: str = "") -> str:
        """The text of an element, as soon as it has one with this part."""
        return self.wait(lambda: part in self.text(selector) and self.text(selector))

    def wait_for_the_end(self) -> None:
        """Until nothing is being written."""
        self.wait(lambda: self.find("#generate").is_enabled())

    def set_slider(self, name: str, value: float) -> None:
        self.run(
            "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event('input'))",
            name,
            value,
        )

    def begin(self, prompt: str, tokens: int) -> None:
        """Let it write, with a seed: one in a hundred random texts ends within four tokens."""
        for field, value in (("#prompt", prompt), ("#seed", "7")):
            self.find(field).clear()
            self.find(field).send_keys(value)
        self.set_slider("max_tokens", tokens)
        self.find("#generate").click()

    def generate(self, prompt: str, tokens: int) -> str:
        """Let it write, and return the text."""
        self.begin(prompt, tokens)
        self.wait_for_the_end()
        return self.content("#text")

    def stop(self) -> int:
        """Press Stop while it writes, and return how many tokens there are."""
        self.wait(lambda: len(self.tokens()) > 3)
        assert not self.find("#generate").is_enabled()
        self.find("#halt").click()
        self.wait_for_the_end()
        return len(self.tokens())

    def look(self, token: int) -> None:
        """Show the attention of a token of the text."""
        self.tokens()[token].click()
        self.wait_for("#attention")

    def severe(self) -> list[str]:
        """Errors in the browser's log since it was last read."""
        return [line["message"] for line in self.browser.get_log("browser") if line["level"] == "SEVERE"]

    def violations(self) -> list[str]:
        """The rules of accessibility that axe-core sees broken on the page as it is, each with an element."""
        self.run(AXE.read_text("utf-8"))
        result = self.browser.execute_async_script("axe.run().then(arguments[0])")
        return [f"{one['id']}: {one['nodes'][0]['html']}" for one in result["violations"]]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Opens an address in a browser; each is a window of its own."""
    browsers = []

    def open_(address: str, width: int = 1100, height: int = 1000, dark: bool = False) -> Page:
        browser = open_browser(tmp_path_factory.mktemp("profile"), width, height)
        browsers.append(browser)
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [colours]})
        browser.get(address)
        return Page(browser)

    yield open_
    for browser in browsers:
        browser.quit()
