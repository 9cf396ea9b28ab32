"""Record the slider of an exported page, docs/demo.gif: `python scripts/screenshots.py docs/demo.html`.

Needs selenium, and the Debian packages chromium and chromium-driver.
"""

import argparse
import io
import shutil
import tempfile
import time
from pathlib import Path

SWITCHES = """headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking
disable-component-update disable-sync hide-scrollbars"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="a file that gpt export --format html wrote")
    parser.add_argument("--prompt", default="Return the ", help="what is typed in")
    parser.add_argument("--output", type=Path, default=Path("docs/demo.gif"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile:
        record(options.page.resolve().as_uri(), options.prompt, options.output, profile)


def record(address: str, prompt: str, path: Path, profile: str) -> None:
    """What each snapshot of the training makes of the prompt."""
    from PIL import Image
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for switch in (*SWITCHES.split(), "window-size=800,900", f"user-data-dir={profile}"):
        options.add_argument(f"--{switch}")
    # named, or selenium looks online for one
    with Chrome(options, Service(shutil.which("chromedriver"))) as browser:
        browser.get(address)
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
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=1500, loop=0, optimize=True)


if __name__ == "__main__":
    main()
