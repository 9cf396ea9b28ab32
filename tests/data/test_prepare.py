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

from gpt.data.find import find_corpus
from gpt.data.prepare import prepare
from gpt.data.shards import META, Prepared
from gpt.data.split import SPLITS, divide_corpus
from gpt.errors import InputError
from gpt.text.tokenizer import Tokenizer


def tokens(folder, split):
    stream = Prepared(folder).stream(split)
    return stream.tokens.tolist()


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


def test_tokens_are_those_of_the_documents_in_order(rows, texts):
    folder = prepare(str(rows), vocab_size=500, val_fraction=0.3)
    tokenizer = Tokenizer("gpt2", vocab_size=500)
    pieces = list(divide_corpus(find_corpus(str(rows)), 0.3).pieces())
    for split in SPLITS:
        chosen = [piece for piece in pieces if piece.split == split]
        documents = sum(piece.first for piece in chosen)
        assert documents > 10
        ids = tokens(folder, split)
        expected: list[int] = []
        for piece in chosen:
            expected += [499] * (piece.first and bool(expected))
            expected += tokenizer.encoding.encode_ordinary(piece.text)
        assert ids == [*expected, 499]
        prepared = Prepared(folder)
        assert prepared.counts[split].documents == documents
        assert prepared.counts[split].bytes == sum(len(piece.text.encode()) for piece in chosen)
        assert prepared.counts[split].tokens == len(ids)
        assert [ids[start - 1] for start in prepared.document_starts(split)[1:]] == [499] * (documents - 1)
    assert Prepared(folder).dtype == np.uint16


# A NUL byte is none of a text.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=80)


@given(documents=st.lists(TEXTS, min_size=1, max_size=12), size=st.sampled_from([257, 50257]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_text_survives(tmp_path_factory, documents, size):
    folder = tmp_path_factory.mktemp("texts")
    for number, document in enumerate(documents):
        (folder / f"{number:03}.txt").write_bytes(document.encode())
    marked = [document.removeprefix("\ufeff") for document in documents]  # a byte order mark is no text
    kept = [document for document in marked if document]
    if not kept:
        with pytest.raises(InputError, match="empty"):
            prepare(str(folder), folder / "out", vocab_size=size)
        return
    done = prepare(str(folder), folder / "out", vocab_size=size, val_fraction=0.4)
    tokenizer = Tokenizer("gpt2", vocab_size=size)
    both = tokens(done, "train") + tokens(done, "val")
    found = [tokenizer.decode_bytes(ids) for ids in split_at(both, tokenizer.eot)]
    assert len(kept) <= len(found) <= sum(map(len, kept))
    assert sorted(b"".join(found)) == sorted("".join(kept).encode())


@pytest.mark.parametrize("workers", [2, 5])
def test_bytes_do_not_depend_on_workers_or_blocks(rows, tmp_path, monkeypatch, workers):
    monkeypatch.setattr("gpt.data.prepare.cores", lambda: 1)
    one = prepare(str(rows), tmp_path / "one", vocab_size=500)
    monkeypatch.setattr("gpt.data.prepare._BLOCK_CHARACTERS", 700)
    monkeypatch.setattr("gpt.data.prepare.cores", lambda: workers)
    many = prepare(str(rows), tmp_path / "many", vocab_size=500)
    assert contents(one) == contents(many)


@pytest.mark.slow
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
    assert done.stderr.count("\n") == 1 and "File too large" in done.stderr


def test_prepared_data_is_found_again_until_something_changes(rows):
    options = {"vocab_size": 500}
    first = prepare(str(rows), **options)
    stamp = (first / META).stat().st_mtime_ns
    assert prepare(str(rows), **options) == first
    assert (first / META).stat().st_mtime_ns == stamp
    others = {
        prepare(str(rows), vocab_size=501),
        prepare(str(rows), **options, val_fraction=0.2),
        prepare(str(rows), **options, most_bytes=10**9),
    }
    rows.write_text(rows.read_text(encoding="utf-8").replace("the", "The", 1), encoding="utf-8")
    others.add(prepare(str(rows), **options))
    assert len(others) == 4
    assert first not in others
    assert prepare(str(first), **options) == first  # a prepared folder is itself


def test_an_update_of_python_keeps_what_is_prepared_but_of_its_own_text(rows, tmp_path, monkeypatch):
    """A folder that is named by the user is still that of the text."""
    own = prepare(str(rows), tmp_path / "out", vocab_size=300)
    cached = prepare(str(rows), vocab_size=300)
    monkeypatch.setattr("gpt.data.builtin.texts", lambda name: ["some text of the library"])
    library = prepare("python-docs", vocab_size=300)
    monkeypatch.setattr("sys.version", "3.11.99 (main, Jan 1 2027)")
    monkeypatch.setattr("platform.python_version", lambda: "3.11.99")
    assert prepare(str(rows), tmp_path / "out", vocab_size=300) == own
    assert prepare(str(rows), vocab_size=300) == cached
    assert prepare("python-docs", vocab_size=300) != library


KILLED = """
import os, signal, sys
import gpt.data.prepare
from gpt.data.prepare import prepare
gpt.data.prepare._BLOCK_CHARACTERS = 20_000
left = int(sys.argv[3])

def count(frame, event, function):
    global left
    names = "write", "flush", "fsync", "rename", "replace", "rmdir", "unlink", "open", "close", "mkdir"
    if event == "c_call" and function.__name__ in names and not isinstance(function.__self__, str):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.setprofile(count)
prepare(sys.argv[1], sys.argv[2], vocab_size=300)
sys.setprofile(None)
print(left)
"""


@pytest.mark.slow
def test_killed_at_any_point_it_is_complete_or_not_there(tmp_path):
    text = " ".join(f"word{i * i % 7919}" for i in range(30_000))
    for number in range(6):
        part = text[number * 40_000 : (number + 1) * 40_000]
        (tmp_path / f"{number:02}.txt").write_text(part, encoding="utf-8")
    source, out = str(tmp_path / "*.txt"), tmp_path / "out"
    whole = prepare(source, tmp_path / "whole", vocab_size=300)

    def run(calls):
        command = [sys.executable, "-c", KILLED, source, str(out), str(calls)]
        return subprocess.run(command, check=False, capture_output=True, encoding="utf-8")

    most = 10**6
    calls = most - int(run(most).stdout)
    out.rename(tmp_path / "first")
    draw = random.Random(11)
    for number in [*draw.sample(range(1, calls - 12), 5), *range(calls - 10, calls, 3)]:
        assert run(number).returncode == -signal.SIGKILL
        if out.exists():  # it was killed as it ended
            assert contents(out) == contents(whole)
            out.rename(tmp_path / f"{number}")
    prepare(source, out, vocab_size=300)
    assert contents(out) == contents(tmp_path / "first") == contents(whole)
    assert [path.name for path in tmp_path.glob(".out*")] == [".out.lock"]


@pytest.mark.slow
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
        (lambda f: (f / META).unlink(), "not what gpt prepare writes: .*No such file"),
        (lambda f: (f / META).write_text("{", encoding="utf-8"), "not what gpt prepare writes: Expecting"),
        (lambda f: (f / META).write_bytes(b"\xff"), "not what gpt prepare writes: .*decode"),
        (lambda f: (f / META).write_text("[" * 100_000, encoding="utf-8"), "nested too deeply"),
        (lambda f: os.truncate(f / "train.bin", 10), "train.bin has 10 bytes, expected"),
        (lambda f: (f / "val.bin").unlink(), "No such file.*val.bin"),
        (lambda f: edit(f, "tokenizer", vocab_size=10**15), "vocab_size must be"),
        (lambda f: edit(f, "tokenizer", vocab_size="many"), "not a saved tokenizer"),
        (lambda f: edit(f, "splits", "train", tokens=10**15), "train.bin has .* expected 2000000000000000"),
        (lambda f: edit(f, "splits", "train", bytes=1e30), "bytes is 1e\\+30, expected int"),
        (lambda f: edit(f, "splits", "val", documents=1000), "val-documents.bin has .* expected 8000"),
        (lambda f: edit(f, splits={}), "expected tokens, documents, bytes, .* got None"),
    ],
)
def test_a_damaged_folder_is_refused_and_in_the_cache_made_again(rows, damage, message):
    folder = prepare(str(rows), vocab_size=500, val_fraction=0.3)
    before = contents(folder)
    damage(folder)
    with pytest.raises(InputError, match=message):
        Prepared(folder)
    assert prepare(str(rows), vocab_size=500, val_fraction=0.3) == folder
    assert contents(folder) == before


def edit(folder, *keys, **changes):
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    target = meta
    for key in keys:
        target = target[key]
    target.update(changes)
    (folder / META).write_text(json.dumps(meta), encoding="utf-8")


def test_a_folder_of_something_else_is_not_touched(rows, tmp_path):
    done = prepare(str(rows), tmp_path / "done", vocab_size=500)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary", encoding="utf-8")
    for folder in (done, tmp_path / "mine"):
        before = contents(folder)
        with pytest.raises(InputError, match=r"holds other files, or other text or options: delete it"):
            prepare(str(rows), folder, vocab_size=501)
        assert contents(folder) == before


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_impossible_fractions(rows, fraction):
    with pytest.raises(InputError, match="val_fraction"):
        prepare(str(rows), val_fraction=fraction)


def test_a_prepared_folder_of_another_vocabulary_is_refused(rows):
    folder = prepare(str(rows), vocab_size=500)
    with pytest.raises(InputError, match="vocab_size 500, not 2048"):
        prepare(str(folder), vocab_size=2048)
