"""What is held out: only on the text, the same for everyone, spread over it, and of a known size."""

import csv
import json
import random
import re
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt.data import split
from gpt.data.find import find_corpus
from gpt.data.formats import PART_BYTES
from gpt.data.split import Rule, divide_corpus, held_out_bytes

WORDS = [f"word{number * number % 7919}" for number in range(4000)]


def prose(size, seed=0):
    """Lines of words, so many bytes of them."""
    draw = random.Random(seed)
    lines = (" ".join(draw.choices(WORDS, k=12)) + "\n" for _ in range(size // 80 + 1))
    text = "".join(lines)
    assert len(text) >= size
    return text[:size]


def divided(path, text, *options):
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": text}), path, row_group_size=20)
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["text"], *([row] for row in text)])
    else:
        if isinstance(text, list):
            text = "".join(json.dumps({"text": row}) + "\n" for row in text)
        path.write_text(text, encoding="utf-8")
    return divide_corpus(find_corpus(str(path)), *options)


def parts(found, *splits):
    pieces = [piece for piece in found.pieces() if piece.split in splits or not splits]
    return "".join(piece.text for piece in pieces)


def test_a_share_that_fits_the_size():
    """The documented numbers, by hand."""
    sizes = {2_000: 200, 1_000_000: 100_000, 4_000_000: 200_000, 100_000_000: 1_000_000, 10**10: 10**7}
    for size, expected in sizes.items():
        assert held_out_bytes(size) == pytest.approx(expected)
        assert Rule.of(size).share == pytest.approx(expected / size)
        assert Rule.of(size).share <= 0.1


@pytest.mark.parametrize("size", [2_000, 5_000, 200_000, 3_000_000])
@pytest.mark.parametrize("documents", [1, 3, 500])
def test_few_large_documents_and_many_small_ones(tmp_path, size, documents):
    """Never more than a tenth, in twenty places where there is enough for that; nothing is lost or moved."""
    text = prose(size)
    step = size // documents
    rows = [text[i * step : (i + 1) * step] for i in range(documents)]
    found = divided(tmp_path / "a.jsonl", rows)
    val = sum(len(piece.text) for piece in found.pieces() if piece.split == "val")
    assert found.size == step * documents
    assert val == found.rule.share * found.size
    assert 0.5 * held_out_bytes(found.size) < val <= 0.1 * size
    if size >= 200_000:
        assert val > 0.9 * held_out_bytes(found.size)
        assert val / found.rule.longest >= 0.9 * 20
    pieces = list(found.pieces())
    assert "".join(piece.text for piece in pieces) == "".join(rows)
    # A part of a document is one there: what stood on both sides of a hole is not joined.
    runs = [list(run) for _, run in groupby(pieces, key=lambda piece: piece.split)]
    assert all(run[0].first for run in runs)
    assert sum(piece.first for piece in pieces) <= documents + len(runs)
    places = [i for i, piece in enumerate(pieces) if piece.split == "val"]
    assert size < 200_000 or min(places) < len(pieces) / 4 < 3 * len(pieces) / 4 < max(places)


def test_equal_documents_are_on_one_side(tmp_path):
    found = divided(tmp_path / "a.jsonl", [f"document {i % 50} repeated" for i in range(200)], 0.3)
    sides = [{piece.text for piece in found.pieces() if piece.split == side} for side in split.SPLITS]
    assert len(sides[0] | sides[1]) == 50
    assert all(sides) and not sides[0] & sides[1]


@pytest.mark.parametrize("text", ["a few words of text", "a" * 200_000, "same line\n" * 5000, "\u9053" * 999])
def test_short_and_repetitive_texts_have_both_parts(tmp_path, text):
    found = divided(tmp_path / "a.txt", text)
    assert parts(found) == text
    assert 0 < len(parts(found, "val")) <= max(1, 0.11 * len(text))


def test_an_example_is_whole_and_decided_by_its_prompt(tmp_path):
    rows = [{"prompt": f"{i % 40} " + "why? " * 300, "completion": prose(3000, i)} for i in range(80)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = divide_corpus(find_corpus(str(path)), 0.2)
    sides = [piece.split for piece in found.pieces() if piece.first]
    assert sides[:40] == sides[40:]
    assert 0 < sides.count("val") <= 16
    for _, pieces in groupby(found.pieces(), key=lambda piece: piece.split):
        assert next(pieces).first


@given(st.lists(st.text(max_size=60), min_size=1, max_size=30), st.sampled_from([None, 0.0, 0.3, 0.9]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_lost(tmp_path, rows, fraction):
    found = divided(tmp_path / "a.jsonl", rows, fraction)
    assert parts(found) == "".join(rows)
    train, val = (parts(found, side) for side in split.SPLITS)
    if fraction == 0.0:
        assert not val
    elif len({row for row in rows if row}) > 1:
        assert train and val


@pytest.fixture
def small(monkeypatch):
    """A text of 300 KB counts as a large one."""
    monkeypatch.setattr("gpt.data.formats.PART_BYTES", 4000)
    monkeypatch.setattr("gpt.data.corpus.PART_BYTES", 4000)
    monkeypatch.setattr("gpt.data.rows.PART_BYTES", 4000)
    monkeypatch.setattr("gpt.data.formats._LONGEST_LINE", 400)
    monkeypatch.setattr(split, "SAMPLE_BYTES", 300_000)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_large_text_is_sampled_from_all_of_it(tmp_path, small, name):
    rows = [f"{i:04} {prose(700, i)}" for i in range(2000)]
    found = divided(tmp_path / name, rows if name == "a.jsonl" else "\n".join(rows))
    whole, sample = list(found.pieces()), list(found.sample())
    assert 0.8 < sum(len(piece.text) for piece in sample) / 300_000 < 1.2
    assert 0.7 < len(parts(found, "val")) / held_out_bytes(found.size) < 1.3
    text, train = parts(found), "".join(piece.text for piece in whole if piece.split == "train")
    taken = [piece.text.strip() for piece in sample if piece.split == "train"]
    assert all(any(line in train for line in each.split("\n")) for each in taken)
    lines = {line for each in taken for line in each.split("\n")[1:-1]}
    held_out = {line for piece in whole if piece.split == "val" for line in piece.text.split("\n")[1:-1]}
    assert not lines & held_out  # what is learned from the sample leaves no trace of what is held out
    places = [text.index(each[:40]) / len(text) for each in taken]
    assert min(places) < 0.05 and max(places) > 0.95 and 0.4 < sum(places) / len(places) < 0.6


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_most_bytes_draws_parts_that_more_of_them_contain(tmp_path, small, name):
    rows = [f"{i:04} {prose(300, i)}\n" for i in range(2000)]
    rows[700] = "long " * 3000 + "\n"
    text = {}
    for most in (40_000, 150_000, 10**9):
        found = divided(tmp_path / name, "".join(rows) if name == "a.txt" else rows, None, most)
        assert found.is_whole == (most >= 10**9)
        text[most] = set(re.findall(r"\b[01]\d{3}\b", parts(found)))
        assert most == 10**9 or 0.7 * most < len(parts(found)) < 1.5 * most
        assert found.size == pytest.approx(len(parts(found)), rel=0.15 if most == 10**9 else 0)
    assert parts(found) == "".join(rows)
    small_lines, large_lines = ({line[:4] for line in text[most]} for most in (40_000, 150_000))
    assert (
        len(small_lines) > 10 and len(small_lines - large_lines) <= len(small_lines) / 5
    )  # cut at their ends


def test_a_sparse_file_of_gigabytes_is_read_where_it_is_drawn(tmp_path):
    """With no byte of the rest: in 16 of 20,000 parts."""
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.write(b"words\n" * 2000)
        file.truncate(5 << 30)
    found = divide_corpus(find_corpus(str(path)), most_bytes=4 << 20)
    pieces = list(found.pieces())
    assert not found.is_whole
    assert 14 * PART_BYTES <= sum(len(piece.text) for piece in pieces) <= 18 * PART_BYTES


def test_compressed_text_is_read_from_its_beginning(tmp_path, small):
    import gzip

    text = prose(900_000)
    (tmp_path / "a.gz").write_bytes(gzip.compress(text.encode()))
    found = divide_corpus(find_corpus(str(tmp_path / "a.gz")))
    assert found.is_whole and parts(found) == text
    assert text.startswith("".join(piece.text for piece in found.sample()))
    found = divide_corpus(find_corpus(str(tmp_path / "a.gz")), most_bytes=100_000)
    assert not found.is_whole and text.startswith(parts(found))
    assert 100_000 <= len(parts(found)) < 110_000 and found.size == len(parts(found))


def test_tens_of_thousands_of_documents(tmp_path):
    rows = [f"{i} is a number" for i in range(30_000)]
    found = divided(tmp_path / "a.jsonl", rows)
    val = [piece for piece in found.pieces() if piece.split == "val"]
    assert all(piece.first for piece in val)
    assert sum(len(piece.text) for piece in val) == pytest.approx(held_out_bytes(found.size), rel=0.01)
