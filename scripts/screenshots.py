"""Take the pictures of the page in docs/: `python scripts/screenshots.py http://127.0.0.1:8000`.

Needs a running `gpt serve`, selenium, and the Debian packages chromium and chromium-driver. Of an exported
file, `python scripts/screenshots.py file:///.../docs/demo.html`, it records the slider over the training.
"""

import argparse
import io
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

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
    if options.address.startswith("file:"):
        record(options.address, options.prompt, options.output / "demo.gif")
        return
    for name, width, height in (("page.png", 1100, 900), ("page-phone.png", 390, 844)):
        with tempfile.TemporaryDirectory() as profile, atomic_write(options.output / name, "wb") as file:
            file.write(picture(options.address, options.prompt, profile, width, height))


def record(address: str, prompt: str, path: Path) -> None:
    """An animation of the slider: what each snapshot of the training makes of the prompt."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as profile:
        browser = open_page(address, profile, 800, 900)
        try:
            browser.find_element("id", "prompt").send_keys(prompt)
            browser.execute_script("document.querySelector('.settings').style.display = 'none'")
            browser.execute_script("document.querySelector('main').style.gridTemplateColumns = '1fr'")
            while not browser.find_element("id", "training").is_displayed():
                time.sleep(0.1)
            last, frames = int(browser.find_element("id", "moment").get_property("max")), []
            for place in range(last):
                browser.execute_script(
                    "const s = document.getElementById('moment'); s.value = arguments[0];"
                    "s.dispatchEvent(new Event('input'))",
                    place,
                )
                time.sleep(0.2)
                while not browser.find_element("id", "generate").is_enabled():
                    time.sleep(0.1)
                frames.append(Image.open(io.BytesIO(browser.get_screenshot_as_png())).quantize(64))
        finally:
            browser.quit()
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=1500, loop=0, optimize=True)


def open_page(address: str, profile: str, width: int, height: int) -> Any:
    """A browser that shows an address."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for switch in (*SWITCHES.split(), f"user-data-dir={profile}"):
        options.add_argument(f"--{switch}")
    # named, or selenium looks online for one
    browser = Chrome(options, Service(shutil.which("chromedriver")))
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    browser.get(address)
    return browser


def picture(address: str, prompt: str, profile: str, width: int, height: int) -> bytes:
    """The page after a text was made and a token clicked, as a PNG."""
    from selenium.webdriver import ActionChains

    browser = open_page(address, profile, width, height)
    try:
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
