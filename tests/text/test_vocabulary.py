import json
import os
import random
import subprocess
import sys
from unittest.mock import Mock

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpt.data.find import find_corpus
from gpt.data.prepare import prepare
from gpt.data.prepared import Prepared
from gpt.data.split import divide_corpus
from gpt.errors import InputError
from gpt.text.table import END_OF_TEXT, merges, read_table, spell, to_json
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import VocabularyToLearn, check_size_used, find_vocabulary, learn

SAMPLES = {
    "english": "The cat doesn't sit; the cats don't sit on 13 mats, do they?\n\n  Indented text. ",
    "russian": "Все счастливые семьи похожи друг на друга. ",  # noqa: RUF001
    "chinese": "道可道，非常道。名可名，非常名。",  # noqa: RUF001
    "hindi": "हिन्दी में लिखा हुआ पाठ ",
}
TEXT = "".join(f"{number} {text}" for number in range(60) for text in SAMPLES.values())
PROSE = " ".join(f"word{i * i % 7919} and" for i in range(4000))
TOKENIZER = learn([TEXT], VocabularyToLearn(400))
BYTES = [bytes([byte]) for byte in range(256)]


@given(text=st.text(max_size=200) | st.text(alphabet=TEXT[:200] + " \n'", max_size=200))
@example(text="<|endoftext|>")
@settings(max_examples=150, deadline=None)
def test_every_text_comes_back_and_the_library_has_the_same_ids(text):
    library = tokenizers.Tokenizer.from_str(json.dumps(to_json(TOKENIZER.tokens)))
    library.encode_special_tokens = True  # read `<|endoftext|>` as text, as we do
    ids = TOKENIZER.encode(text)
    assert library.encode(text, add_special_tokens=False).ids == ids
    assert library.decode(ids) == TOKENIZER.decode(ids) == text


LEARN = """
import argparse, pickle, typing
from pathlib import Path
from gpt.text.vocabulary import VocabularyToLearn, learn
texts = [Path(each.__file__).read_text(encoding="utf-8") for each in (argparse, pickle, typing)]
print(learn(texts, VocabularyToLearn(600)).tokens)
"""


def test_one_thread_and_two_learn_the_same_table():
    def learned(threads: str) -> bytes:
        environment = {**os.environ, "RAYON_NUM_THREADS": threads}
        return subprocess.check_output([sys.executable, "-c", LEARN], env=environment)

    assert learned("1") == learned("2") != b""


def test_what_is_held_out_leaves_no_trace(tmp_path):
    """The vocabulary is learned only from the text to train on."""
    path = tmp_path / "a.txt"
    path.write_text(PROSE, "utf-8")
    tokenizer = Prepared(prepare(str(path), vocabulary="learn:400", val_fraction=0.2)).tokenizer
    pieces = divide_corpus(find_corpus(str(path)), 0.2).pieces()
    assert tokenizer == learn(
        [piece.text for piece in pieces if piece.split == "train"], VocabularyToLearn(400)
    )


ONE_WORD = {
    "genes": "".join(random.Random(0).choices("ACGT", k=1_000_000)),
    "three bytes": "\u9053" * 100_000,
}


@pytest.mark.parametrize("text", ONE_WORD.values(), ids=ONE_WORD)
def test_a_text_of_one_word_is_learned_in_parts(text):
    """In time that grows with the text: in one word it took minutes."""
    tokenizer = learn([text], VocabularyToLearn(1024))
    assert max(map(len, tokenizer.tokens)) <= 128
    assert tokenizer.decode(tokenizer.encode(text[:5000])) == text[:5000]


def test_it_travels_with_the_prepared_data(text_file):
    folder = prepare(str(text_file), vocabulary="learn:300")
    assert prepare(str(text_file), vocabulary="learn:301") != folder
    assert prepare(str(folder), vocabulary="learn") == folder
    tokenizer = Prepared(folder).tokenizer
    assert (tokenizer.name, tokenizer.n_vocab) == ("own", 300)
    with pytest.raises(InputError, match="was prepared with vocab_size 300"):
        prepare(str(folder), vocabulary="gpt2:300")


def test_a_smaller_vocabulary_is_the_beginning_of_a_larger_one():
    """A plan learns the largest, and its run takes the first ids without learning again."""
    large = learn([TEXT, PROSE], VocabularyToLearn(800))
    for size in (300, 600):
        assert learn([TEXT, PROSE], VocabularyToLearn(size)).tokens == large.tokens[: size - 1]


def test_names():
    assert find_vocabulary(None, 2048) == find_vocabulary("gpt2:2048", 1) == Tokenizer("gpt2", 2048)
    assert find_vocabulary("gpt2", 1) == Tokenizer()
    assert find_vocabulary("learn:300", 1) == find_vocabulary("learn", 300) == VocabularyToLearn(300)


def test_a_vocabulary_with_a_size_takes_no_other(text_file):
    for free in (None, "learn"):
        check_size_used(free, 300)
    check_size_used("gpt2", None)
    check_size_used("learn:300", 300)
    with pytest.raises(InputError, match="gpt2:500 has 500 tokens: leave the vocab_size 300 out"):
        check_size_used("gpt2:500", 300)
    with pytest.raises(InputError, match="257 to 50257, got 0"):
        prepare(str(text_file), vocab_size=0)


def test_a_file_of_tokens_is_read_once(text_file, tmp_path, monkeypatch):
    read = Mock(wraps=read_table)
    monkeypatch.setattr("gpt.text.tokenizer.read_table", read)
    (tmp_path / "tokenizer.json").write_text(json.dumps(to_json(BYTES)), "utf-8")
    prepare(str(text_file), vocabulary=str(tmp_path / "tokenizer.json"), vocab_size=257)
    assert read.call_count == 1


NO_NAMES = {
    "gpt3": "unknown vocabulary .*expected gpt2, gpt2:SIZE",
    "learn:" + "9" * 5000: "unknown vocabulary",
    "learn:256": "vocab_size must be 257 to 63488, got 256",
    "gpt2:99999": "50257, got 99999",
}


@pytest.mark.parametrize(("name", "message"), NO_NAMES.items(), ids=lambda value: value[:20])
def test_names_that_are_none(name, message):
    with pytest.raises(InputError, match=message):
        find_vocabulary(name, 1)


def edited(tokens, model=None, **changes):
    saved = to_json(BYTES) | changes
    saved["model"] |= {"vocab": {spell(token): rank for rank, token in enumerate(tokens)}} | (model or {})
    return json.dumps(saved)


LONG = [b"%01000d" % number for number in range(300)]
WITHOUT_REGEX = {"type": "ByteLevel", "use_regex": False}
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
    "no words": (edited(BYTES, pre_tokenizer=WITHOUT_REGEX), "other words than GPT-2"),
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


ADDED = {
    "of that name": (["<pad>", "<|endoftext|>"], 257, ""),
    "the first": (["</s>", "<pad>"], 256, "; '</s>' is the end of a text"),
}


@pytest.mark.parametrize(("names", "end", "more"), ADDED.values(), ids=ADDED)
def test_the_end_of_a_text_is_known_by_its_name(tmp_path, capsys, names, end, more):
    path = tmp_path / "tokenizer.json"
    added = [{"id": 256 + number, "content": name} for number, name in enumerate(names)]
    path.write_text(edited(BYTES, added_tokens=added), "utf-8")
    assert read_table(path) == (BYTES, end)
    assert f"gpt: {path}: the added tokens ['<pad>'] are left out{more}\n" in capsys.readouterr().err


def test_gpt2s_table_in_a_file_or_in_two_as_transformers_wrote_them_is_gpt2(tmp_path):
    """Among the merges is one of two `#`, with which comments begin."""
    tokens = Tokenizer("gpt2", 5000).tokens
    vocabulary = {spell(token): rank for rank, token in enumerate(tokens)} | {END_OF_TEXT: 4999}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    pairs = [" ".join(map(spell, pair)) for pair in merges(tokens) if pair]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs, ""]), "utf-8")
    (tmp_path / "tokenizer.json").write_text(json.dumps(to_json(tokens)), "utf-8")
    for name in ("vocab.json", "tokenizer.json"):
        found = find_vocabulary(str(tmp_path / name), 1)
        assert (found, found.name) == (Tokenizer("gpt2", 5000), "gpt2")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.touch()
    os.truncate(path, 1 << 30)
    with pytest.raises(InputError, match=r"has more than [\d,]+ bytes"):
        find_vocabulary(str(path), 1)


def test_a_table_may_be_larger_than_gpt2s_but_not_than_files_can_hold(tmp_path):
    tokens = [*BYTES, *(first + second for first in BYTES for second in BYTES)]
    path = tmp_path / "large.json"
    path.write_text(json.dumps(to_json(tokens[:59_999])), "utf-8")
    (tmp_path / "a.txt").write_text(PROSE, "utf-8")
    prepared = Prepared(prepare(str(tmp_path / "a.txt"), vocabulary=str(path), val_fraction=0))
    assert prepared.tokenizer.tokens == tokens[:59_999]
    assert prepared.tokenizer.decode(prepared.stream("train").tokens) == PROSE + END_OF_TEXT
    with pytest.raises(InputError, match="257 to 63488, got 63489"):
        Tokenizer("own", table=tokens[:63_488])
    with pytest.raises(InputError, match="it has 60000 tokens, expected 59999"):
        Tokenizer.from_dict(prepared.tokenizer.to_dict() | {"vocab_size": 59_999})
