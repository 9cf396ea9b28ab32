"""Weights of files: which of their rows and passages are read."""

import gzip
import json
import re
from itertools import pairwise

import pytest
from corpora import documents, write, write_texts

from gpt.data.find import find_corpus
from gpt.data.split import divide_corpus
from gpt.data.text_file import CHUNK_BYTES


@pytest.fixture
def weighted(tmp_path):
    """Writes a corpus file of files in the test's folder, given the weight of each."""

    def write_recipe(weights: dict[str, float]) -> str:
        files = [str(tmp_path / name) for name in weights]
        recipe = {"corpus": {"files": files, "weights": list(weights.values())}}
        return str(write(tmp_path / "mine.yaml", json.dumps(recipe)))

    return write_recipe


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.jsonl.gz", "a.json"])
def test_a_weight_is_the_share_of_the_rows_that_is_read(tmp_path, weighted, name):
    """Spread over all of them, in order; a larger one adds rows to those of a smaller one."""
    write_texts(tmp_path / "new.jsonl", ["1000", "2000"])
    write_texts(tmp_path / name, [f"{number:03}" for number in range(400)])
    read = documents(weighted({"new.jsonl": 1, name: 0.25}))
    assert read[:2] == ["1000", "2000"]
    places = list(map(int, read[2:]))
    assert places[0] == 0
    assert 99 <= len(places) <= 101
    assert {after - before for before, after in pairwise([*places, 400])} <= {1, 2, 3, 4, 5}
    assert set(read) <= set(documents(weighted({"new.jsonl": 1, name: 0.5})))


@pytest.mark.parametrize("lines", [600, 60_000], ids=["one part", "several parts"])
def test_a_weight_is_the_share_of_the_passages_of_a_text(tmp_path, weighted, lines):
    """A passage is a document of its own, unless it follows one that is read."""
    text = "".join(f"{number:06} line\n" for number in range(lines))
    write(tmp_path / "a.txt", text)
    passages = documents(weighted({"a.txt": 0.25}))
    assert sum(map(len, passages)) / len(text) == pytest.approx(0.25, abs=0.06)
    begins = [text.index(passage) for passage in passages]
    ends = [begin + len(passage) for begin, passage in zip(begins, passages, strict=True)]
    assert begins[0] == 0
    assert begins[-1] > 0.8 * len(text)
    assert all(end < begin for end, begin in zip(ends, begins[1:], strict=False))
    assert documents(weighted({"a.txt": 1})) == [text]


def test_the_most_bytes_of_a_compressed_text_are_bytes(tmp_path):
    """And not characters, of which Chinese has a third as many."""
    path = write(tmp_path / "a.txt.gz", gzip.compress(("\u4e2d" * 20 + "\n").encode() * 40_000))
    pieces = find_corpus(str(path)).pieces(1 << 20)
    assert 1 << 20 <= sum(len(piece.text.encode()) for piece in pieces) <= (1 << 20) + 2 * CHUNK_BYTES


@pytest.mark.parametrize("rows", [4, 1], ids=["some are longer than a chunk", "one fills all chunks"])
def test_the_first_row_of_long_ones_is_read_whatever_the_limit(tmp_path, rows):
    texts = [f"row {number}".ljust(4_000_000 // rows, ".") for number in range(rows)]
    corpus = find_corpus(str(write_texts(tmp_path / "a.jsonl", texts)))
    read = list(corpus.pieces(300_000))
    assert read and read[0].text.startswith("row 0")


def test_an_estimated_size_counts_by_weight(tmp_path, weighted):
    write(tmp_path / "c.gz", gzip.compress(b"ten bytes\n" * 1000))
    corpus = find_corpus(weighted({"c.gz": 0.25}))
    assert corpus.size() is None
    assert corpus.estimated_size(0, 0) == 2500


def test_nothing_that_is_held_out_is_trained_on_beside_a_weight(tmp_path, weighted):
    write(tmp_path / "old.txt", "".join(f"{i:06} of the old lines\n" for i in range(60_000)))
    lines = {"train": set(), "val": set()}
    for piece in divide_corpus(find_corpus(weighted({"old.txt": 0.6}))).pieces():
        lines[piece.split].update(re.findall(r"\d{6} of the old lines", piece.text))
    assert len(lines["val"]) > 1000
    assert not lines["train"] & lines["val"]
