"""Take a picture of a page with a model, `python scripts/screenshots.py http://127.0.0.1:8000` or `file:///...`.

Needs selenium, and the Debian packages chromium and chromium-driver. docs/page.png shows a text, a token's
alternatives, and the attention of the head and the token where one earlier token has the largest weight. With
`--slider`, docs/demo.gif shows what each moment of the training makes of the prompt.
"""

import argparse
import io
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from gpt.files import atomic_write

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
SWITCHES = """headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking
disable-component-update disable-sync disable-dev-shm-usage hide-scrollbars"""
SLIDE = """
const slider = document.getElementById("moment");
slider.value = arguments[0];
slider.dispatchEvent(new Event("input"));
"""
# Leaves the curve, the slider and the text, in a size that can be read.
ONLY_TRAINING = """
const hide = (element) => { element.style.display = "none"; };
document.querySelectorAll(".settings, header, #legend, #empty").forEach(hide);
hide(document.getElementById("prompt").closest("section"));
document.querySelector("main").style.gridTemplateColumns = "1fr";
document.getElementById("curve").style.height = "60px";
document.getElementById("text").style.fontSize = "17px";
"""
FRAME_MS = 3000
"""How long a frame of the animation is shown: long enough to read its text."""
SHORT = """
const slider = document.getElementById("max_tokens");
slider.value = 64;
slider.dispatchEvent(new Event("input"));
"""
# Chooses the head and the token, and returns its mark.
CHOOSE = """
const done = arguments[0];
(async () => {
  let best = [0];
  for (const [mark, token] of current.marks) {
    const { weights } = await backend.ask("attention", attentionForm(current, token));
    weights.forEach((layer, l) => layer.forEach((head, h) => {
      const most = Math.max(0, ...head.slice(1, -2));
      if (most > best[0]) best = [most, mark, [l, h]];
    }));
  }
  place = best[2];
  done(best[1]);
})();
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", help="of a server, or of an exported file")
    parser.add_argument("--prompt", default="Return the ", help="what is typed in")
    parser.add_argument("--slider", action="store_true", help="record the slider over the training")
    parser.add_argument("--output", type=Path, default=Path("docs"), help="the folder for the picture")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile:
        size = (800, 450) if options.slider else (1100, 900)
        browser = open_browser(Path(profile), *size)
        try:
            emulate(browser, *size)
            browser.get(options.address)
            browser.find_element("id", "prompt").send_keys(options.prompt)
            if options.slider:
                record(browser, options.output / "demo.gif")
            else:
                picture(browser, options.output / "page.png")
        finally:
            browser.quit()


def record(browser: Any, path: Path) -> None:
    """Write an animation of the slider."""
    from PIL import Image

    browser.execute_script(ONLY_TRAINING)
    browser.execute_script(SHORT)
    wait(browser.find_element("id", "training").is_displayed)
    frames = []
    for place in range(int(browser.find_element("id", "moment").get_property("max")) + 1):
        browser.execute_script(SLIDE, place)
        time.sleep(0.2)
        wait(browser.find_element("id", "generate").is_enabled)
        frames.append(Image.open(io.BytesIO(browser.get_screenshot_as_png())).quantize(64))
    how = {"save_all": True, "append_images": frames[1:], "duration": FRAME_MS, "loop": 0, "optimize": True}
    with atomic_write(path, "wb") as file:
        frames[0].save(file, "GIF", **how)


def picture(browser: Any, path: Path) -> None:
    """Write the page after a text was made and a token chosen, as a PNG."""
    from selenium.webdriver import ActionChains

    browser.find_element("id", "seed").send_keys("1")
    browser.execute_script(SHORT)
    browser.find_element("id", "generate").click()
    wait(browser.find_element("id", "generate").is_enabled)
    browser.set_script_timeout(120)
    browser.execute_script("arguments[0].click()", browser.execute_async_script(CHOOSE))
    wait(browser.find_element("id", "attention").is_displayed)
    size = browser.execute_script("return document.documentElement.scrollHeight")
    emulate(browser, 1100, size)
    browser.execute_script("scrollTo(0, 0)")
    tokens = browser.find_elements("css selector", "#text .token")
    ActionChains(browser).move_to_element(tokens[12]).perform()
    time.sleep(0.3)
    with atomic_write(path, "wb") as file:
        file.write(browser.get_screenshot_as_png())


def wait(condition: Any) -> None:
    """Wait until something on the page is so."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "the page does not get there"
        time.sleep(0.1)


def open_browser(profile: Path, width: int, height: int) -> Any:
    """A window of Chromium, whose errors are logged. Tests of the page use it too."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for switch in (*SWITCHES.split(), f"user-data-dir={profile}", f"window-size={width},{height}"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return Chrome(options, Service(DRIVER))  # named, or selenium looks online for one


def emulate(browser: Any, width: int, height: int) -> None:
    """Give the page so many pixels."""
    sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)


if __name__ == "__main__":
    main()
