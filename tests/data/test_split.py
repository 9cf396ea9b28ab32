"""What is held out: only on the text, the same for everyone, spread over it, and of a known size."""

import gzip
import os
import random
import re
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import write, write_rows, write_texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt.data.find import find_corpus
from gpt.data.split import SPLITS, Divided, divide_corpus, held_out_bytes
from gpt.data.text_file import CHUNK_BYTES

WORDS = [f"word{number * number % 7919}" for number in range(4000)]


def prose(size, seed=0) -> str:
    """Lines of words, so many bytes of them."""
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS, k=12)) + "\n" for _ in range(size // 80 + 1))[:size]


def divided(path, text: str | list[str], *options) -> Divided:
    """The corpus of a text, or of documents, in a file of this name."""
    write(path, text) if isinstance(text, str) else write_texts(path, text)
    return divide_corpus(find_corpus(str(path)), *options)


def text_of(pieces, *splits) -> str:
    """The text of the pieces that are in these splits, or of all of them."""
    return "".join(piece.text for piece in pieces if piece.split in splits or not splits)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(2_000, 200), (1_000_000, 100_000), (4_000_000, 200_000), (100_000_000, 1_000_000), (10**10, 10**7)],
)
def test_a_share_that_fits_the_size(size, expected):
    """The documented numbers, by hand."""
    assert held_out_bytes(size) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2_000, 200_000, 3_000_000])
@pytest.mark.parametrize("documents", [1, 3, 500])
def test_few_large_documents_and_many_small_ones(tmp_path, size, documents):
    """Never more than the usual part, in twenty places where there is enough for that; nothing is moved."""
    text = prose(size)
    step = size // documents
    rows = [text[number * step :][:step] for number in range(documents)]
    corpus = divided(tmp_path / "a.jsonl", rows)
    pieces = list(corpus.pieces())
    assert text_of(pieces) == "".join(rows)
    held_out, usual = len(text_of(pieces, "val")), held_out_bytes(corpus.size)
    assert corpus.size == step * documents
    assert held_out == corpus.rule.share * corpus.size
    assert (0.5 if size == 2_000 else 0.9) * usual < held_out <= usual
    # A part of a document is one there: what stood on both sides of a hole is not joined.
    runs = [list(run) for _, run in groupby(pieces, key=lambda piece: piece.split)]
    assert all(first.first for first, *_ in runs)
    assert sum(piece.first for piece in pieces) <= documents + len(runs)
    if size > 2_000:
        places = [place / len(pieces) for place, piece in enumerate(pieces) if piece.split == "val"]
        assert len(places) > 15
        assert min(places) < 0.25 < 0.75 < max(places)


def test_equal_documents_are_on_one_side(tmp_path):
    pieces = divided(tmp_path / "a.jsonl", [f"document {i % 50} repeated" for i in range(200)], 0.3).pieces()
    train, val = ({piece.text for piece in pieces if piece.split == split} for split in SPLITS)
    assert train and val and not train & val
    assert len(train | val) == 50


def test_an_example_is_whole_and_decided_by_its_prompt(tmp_path):
    rows = [{"prompt": f"{i % 40} " + "why? " * 300, "completion": prose(3000, i)} for i in range(80)]
    pieces = divide_corpus(find_corpus(str(write_rows(tmp_path / "a.jsonl", rows))), 0.2).pieces()
    sides = [piece.split for piece in pieces if piece.first]
    assert sides[:40] == sides[40:]
    assert 0 < sides.count("val") <= 16
    assert all(next(run).first for _, run in groupby(pieces, key=lambda piece: piece.split))


@pytest.mark.parametrize("variant", range(6))
@pytest.mark.parametrize(("often", "rarely", "fraction"), [(99, 1, 0.001), (190, 10, 0.2)])
def test_a_prompt_with_most_of_the_examples_is_trained_on(tmp_path, variant, often, rarely, fraction, capsys):
    """Whichever of the prompts has the lowest hash. What is held out is of the others."""
    rows = [{"prompt": f"{variant} often?", "completion": "yes"}] * often
    rows += [{"prompt": f"{variant} rarely? {i}", "completion": "no"} for i in range(rarely)]
    corpus = divide_corpus(find_corpus(str(write_rows(tmp_path / "a.jsonl", rows))), fraction)
    assert 1 <= text_of(corpus.pieces(), "val").count("rarely?") <= rarely
    assert text_of(corpus.pieces(), "train").count("often?") == often
    assert "held out" not in capsys.readouterr().err


def test_the_user_is_told_if_much_more_is_held_out_than_was_asked_for(tmp_path, capsys):
    rows = [{"prompt": f"{i % 2}?", "completion": "yes"} for i in range(100)]
    corpus = divide_corpus(find_corpus(str(write_rows(tmp_path / "a.jsonl", rows))), 0.1)
    assert corpus.rule.share == 0.5
    assert "a.jsonl: 50% of the text is held out, not 10%: no smaller part" in capsys.readouterr().err


def test_half_a_character_in_a_prompt_decides_as_its_replacement(tmp_path):
    """JSON can write one half of a surrogate pair, which UTF-8 cannot hold."""
    path = write(tmp_path / "a.jsonl", r'{"prompt": "a\ud83d", "completion": "b"}')
    keys = [piece.key for piece in divide_corpus(find_corpus(str(path))).pieces() if piece.first]
    assert keys == ["### Instruction:\na\ufffd\n\n### Response:\n"]


@given(st.lists(st.text(max_size=60), min_size=1, max_size=30), st.sampled_from([None, 0.0, 0.3, 0.9]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_lost(tmp_path, rows, fraction):
    pieces = list(divided(tmp_path / "a.jsonl", rows, fraction).pieces())
    assert text_of(pieces) == "".join(rows)
    assert bool(text_of(pieces, "train")) == any(rows)
    if fraction == 0.0:
        assert not text_of(pieces, "val")
    elif len({row for row in rows if row}) > 1:
        assert text_of(pieces, "val")


@pytest.fixture
def small(monkeypatch):
    """A text of 300 KB counts as a large one."""
    for module in ("text_file", "corpus", "rows"):
        monkeypatch.setattr(f"gpt.data.{module}.CHUNK_BYTES", 4000)
    monkeypatch.setattr("gpt.data.split.SAMPLE_BYTES", 300_000)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_large_text_is_sampled_from_all_of_it(tmp_path, small, name):
    """What is learned from the sample leaves no trace of what is held out."""
    rows = [f"{number:04} {prose(700, number)}" for number in range(2000)]
    corpus = divided(tmp_path / name, rows if name == "a.jsonl" else "\n".join(rows))
    whole, sample = list(corpus.pieces()), list(corpus.sample())
    assert 0.8 < len(text_of(sample)) / 300_000 < 1.2
    assert 0.7 < len(text_of(whole, "val")) / held_out_bytes(corpus.size) < 1.3

    def whole_lines(pieces, split) -> set[str]:
        return {line for each in pieces if each.split == split for line in each.text.split("\n")[1:-1]}

    taken = whole_lines(sample, "train")
    assert taken and not taken & whole_lines(whole, "val")
    assert whole_lines(sample, "val") & whole_lines(whole, "train")  # of less text a larger share is held out
    text = text_of(whole)
    places = [text.index(piece.text) / len(text) for piece in sample]
    assert min(places) < 0.05 < 0.95 < max(places)
    assert 0.4 < sum(places) / len(places) < 0.6


@pytest.fixture
def repeated(tmp_path):
    """A Parquet file of 200 KB: 40 texts, each of which stands in 5 rows and is stored once."""
    texts = [f"{number:04} {prose(4900, number)}" for number in range(40)]
    values = pa.DictionaryArray.from_arrays(pa.array(list(range(40)) * 5, pa.int32()), texts)
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet", store_schema=False)
    corpus = find_corpus(str(tmp_path / "a.parquet"))
    assert corpus.size() < 210_000
    return corpus


def test_a_file_with_more_text_than_its_size_says_is_sampled_in_the_same_units(repeated, small):
    corpus = divide_corpus(repeated, 0.05)
    assert corpus.text is None
    held_out = [piece.text for piece in corpus.pieces() if piece.split == "val"]
    learned = "\n".join(piece.text for piece in corpus.sample() if piece.split == "train")
    assert held_out and not [text for text in held_out if text in learned]


def test_all_of_a_text_is_read_only_if_it_has_no_more_than_is_asked_for(repeated):
    """Its size in the file says little: 200 KB hold 1 MB of text."""
    part = divide_corpus(repeated, most_bytes=400_000)
    assert part.limit == 400_000 and part.size == len(text_of(part.pieces())) < 800_000
    for most in (None, 2_000_000):
        whole = divide_corpus(repeated, most_bytes=most)
        assert whole.limit is None and whole.size == len(text_of(whole.pieces())) == 40 * 4905 * 5


def test_most_bytes_are_kept_to_where_only_the_size_says_that_all_fits(repeated, small):
    part = divide_corpus(repeated, most_bytes=600_000)
    assert part.text is None and part.limit == 600_000
    assert 600_000 <= len(text_of(part.pieces())) < 620_000
    for corpus in (part, divide_corpus(repeated)):
        assert corpus.size >= 300_000  # as much was read to find it out
    assert len(text_of(divide_corpus(repeated).pieces())) == 40 * 4905 * 5


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_most_bytes_draws_parts_that_more_of_them_contain(tmp_path, small, name):
    rows = [f"{number:04} {prose(300, number)}\n" for number in range(2000)]
    rows[700] = "long " * 3000 + "\n"
    write(tmp_path / name, "".join(rows)) if name == "a.txt" else write_texts(tmp_path / name, rows)

    def drawn(most: int) -> str:
        corpus = divide_corpus(find_corpus(str(tmp_path / name)), most_bytes=most)
        text = text_of(corpus.pieces())
        assert (corpus.limit is None) == (most > 10**6)
        assert corpus.size == pytest.approx(len(text), rel=0 if corpus.limit else 0.15)
        return text

    whole, few, more = map(drawn, (10**9, 40_000, 150_000))
    assert whole == "".join(rows)
    assert 0.7 < len(few) / 40_000 < 1.5 and 0.7 < len(more) / 150_000 < 1.5
    few, more = (set(re.findall(r"\b[01]\d{3}\b", text)) for text in (few, more))
    assert len(few) > 10
    assert len(few - more) <= len(few) / 5  # which are cut at their ends


@pytest.mark.parametrize(("size", "most"), [(1_100_000, 100_000), (10_000_000, 300_000), (10_000_000, 10**6)])
def test_few_bytes_of_a_text_come_from_all_of_it(tmp_path, size, most):
    """In pieces, which begin documents. The beginning is read, and of more bytes the same and more."""
    lines = [f"{number:07} of the lines\n" for number in range(size // 21)]
    corpus = find_corpus(str(write(tmp_path / "a.txt", "".join(lines))))
    read, more = (text_of(corpus.pieces(most)) for most in (most, 2 * most))
    assert len(read) == pytest.approx(most, rel=0.2)
    places = [int(number) for number in re.findall(r"\d{7}", read)]
    assert places[0] == 0 and places[-1] > 0.85 * len(lines)
    assert sum(places) / len(places) / len(lines) == pytest.approx(0.5, abs=0.1)
    assert set(places) <= {int(number) for number in re.findall(r"\d{7}", more)}


def test_a_sparse_file_of_gigabytes_is_read_where_it_is_drawn(tmp_path):
    """With no byte of the rest: in 16 of 20,000 parts."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"words\n" * 2000)
    os.truncate(path, 5 << 30)
    corpus = divide_corpus(find_corpus(str(path)), most_bytes=4 << 20)
    assert corpus.limit == 4 << 20
    assert 14 * CHUNK_BYTES <= len(text_of(corpus.pieces())) <= 18 * CHUNK_BYTES


def test_compressed_text_is_read_from_its_beginning(tmp_path, small):
    """A text that is larger than memory holds is held out by what it has, not by what was read of it."""
    text = prose(900_000)
    corpus = find_corpus(str(write(tmp_path / "a.gz", gzip.compress(text.encode()))))
    for most in (None, 10**9):
        whole = divide_corpus(corpus, most_bytes=most)
        assert whole.limit is None and text_of(whole.pieces()) == text
        assert whole.size == len(text) and whole.rule.share == held_out_bytes(len(text)) / len(text)
    assert text.startswith(text_of(whole.sample()))
    part = divide_corpus(corpus, most_bytes=100_000)
    assert part.limit == 100_000 and text.startswith(text_of(part.pieces()))
    assert 100_000 <= part.size == len(text_of(part.pieces())) < 110_000


def test_the_last_example_that_is_read_has_its_reply(tmp_path, small):
    """Whatever the bytes at which reading ends; the rows have prompts and replies of equal length."""
    rows = [{"prompt": prose(2900, i), "completion": prose(3000, -i)} for i in range(20)]
    corpus = find_corpus(str(write_rows(tmp_path / "a.jsonl.gz", rows)))
    for most in range(10_000, 30_000, 3000):
        pieces = list(corpus.pieces(most))
        assert most < len(text_of(pieces)) < most + 12_000
        assert pieces[-1].scored and len(pieces) % 2 == 0


@pytest.mark.parametrize("text", ["a few words of text", "a" * 200_000, "same line\n" * 5000, "\u9053" * 999])
def test_short_and_repetitive_texts_have_both_parts(tmp_path, text):
    pieces = divided(tmp_path / "a.txt", text).pieces()
    assert text_of(pieces) == text
    assert 0 < len(text_of(pieces, "val")) <= max(1, 0.11 * len(text))
