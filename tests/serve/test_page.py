"""The page of the server, in a real browser."""

import copy
import math
import time
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from gpt.evaluation.copied import Copied
from gpt.generation import generate
from gpt.text.template import Template
from gpt.weights.checkpoint import RunPart
from tests.browser import marks, needs_axe
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
const shade = mark => Number(mark.style.getPropertyValue("--a"));
return current.marks.map(([mark, token]) => [token.logProbability, shade(mark)]);
"""

MOVED_WHILE_ASKING = """
follow().then(arguments[1]);
const slider = document.getElementById("moment");
slider.value = arguments[0];
slider.dispatchEvent(new Event("input"));
"""

TEMPLATE = Template(user="U{content}\n", assistant="A{content}")


@pytest.fixture
def open_page(start):
    """Serves an application, and opens its page in a browser."""
    with ExitStack() as servers:
        yield lambda app, **window: start(servers.enter_context(listening(app)), **window)


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


def test_type_generate_see_the_text(open_page):
    from selenium.webdriver import ActionChains

    trained = RunPart(
        options={"data": {"corpus": "my.txt"}}, seconds=90.0, validation={"val_bits_per_byte": 1.5}
    )
    page = open_page(new_app(trained=trained))
    count = math.ceil(MODEL.num_parameters() / 1000)
    known = "trained on my.txt · 1.5 minutes of training · 1.50 bits per byte of held-out text"
    assert page.wait_for_text("#figures") == f"{count} thousand parameters · {known}"
    assert page.browser.title == "tiny · gpt" and page.text("#model") == "tiny"
    assert "press Generate" in page.text("#empty")
    assert not page.shows("#legend") and not page.shows("#key")

    text = page.generate("Hello", 40)
    assert text.startswith("Hello") and len(text) > 20
    assert page.generate("Hello", 40) == text  # the seed repeats it
    assert "40 tokens" in page.text("#speed") and "surprising" in page.text("#legend")
    assert not page.shows("#empty")

    shades = page.run(SHADES)
    assert len(shades) > 10
    for log_probability, shade in shades:  # the less likely, the stronger
        assert shade == pytest.approx(min(1, -log_probability / math.log(1000)), abs=1e-3)

    ActionChains(page.browser).move_to_element(page.tokens()[3]).perform()
    page.wait_for("#tip")
    rows = page.text("#tip").splitlines()
    assert 5 <= len(rows) <= 6 and all(row.endswith("%") for row in rows)
    assert page.all("#tip .own")

    page.look(3)
    cells = page.all("#grid button")
    assert len(cells) == 2 * 4  # layers times heads
    cells[5].click()
    assert page.text("#which").startswith("Layer 1, head 1")
    seen = page.content("#seen")
    assert text.startswith(seen) and seen.startswith("Hello")
    assert not page.severe()  # the icon too is allowed


def test_stop_ends_the_text_and_frees_the_server(open_page):
    app = new_app(slow(0.05))
    page = open_page(app)
    page.begin("Hello", 512)
    shown = page.stop()
    page.wait(lambda: app.state.service.open_cost == 0)
    assert len(page.tokens()) == shown < 200
    assert page.text("#error") == ""


def test_an_error_is_shown_and_the_key_asked_for(open_page):
    page = open_page(new_app(api_key="secret"))
    page.wait_for_text("#error", "API key")
    assert page.shows("#key")
    page.find("#key").send_keys("secret\t")
    page.wait(lambda: page.text("#error") == "")
    assert page.generate("Hi", 5).startswith("Hi")
    assert page.text("#error") == ""
    page.find("#seed").send_keys("x")
    page.find("#generate").click()
    page.wait_for_text("#error", "seed")


def drawn_at(page, place: int) -> list:
    """What is drawn at a place of the slider; read at once, since drawing replaces the elements."""
    page.run("document.getElementById('chosen').textContent = ''")
    page.set_slider("moment", place)
    page.wait(lambda: page.content("#chosen"))
    page.wait_for_the_end()
    now, before = page.run(DRAWN), None
    while now != before:
        time.sleep(0.1)
        now, before = page.run(DRAWN), now
    return now


def test_the_slider_moves_text_shades_attention_and_point_together(open_page, run):
    page = open_page(new_app(run=run))
    page.wait_for("#training")
    served = page.generate("Hello you", 20)
    assert "served" in page.text("#when") and not page.find("#point").get_attribute("d")
    assert not page.shows("#attention")

    first, last = drawn_at(page, 0), drawn_at(page, 2)
    assert page.text("#when") == "step 16, training loss 0.35"
    assert all(before != after for before, after in zip(first, last, strict=True))
    (text, _, _, (x, y)), (last_text, _, _, (last_x, last_y)) = first, last
    assert text.startswith("Hello you") and last_text.startswith("Hello you") and served != text
    assert float(x) < float(last_x) and float(y) < float(last_y)  # the curve goes right and down
    assert drawn_at(page, 0) == first  # the same random numbers
    page.browser.execute_async_script(MOVED_WHILE_ASKING, 2)
    assert page.find("#moment").get_property("value") == "2"

    page.set_slider("moment", 3)  # the served checkpoint again
    page.wait_for_the_end()
    assert not page.shows("#attention") and not page.all("#text .token.prompt")
    assert not page.severe()


def test_the_page_follows_a_run(open_page, tmp_path):
    train(tmp_path, 1, 4)
    page = open_page(new_app(run=tmp_path))
    page.wait_for("#training")
    page.set_slider("max_tokens", 10)
    page.set_slider("moment", 1)
    page.wait_for_text("#when", "step 4,")
    train(tmp_path, 6)
    page.wait_for_text("#when", "step 6,")
    assert page.find("#moment").get_property("max") == "3"
    next(tmp_path.glob("snapshots/step-4-*")).unlink()  # thinned: the slider stays at its step
    page.wait(lambda: page.find("#moment").get_property("max") == "2")
    assert page.text("#when").startswith("step 6,")


def test_the_slider_goes_to_the_newest_step_if_its_own_and_all_later_ones_were_deleted(open_page, tmp_path):
    train(tmp_path, 1, 2, 4, 6)
    page = open_page(new_app(run=tmp_path))
    page.wait_for("#training")
    page.set_slider("max_tokens", 10)
    page.set_slider("moment", 2)
    page.wait_for_text("#when", "step 4,")
    page.wait_for_the_end()
    page.run("backend.ask = async () => ({ ...about, snapshots: [1, 2], train: [[1, 3], [2, 2]] })")
    assert page.wait_for_text("#when", "step 2,")


def test_the_keyboard_reaches_tokens_alternatives_and_heads(open_page):
    from selenium.webdriver import Keys

    page = open_page(new_app())
    page.generate("Hello", 20)

    def press(*keys):
        """Press keys, and return the element that is active then."""
        for key in keys:
            page.browser.switch_to.active_element.send_keys(key)
        return page.browser.switch_to.active_element

    tokens = page.tokens()
    page.find("#generate").send_keys(Keys.TAB)  # Stop is disabled
    assert press() == tokens[0] and page.shows("#tip")
    assert press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT) == tokens[1]
    assert len(page.all("#text .token[tabindex='0']")) == 1
    press(Keys.ESCAPE)
    assert not page.shows("#tip")
    press(Keys.ENTER)
    page.wait_for("#attention")
    cells = page.all("#grid button")
    assert press(Keys.TAB) == cells[4]  # the first head of the last layer is shown
    assert press(Keys.ARROW_UP, Keys.ARROW_RIGHT) == cells[1]
    press(Keys.SPACE)
    assert page.text("#which").startswith("Layer 0, head 1")
    assert not page.severe()


@needs_axe
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["text", "chat"])
def test_accessibility_has_no_violation(open_page, template, dark, run):
    page = open_page(new_app(run=run, template=template, trained=RunPart()), dark=dark)
    page.wait_for("#training")
    assert page.violations() == []
    page.generate("Hello", 30)
    page.look(2)
    assert page.violations() == []


def test_a_narrow_phone_needs_no_scrolling_sideways(open_page, tmp_path):
    train(tmp_path, 1, 4, 1000)
    page = open_page(new_app(run=tmp_path), width=500, height=800)
    # Chromium's windows are at least 500 wide; a phone is emulated.
    phone = {"width": 320, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    page.browser.refresh()
    text = page.generate("word " * 20, 60)
    page.look(2)
    assert len(TOKENIZER.encode(text)) > 100
    assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [320, 320]


def test_a_model_tuned_on_examples_chats_and_what_it_copies_is_underlined(open_page):
    ids = [TOKENIZER.eot, *TOKENIZER.encode("UHi\nA")]
    (written,) = generate(MODEL, [ids], max_new_tokens=30, temperature=0)
    reply = written[len(ids) :]
    if TOKENIZER.eot in reply:
        reply = reply[: reply.index(TOKENIZER.eot) + 1]
    copied = Copied(np.array(reply[:8], np.uint16), TOKENIZER, 5)

    page = open_page(new_app(template=TEMPLATE, copied=copied), width=390)
    page.wait_for("#clear")
    page.set_slider("max_tokens", 30)
    page.set_slider("temperature", 0)
    page.find("#prompt").send_keys("Hi\n")
    longest = max(end - begin for begin, end in copied.runs(reply))
    page.wait_for_text("#copied", f"of {len(reply)} tokens are copied, the longest run {longest}")
    assert page.all(".token.copied")

    first = page.content(".turn.assistant")
    page.find("#generate").click()  # without a message the last reply is written again
    page.wait_for_the_end()
    assert [turn.get_property("textContent") for turn in page.all(".turn")] == ["Hi", first]
    assert [role.text for role in page.all(".role")] == ["You", "Model"]
    page.look(0)
    assert page.content("#seen").startswith("<|endoftext|>UHi\nA")
    page.find("#clear").click()
    assert not page.all(".turn") and not page.severe()


SLOWLY = """
const ask = backend.ask.bind(backend);
backend.ask = (path, form) => new Promise(resume => setTimeout(resume, 300)).then(() => ask(path, form));
current.marks[0][0].click();
showCopied(current).then(arguments[0]);
document.getElementById("clear").click();
"""


def test_what_is_answered_after_a_new_chat_was_begun_is_not_shown(open_page):
    copied = Copied(np.zeros(20, np.uint16), TOKENIZER)
    page = open_page(new_app(template=TEMPLATE, copied=copied))
    page.wait_for("#clear")
    chatting(page, "Hi")
    page.browser.execute_async_script(SLOWLY)
    time.sleep(1)
    assert not page.shows("#attention") and page.text("#copied") == ""
    assert not page.severe()


def test_what_is_typed_into_a_chat_stays_while_other_weights_reply(open_page, run):
    page = open_page(new_app(template=TEMPLATE, run=run))
    page.wait_for("#training")
    page.set_slider("max_tokens", 10)
    page.find("#prompt").send_keys("Hi\n")
    page.wait_for_the_end()
    page.find("#prompt").send_keys("half a mess")
    page.set_slider("moment", 0)
    page.wait_for_text("#when", "step 1,")
    page.wait_for_the_end()
    assert page.find("#prompt").get_property("value") == "half a mess"
    assert [turn.get_property("textContent") for turn in page.all(".turn.user")] == ["Hi"]


def chatting(page, *messages: str) -> None:
    page.set_slider("max_tokens", 20)
    for message in messages:
        page.find("#prompt").send_keys(f"{message}\n")
        page.wait_for_the_end()


def test_a_long_chat_stays_at_its_end(open_page):
    page = open_page(new_app(template=TEMPLATE), height=500)
    page.wait_for("#clear")
    chatting(page, *["A message that takes some lines of the page" * 3] * 5)
    box = "const box = document.getElementById('text');"
    assert page.run(f"{box} return box.scrollHeight > 2 * box.clientHeight")
    assert page.run(f"{box} return box.scrollHeight - box.clientHeight - box.scrollTop") < 40


def test_a_message_without_a_reply_can_be_sent_again(open_page):
    page = open_page(new_app(template=TEMPLATE))
    page.wait_for("#clear")
    page.find("#seed").send_keys("x")  # is refused
    chatting(page, "Hi")
    page.wait_for_text("#error", "seed")
    assert page.find("#prompt").get_property("value") == "Hi"
    assert not page.all(".turn")
    page.find("#seed").clear()
    chatting(page, "")
    assert [turn.get_property("textContent") for turn in page.all(".turn.user")] == ["Hi"]
    assert len(page.all(".turn.assistant")) == 1 and page.text("#error") == ""
