"""An exported file, opened from the disk in a real browser."""

import time

import pytest

from gpt import GPTConfig, Tokenizer
from gpt.text.template import Template
from gpt.weights.checkpoint import snapshots_of
from tests.browser import begin, find, find_all, generate, marks, set_slider, severe, wait_for
from tests.generation.conftest import sharp
from tests.serve.server import MODEL, TOKENIZER
from tests.share.node import export, needs_node, run
from tests.snapshots import add_snapshot

pytestmark = marks
FORM = {"top_k": 50, "temperature": 0.8, "seed": 7, "max_tokens": 40}


@pytest.fixture
def opened(start, tmp_path):
    """Opens a file from the disk."""

    def open_(path, height: int = 900):
        browser = start(1100, height)
        browser.get(path.as_uri())
        return browser

    return open_


@needs_node
def test_it_writes_with_alternatives_attention_and_slider(opened, tmp_path):
    for step in (1, 4, 16):
        add_snapshot(tmp_path / "run", step, sharp(MODEL.config, seed=step), TOKENIZER, 6 / step)
    path = export(tmp_path / "it.html", MODEL, TOKENIZER, snapshots=snapshots_of(tmp_path / "run"))
    (expected,) = run(path, ["text", {**FORM, "prompt": "Hello"}])
    browser = opened(path, height=1000)
    text = generate(browser, "Hello", 40)
    assert text == "Hello" + "".join(choice["text"] for choice in expected)
    assert find(browser, "#model").text == "tiny" and not find(browser, "#progress").is_displayed()

    find_all(browser, "#text .token")[3].click()
    wait_for(lambda: find(browser, "#attention").is_displayed())
    assert find(browser, "#seen").get_property("textContent").startswith("Hello")
    assert len(find(browser, "#tip").text.splitlines()) >= 5
    assert find(browser, "#when").text == "the model in this file"

    texts = set()
    for place, step in enumerate((1, 4, 16)):
        set_slider(browser, "moment", place)
        wait_for(lambda step=step: find(browser, "#when").text.startswith(f"step {step}, training loss"))
        wait_for(
            lambda: find(browser, "#generate").is_enabled() and find(browser, "#point").get_attribute("d")
        )
        texts.add(find(browser, "#text").get_property("textContent"))
    assert len(texts) == 3 and all(text.startswith("Hello") for text in texts)
    assert not severe(browser)


LONGEST_WAIT = """
const done = arguments[0];
let longest = 0, before = performance.now(), left = 20;
const tick = () => {
  const now = performance.now();
  longest = Math.max(longest, now - before);
  before = now;
  left-- ? setTimeout(tick, 10) : done(longest);
};
tick();
"""


def test_it_answers_while_it_writes_and_stops(opened, tmp_path):
    large = GPTConfig(vocab_size=257, context_length=512, emb_dim=256, num_heads=4, num_layers=16)
    browser = opened(export(tmp_path / "it.html", sharp(large), TOKENIZER, precision="int8"))
    begin(browser, "Hello", 512)
    wait_for(lambda: len(find_all(browser, "#text .token")) > 3)
    longest = browser.execute_async_script(LONGEST_WAIT)
    assert not find(browser, "#generate").is_enabled() and longest < 2000  # milliseconds: it is drawing
    find(browser, "#halt").click()
    wait_for(lambda: find(browser, "#generate").is_enabled())
    shown = len(find_all(browser, "#text .token"))
    time.sleep(0.3)
    assert len(find_all(browser, "#text .token")) == shown < 512
    assert find(browser, "#error").text == "" and not severe(browser)


HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'><!--"


def test_nothing_is_interpreted_and_nothing_is_fetched(opened, tmp_path):
    pieces = {HOSTILE[:end].encode() for end in range(2, len(HOSTILE) + 1)}
    tokenizer = Tokenizer("own", table=[*(bytes([byte]) for byte in range(256)), *sorted(pieces, key=len)])
    config = GPTConfig(vocab_size=tokenizer.n_vocab, context_length=64, emb_dim=32, num_heads=4, num_layers=2)
    template = Template(system=HOSTILE + "{content}", user=HOSTILE + "{content}", assistant="{content}")
    browser = opened(export(tmp_path / "it.html", sharp(config), tokenizer, template))
    wait_for(lambda: find(browser, "#clear").is_displayed())
    find(browser, "#prompt").send_keys(HOSTILE + "\n")
    wait_for(lambda: find_all(browser, "#text .token"))
    wait_for(lambda: find(browser, "#generate").is_enabled())
    assert HOSTILE in find(browser, ".turn.user").get_property("textContent")
    assert browser.title == "tiny · gpt" and not find_all(browser, "img") and not severe(browser)
    fetched = "const done = arguments[0]; fetch('https://example.org/').then(() => done(1), () => done(0))"
    assert browser.execute_async_script(fetched) == 0
    assert "Content Security Policy" in severe(browser)[0]


def test_a_changed_script_does_not_run(opened, tmp_path):
    path = export(tmp_path / "it.html", MODEL, TOKENIZER)
    path.write_text(path.read_text("utf-8").replace('"tiny"', '"\\u003c/script>"'), "utf-8")
    browser = opened(path)
    assert "damaged" in wait_for(lambda: find(browser, "#error").text)
    assert find(browser, "#model").text == ""


@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_a_file_that_was_cut_off_says_so(opened, tmp_path, kept):
    path = export(tmp_path / "it.html", MODEL, TOKENIZER)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    browser = opened(path)
    wait_for(lambda: "damaged" in find(browser, "#error").text)
