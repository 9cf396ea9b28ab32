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


@needs_node
def test_it_writes_with_alternatives_attention_and_slider(start, tmp_path):
    for step in (1, 4, 16):
        add_snapshot(tmp_path / "run", step, sharp(MODEL.config, seed=step), TOKENIZER, 6 / step)
    path = export(tmp_path / "it.html", MODEL, TOKENIZER, snapshots=snapshots_of(tmp_path / "run"))
    expected = run(path, ["text", {**FORM, "prompt": "Hello"}])[0]
    browser = start(1100, 1000)
    browser.get(path.as_uri())
    text = generate(browser, "Hello", 40)
    assert text == "Hello" + "".join(choice["text"] for choice in expected)
    assert find(browser, "#model").text == "tiny" and not find(browser, "#progress").is_displayed()
    tokens = find_all(browser, "#text .token")
    tokens[3].click()
    wait_for(lambda: find(browser, "#attention").is_displayed())
    assert len(find_all(browser, "#grid button")) == 2 * 4
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
    assert len(texts) == 3 and all(one.startswith("Hello") for one in texts)
    assert not severe(browser)


def test_it_answers_while_it_writes_and_stops(start, tmp_path):
    large = GPTConfig(vocab_size=257, context_length=512, emb_dim=256, num_heads=4, num_layers=16)
    path = export(tmp_path / "it.html", sharp(large), TOKENIZER, precision="int8")
    browser = start(1100, 900)
    browser.get(path.as_uri())
    begin(browser, "Hello", 512)
    wait_for(lambda: len(find_all(browser, "#text .token")) > 3)
    longest = browser.execute_async_script(
        "const done = arguments[0]; let longest = 0, before = performance.now(), left = 20;"
        "const tick = () => { const now = performance.now(); longest = Math.max(longest, now - before);"
        "before = now; left-- ? setTimeout(tick, 10) : done(longest); }; tick();"
    )
    assert not find(browser, "#generate").is_enabled() and longest < 2000  # milliseconds: it is drawing
    find(browser, "#halt").click()
    wait_for(lambda: find(browser, "#generate").is_enabled())
    shown = len(find_all(browser, "#text .token"))
    time.sleep(0.3)
    assert len(find_all(browser, "#text .token")) == shown < 512
    assert find(browser, "#error").text == "" and not severe(browser)


def test_a_chat_model_chats(start, tmp_path):
    template = Template(user="U{content}\n", assistant="A{content}")
    path = export(tmp_path / "it.html", MODEL, TOKENIZER, template)
    browser = start(1100, 900)
    browser.get(path.as_uri())
    wait_for(lambda: find(browser, "#clear").is_displayed())
    set_slider(browser, "max_tokens", 10)
    for number, said in enumerate(("Hi", "<b>and</b>"), start=1):
        find(browser, "#prompt").send_keys(said + "\n")
        wait_for(lambda number=number: len(find_all(browser, ".turn.assistant")) == number)
        wait_for(lambda: find(browser, "#generate").is_enabled())
    turns = [turn.get_property("textContent") for turn in find_all(browser, ".turn")]
    assert turns[0] == "Hi" and turns[2] == "<b>and</b>" and find(browser, "#prompt").text == ""
    find_all(browser, ".turn.assistant")[0].find_element("css selector", ".token").click()
    wait_for(lambda: find(browser, "#attention").is_displayed())
    read = find(browser, "#seen").get_property("textContent")
    assert read.startswith("<|endoftext|>UHi\nA")
    find(browser, "#clear").click()
    assert not find_all(browser, ".turn") and not severe(browser)


HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'><!--"


def test_nothing_is_interpreted_and_nothing_is_fetched(start, tmp_path):
    table = [bytes([byte]) for byte in range(256)]
    pieces = {HOSTILE[:end].encode() for end in range(2, len(HOSTILE) + 1)}
    tokenizer = Tokenizer("own", table=[*table, *sorted(pieces, key=len)])
    config = GPTConfig(vocab_size=tokenizer.n_vocab, context_length=64, emb_dim=32, num_heads=4, num_layers=2)
    template = Template(system=HOSTILE + "{content}", user=HOSTILE + "{content}", assistant="{content}")
    path = export(tmp_path / "it.html", sharp(config), tokenizer, template)
    path.write_text(path.read_text(encoding="utf-8").replace('"tiny"', '"\\u003c/script>"'), encoding="utf-8")
    browser = start(1100, 900)
    browser.get(path.as_uri())
    damaged = wait_for(lambda: find(browser, "#error").text)  # a changed script does not run
    assert "damaged" in damaged and find(browser, "#model").text == ""
    browser.get_log("browser")
    export(path, sharp(config), tokenizer, template)
    browser.get(path.as_uri())
    wait_for(lambda: find(browser, "#clear").is_displayed())
    find(browser, "#prompt").send_keys(HOSTILE + "\n")
    wait_for(lambda: find_all(browser, "#text .token"))
    wait_for(lambda: find(browser, "#generate").is_enabled())
    assert HOSTILE in find(browser, ".turn.user").get_property("textContent")
    assert browser.title == "tiny · gpt" and not find_all(browser, "img") and not severe(browser)
    fetched = "const done = arguments[0]; fetch('https://example.org/').then(() => done(1), () => done(0))"
    assert browser.execute_async_script(fetched) == 0
    assert "Content Security Policy" in severe(browser)[0]


@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_a_file_that_was_cut_off_says_so(start, tmp_path, kept):
    path = export(tmp_path / "it.html", MODEL, TOKENIZER)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    browser = start(1100, 900)
    browser.get(path.as_uri())
    wait_for(lambda: "damaged" in find(browser, "#error").text)
