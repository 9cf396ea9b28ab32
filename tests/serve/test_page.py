"""The page of the server, in a real browser."""

import copy
import math
import time

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


def test_type_generate_see_the_text(start):
    with listening(new_app()) as address:
        browser = start(1100, 900)
        browser.get(address)
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
        assert not severe(browser)


def test_stop_ends_the_text_and_frees_the_server(start):
    app = new_app(slow(0.05))
    with listening(app) as address:
        browser = start(1100, 900)
        browser.get(address)
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


def trained(run, *steps: int) -> None:
    """Snapshots that differ more from the first model with each step."""
    for step in steps:
        model = copy.deepcopy(MODEL)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight += torch.randn(weight.shape, generator=generator) * weight.std() * step / 8
        add_snapshot(run, step, model, TOKENIZER, 6 / (1 + step))


def test_the_slider_moves_text_shades_attention_and_point_together(start, tmp_path):
    trained(tmp_path, 1, 4, 16)
    with listening(new_app(run=tmp_path)) as address:
        browser = start(1100, 1000)
        browser.get(address)
        wait_for(lambda: find(browser, "#training").is_displayed())
        served = generate(browser, "Hello you", 20)
        assert "served" in find(browser, "#when").text and not find(browser, "#point").get_attribute("d")
        assert not find(browser, "#attention").is_displayed()

        def state() -> list:
            """What is drawn, when it no longer changes; read at once, since drawing replaces the elements."""
            found, before = browser.execute_script(DRAWN), None
            while found != before:
                time.sleep(0.1)
                found, before = browser.execute_script(DRAWN), found
            return found

        def at(place: int) -> list:
            browser.execute_script("document.getElementById('chosen').textContent = ''")
            set_slider(browser, "moment", place)
            wait_for(lambda: find(browser, "#chosen").get_property("textContent"))
            wait_for(lambda: find(browser, "#generate").is_enabled())
            return state()

        first, last = at(0), at(2)
        assert find(browser, "#when").text == "step 16, training loss 0.35"
        for one, other in zip(first, last, strict=True):
            assert one != other
        assert first[0].startswith("Hello you") and last[0].startswith("Hello you") and served != first[0]
        assert float(first[3][0]) < float(last[3][0]) and float(first[3][1]) < float(last[3][1])  # down
        assert at(0) == first  # the same random numbers
        browser.execute_async_script(MOVED_WHILE_ASKING, 2)
        assert find(browser, "#moment").get_property("value") == "2"

        set_slider(browser, "moment", 3)  # the served checkpoint again
        wait_for(lambda: find(browser, "#generate").is_enabled())
        assert not find(browser, "#attention").is_displayed()
        assert not find_all(browser, "#text .token.prompt")
        assert not severe(browser)


def test_the_page_follows_a_run(start, tmp_path):
    trained(tmp_path, 1, 4)
    with listening(new_app(run=tmp_path)) as address:
        browser = start(1100, 1000)
        browser.get(address)
        wait_for(lambda: find(browser, "#training").is_displayed())
        set_slider(browser, "max_tokens", 10)
        set_slider(browser, "moment", 1)
        wait_for(lambda: find(browser, "#when").text.startswith("step 4,"))
        trained(tmp_path, 1, 4, 6)
        wait_for(lambda: find(browser, "#when").text.startswith("step 6,"))
        assert find(browser, "#moment").get_property("max") == "3"
        next(tmp_path.glob("snapshots/step-4-*")).unlink()  # thinned: the slider stays at its step
        wait_for(lambda: find(browser, "#moment").get_property("max") == "2")
        assert find(browser, "#when").text.startswith("step 6,")


def test_the_page_names_the_model_its_figures_and_what_to_do(start):
    trained = RunPart(
        options={"data": {"corpus": "my.txt"}}, seconds=90.0, validation={"val_bits_per_byte": 1.5}
    )
    with listening(new_app(trained=trained)) as address:
        browser = start(1100, 900)
        browser.get(address)
        figures = wait_for(lambda: find(browser, "#figures").text)
        count = math.ceil(MODEL.num_parameters() / 1000)
        known = "trained on my.txt · 1.5 minutes of training · 1.50 bits per byte of held-out text"
        assert figures == f"{count} thousand parameters · {known}"
        assert browser.title == "tiny · gpt"
        assert (
            "press Generate" in find(browser, "#empty").text and not find(browser, "#legend").is_displayed()
        )
        generate(browser, "Hello", 10)
        assert not find(browser, "#empty").is_displayed() and "surprising" in find(browser, "#legend").text
        assert not severe(browser)  # the icon too is allowed


def test_a_less_likely_token_has_a_stronger_shade(start):
    with listening(new_app()) as address:
        browser = start(1100, 900)
        browser.get(address)
        generate(browser, "Hello", 40)
        pairs = browser.execute_script(SHADES)
        for log_probability, shade in pairs:
            assert shade == pytest.approx(min(1, -log_probability / math.log(1000)), abs=1e-3)
        assert len(pairs) > 10


def test_the_keyboard_reaches_tokens_alternatives_and_heads(start):
    from selenium.webdriver import Keys

    with listening(new_app()) as address:
        browser = start(1100, 900)
        browser.get(address)
        generate(browser, "Hello", 20)
        active = lambda: browser.switch_to.active_element  # noqa: E731
        tokens = find_all(browser, "#text .token")
        find(browser, "#generate").send_keys(Keys.TAB)  # Stop is disabled
        assert active() == tokens[0] and find(browser, "#tip").is_displayed()
        active().send_keys(Keys.ARROW_RIGHT)
        active().send_keys(Keys.ARROW_RIGHT)
        active().send_keys(Keys.ARROW_LEFT)
        assert active() == tokens[1] and len(find_all(browser, "#text .token[tabindex='0']")) == 1
        active().send_keys(Keys.ESCAPE)
        assert not find(browser, "#tip").is_displayed()
        active().send_keys(Keys.ENTER)
        wait_for(lambda: find(browser, "#attention").is_displayed())
        active().send_keys(Keys.TAB)
        cells = find_all(browser, "#grid button")
        assert active() == cells[4]  # the first head of the last layer is shown
        active().send_keys(Keys.ARROW_UP)
        active().send_keys(Keys.ARROW_RIGHT)
        assert active() == cells[1]
        active().send_keys(Keys.SPACE)
        assert find(browser, "#which").text.startswith("Layer 0, head 1")
        assert not severe(browser)


@needs_axe
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_accessibility_has_no_violation(start, chat, dark, tmp_path):
    trained(tmp_path, 1, 4, 16)
    template = Template(user="U{content}\n", assistant="A{content}") if chat else None
    with listening(new_app(run=tmp_path, template=template, trained=RunPart())) as address:
        browser = start(1100, 900)
        if dark:
            set_dark(browser)
        browser.get(address)
        wait_for(lambda: find(browser, "#training").is_displayed())
        assert violations(browser) == []
        generate(browser, "Hello", 30)
        find_all(browser, "#text .token")[2].click()
        wait_for(lambda: find(browser, "#attention").is_displayed())
        assert violations(browser) == []


@pytest.mark.parametrize("width", [320, 360, 390])
def test_a_phones_width_needs_no_scrolling_sideways(start, width, tmp_path):
    trained(tmp_path, 1, 4, 1000)
    with listening(new_app(run=tmp_path)) as address:
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


def test_a_model_tuned_on_examples_chats_and_what_it_copies_is_underlined(start):
    template = Template(user="U{content}\n", assistant="A{content}")
    ids = TOKENIZER.encode("UHi\nA")
    (reply,) = gpt_generate(MODEL, [[TOKENIZER.eot, *ids]], max_new_tokens=30, temperature=0)
    reply = reply[1 + len(ids) :]
    reply = reply[: reply.index(TOKENIZER.eot) + 1] if TOKENIZER.eot in reply else reply
    copied = Copied(np.array(reply[:8], np.uint16), TOKENIZER, 5)
    with listening(new_app(template=template, copied=copied)) as address:
        browser = start(390, 900)
        browser.get(address)
        wait_for(lambda: find(browser, "#clear").is_displayed())
        set_slider(browser, "max_tokens", 30)
        set_slider(browser, "temperature", 0)
        find(browser, "#prompt").send_keys("Hi\n")
        wait_for(lambda: find(browser, "#copied").text)
        runs = copied.runs(reply)
        longest = max(end - begin for begin, end in runs)
        assert (
            f"of {len(reply)} tokens are copied, the longest run {longest}" in find(browser, "#copied").text
        )
        assert find_all(browser, ".token.copied")
        first = find(browser, ".turn.assistant").get_property("textContent")
        find(browser, "#generate").click()  # without a message the last reply is written again
        wait_for(lambda: find(browser, "#generate").is_enabled())
        turns = [turn.get_property("textContent") for turn in find_all(browser, ".turn")]
        assert turns == ["Hi", first]
        assert [role.text for role in find_all(browser, ".role")] == ["You", "Model"]
        assert not severe(browser)
