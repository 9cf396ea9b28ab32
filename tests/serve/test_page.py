"""The page of the server, in a real browser."""

import copy
import math
import time
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from gpt.evaluation.copied import Copied
from gpt.generation import generate as gpt_generate
from gpt.text.template import Template
from gpt.weights.checkpoint import RunPart
from tests.browser import (
    begin,
    find,
    find_all,
    generate,
    marks,
    needs_axe,
    set_dark,
    set_slider,
    severe,
    violations,
    wait_for,
)
from tests.serve.server import MODEL, TOKENIZER, listening, new_app, slow
from tests.snapshots import add_snapshot

pytestmark = marks

DRAWN = """
const styles = (selector) => [...document.querySelectorAll(selector)].map((one) => one.getAttribute("style"));
return [
  document.querySelector("#text").textContent, styles("#text .token"), styles("#grid button"),
  document.querySelector("#point").getAttribute("d").slice(1, -2).split(" "),
];
"""

SHADES = """
return text.marks.map(([mark, token]) => [token.logProbability, Number(mark.style.getPropertyValue("--a"))]);
"""

MOVED_WHILE_ASKING = """
follow().then(arguments[1]);
const slider = document.getElementById("moment");
slider.value = arguments[0];
slider.dispatchEvent(new Event("input"));
"""

TEMPLATE = Template(user="U{content}\n", assistant="A{content}")


@pytest.fixture
def page(start):
    """Serves an application, and opens its page in a browser."""
    with ExitStack() as servers:

        def opened(app, width: int = 1100, height: int = 900, dark: bool = False):
            address = servers.enter_context(listening(app))
            browser = start(width, height)
            if dark:
                set_dark(browser)
            browser.get(address)
            return browser

        yield opened


@pytest.fixture
def run(tmp_path):
    """A run with snapshots of three steps."""
    train(tmp_path, 1, 4, 16)
    return tmp_path


def train(run, *steps: int) -> None:
    """Add snapshots that differ more from the first model with each step."""
    for step in steps:
        model = copy.deepcopy(MODEL)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight += torch.randn(weight.shape, generator=generator) * weight.std() * step / 8
        add_snapshot(run, step, model, TOKENIZER, 6 / (1 + step))


def text_of(browser, selector: str) -> str:
    return find(browser, selector).get_property("textContent")


def look(browser, token: int) -> None:
    """Show the attention of a token of the text."""
    find_all(browser, "#text .token")[token].click()
    wait_for(lambda: find(browser, "#attention").is_displayed())


def test_type_generate_see_the_text(page):
    from selenium.webdriver import ActionChains

    browser = page(new_app())
    text = generate(browser, "Hello", 40)
    assert text.startswith("Hello") and len(text) > 20
    assert generate(browser, "Hello", 40) == text  # the seed repeats it
    assert "40 tokens" in find(browser, "#speed").text
    assert find(browser, "#model").text == "tiny"
    assert not find(browser, "#key").is_displayed()

    shades = browser.execute_script(SHADES)
    assert len(shades) > 10
    for log_probability, shade in shades:  # the less likely, the stronger
        assert shade == pytest.approx(min(1, -log_probability / math.log(1000)), abs=1e-3)

    ActionChains(browser).move_to_element(find_all(browser, "#text .token")[3]).perform()
    wait_for(lambda: find(browser, "#tip").is_displayed())
    rows = find(browser, "#tip").text.splitlines()
    assert 5 <= len(rows) <= 6 and all(row.endswith("%") for row in rows)
    assert find_all(browser, "#tip .own")

    look(browser, 3)
    cells = find_all(browser, "#grid button")
    assert len(cells) == 2 * 4  # layers times heads
    cells[5].click()
    assert find(browser, "#which").text.startswith("Layer 1, head 1")
    seen = text_of(browser, "#seen")
    assert text.startswith(seen) and seen.startswith("Hello")
    assert not severe(browser)


def test_stop_ends_the_text_and_frees_the_server(page):
    app = new_app(slow(0.05))
    browser = page(app)
    begin(browser, "Hello", 512)
    wait_for(lambda: len(find_all(browser, "#text .token")) > 3)
    assert not find(browser, "#generate").is_enabled()
    find(browser, "#halt").click()
    wait_for(lambda: find(browser, "#generate").is_enabled())
    shown = len(find_all(browser, "#text .token"))
    wait_for(lambda: app.state.service.cost == 0)
    assert 3 < shown < 200
    assert len(find_all(browser, "#text .token")) == shown
    assert find(browser, "#error").text == ""


def test_an_error_is_shown_and_the_key_asked_for(page):
    browser = page(new_app(api_key="secret"))
    wait_for(lambda: "API key" in find(browser, "#error").text)
    assert find(browser, "#key").is_displayed()
    find(browser, "#key").send_keys("secret")
    assert generate(browser, "Hi", 5).startswith("Hi")
    assert find(browser, "#error").text == ""
    find(browser, "#seed").send_keys("x")
    find(browser, "#generate").click()
    wait_for(lambda: "seed" in find(browser, "#error").text)


def settled(browser) -> list:
    """What is drawn, when it no longer changes; read at once, since drawing replaces the elements."""
    now, before = browser.execute_script(DRAWN), None
    while now != before:
        time.sleep(0.1)
        now, before = browser.execute_script(DRAWN), now
    return now


def drawn_at(browser, place: int) -> list:
    """What is drawn at a place of the slider."""
    browser.execute_script("document.getElementById('chosen').textContent = ''")
    set_slider(browser, "moment", place)
    wait_for(lambda: text_of(browser, "#chosen"))
    wait_for(lambda: find(browser, "#generate").is_enabled())
    return settled(browser)


def test_the_slider_moves_text_shades_attention_and_point_together(page, run):
    browser = page(new_app(run=run), height=1000)
    wait_for(lambda: find(browser, "#training").is_displayed())
    served = generate(browser, "Hello you", 20)
    assert "served" in find(browser, "#when").text and not find(browser, "#point").get_attribute("d")
    assert not find(browser, "#attention").is_displayed()

    first, last = drawn_at(browser, 0), drawn_at(browser, 2)
    assert find(browser, "#when").text == "step 16, training loss 0.35"
    assert all(before != after for before, after in zip(first, last, strict=True))
    (text, _, _, (x, y)), (last_text, _, _, (last_x, last_y)) = first, last
    assert text.startswith("Hello you") and last_text.startswith("Hello you") and served != text
    assert float(x) < float(last_x) and float(y) < float(last_y)  # the curve goes right and down
    assert drawn_at(browser, 0) == first  # the same random numbers
    browser.execute_async_script(MOVED_WHILE_ASKING, 2)
    assert find(browser, "#moment").get_property("value") == "2"

    set_slider(browser, "moment", 3)  # the served checkpoint again
    wait_for(lambda: find(browser, "#generate").is_enabled())
    assert not find(browser, "#attention").is_displayed()
    assert not find_all(browser, "#text .token.prompt")
    assert not severe(browser)


def test_the_page_follows_a_run(page, tmp_path):
    train(tmp_path, 1, 4)
    browser = page(new_app(run=tmp_path), height=1000)
    wait_for(lambda: find(browser, "#training").is_displayed())
    set_slider(browser, "max_tokens", 10)
    set_slider(browser, "moment", 1)
    wait_for(lambda: find(browser, "#when").text.startswith("step 4,"))
    train(tmp_path, 6)
    wait_for(lambda: find(browser, "#when").text.startswith("step 6,"))
    assert find(browser, "#moment").get_property("max") == "3"
    next(tmp_path.glob("snapshots/step-4-*")).unlink()  # thinned: the slider stays at its step
    wait_for(lambda: find(browser, "#moment").get_property("max") == "2")
    assert find(browser, "#when").text.startswith("step 6,")


def test_the_page_names_the_model_its_figures_and_what_to_do(page):
    trained = RunPart(
        options={"data": {"corpus": "my.txt"}}, seconds=90.0, validation={"val_bits_per_byte": 1.5}
    )
    browser = page(new_app(trained=trained))
    figures = wait_for(lambda: find(browser, "#figures").text)
    count = math.ceil(MODEL.num_parameters() / 1000)
    known = "trained on my.txt · 1.5 minutes of training · 1.50 bits per byte of held-out text"
    assert figures == f"{count} thousand parameters · {known}"
    assert browser.title == "tiny · gpt"
    assert "press Generate" in find(browser, "#empty").text and not find(browser, "#legend").is_displayed()
    generate(browser, "Hello", 10)
    assert not find(browser, "#empty").is_displayed() and "surprising" in find(browser, "#legend").text
    assert not severe(browser)  # the icon too is allowed


def test_the_keyboard_reaches_tokens_alternatives_and_heads(page):
    from selenium.webdriver import Keys

    browser = page(new_app())
    generate(browser, "Hello", 20)
    tokens = find_all(browser, "#text .token")

    def active():
        return browser.switch_to.active_element

    def press(*keys):
        for key in keys:
            active().send_keys(key)

    find(browser, "#generate").send_keys(Keys.TAB)  # Stop is disabled
    assert active() == tokens[0] and find(browser, "#tip").is_displayed()
    press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert active() == tokens[1] and len(find_all(browser, "#text .token[tabindex='0']")) == 1
    press(Keys.ESCAPE)
    assert not find(browser, "#tip").is_displayed()
    press(Keys.ENTER)
    wait_for(lambda: find(browser, "#attention").is_displayed())
    press(Keys.TAB)
    cells = find_all(browser, "#grid button")
    assert active() == cells[4]  # the first head of the last layer is shown
    press(Keys.ARROW_UP, Keys.ARROW_RIGHT)
    assert active() == cells[1]
    press(Keys.SPACE)
    assert find(browser, "#which").text.startswith("Layer 0, head 1")
    assert not severe(browser)


@needs_axe
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["text", "chat"])
def test_accessibility_has_no_violation(page, template, dark, run):
    browser = page(new_app(run=run, template=template, trained=RunPart()), dark=dark)
    wait_for(lambda: find(browser, "#training").is_displayed())
    assert violations(browser) == []
    generate(browser, "Hello", 30)
    look(browser, 2)
    assert violations(browser) == []


@pytest.mark.parametrize("width", [320, 390])
def test_a_phones_width_needs_no_scrolling_sideways(page, width, tmp_path):
    train(tmp_path, 1, 4, 1000)
    browser = page(new_app(run=tmp_path), 500, 800)
    # Chromium's windows are at least 500 wide; a phone is emulated.
    phone = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    browser.refresh()
    text = generate(browser, "word " * 20, 60)
    look(browser, 2)
    assert len(TOKENIZER.encode(text)) > 100
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    assert browser.execute_script("return innerWidth") == width


def test_a_model_tuned_on_examples_chats_and_what_it_copies_is_underlined(page):
    ids = [TOKENIZER.eot, *TOKENIZER.encode("UHi\nA")]
    (written,) = gpt_generate(MODEL, [ids], max_new_tokens=30, temperature=0)
    reply = written[len(ids) :]
    if TOKENIZER.eot in reply:
        reply = reply[: reply.index(TOKENIZER.eot) + 1]
    copied = Copied(np.array(reply[:8], np.uint16), TOKENIZER, 5)

    browser = page(new_app(template=TEMPLATE, copied=copied), width=390)
    wait_for(lambda: find(browser, "#clear").is_displayed())
    set_slider(browser, "max_tokens", 30)
    set_slider(browser, "temperature", 0)
    find(browser, "#prompt").send_keys("Hi\n")
    summary = wait_for(lambda: find(browser, "#copied").text)
    longest = max(end - begin for begin, end in copied.runs(reply))
    assert f"of {len(reply)} tokens are copied, the longest run {longest}" in summary
    assert find_all(browser, ".token.copied")

    first = text_of(browser, ".turn.assistant")
    find(browser, "#generate").click()  # without a message the last reply is written again
    wait_for(lambda: find(browser, "#generate").is_enabled())
    assert [turn.get_property("textContent") for turn in find_all(browser, ".turn")] == ["Hi", first]
    assert [role.text for role in find_all(browser, ".role")] == ["You", "Model"]
    find(browser, ".turn.assistant .token").click()
    wait_for(lambda: find(browser, "#attention").is_displayed())
    assert text_of(browser, "#seen").startswith("<|endoftext|>UHi\nA")
    find(browser, "#clear").click()
    assert not find_all(browser, ".turn") and not severe(browser)
