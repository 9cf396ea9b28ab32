"""Weights of files: which of their rows and passages are read."""

import gzip
import json
import re
from itertools import pairwise

import pytest
from corpora import documents, write, write_texts

from gpt.data.find import find_corpus
from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.data.split import divide_corpus


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
    """Spread over all of them, the same each time; all of the other file."""
    old = [f"{i:03} old" for i in range(400)]
    write_texts(tmp_path / "new.jsonl", ["new 1", "new 2"])
    write_texts(tmp_path / name, old)
    recipe = weighted({"new.jsonl": 1, name: 0.25})
    read = documents(recipe)
    assert read == documents(recipe)
    assert read[:2] == ["new 1", "new 2"]
    places = [old.index(text) for text in read[2:]]
    assert places == sorted(set(places))
    assert 99 <= len(places) <= 101
    assert max(after - before for before, after in pairwise([*places, 400])) <= 5
    assert set(read) <= set(documents(weighted({"new.jsonl": 1, name: 0.5})))


@pytest.mark.parametrize("lines", [600, 60_000], ids=["one part", "several parts"])
def test_a_weight_is_the_share_of_the_passages_of_a_text(tmp_path, weighted, lines):
    """A passage is a document of its own, unless it follows one that is read."""
    text = "".join(f"{i:06} line\n" for i in range(lines))
    write(tmp_path / "a.txt", text)
    passages = documents(weighted({"a.txt": 0.25}))
    assert passages == documents(weighted({"a.txt": 0.25}))
    assert sum(map(len, passages)) / len(text) == pytest.approx(0.25, abs=0.06)
    places = [text.index(passage) for passage in passages]
    assert places[0] == 0
    assert places[-1] > 0.8 * len(text)
    for passage, (place, following) in zip(passages, pairwise(places), strict=False):
        assert place + len(passage) < following
    assert documents(weighted({"a.txt": 1})) == [text]


def test_a_file_with_a_weight_is_never_left_out(tmp_path, weighted):
    write_texts(tmp_path / "a.jsonl", ["only"])
    write(tmp_path / "b.txt", "few words")
    row, passage = documents(weighted({"a.jsonl": 0.01, "b.txt": 0.01}))
    assert row == "only"
    assert passage and "few words".startswith(passage)


def test_sizes_count_by_weight(tmp_path, weighted):
    """Also where a part of the text is read."""
    write(tmp_path / "old.txt", "ten bytes\n" * 400_000)
    write(tmp_path / "new.txt", "new words\n" * 100_000)
    corpus = find_corpus(weighted({"new.txt": 1, "old.txt": 0.25}))
    assert corpus.size() == 2_000_000
    drawn = "".join(piece.text for piece in corpus.pieces(1_000_000))
    assert len(drawn) == pytest.approx(1_000_000, rel=0.4)
    assert "new" in drawn and "ten" in drawn


def test_an_estimated_size_counts_by_weight(tmp_path, weighted):
    write(tmp_path / "c.gz", gzip.compress(b"ten bytes\n" * 1000))
    corpus = find_corpus(weighted({"c.gz": 0.25}))
    assert corpus.size() is None
    assert corpus.estimated_size(0, 0) == 2500


def test_prepared_data_and_plans_know_the_weights(tmp_path, weighted):
    write(tmp_path / "old.txt", "".join(f"{i} of the old lines\n" for i in range(20_000)))
    write(tmp_path / "new.txt", "".join(f"{i} of the new lines\n" for i in range(5_000)))
    folders = set()
    for weight in (0.25, 0.5):
        recipe = weighted({"new.txt": 1, "old.txt": weight})
        folder = prepare(recipe, vocabulary="gpt2:300")
        assert prepare(recipe, vocabulary="gpt2:300") == folder
        size = sum(counts.bytes for counts in Prepared(folder).counts.values())
        assert divide_corpus(find_corpus(recipe)).size == size
        assert size == pytest.approx(find_corpus(recipe).size(), rel=0.05)
        folders.add(folder)
    assert len(folders) == 2


def test_nothing_that_is_held_out_is_trained_on_beside_a_weight(tmp_path, weighted):
    write(tmp_path / "old.txt", "".join(f"{i:06} of the old lines\n" for i in range(60_000)))
    lines = {"train": set(), "val": set()}
    for piece in divide_corpus(find_corpus(weighted({"old.txt": 0.6}))).pieces():
        lines[piece.split].update(re.findall(r"\d{6} of the old lines", piece.text))
    assert len(lines["val"]) > 1000
    assert not lines["train"] & lines["val"]
