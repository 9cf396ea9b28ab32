"""Take the pictures of the page in docs/: `python scripts/screenshots.py http://127.0.0.1:8000`.

Needs a running `gpt serve`, selenium, and the Debian packages chromium and chromium-driver.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from gpt.files import atomic_write

SWITCHES = """headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking
disable-component-update disable-sync hide-scrollbars"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", help="where gpt serve listens")
    parser.add_argument("--prompt", default="Return the ", help="what is typed in")
    parser.add_argument("--output", type=Path, default=Path("docs"), help="the folder for the pictures")
    options = parser.parse_args()
    for name, width, height in (("page.png", 1100, 900), ("page-phone.png", 390, 844)):
        with tempfile.TemporaryDirectory() as profile, atomic_write(options.output / name, "wb") as file:
            file.write(picture(options.address, options.prompt, profile, width, height))


def picture(address: str, prompt: str, profile: str, width: int, height: int) -> bytes:
    """The page after a text was made and a token clicked, as a PNG."""
    from selenium.webdriver import ActionChains, Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for switch in (*SWITCHES.split(), f"user-data-dir={profile}"):
        options.add_argument(f"--{switch}")
    browser = Chrome(
        options, Service(shutil.which("chromedriver"))
    )  # named, or selenium looks online for one
    try:
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        browser.get(address)
        browser.find_element("id", "prompt").send_keys(prompt)
        browser.find_element("id", "seed").send_keys("1")
        browser.find_element("id", "generate").click()
        while not browser.find_element("id", "generate").is_enabled():
            time.sleep(0.1)
        tokens = browser.find_elements("css selector", "#text .token")
        browser.execute_script("arguments[0].click()", tokens[30])
        while not browser.find_element("id", "attention").is_displayed():
            time.sleep(0.1)
        ActionChains(browser).move_to_element(tokens[12]).perform()
        time.sleep(0.3)
        size = browser.execute_script("return document.documentElement.scrollHeight")
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": size, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        browser.execute_script("scrollTo(0, 0)")
        ActionChains(browser).move_to_element(tokens[12]).perform()
        time.sleep(0.3)
        return browser.get_screenshot_as_png()
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
