import json
import os
from base64 import b64encode

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import forked

from gpt.data import vocabularies
from gpt.data.corpus import choose_split, find_corpus
from gpt.data.module import TokenData
from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.data.vocabularies import Learned, find_vocabulary, learn, learn_table
from gpt.errors import InputError
from gpt.text.table import PATTERNS, merges, to_json
from gpt.text.tokenizer import Tokenizer

SAMPLES = {
    "english": "The cat doesn't sit; the cats don't sit on 13 mats, do they?\n\n  Indented text. ",
    "russian": "Все счастливые семьи похожи друг на друга. ",  # noqa: RUF001
    "chinese": "道可道，非常道。名可名，非常名。",  # noqa: RUF001
    "hindi": "हिन्दी में लिखा हुआ पाठ ",
}
TEXT = "".join(f"{number} {text}" for number in range(60) for text in SAMPLES.values())


PROSE = " ".join(f"word{i * i % 7919} and" for i in range(4000))


def learned(size=400, pattern="gpt2", text=TEXT):
    return Tokenizer("own", table=learn_table([text], size, pattern), pattern=pattern)


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
    assert b"endoftext" in learn_table(["<|endoftext|> or not, " * 50], 290, "gpt2", at_most=True)


def test_learned_merges_are_the_ones_that_the_ranks_give():
    table = learn_table([TEXT], 430, "gpt2")
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
        "from gpt.data.vocabularies import learn_table;"
        "texts = [Path(each.__file__).read_text(encoding='utf-8') for each in (argparse, pickle, typing)];"
        "print(sha256(repr(learn_table(iter(texts), 600, 'gpt2')).encode()).hexdigest())"
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


def write_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def test_documents_held_out_leave_no_trace(tmp_path):
    texts = [f"document {i}: {PROSE[i * 100 :][:200]}" for i in range(200)]
    held_out = [text for text in texts if choose_split(text.encode(), 0.2) == "val"]
    assert 10 < len(held_out) < 100
    strange = iter([t for i in range(9999) if choose_split((t := f"{i} zyx" * 20).encode(), 0.2) == "val"])
    changed = [next(strange) if text in held_out else text for text in texts]
    wanted = Learned(n_vocab=400)
    tables = [
        learn(find_corpus(write_rows(tmp_path / f"{name}.jsonl", each)), wanted, 0.2)
        for name, each in (("a", texts), ("b", changed), ("c", texts[:1] + changed[1:] + ["zyx " * 900]))
    ]
    assert tables[0] == tables[1]
    assert tables[0] != tables[2]  # the last document is trained on


def test_text_held_out_by_position_leaves_no_trace(tmp_path):
    tokenizers = []
    for end in ("zyx ", "qwv "):
        text = PROSE[:18_000] + (end * 1000)[:2000]
        (tmp_path / f"{end}.txt").write_text(text, encoding="utf-8")
        prepared = Prepared(prepare(str(tmp_path / f"{end}.txt"), vocabulary="learn:400", val_fraction=0.1))
        assert prepared.meta["split_by"] == "position"
        val = prepared.tokenizer.decode_bytes(np.concatenate(prepared.stream("val").parts)[:-1].tolist())
        assert text.encode().endswith(val)
        assert 1990 < len(val) <= 2000
        tokenizers.append(prepared.tokenizer)
    assert tokenizers[0] == tokenizers[1]
    (tmp_path / "c.txt").write_text(PROSE[:17_000] + (end * 1000)[:3000], encoding="utf-8")
    seen = Prepared(prepare(str(tmp_path / "c.txt"), vocabulary="learn:400", val_fraction=0.1))
    assert seen.tokenizer != tokenizers[0]


def test_an_example_that_is_held_out_leaves_no_trace(tmp_path):
    """The last one, whole, though most of it lies before the fraction that is held out."""
    tokenizers = []
    for end in ("zyx ", "qwv "):
        texts = [PROSE[:2000], PROSE[2000:4000], end * 500]
        lines = (json.dumps({"prompt": "Write", "completion": text}) + "\n" for text in texts)
        (tmp_path / f"{end}.jsonl").write_text("".join(lines), encoding="utf-8")
        options = {"vocabulary": "learn:300", "val_fraction": 0.01}
        prepared = Prepared(prepare(str(tmp_path / f"{end}.jsonl"), **options))
        assert prepared.meta["split_by"] == "position"
        assert [prepared.count(split, "documents") for split in ("train", "val")] == [2, 1]
        tokenizers.append(prepared.tokenizer)
    assert tokenizers[0] == tokenizers[1]


def test_of_a_large_text_parts_are_chosen_by_a_rule(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabularies, "_PART_CHARACTERS", 500)
    monkeypatch.setattr(vocabularies, "_SAMPLE_BYTES", 20_000)
    taken = []
    monkeypatch.setattr(
        vocabularies, "learn_table", lambda texts, *_: taken.append(texts) or [bytes([b]) for b in range(256)]
    )
    source = find_corpus(
        write_rows(tmp_path / "a.jsonl", [f"{i} {TEXT[i * 50 :][:400]}" for i in range(200)])
    )
    for _ in range(2):
        learn(source, Learned(n_vocab=300), 0.05)
    assert taken[0] == taken[1]
    assert 5_000 < sum(len(text.encode()) for text in taken[0]) <= 20_000
    monkeypatch.setattr(vocabularies, "_SCANNED_BYTES", 10_000)
    learn(source, Learned(n_vocab=300), 0.05)
    assert 0 < sum(len(text.encode()) for text in taken[2]) <= 10_500


def test_it_travels_with_the_prepared_data(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    folder = prepare(str(tmp_path / "a.txt"), vocabulary="learn:400")
    assert prepare(str(tmp_path / "a.txt"), vocabulary="learn:400") == folder
    assert prepare(str(tmp_path / "a.txt"), vocabulary="learn:401") != folder
    data = TokenData(str(folder), vocab_size=400, context_length=16)
    assert (data.tokenizer.name, data.tokenizer.n_vocab) == ("own", 400)
    both = np.concatenate([data.prepared.stream(split).parts[0] for split in ("train", "val")])
    assert data.tokenizer.decode(both[:-1].tolist()) == TEXT
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
        ("learn:256", "at least 257 ids, got learn:256"),
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
    with pytest.raises(InputError, match=r"supports at most \d+ ids, got learn:5000"):
        learn_table(["a short text, a short text"], 5000, "gpt2")


BYTES = [bytes([byte]) for byte in range(256)]


def as_tiktoken(tokens):
    return b"".join(b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (as_tiktoken(BYTES[:-1]), "lacks the byte 255"),
        (as_tiktoken([*BYTES, b"ab", b"ab"]), "b'ab' twice"),
        (as_tiktoken([*BYTES, b"abc"]), "b'abc' cannot be reached"),
        (as_tiktoken(BYTES) + b64encode(b"ab") + b" 7\n", "rank 7 is there twice"),
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
    with pytest.raises(InputError, match="the tokenizer has 300 ids, but claims 301"):
        Tokenizer.from_dict({**saved, "vocab_size": 301})
