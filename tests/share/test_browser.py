"""An exported file, opened from the disk in a real browser."""

import time

import pytest
from demo import DEMO

from gpt import GPTConfig, Tokenizer
from gpt.text.template import Template
from gpt.weights.runs import snapshots_of
from tests.browser import marks
from tests.generation.conftest import sharp
from tests.serve.server import MODEL, TOKENIZER
from tests.share.node import export, needs_node, run
from tests.snapshots import add_snapshot

pytestmark = marks
FORM = {"top_k": 50, "temperature": 0.8, "seed": 7, "max_tokens": 40}


@pytest.fixture
def path(tmp_path):
    """Where the file is."""
    return tmp_path / "it.html"


@needs_node
def test_it_writes_with_alternatives_attention_and_slider(start, path):
    for step in (1, 4, 16):
        add_snapshot(path.with_name("run"), step, sharp(MODEL.config, seed=step), TOKENIZER, 6 / step)
    export(path, MODEL, TOKENIZER, snapshots=snapshots_of(path.with_name("run")))
    (expected,) = run(path, ["text", {**FORM, "prompt": "Hello"}])
    page = start(path.as_uri())
    assert page.generate("Hello", 40) == "Hello" + "".join(choice["text"] for choice in expected)
    assert page.text("#model") == "tiny" and not page.shows("#progress")

    page.look(3)
    assert page.content("#seen").startswith("Hello")
    assert len(page.text("#tip").splitlines()) >= 5
    assert page.text("#when") == "the model in this file"

    texts = set()
    for place, step in enumerate((1, 4, 16)):
        page.set_slider("moment", place)
        page.wait_for_text("#when", f"step {step}, training loss")
        page.wait_for_the_end()
        assert page.find("#point").get_attribute("d")
        texts.add(page.content("#text"))
    assert len(texts) == 3 and all(text.startswith("Hello") for text in texts)
    assert not page.severe()


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


def test_it_answers_while_it_writes_and_stops(start, path):
    large = GPTConfig(vocab_size=257, context_length=512, emb_dim=256, num_heads=4, num_layers=16)
    page = start(export(path, sharp(large), TOKENIZER, precision="int8").as_uri())
    page.begin("Hello", 512)
    page.wait(page.tokens)
    longest = page.browser.execute_async_script(LONGEST_WAIT)
    assert longest < 2000  # milliseconds: it is drawing
    shown = page.stop()
    time.sleep(0.3)
    assert len(page.tokens()) == shown < 512
    assert page.text("#error") == "" and not page.severe()


def test_a_text_that_is_stopped_before_the_file_is_read_is_not_written(start, path):
    page = start(export(path, MODEL, TOKENIZER).as_uri())
    page.wait_for("#prompt")
    page.browser.execute_script("backend.loaded = new Promise(resolve => { window.beRead = resolve; });")
    page.begin("Hello", 40)
    page.find("#halt").click()
    page.browser.execute_script("beRead();")
    page.wait_for_the_end()
    assert not page.all("#text .token:not(.prompt)") and page.text("#error") == ""


HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'><!--"


def test_nothing_is_interpreted_and_nothing_is_fetched(start, path):
    pieces = {HOSTILE[:end].encode() for end in range(2, len(HOSTILE) + 1)}
    tokenizer = Tokenizer("own", table=[*(bytes([byte]) for byte in range(256)), *sorted(pieces, key=len)])
    config = GPTConfig(vocab_size=tokenizer.n_vocab, context_length=64, emb_dim=32, num_heads=4, num_layers=2)
    template = Template(system=HOSTILE + "{content}", user=HOSTILE + "{content}", assistant="{content}")
    page = start(export(path, sharp(config), tokenizer, template).as_uri())
    page.wait_for("#clear")
    page.find("#prompt").send_keys(HOSTILE + "\n")
    page.wait(page.tokens)
    page.wait_for_the_end()
    assert HOSTILE in page.content(".turn.user")
    assert page.browser.title == "tiny · gpt" and not page.all("img") and not page.severe()
    fetched = "const done = arguments[0]; fetch('https://example.org/').then(() => done(1), () => done(0))"
    assert page.browser.execute_async_script(fetched) == 0
    assert "Content Security Policy" in page.severe()[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.replace(b'"tiny"', b'"\\u003c/script>"'),
        lambda data: data[: len(data) // 2],
        lambda data: data[: int(len(data) * 0.999)],
    ],
    ids=["a changed script", "a half", "all but the end"],
)
def test_a_damaged_file_says_so(damage, start, path):
    export(path, MODEL, TOKENIZER)
    path.write_bytes(damage(path.read_bytes()))
    page = start(path.as_uri())
    page.wait_for_text("#error", "This file is damaged")


def test_the_demo_writes_and_shows_its_training(start):
    page = start(DEMO.as_uri())
    assert page.generate("ROMEO:", 40).startswith("ROMEO:")
    page.set_slider("moment", 0)
    page.wait_for_text("#when", "step 1, training loss")
    page.wait_for_the_end()
    assert page.content("#text").startswith("ROMEO:")
    assert not page.severe()
