"""The files of `gpt prepare`: the tokens of the documents, whole or not there, made once."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpora import write, write_rows, write_texts

from gpt.data.find import find_corpus
from gpt.data.module import TokenData
from gpt.data.prepare import prepare
from gpt.data.prepared import META, Prepared
from gpt.data.split import divide_corpus
from gpt.errors import InputError
from gpt.evaluation.choices import read_examples
from gpt.text.tokenizer import Tokenizer


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if not path.name.startswith(".")}


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)


def test_tokens_are_those_of_the_documents_in_order(rows):
    prepared = Prepared(prepare(str(rows), vocab_size=500, val_fraction=0.3))
    texts: dict[str, list[str]] = {"train": [], "val": []}
    for piece in divide_corpus(find_corpus(str(rows)), 0.3).pieces():
        if piece.first:
            texts[piece.split].append("")
        texts[piece.split][-1] += piece.text
    encode = Tokenizer("gpt2", vocab_size=500).encoding.encode_ordinary
    assert prepared.dtype == np.uint16
    for split, documents in texts.items():
        tokens = prepared.stream(split).tokens
        *stored, after = np.split(tokens, np.flatnonzero(tokens == 499) + 1)
        assert len(stored) > 10 and not len(after)
        assert [ids.tolist() for ids in stored] == [[*encode(text), 499] for text in documents]
        assert prepared.counts[split].bytes == len("".join(documents).encode())


def test_bytes_do_not_depend_on_workers(tmp_path, texts, monkeypatch):
    write_texts(tmp_path / "a.jsonl", texts * 15)  # several blocks
    folders = []
    for count in (1, 5):
        monkeypatch.setattr("gpt.data.token_files.cores", lambda count=count: count)
        folders.append(prepare(str(tmp_path / "a.jsonl"), tmp_path / f"by-{count}", vocab_size=500))
    assert contents(folders[0]) == contents(folders[1])


FULL = """
import resource, signal, sys
from gpt.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(main(["prepare", sys.argv[1], "--output", sys.argv[2], "--vocab_size", "300"]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX limits")
def test_a_disk_that_is_full_at_a_write_is_one_line(tmp_path):
    """What a file has not written when a write fails, it tries to write again as it is closed."""
    path = write_texts(tmp_path / "a.jsonl", [f"some words of text, {i}" for i in range(20_000)])
    done = run_python(FULL, path, tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "File too large" in done.stderr


def test_prepared_data_is_found_again_until_something_changes(rows):
    def prepared(**options) -> Path:
        return prepare(str(rows), **{"vocab_size": 500, **options})

    first = prepared()
    stamp = (first / META).stat().st_mtime_ns
    assert prepared() == first == prepare(str(first), vocab_size=500)
    assert (first / META).stat().st_mtime_ns == stamp
    changes = {"vocab_size": 501}, {"val_fraction": 0.2}, {"most_bytes": 10**9}, {"skip_bad_rows": 1}
    others = {prepared(**change) for change in changes}
    rows.write_text(rows.read_text("utf-8").replace("the", "The", 1), "utf-8")
    assert len({first, *others, prepared()}) == 6


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
from gpt.data.prepare import prepare
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
    for number in range(6):
        write(tmp_path / f"{number:02}.txt", " ".join(f"word{i * i % 7919 + number}" for i in range(30_000)))
    source, out = str(tmp_path / "*.txt"), tmp_path / "out"
    whole = contents(prepare(source, tmp_path / "whole", vocab_size=300))
    most = 10**6
    calls = most - int(run_python(KILLED, source, out, most).stdout)
    assert contents(out) == whole
    shutil.rmtree(out)
    draw = random.Random(11)
    for number in [*draw.sample(range(1, calls - 12), 5), *range(calls - 10, calls, 3)]:
        assert run_python(KILLED, source, out, number).returncode == -signal.SIGKILL
        if out.exists():  # it was killed as it ended
            assert contents(out) == whole
            shutil.rmtree(out)
    assert contents(prepare(source, out, vocab_size=300)) == whole
    assert [path.name for path in tmp_path.glob(".out*")] == [".out.lock"]


PEAK = r"""
import re, sys
from gpt.data.prepare import prepare
prepare(*sys.argv[1:], vocab_size=2048)
print(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's peak memory as Linux tells it")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    line = "".join(f" word{i * 7919 % 1009}" for i in range(4000)) + "\n"
    peaks = []
    for lines in (300, 1500):  # 10 and 50 MB, a single document
        path = write(tmp_path / f"{lines}.txt", line * lines)
        peaks.append(int(run_python(PEAK, path, tmp_path / f"of-{lines}").stdout))
    assert peaks[0] > 30_000  # kB
    assert peaks[1] - peaks[0] < 25_000


def edit(folder: Path, old: str, new: str) -> None:
    """Change the folder's description."""
    text = (folder / META).read_text("utf-8")
    assert old in text
    write(folder / META, text.replace(old, new))


DAMAGE = {
    "no description": (lambda f: (f / META).unlink(), "not what gpt prepare writes: .*No such file"),
    "no JSON": (lambda f: write(f / META, "{"), "not what gpt prepare writes: Expecting"),
    "no counts": (lambda f: edit(f, '"train"', '"other"'), "expected tokens, documents, bytes, .* got None"),
    "no tokenizer": (lambda f: edit(f, '"vocab_size": 500', '"vocab_size": "many"'), "not a saved tokenizer"),
    "half a file": (lambda f: os.truncate(f / "train.bin", 10), "train.bin has 10 bytes, expected"),
    "no file": (lambda f: (f / "val.bin").unlink(), "No such file.*val.bin"),
    "a wrong count": (
        lambda f: edit(f, '"tokens": ', '"tokens": 9'),
        r"train\.bin has \d+ bytes, expected 1",
    ),
    "a count below 0": (lambda f: edit(f, 'scored_tokens": ', 'scored_tokens": -'), "must be at least 0"),
    "too many scored": (lambda f: edit(f, 'scored_tokens": ', 'scored_tokens": 9'), "contradict one another"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_refused_and_in_the_cache_made_again(rows, damage, message):
    folder = prepare(str(rows), vocab_size=500, val_fraction=0.3)
    before = contents(folder)
    damage(folder)
    with pytest.raises(InputError, match=message):
        Prepared(folder)
    assert prepare(str(rows), vocab_size=500, val_fraction=0.3) == folder
    assert contents(folder) == before


@pytest.fixture
def examples(tmp_path) -> Path:
    """A prepared folder of examples."""
    rows = [{"prompt": f"What is {i}?", "completion": str(i)} for i in range(20)]
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    return prepare(str(path), tmp_path / "examples", vocab_size=300, val_fraction=0)


FORGED_STARTS = {
    "not from 0 on": [1, 9],
    "backwards": [0, 9, 5],
    "below 0": [0, 1 << 62, -1 << 63, -1 << 62],
    "beyond the end": [0, 1 << 40],
    "none": [],
}


@pytest.mark.parametrize("starts", FORGED_STARTS.values(), ids=FORGED_STARTS)
def test_an_index_that_does_not_fit_the_examples_is_refused(examples, starts):
    np.array(starts, "<i8").tofile(examples / "train-documents.bin")
    edit(examples, '"documents": 20', f'"documents": {len(starts)}')
    with pytest.raises(InputError, match=r"is not what gpt prepare writes: the (index|counts) of"):
        Prepared(examples)


def test_an_index_has_as_many_examples_as_are_counted_and_plain_text_has_none(examples, rows):
    edit(examples, '"documents": 20', '"documents": 19')
    with pytest.raises(InputError, match=r"train-documents\.bin has 160 bytes, expected 152"):
        Prepared(examples)
    files = {path.name for path in prepare(str(rows), vocab_size=500).iterdir()}
    assert files == {META, "train.bin", "val.bin"}


def test_a_token_that_the_vocabulary_lacks_is_named_where_it_is_used(examples):
    data = TokenData(str(examples), vocab_size=300, context_length=64)
    tokens = np.fromfile(examples / "train.bin", "<i4")
    for token in (300, ~300):
        np.append(tokens[:-1], token).astype("<i4").tofile(examples / "train.bin")
        for use in (
            lambda: list(data.train_dataloader()),
            lambda: Prepared(examples).spread_ids(1000, "train"),
            lambda: list(read_examples(Prepared(examples), "train")),
        ):
            with pytest.raises(InputError, match=r"train\.bin has the token 300, its vocabulary only 300"):
                use()


def test_examples_without_a_scored_token_are_refused(examples):
    tokens = np.fromfile(examples / "train.bin", "<i4")
    np.where(tokens < 0, tokens, ~tokens).tofile(examples / "train.bin")
    with pytest.raises(InputError, match="no token of the training text is scored"):
        TokenData(str(examples), vocab_size=300, context_length=64).train_dataloader()


def test_a_folder_of_another_version_is_no_text(rows, tmp_path):
    folder = prepare(str(rows), tmp_path / "old", vocab_size=500)
    (folder / META).rename(folder / "meta-3.json")
    with pytest.raises(InputError, match="old was prepared by another version of this program: prepare it"):
        prepare(str(folder), vocab_size=500)


@pytest.mark.parametrize("options", [{"output": "new"}, {"val_fraction": 0.5}, {"text_column": "text"}])
def test_what_is_prepared_is_not_prepared_in_another_way(rows, workplace, options):
    folder = prepare(str(rows), "old", vocab_size=500)
    with pytest.raises(InputError, match=r"old is prepared already: to have it .*give the text itself"):
        prepare(str(folder), vocab_size=500, **options)
    assert not Path("new").exists()


def test_options_of_a_recipe_that_change_nothing_in_a_prepared_folder_are_told(rows, workplace, capsys):
    data = TokenData(str(prepare(str(rows), "old", vocab_size=500)), 500, val_fraction=0.5, most_bytes=10**6)
    assert data.prepared.counts["val"].bytes < data.prepared.counts["train"].bytes / 5
    told = "old is prepared already, so val_fraction 0.5 and most_bytes 1000000 of a config or a run changes"
    assert told in capsys.readouterr().err


def test_a_folder_of_something_else_is_not_touched(rows, tmp_path):
    done = prepare(str(rows), tmp_path / "done", vocab_size=500)
    mine = write(tmp_path / "mine" / "diary.txt", "dear diary").parent
    for folder in (done, mine):
        before = contents(folder)
        with pytest.raises(InputError, match=r"holds other files, or other text or options: delete it"):
            prepare(str(rows), folder, vocab_size=501)
        assert contents(folder) == before


@pytest.mark.parametrize("output", [".", "diary.txt", "link"])
def test_what_cannot_become_a_folder_is_refused_before_the_text_is_read(output, rows, workplace, monkeypatch):
    write(workplace / "diary.txt", "dear diary")
    (workplace / "empty").mkdir()
    (workplace / "link").symlink_to("empty")
    monkeypatch.setattr("gpt.data.prepare.divide_corpus", lambda *_: pytest.fail("it reads"))
    with pytest.raises(InputError, match=f"cannot write {output}: expected the name of a new or an empty"):
        prepare(str(rows), output, vocab_size=500)
    assert (workplace / "diary.txt").read_text("utf-8") == "dear diary"


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_an_impossible_fraction_is_refused(rows, fraction):
    with pytest.raises(InputError, match=rf"val_fraction must be in \[0, 1\), got {fraction}"):
        prepare(str(rows), val_fraction=fraction)
