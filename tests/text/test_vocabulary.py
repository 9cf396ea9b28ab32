import json
import os
import random
from base64 import b64encode

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import forked

from gpt.data.corpus import find_corpus
from gpt.data.module import TokenData
from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.data.split import Divided
from gpt.errors import InputError
from gpt.text import vocabulary
from gpt.text.table import PATTERNS, merges, to_json
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import Learned, find_vocabulary, learn

SAMPLES = {
    "english": "The cat doesn't sit; the cats don't sit on 13 mats, do they?\n\n  Indented text. ",
    "russian": "Все счастливые семьи похожи друг на друга. ",  # noqa: RUF001
    "chinese": "道可道，非常道。名可名，非常名。",  # noqa: RUF001
    "hindi": "हिन्दी में लिखा हुआ पाठ ",
}
TEXT = "".join(f"{number} {text}" for number in range(60) for text in SAMPLES.values())


PROSE = " ".join(f"word{i * i % 7919} and" for i in range(4000))


def learned(size=400, pattern="gpt2", text=TEXT):
    return learn([text], Learned(n_vocab=size, pattern=pattern))


@pytest.fixture(scope="module", params=["gpt2", "marks"])
def tokenizer(request):
    return learned(pattern=request.param)


@given(text=st.text(max_size=200) | st.text(alphabet=TEXT[:200] + " \n'", max_size=200))
@example(text="<|endoftext|>")
@settings(max_examples=150, deadline=None)
def test_every_text_comes_back_and_the_library_has_the_same_ids(tokenizer, text):
    import tokenizers

    library = tokenizers.Tokenizer.from_str(json.dumps(to_json(tokenizer.tokens, tokenizer.pattern)))
    library.encode_special_tokens = True  # read `<|endoftext|>` as text, as we do
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < tokenizer.eot
    assert library.encode(text, add_special_tokens=False).ids == ids
    assert library.decode(ids) == text


@given(data=st.binary(max_size=100))
@settings(max_examples=100, deadline=None)
def test_every_byte_string_comes_back(tokenizer, data):
    assert tokenizer.decode_bytes(tokenizer.encoding._encode_bytes(data)) == data


def test_the_library_encodes_all_of_the_text_alike(tokenizer):
    import tokenizers

    library = tokenizers.Tokenizer.from_str(json.dumps(to_json(tokenizer.tokens, tokenizer.pattern)))
    assert library.encode(TEXT).ids == tokenizer.encode(TEXT)
    assert len(tokenizer.encode(TEXT)) < 0.6 * len(Tokenizer("gpt2", 400).encode(TEXT))


def test_the_end_of_a_text_is_learned_as_any_other_text():
    assert b"endoftext" in learn(["<|endoftext|> or not, " * 50], Learned(n_vocab=290, at_most=True)).tokens


def test_learned_merges_are_the_ones_that_the_ranks_give():
    table = learned(430).tokens
    pairs = merges(table)
    assert None not in pairs
    assert [first + second for first, second in pairs] == table[256:]


def test_marks_stay_in_their_words():
    gpt2, marks = (learned(272, pattern, SAMPLES["hindi"] * 50) for pattern in ("gpt2", "marks"))
    assert len(marks.encode(SAMPLES["hindi"])) < len(gpt2.encode(SAMPLES["hindi"]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_one_thread_and_two_learn_the_same_table(tmp_path):
    code = (
        "import argparse, pickle, typing; from pathlib import Path; from hashlib import sha256;"
        "from gpt.text.vocabulary import Learned, learn;"
        "texts = [Path(each.__file__).read_text(encoding='utf-8') for each in (argparse, pickle, typing)];"
        "print(sha256(repr(learn(iter(texts), Learned(n_vocab=600)).tokens).encode()).hexdigest())"
    )
    found = set()
    for threads in ("1", "2"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads}
        with (
            open(tmp_path / threads, "wb") as out,
            forked(code=code, streams={1: out.fileno()}, environment=environment) as process,
        ):
            process.join(120)
            assert process.exitcode == 0
        found.add((tmp_path / threads).read_bytes())
    assert len(found) == 1 and len(found.pop()) == 65


def test_text_that_is_held_out_leaves_no_trace(tmp_path):
    """In documents, in one text and in a sample of a large one, whatever stands there."""
    for name, text in (("a.jsonl", [f"{i}: {PROSE[i * 100 :][:200]}" for i in range(200)]), ("a.txt", PROSE)):
        tables = []
        for _ in range(2):
            lines = [json.dumps({"text": row}) for row in text] if name == "a.jsonl" else [text]
            (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
            prepared = Prepared(prepare(str(tmp_path / name), vocabulary="learn:400", val_fraction=0.2))
            tables.append(prepared.tokenizer)
            pieces = Divided(find_corpus(str(tmp_path / name)), 0.2).pieces()
            train = [piece.text for piece in pieces if piece.split == "train"]
            assert tables[-1] == learn(train, Learned(n_vocab=400))
            # Again without what is held out: nothing changes; with other text to train on it does.
            text = [row for row in text if row in train] if name == "a.jsonl" else "".join(train)
        assert learn(["zyx " * 900, *train], Learned(n_vocab=400)) != tables[0]


def test_a_smaller_vocabulary_is_the_beginning_of_a_larger_one():
    """A plan learns the largest, and its run takes the first ids without learning again."""
    large = learn([TEXT, PROSE], Learned(n_vocab=900, at_most=True))
    assert list(vocabulary._learned.values())[-1] == (899, large.tokens)
    learn([PROSE], Learned(n_vocab=300))  # as a plan does on the way
    assert len(vocabulary._learned) == 2
    for size in (300, 600):
        small = learn([TEXT, PROSE], Learned(n_vocab=size))
        assert small.tokens == large.tokens[: size - 1]
        vocabulary._learned.clear()
        assert learn([TEXT, PROSE], Learned(n_vocab=size)) == small


@pytest.mark.parametrize("text", ["ACGT" * 250_000, "a" * 200_000, "\u9053" * 100_000, "0" * 100_000])
def test_a_text_of_one_word_is_learned_in_parts(text):
    """In time that grows with the text: in one word it took minutes."""
    draw = random.Random(0)
    text = "".join(draw.choices(text[:4], k=len(text))) if text[0] == "A" else text
    tokenizer = learn([text], Learned(n_vocab=1024, at_most=True))
    assert max(map(len, tokenizer.tokens)) <= 128
    assert tokenizer.decode(tokenizer.encode(text[:5000])) == text[:5000]


def test_it_travels_with_the_prepared_data(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    folder = prepare(str(tmp_path / "a.txt"), vocabulary="learn:400")
    assert prepare(str(tmp_path / "a.txt"), vocabulary="learn:400") == folder
    assert prepare(str(tmp_path / "a.txt"), vocabulary="learn:401") != folder
    data = TokenData(str(folder), vocab_size=400, context_length=16)
    assert (data.tokenizer.name, data.tokenizer.n_vocab) == ("own", 400)
    assert TokenData(str(folder), context_length=16, vocabulary="learn:400").tokenizer == data.tokenizer
    for wrong in ("learn:401", "gpt2:500", "gpt2:400", "learn:400:marks"):
        with pytest.raises(InputError, match="was prepared with vocab_size 400"):
            _ = TokenData(str(folder), vocabulary=wrong).prepared


def test_characters_as_a_vocabulary(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    data = TokenData(str(tmp_path / "a.txt"), vocabulary="learn:chars", context_length=16)
    others = {c for c in TEXT[: int(len(TEXT) * 0.9)] if ord(c) > 127}
    assert data.tokenizer.n_vocab >= 257 + len(others)
    assert len(data.tokenizer.encode(TEXT[:500])) == 500
    assert data.tokenizer.decode(data.tokenizer.encode("\u00e9\U0001f600")) == "\u00e9\U0001f600"


def test_names():
    assert find_vocabulary(None, 2048) == find_vocabulary("gpt2:2048", 1) == Tokenizer("gpt2", 2048)
    assert find_vocabulary("gpt2", 1) == Tokenizer()
    assert find_vocabulary("learn:300:marks", 1) == Learned(n_vocab=300, pattern="marks")
    assert find_vocabulary("learn", 300) == Learned(n_vocab=300, at_most=True)
    for name in ("gpt3", "learn:many", "learned", "gpt2:", "nothing.json", "learn:" + "9" * 5000):
        with pytest.raises(InputError, match=r"unknown vocabulary .*expected gpt2, gpt2:SIZE"):
            find_vocabulary(name, 1)
    for name, message in (
        ("learn:256", "at least 257 tokens, got learn:256"),
        ("learn:300:words", "unknown pattern of words 'words'"),
        ("gpt2:99999", "50257, got 99999"),
    ):
        with pytest.raises(InputError, match=message):
            find_vocabulary(name, 1)


def test_at_most_as_many_as_the_text_supports(tmp_path):
    (tmp_path / "a.txt").write_text("a short text, a short text\n", encoding="utf-8")
    few = TokenData(str(tmp_path / "a.txt"), vocabulary="learn", vocab_size=5000, context_length=4).tokenizer
    assert 257 < few.n_vocab < 280
    assert few.decode(few.encode("a short text")) == "a short text"
    (tmp_path / "b.txt").write_text(TEXT, encoding="utf-8")
    enough = TokenData(
        str(tmp_path / "b.txt"), vocabulary="learn", vocab_size=300, context_length=4
    ).tokenizer
    assert enough == TokenData(str(tmp_path / "b.txt"), vocabulary="learn:300", context_length=4).tokenizer


def test_prepared_text_of_any_vocabulary_not_above_the_limit(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    folder = str(prepare(str(tmp_path / "a.txt"), tmp_path / "out", vocabulary="gpt2:400"))
    assert TokenData(folder, vocabulary="learn", vocab_size=400).tokenizer == Tokenizer("gpt2", 400)
    with pytest.raises(InputError, match="was prepared with vocab_size 400, not 399"):
        TokenData(folder, vocabulary="learn", vocab_size=399).tokenizer  # noqa: B018


def test_more_than_the_text_supports():
    with pytest.raises(InputError, match=r"supports at most \d+ tokens, got learn:5000"):
        learn(["a short text, a short text"], Learned(n_vocab=5000))


BYTES = [bytes([byte]) for byte in range(256)]


def as_tiktoken(tokens):
    return b"".join(b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (as_tiktoken(BYTES[:-1]), "lacks the byte 255"),
        (as_tiktoken([*BYTES, b"ab", b"ab"]), "b'ab' twice"),
        (as_tiktoken([*BYTES, b"abc"]), "b'abc' cannot be reached"),
        (as_tiktoken(BYTES) + b64encode(b"ab") + b" 7\n", "ranks are not 0 to 256, each once"),
        (as_tiktoken(BYTES) + b64encode(b"ab") + b" 300\n", "ranks are not 0 to 256"),
        (b"no table", "neither a .tiktoken file nor a tokenizer.json"),
        (b'{"model": 1}', "neither"),
        pytest.param(b'{"model": ' + b"[" * 200_000, "neither", id="too deep"),
        (b'{"model": {"type": "Unigram"}}', "expected byte-level BPE"),
        (b"\n\x0e\n\x05<unk>", "sentencepiece model, which changes blanks"),
    ],
)
def test_tables_with_errors_are_refused(tmp_path, content, message):
    (tmp_path / "table").write_bytes(content)
    with pytest.raises(InputError, match=message):
        find_vocabulary(str(tmp_path / "table"), 1)


def test_large_and_hostile_tables_are_refused_at_once(tmp_path, monkeypatch):
    """In a time that grows with the file: looking for each token before it would take hours."""
    many = [*BYTES, *(b"%06d" % number for number in range(300_000))]
    path = tmp_path / "tokenizer.json"
    for tokens, message in (
        ([*many, many[-1]], "b'299999' twice"),
        ([*BYTES, b"a" * 2000], "a token has 2,000 bytes, expected 1 to 1,024"),
        ([*BYTES, *(b"%01000d" % number for number in range(300))], "too many long tokens"),
    ):
        path.write_bytes(as_tiktoken(tokens))
        with pytest.raises(InputError, match=message):
            find_vocabulary(str(path), 1)
    model = {"type": "BPE", "vocab": {"\u0100" * 1_000_000: 0}, "merges": []}
    path.write_text(json.dumps({"model": model, "pre_tokenizer": {"type": "ByteLevel"}}), encoding="utf-8")
    with pytest.raises(InputError, match="lacks the byte 0"):
        find_vocabulary(str(path), 1)
    monkeypatch.setattr("gpt.text.table._LARGEST_FILE", 1000)
    with pytest.raises(InputError, match="has more than 1,000 bytes, the limit of a vocabulary"):
        find_vocabulary(str(path), 1)


def test_files_of_ones_own(tmp_path, tokenizer):
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(to_json(tokenizer.tokens, tokenizer.pattern)), encoding="utf-8"
    )
    assert find_vocabulary(str(tmp_path / "tokenizer.json"), 1) == tokenizer
    (tmp_path / "a.tiktoken").write_bytes(as_tiktoken(Tokenizer("gpt2", 500).tokens))
    assert find_vocabulary(str(tmp_path / "a.tiktoken"), 1) == Tokenizer("gpt2", 500)
    saved = to_json([*BYTES, b"ab", b"abc"], "gpt2")
    saved["model"]["merges"].reverse()
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    with pytest.raises(InputError, match="merges do not make its tokens"):
        find_vocabulary(str(tmp_path / "tokenizer.json"), 1)
    saved["pre_tokenizer"] = {"type": "Whitespace"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    with pytest.raises(InputError, match="pattern of words is none of"):
        find_vocabulary(str(tmp_path / "tokenizer.json"), 1)


def test_patterns_take_every_character():
    text = TEXT + "\u00a0\u2028\r\n \t.\U0001f600"
    import regex

    for pattern in PATTERNS.values():
        assert "".join(regex.findall(pattern, text)) == text


def test_a_saved_table_of_another_size_than_it_claims():
    saved = learned(size=300).to_dict()
    assert Tokenizer.from_dict(saved) == learned(size=300)
    with pytest.raises(InputError, match="the tokenizer has 300 tokens, but claims 301"):
        Tokenizer.from_dict({**saved, "vocab_size": 301})
