"""What is held out: only on the text, the same for everyone, spread over it, and of a known size."""

import gzip
import random
import re
from itertools import groupby

import pytest
from corpora import write, write_rows, write_texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt.data.find import find_corpus
from gpt.data.formats import PART_BYTES
from gpt.data.split import SPLITS, Divided, Rule, divide_corpus, held_out_bytes

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
    assert Rule.of(size).share == pytest.approx(expected / size)


@pytest.mark.parametrize("size", [2_000, 5_000, 200_000, 3_000_000])
@pytest.mark.parametrize("documents", [1, 3, 500])
def test_few_large_documents_and_many_small_ones(tmp_path, size, documents):
    """Never more than a tenth, in twenty places where there is enough for that; nothing is lost or moved."""
    text = prose(size)
    step = size // documents
    rows = [text[i * step : (i + 1) * step] for i in range(documents)]
    corpus = divided(tmp_path / "a.jsonl", rows)
    pieces = list(corpus.pieces())
    assert text_of(pieces) == "".join(rows)
    val = len(text_of(pieces, "val"))
    assert corpus.size == step * documents
    assert val == corpus.rule.share * corpus.size
    assert 0.5 * held_out_bytes(corpus.size) < val <= 0.1 * size
    # A part of a document is one there: what stood on both sides of a hole is not joined.
    runs = [list(run) for _, run in groupby(pieces, key=lambda piece: piece.split)]
    assert all(first.first for first, *_ in runs)
    assert sum(piece.first for piece in pieces) <= documents + len(runs)
    if size >= 200_000:
        assert val > 0.9 * held_out_bytes(corpus.size)
        assert val / corpus.rule.longest >= 0.9 * 20
        places = [place / len(pieces) for place, piece in enumerate(pieces) if piece.split == "val"]
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
    for _, run in groupby(pieces, key=lambda piece: piece.split):
        assert next(run).first


# Neither a NUL byte nor a byte order mark is text.
DOCUMENTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff"), max_size=60)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@given(st.lists(DOCUMENTS, min_size=1, max_size=30), st.sampled_from([None, 0.0, 0.3, 0.9]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_lost(tmp_path, name, rows, fraction):
    content = "".join(rows) if name == "a.txt" else rows
    pieces = list(divided(tmp_path / name, content, fraction).pieces())
    assert text_of(pieces) == "".join(rows)
    train, val = (text_of(pieces, split) for split in SPLITS)
    if fraction == 0.0:
        assert not val
    elif name == "a.jsonl" and len({row for row in rows if row}) > 1:
        assert train and val


@pytest.fixture
def small(monkeypatch):
    """A text of 300 KB counts as a large one."""
    for module in ("formats", "corpus", "rows"):
        monkeypatch.setattr(f"gpt.data.{module}.PART_BYTES", 4000)
    monkeypatch.setattr("gpt.data.split.SAMPLE_BYTES", 300_000)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_large_text_is_sampled_from_all_of_it(tmp_path, small, name):
    rows = [f"{i:04} {prose(700, i)}" for i in range(2000)]
    corpus = divided(tmp_path / name, rows if name == "a.jsonl" else "\n".join(rows))
    whole, sample = list(corpus.pieces()), list(corpus.sample())
    assert 0.8 < len(text_of(sample)) / 300_000 < 1.2
    assert 0.7 < len(text_of(whole, "val")) / held_out_bytes(corpus.size) < 1.3
    taken = [piece.text.strip() for piece in sample if piece.split == "train"]
    train = text_of(whole, "train")
    assert all(any(line in train for line in each.split("\n")) for each in taken)

    def whole_lines(texts) -> set[str]:
        return {line for text in texts for line in text.split("\n")[1:-1]}

    # What is learned from the sample leaves no trace of what is held out.
    assert not whole_lines(taken) & whole_lines(piece.text for piece in whole if piece.split == "val")
    text = text_of(whole)
    places = [text.index(each[:40]) / len(text) for each in taken]
    assert min(places) < 0.05 and max(places) > 0.95
    assert 0.4 < sum(places) / len(places) < 0.6


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_most_bytes_draws_parts_that_more_of_them_contain(tmp_path, small, name):
    rows = [f"{i:04} {prose(300, i)}\n" for i in range(2000)]
    rows[700] = "long " * 3000 + "\n"
    write(tmp_path / name, "".join(rows)) if name == "a.txt" else write_texts(tmp_path / name, rows)

    def drawn(most: int) -> str:
        corpus = divide_corpus(find_corpus(str(tmp_path / name)), most_bytes=most)
        text = text_of(corpus.pieces())
        assert corpus.is_whole == (most > 10**6)
        assert corpus.size == pytest.approx(len(text), rel=0.15 if corpus.is_whole else 0)
        return text

    assert drawn(10**9) == "".join(rows)
    few, more = drawn(40_000), drawn(150_000)
    assert 0.7 < len(few) / 40_000 < 1.5 and 0.7 < len(more) / 150_000 < 1.5
    few, more = (set(re.findall(r"\b[01]\d{3}\b", text)) for text in (few, more))
    assert len(few) > 10
    assert len(few - more) <= len(few) / 5  # which are cut at their ends


def test_a_sparse_file_of_gigabytes_is_read_where_it_is_drawn(tmp_path):
    """With no byte of the rest: in 16 of 20,000 parts."""
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.write(b"words\n" * 2000)
        file.truncate(5 << 30)
    corpus = divide_corpus(find_corpus(str(path)), most_bytes=4 << 20)
    assert not corpus.is_whole
    assert 14 * PART_BYTES <= len(text_of(corpus.pieces())) <= 18 * PART_BYTES


def test_compressed_text_is_read_from_its_beginning(tmp_path, small):
    text = prose(900_000)
    corpus = find_corpus(str(write(tmp_path / "a.gz", gzip.compress(text.encode()))))
    whole = divide_corpus(corpus)
    assert whole.is_whole and text_of(whole.pieces()) == text
    assert text.startswith(text_of(whole.sample()))
    part = divide_corpus(corpus, most_bytes=100_000)
    assert not part.is_whole and text.startswith(text_of(part.pieces()))
    assert 100_000 <= part.size == len(text_of(part.pieces())) < 110_000


@pytest.mark.parametrize("text", ["a few words of text", "a" * 200_000, "same line\n" * 5000, "\u9053" * 999])
def test_short_and_repetitive_texts_have_both_parts(tmp_path, text):
    pieces = divided(tmp_path / "a.txt", text).pieces()
    assert text_of(pieces) == text
    assert 0 < len(text_of(pieces, "val")) <= max(1, 0.11 * len(text))
