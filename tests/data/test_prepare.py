import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt.data import documents, shard_writer
from gpt.data.prepare import prepare
from gpt.data.shards import META, SPLITS, Prepared
from gpt.errors import InputError
from gpt.text.tokenizer import Tokenizer


def tokens(folder, split):
    stream = Prepared(folder).stream(split)
    return np.concatenate([np.empty(0, stream.dtype), *stream.parts]).tolist()


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if not path.name.startswith(".")}


def split_at(ids, end):
    """The documents in a list of ids, each without its end of text; the last must have one."""
    documents, current = [], []
    for i in ids:
        if i == end:
            documents.append(current)
            current = []
        else:
            current.append(i)
    assert not current
    return documents


def expected_split(text, val_fraction):
    """Written again from the documentation: a SHA-256 of the text against the fraction."""
    import hashlib

    share = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64
    return "val" if share < val_fraction else "train"


def test_tokens_are_those_of_the_documents_in_order(rows, texts):
    folder = prepare(str(rows), vocab_size=500, val_fraction=0.3)
    tokenizer = Tokenizer("gpt2", vocab_size=500)
    for split in SPLITS:
        chosen = [text for text in texts if expected_split(text, 0.3) == split]
        assert 0 < len(chosen) < len(texts)
        ids = tokens(folder, split)
        assert ids == [i for text in chosen for i in [*tokenizer.encoding.encode_ordinary(text), 499]]
        prepared = Prepared(folder)
        assert prepared.count(split, "documents") == len(chosen)
        assert prepared.count(split, "bytes") == sum(len(text.encode()) for text in chosen)
        assert prepared.count(split, "tokens") == len(ids)
        assert [ids[start - 1] for start in prepared.document_starts(split)[1:]] == [499] * (len(chosen) - 1)
    assert Prepared(folder).dtype == np.uint16
    Prepared(folder).verify()


@given(documents=st.lists(st.text(max_size=80), min_size=1, max_size=12), size=st.sampled_from([257, 50257]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_text_survives(tmp_path_factory, documents, size):
    folder = tmp_path_factory.mktemp("texts")
    for number, document in enumerate(documents):
        (folder / f"{number:03}.txt").write_bytes(document.encode())
    kept = [document for document in documents if document]
    if not kept:
        with pytest.raises(InputError, match="empty"):
            prepare(str(folder), folder / "out", vocab_size=size)
        return
    done = prepare(str(folder), folder / "out", vocab_size=size, val_fraction=0.4)
    tokenizer = Tokenizer("gpt2", vocab_size=size)
    both = tokens(done, "train") + tokens(done, "val")
    found = [tokenizer.decode(ids) for ids in split_at(both, tokenizer.eot)]
    assert sorted(found) == sorted(kept)
    assert Prepared(done).meta["empty_documents"] == len(documents) - len(kept)


@pytest.mark.parametrize("workers", [2, 5])
def test_bytes_do_not_depend_on_workers_or_blocks(rows, tmp_path, monkeypatch, workers):
    one = prepare(str(rows), tmp_path / "one", vocab_size=500, workers=1)
    monkeypatch.setattr("gpt.data.prepare._BLOCK_CHARACTERS", 700)
    many = prepare(str(rows), tmp_path / "many", vocab_size=500, workers=workers)
    assert contents(one) == contents(many)


def test_long_documents_come_in_pieces_and_shards(tmp_path, monkeypatch):
    text = "It is a truth universally acknowledged, that.\n" * 300
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    whole = prepare(str(tmp_path / "a.txt"), tmp_path / "whole", vocab_size=500)
    monkeypatch.setattr(documents, "LONGEST_PIECE", 1000)
    monkeypatch.setattr(documents, "_BYTES_AT_ONCE", 333)
    monkeypatch.setattr(shard_writer, "_SHARD_TOKENS", 512)
    parts = prepare(str(tmp_path / "a.txt"), tmp_path / "parts", vocab_size=500)
    assert len(list(parts.glob("*-0*.bin"))) > 5
    for split in SPLITS:
        assert tokens(parts, split) == tokens(whole, split)
    assert len(split_at(tokens(parts, "train") + tokens(parts, "val"), 499)) == 1


def test_a_single_document_is_split_by_position(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "_COUNTED_AT_ONCE", 50)
    text = "Call me Ishmael. Some years ago - never mind how long precisely. \u00e9\u00e9 " * 40
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    folder = prepare(str(tmp_path / "a.txt"), vocab_size=600, val_fraction=0.1)
    ids = [*Tokenizer("gpt2", vocab_size=600).encode(text), 599]
    train, val = tokens(folder, "train"), tokens(folder, "val")
    assert train + val == ids
    assert len(val) == round(0.1 * len(ids))
    prepared = Prepared(folder)
    assert prepared.count("train", "bytes") + prepared.count("val", "bytes") == len(text.encode())
    assert prepared.count("val", "bytes") == len(Tokenizer("gpt2", vocab_size=600).decode_bytes(val[:-1]))
    assert prepared.document_starts("val").tolist() == [0]
    prepared.verify()


def test_documents_that_hash_to_one_side_are_split_by_position(tmp_path):
    texts = [t for i in range(60) if expected_split(t := f"story number {i} of many " * 9, 0.05) == "train"][
        :6
    ]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    folder = prepare(str(tmp_path), tmp_path / "out", vocab_size=600, val_fraction=0.05)
    prepared = Prepared(folder)
    assert prepared.meta["split_by"] == "position"
    train, val = tokens(folder, "train"), tokens(folder, "val")
    tokenizer = Tokenizer("gpt2", vocab_size=600)
    assert train + val == [i for text in texts for i in [*tokenizer.encode(text), 599]]
    assert len(val) == round(0.05 * len(train + val))
    assert prepared.document_starts("train").tolist() == [
        0,
        *(i + 1 for i in range(len(train)) if train[i] == 599),
    ]


def test_equal_documents_stand_on_one_side(tmp_path):
    lines = [json.dumps({"text": f"document {i % 50} repeated"}) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    folder = prepare(str(tmp_path / "a.jsonl"), vocab_size=2048, val_fraction=0.3)
    sides = [{tuple(d) for d in split_at(tokens(folder, split), 2047)} for split in SPLITS]
    assert len(sides[0] | sides[1]) == 50
    assert all(sides)
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("vocabulary", ["gpt2:300", "learn:260"])
@pytest.mark.parametrize("side", SPLITS)
def test_a_large_fraction_of_one_text_leaves_the_rest(tmp_path, side, vocabulary):
    """On whichever side its hash is."""
    text = next(t for i in range(99) if expected_split(t := f"{i} words " * 300, 0.5) == side)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    prepared = Prepared(prepare(str(tmp_path / "a.txt"), vocabulary=vocabulary, val_fraction=0.5))
    assert prepared.meta["split_by"] == "position"
    sizes = [prepared.count(split, "bytes") for split in SPLITS]
    assert min(sizes) > 0.48 * sum(sizes)


@pytest.mark.parametrize("vocabulary", ["gpt2:300", "learn:257"])
@pytest.mark.parametrize("text", ["ab", "a few words of text"])
def test_text_is_held_out_of_the_shortest(tmp_path, text, vocabulary):
    """Not `<|endoftext|>` alone, of which no bits per byte can be computed."""
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    prepared = Prepared(prepare(str(tmp_path / "a.txt"), vocabulary=vocabulary))
    assert prepared.count("val", "bytes") >= 1
    assert prepared.count("train", "bytes") + prepared.count("val", "bytes") == len(text)


def test_a_preparation_that_ends_while_another_begins_is_no_stranger(rows, tmp_path):
    """The second looks for progress.json when the first has written meta.json and removed it."""
    assert shard_writer.check_ours(prepare(str(rows), tmp_path / "out", vocab_size=500)) == {}


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_are_at_least_one(rows, workers):
    with pytest.raises(InputError, match=f"workers must be at least 1, got {workers}"):
        prepare(str(rows), vocab_size=500, workers=workers)


@pytest.mark.skipif(os.name == "nt", reason="POSIX limits")
def test_a_disk_that_is_full_at_a_write_is_one_line(tmp_path):
    """What a file has not written when a write fails, it tries to write again as it is closed."""
    lines = "".join(json.dumps({"text": f"some words of text, {i}"}) + "\n" for i in range(20_000))
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    code = (
        "import resource, signal, sys; from gpt.cli import main;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "sys.exit(main(['prepare', *sys.argv[1:], '--vocab_size', '300']))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "out: File too large; what is written is kept" in done.stderr


def test_val_fraction_zero_keeps_everything_for_training(rows, texts):
    prepared = Prepared(prepare(str(rows), vocab_size=500, val_fraction=0.0))
    assert prepared.count("train", "documents") == len(texts)
    assert (
        prepared.count("val", "tokens")
        == len(prepared.stream("val"))
        == len(prepared.document_starts("val"))
        == 0
    )


def test_prepared_data_is_found_again_until_something_changes(rows, tmp_path):
    options = {"vocab_size": 500}
    first = prepare(str(rows), **options)
    stamp = (first / META).stat().st_mtime_ns
    assert prepare(str(rows), **options) == first
    assert (first / META).stat().st_mtime_ns == stamp
    same_text = tmp_path / "copy.jsonl"
    same_text.write_bytes(rows.read_bytes())
    assert prepare(str(same_text), **options).name.split("-")[-1] == first.name.split("-")[-1]
    others = {
        prepare(str(rows), vocab_size=501),
        prepare(str(rows), **options, val_fraction=0.2),
        prepare(str(rows), **options, text_column="text", errors="replace"),
    }
    rows.write_text(rows.read_text(encoding="utf-8").replace("the", "The", 1), encoding="utf-8")
    others.add(prepare(str(rows), **options))
    assert len(others) == 4
    assert first not in others
    assert prepare(str(first), **options) == first  # a prepared folder is itself


def test_a_second_call_goes_on_where_the_first_stopped(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("gpt.data.prepare._BLOCK_CHARACTERS", 700)
    monkeypatch.setattr(shard_writer, "_SECONDS_BETWEEN_COMMITS", -1.0)
    whole = prepare(str(rows), tmp_path / "whole", vocab_size=500)
    add, seen = shard_writer.ShardWriter.add, []

    def stop_at_nine(self, block):
        if len(seen) == 9:
            raise KeyboardInterrupt
        seen.append(len(block))
        return add(self, block)

    monkeypatch.setattr(shard_writer.ShardWriter, "add", stop_at_nine)
    with pytest.raises(KeyboardInterrupt):
        prepare(str(rows), tmp_path / "out", vocab_size=500)
    with pytest.raises(InputError, match="not prepared"):
        Prepared(tmp_path / "out")
    done = sum(seen)
    with (tmp_path / "out" / "train-00000.bin").open("ab") as file:
        file.write(b"written after the last commit")
    (tmp_path / "out" / "train-00001.bin").write_bytes(b"a shard begun after the last commit")
    (tmp_path / "out" / ".progress.json.x.tmp").write_bytes(b"half")
    seen.append(0)  # now it does not stop
    prepare(str(rows), tmp_path / "out", vocab_size=500)
    assert done + sum(seen[10:]) == 40
    assert contents(tmp_path / "out") == contents(whole)
    assert not list((tmp_path / "out").glob(".*.tmp"))


KILLED = """
import os, signal, sys
import gpt.data.prepare
from gpt.data import shard_writer
from gpt.data.prepare import prepare
gpt.data.prepare._BLOCK_CHARACTERS = 20_000
shard_writer._SECONDS_BETWEEN_COMMITS = 0.0
shard_writer._SHARD_TOKENS = 100_000
left = int(sys.argv[3])

def count(frame, event, function):
    global left
    names = "write", "flush", "fsync", "replace", "truncate", "unlink", "open"
    if event == "c_call" and function.__name__ in names and not isinstance(function.__self__, str):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.setprofile(count)
prepare(sys.argv[1], sys.argv[2], vocab_size=300, workers=2)
"""


def test_killed_twenty_times_it_ends_with_the_same_bytes(tmp_path, monkeypatch):
    text = " ".join(f"word{i * i % 7919}" for i in range(300_000))
    for number in range(60):
        part = text[number * 40_000 : (number + 1) * 40_000]
        (tmp_path / f"{number:02}.txt").write_text(part, encoding="utf-8")
    source, out = str(tmp_path / "*.txt"), tmp_path / "out"
    monkeypatch.setattr(shard_writer, "_SHARD_TOKENS", 100_000)
    whole = prepare(source, tmp_path / "whole", vocab_size=300)
    draw, reached = random.Random(11), set()
    for _ in range(20):
        command = [sys.executable, "-c", KILLED, source, str(out), str(draw.randint(150, 250))]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        with pytest.raises(InputError, match="not prepared"):
            Prepared(out)
        if (out / "progress.json").exists():
            reached.add(json.loads((out / "progress.json").read_text(encoding="utf-8"))["parts"])
    assert len(reached) > 10  # work done before a kill was kept
    prepare(source, out, vocab_size=300)
    assert contents(out) == contents(whole)


def test_a_full_disk_keeps_what_is_written(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("gpt.data.prepare._BLOCK_CHARACTERS", 700)
    whole = prepare(str(rows), tmp_path / "whole", vocab_size=500)
    open_file, calls = shard_writer.ShardWriter._file, []

    def full(self, name):
        calls.append(name)
        if len(calls) == 12:
            raise OSError(28, os.strerror(28))
        return open_file(self, name)

    monkeypatch.setattr(shard_writer.ShardWriter, "_file", full)
    with pytest.raises(InputError, match=r"out: No space left on device; what is written is kept"):
        prepare(str(rows), tmp_path / "out", vocab_size=500)
    prepare(str(rows), tmp_path / "out", vocab_size=500)
    assert contents(tmp_path / "out") == contents(whole)


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    if not Path("/proc/self/status").exists():
        pytest.skip("reads a process's peak memory as Linux tells it")
    line = "".join(f" word{i * 7919 % 1009}" for i in range(4000)) + "\n"
    code = (
        "import re, sys; from gpt.data.prepare import prepare; prepare(*sys.argv[1:], vocab_size=2048);"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    peaks = []
    for name, lines in (("small", 300), ("large", 1500)):  # 10 and 50 MB, a single document
        with open(tmp_path / f"{name}.txt", "w", encoding="utf-8") as file:
            file.writelines(line for _ in range(lines))
        command = [sys.executable, "-c", code, str(tmp_path / f"{name}.txt"), str(tmp_path / name)]
        peaks.append(int(subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout))
    assert peaks[0] > 30_000  # kB
    assert peaks[1] - peaks[0] < 25_000


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / META).unlink(), "not prepared data"),
        (lambda f: (f / META).write_text("{", encoding="utf-8"), "not as gpt prepare writes it .JSON"),
        (lambda f: os.truncate(f / "train-00000.bin", 10), "train-00000.bin has 10 bytes, expected"),
        (lambda f: (f / "val-00000.bin").unlink(), "val-00000.bin has 0 bytes"),
        (lambda f: edit(f, "tokenizer", fingerprint="0" * 64), "another tokenizer"),
        (lambda f: edit(f, format=99), "format 99"),
        (lambda f: edit(f, dtype="<u4"), "dtype <u4, expected <u2"),
        (lambda f: edit(f, "tokenizer", vocab_size=10**15), "vocab_size must be"),
        (lambda f: edit(f, "tokenizer", vocab_size="many"), "not a saved tokenizer"),
        (lambda f: edit(f, "splits", "train", tokens=10**15), "claims 1000000000000000 tokens of train"),
        (lambda f: edit(f, "splits", "train", bytes=1e30), "bytes of train is 1e\\+30"),
        (lambda f: edit(f, "splits", "train", tokens=-1), "claims -1 tokens of train"),
        (lambda f: edit(f, "splits", "val", tokens=10**15), "claims 1000000000000000 tokens of val"),
        (lambda f: edit(f, "splits", "train", documents=1e3), "documents of train is 1000.0"),
        (lambda f: edit(f, "splits", "val", documents=1000), r"claims 10\d\d documents"),
        (lambda f: edit(f, files={}), "not as gpt prepare writes it|claims .* tokens of train"),
        (lambda f: edit(f, "files", **{"../x": {"bytes": 0, "sha256": ""}}), "'../x', expected a .bin file"),
        (lambda f: edit(f, source={}), "not as gpt prepare writes it .KeyError: 'corpus'"),
        (lambda f: edit(f, source=None), "not as gpt prepare writes it"),
        (lambda f: edit(f, key=None), "key is None"),
        (lambda f: edit(f, split_by=5), "split_by is 5"),
        (lambda f: edit(f, val_fraction="a"), "val_fraction is 'a'"),
        (lambda f: edit(f, empty_documents="x"), "empty_documents is 'x'"),
        (lambda f: edit(f, "files", **{"train-00000.bin": {"bytes": 5}}), "KeyError: 'sha256'"),
        (lambda f: (f / META).write_text("[" * 100_000, encoding="utf-8"), "RecursionError"),
        (lambda f: put(f / "train-00000.bin", 501), "train.*id 501, outside the vocabulary of 500"),
    ],
)
def test_damaged_folders_are_refused(rows, tmp_path, damage, message):
    folder = prepare(str(rows), tmp_path / "out", vocab_size=500, val_fraction=0.3)
    damage(folder)
    with pytest.raises(InputError, match=message):
        Prepared(folder)


def test_document_starts_must_be_in_order(rows, tmp_path):
    folder = prepare(str(rows), tmp_path / "out", vocab_size=500, val_fraction=0.3)
    starts = np.fromfile(folder / "train-documents.bin", "<i8")
    starts[3] = 10**15
    starts.tofile(folder / "train-documents.bin")
    with pytest.raises(InputError, match=r"documents of .* not in order"):
        Prepared(folder).document_starts("train")


@pytest.mark.parametrize("tokens", [10**15, -1, "many"])
def test_an_unfinished_preparation_cannot_claim_more_than_is_there(rows, tmp_path, tokens):
    (tmp_path / "out").mkdir()
    counts = {"tokens": tokens, "documents": 0, "bytes": 0}
    state = {"key": "k", "tokenizer": "t", "parts": 1, "empty": 0, "splits": dict.fromkeys(SPLITS, counts)}
    for content in (json.dumps(state), "[" * 100_000):
        (tmp_path / "out" / "progress.json").write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match="holds other files"):
            prepare(str(rows), tmp_path / "out", vocab_size=500)
    counts["tokens"] = 0  # with this alone it is an unfinished preparation
    (tmp_path / "out" / "progress.json").write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(InputError, match="unfinished preparation"):
        prepare(str(rows), tmp_path / "out", vocab_size=500)


def test_an_altered_shard_is_found_by_its_checksum(rows, tmp_path):
    folder = prepare(str(rows), tmp_path / "out", vocab_size=500, val_fraction=0.3)
    put(folder / "val-00000.bin", 3)
    with pytest.raises(InputError, match=r"val-00000.bin was altered"):
        Prepared(folder).verify()


def edit(folder, *keys, **changes):
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    target = meta
    for key in keys:
        target = target[key]
    target.update(changes)
    (folder / META).write_text(json.dumps(meta), encoding="utf-8")


def put(path, value):
    data = np.fromfile(path, "<u2")
    assert data[5] != value
    data[5] = value
    data.tofile(path)


def test_a_folder_of_something_else_is_not_touched(rows, tmp_path):
    done = prepare(str(rows), tmp_path / "done", vocab_size=500)
    before = contents(done)
    with pytest.raises(InputError, match="other options"):
        prepare(str(rows), done, vocab_size=501)
    assert contents(done) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary", encoding="utf-8")
    with pytest.raises(InputError, match=r"holds other files \(diary.txt\)"):
        prepare(str(rows), tmp_path / "mine", vocab_size=500)
    assert contents(tmp_path / "mine") == {"diary.txt": b"dear diary"}


def test_an_unfinished_preparation_of_something_else_is_not_continued(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer.ShardWriter, "finish", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(str(rows), tmp_path / "out", vocab_size=500)
    monkeypatch.undo()
    state = json.loads((tmp_path / "out" / "progress.json").read_text(encoding="utf-8"))
    assert state["parts"] == 0
    (tmp_path / "out" / "progress.json").write_text(json.dumps({**state, "parts": 3}), encoding="utf-8")
    with pytest.raises(InputError, match="unfinished preparation"):
        prepare(str(rows), tmp_path / "out", vocab_size=501)


def test_mended_text_can_be_prepared_where_it_failed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"some text \xff and more")
    with pytest.raises(InputError, match="byte 10"):
        prepare(str(path), tmp_path / "out", vocab_size=300)
    path.write_bytes(b"some text   and more")
    assert tokens(prepare(str(path), tmp_path / "out", vocab_size=300), "train")


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_impossible_fractions(rows, fraction):
    with pytest.raises(InputError, match="val_fraction"):
        prepare(str(rows), val_fraction=fraction)


def test_a_prepared_folder_of_another_vocabulary_is_refused(rows):
    folder = prepare(str(rows), vocab_size=500)
    with pytest.raises(InputError, match="vocab_size 500, not 2048"):
        prepare(str(folder), vocab_size=2048)
