import json
import os
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import forked

from gpt.data.find import find_corpus
from gpt.data.module import TokenData
from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.data.split import divide_corpus
from gpt.errors import InputError
from gpt.text.table import spell, to_json
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


TOKENIZER = learn([TEXT], Learned(400))


@given(text=st.text(max_size=200) | st.text(alphabet=TEXT[:200] + " \n'", max_size=200))
@example(text="<|endoftext|>")
@settings(max_examples=150, deadline=None)
def test_every_text_comes_back_and_the_library_has_the_same_ids(text):
    import tokenizers

    library = tokenizers.Tokenizer.from_str(json.dumps(to_json(TOKENIZER.tokens)))
    library.encode_special_tokens = True  # read `<|endoftext|>` as text, as we do
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert max(ids, default=0) < TOKENIZER.eot
    assert library.encode(text, add_special_tokens=False).ids == ids
    assert library.decode(ids) == text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_one_thread_and_two_learn_the_same_table(tmp_path):
    code = (
        "import argparse, pickle, typing; from pathlib import Path; from hashlib import sha256;"
        "from gpt.text.vocabulary import Learned, learn;"
        "texts = [Path(each.__file__).read_text(encoding='utf-8') for each in (argparse, pickle, typing)];"
        "print(sha256(repr(learn(texts, Learned(600)).tokens).encode()).hexdigest())"
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


DOCUMENTS = [f"{i}: {PROSE[i * 100 :][:200]}" for i in range(200)]
HELD_OUT = {
    "documents": ("a.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in DOCUMENTS)),
    "a part of a text": ("a.txt", PROSE),
}


@pytest.mark.parametrize(("name", "text"), HELD_OUT.values(), ids=HELD_OUT)
def test_what_is_held_out_leaves_no_trace(tmp_path, name, text):
    """The vocabulary is learned only from the text to train on, and depends on it."""
    path = tmp_path / name
    path.write_text(text, "utf-8")
    tokenizer = Prepared(prepare(str(path), vocabulary="learn:400", val_fraction=0.2)).tokenizer
    pieces = divide_corpus(find_corpus(str(path)), 0.2).pieces()
    train = [piece.text for piece in pieces if piece.split == "train"]
    assert tokenizer == learn(train, Learned(400))
    assert tokenizer != learn(["zyx " * 900, *train], Learned(400))


ONE_WORD = {
    "genes": "".join(random.Random(0).choices("ACGT", k=1_000_000)),
    "letters": "a" * 200_000,
    "three bytes": "\u9053" * 100_000,
    "digits": "0" * 100_000,
}


@pytest.mark.parametrize("text", ONE_WORD.values(), ids=ONE_WORD)
def test_a_text_of_one_word_is_learned_in_parts(text):
    """In time that grows with the text: in one word it took minutes."""
    tokenizer = learn([text], Learned(1024))
    assert max(map(len, tokenizer.tokens)) <= 128
    assert tokenizer.decode(tokenizer.encode(text[:5000])) == text[:5000]


def data_of(path, **options) -> TokenData:
    return TokenData(str(path), context_length=4, **options)


def test_it_travels_with_the_prepared_data(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    folder = prepare(str(tmp_path / "a.txt"), vocabulary="learn:400")
    assert prepare(str(tmp_path / "a.txt"), vocabulary="learn:401") != folder
    tokenizer = data_of(folder, vocabulary="learn").tokenizer
    assert (tokenizer.name, tokenizer.n_vocab) == ("own", 400)
    assert data_of(folder, vocabulary="learn:400").tokenizer == tokenizer
    for wrong in ("gpt2:500", "gpt2:400"):
        with pytest.raises(InputError, match="was prepared with vocab_size 400"):
            _ = data_of(folder, vocabulary=wrong).prepared


def test_at_most_as_many_as_the_text_supports(tmp_path):
    (tmp_path / "a.txt").write_text("a short text, a short text\n", "utf-8")
    few = data_of(tmp_path / "a.txt", vocabulary="learn", vocab_size=5000).tokenizer
    assert 257 < few.n_vocab < 280
    assert few.decode(few.encode("a short text")) == "a short text"


BYTES = [bytes([byte]) for byte in range(256)]


def test_a_smaller_vocabulary_is_the_beginning_of_a_larger_one():
    """A plan learns the largest, and its run takes the first ids without learning again."""
    large = learn([TEXT, PROSE], Learned(800))
    for size in (300, 600):
        assert learn([TEXT, PROSE], Learned(size)).tokens == large.tokens[: size - 1]


def test_names():
    assert find_vocabulary(None, 2048) == find_vocabulary("gpt2:2048", 1) == Tokenizer("gpt2", 2048)
    assert find_vocabulary("gpt2", 1) == Tokenizer()
    assert find_vocabulary("learn:300", 1) == find_vocabulary("learn", 300) == Learned(300)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt3", "unknown vocabulary .*expected gpt2, gpt2:SIZE"),
        ("learn:many", "unknown vocabulary"),
        ("gpt2:", "unknown vocabulary"),
        ("learn:" + "9" * 5000, "unknown vocabulary"),
        ("learn:256", "vocab_size must be 257 to 63488, got 256"),
        ("learn:63489", "vocab_size must be 257 to 63488, got 63489"),
        ("gpt2:99999", "50257, got 99999"),
    ],
    ids=lambda value: value[:20],
)
def test_names_that_are_none(name, message):
    with pytest.raises(InputError, match=message):
        find_vocabulary(name, 1)


def edited(tokens, model=None, **changes):
    saved = to_json(BYTES) | changes
    saved["model"] |= {"vocab": {spell(token): rank for rank, token in enumerate(tokens)}} | (model or {})
    return json.dumps(saved)


LONG = [b"%01000d" % number for number in range(300)]
BAD_TABLES = {
    "a byte less": (edited(BYTES[:-1]), "lacks the byte 255"),
    "one long token": (edited([b"a" * 500_000]), "lacks the byte 0"),
    "a token without a merge": (edited([*BYTES, b"abc"]), "merges do not make its tokens"),
    "no merges": (edited([*BYTES, b"ab"]), "merges do not make its tokens"),
    "long tokens": (edited([*BYTES, *LONG]), "too many long tokens"),
    "another number": (edited(BYTES, {"vocab": {"a": 7}}), "not numbered from 0 on"),
    "another model": (edited(BYTES, {"type": "WordPiece", "merges": None}), "no tokenizer.json"),
    "bytes for the unknown": (edited(BYTES, {"byte_fallback": True}), "would not come back"),
    "a normalizer": (edited(BYTES, normalizer={"type": "NFC"}), "would not come back"),
    "other words": (edited(BYTES, pre_tokenizer={"type": "Whitespace"}), "other words than GPT-2"),
    "no words": (
        edited(BYTES, pre_tokenizer={"type": "ByteLevel", "use_regex": False}),
        "other words than GPT-2",
    ),
    "a space before": (
        edited(BYTES, pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True}),
        "other words than GPT-2",
    ),
    "SentencePiece": ("\n\x0e\n\x05<unk>", "no tokenizer.json"),
    "another JSON": ('{"model": 1}', "no tokenizer.json"),
    "deep": ('{"model": ' + "[" * 200_000, "nested too deeply"),
}


@pytest.mark.parametrize(("content", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_tables_with_errors_are_refused(tmp_path, content, message):
    """In a time that grows with the file."""
    (tmp_path / "tokenizer.json").write_text(content, "utf-8")
    with pytest.raises(InputError, match=message):
        find_vocabulary(str(tmp_path / "tokenizer.json"), 1)


@pytest.mark.parametrize("own", [TOKENIZER, Tokenizer("gpt2", 500)], ids=["own", "gpt2"])
def test_a_file_of_ones_own(tmp_path, own):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(to_json(own.tokens)), "utf-8")
    assert find_vocabulary(str(path), 1) == own == Tokenizer.from_dict(own.to_dict())


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InputError, match=r"has more than [\d,]+ bytes"):
        find_vocabulary(str(path), 1)


def test_a_table_that_the_files_cannot_hold_is_refused_before_anything_is_read(tmp_path):
    """One that they hold comes back, also with more tokens than GPT-2's."""
    pairs = [bytes([first, second]) for first in range(256) for second in range(256)]
    for tokens in (60_000, 63_489):
        path = tmp_path / f"{tokens}.json"
        path.write_text(json.dumps(to_json([*BYTES, *pairs][: tokens - 1])), "utf-8")
    tokenizer = find_vocabulary(str(tmp_path / "60000.json"), 1)
    assert Tokenizer.from_dict(tokenizer.to_dict()) == tokenizer
    (tmp_path / "a.txt").write_text(PROSE, "utf-8")
    prepared = Prepared(prepare(str(tmp_path / "a.txt"), vocabulary=str(tmp_path / "60000.json")))
    assert prepared.tokenizer == tokenizer
    assert prepared.counts["train"].tokens == len(prepared.stream("train").tokens) > 0
    with pytest.raises(InputError, match="257 to 63488, got 63489"):
        prepare(str(tmp_path / "a.txt"), vocabulary=str(tmp_path / "63489.json"))
    saved = tokenizer.to_dict() | {"vocab_size": 59_999}
    with pytest.raises(InputError, match="it has 60000 tokens, expected 59999"):
        Tokenizer.from_dict(saved)
