"""What the commands beside a run read and write, in places that work against them: one line, or it works.

Links, pipes, names that are not UTF-8 or as long as names can be, folders that nobody may write, another file
system, and calls that a file system does not know. tests/test_home.py has a user without a home.
"""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from gpt import GPT
from gpt.cli import main
from gpt.files import atomic_write

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX")

LONGEST = "n" * 255
NOT_UTF8 = os.fsdecode(b"o\xff")
TO_A_FOLDER = {
    "hf": ("export", "--format", "hf", "--checkpoint", "weights", "--output"),
    "nanogpt": ("export", "--format", "nanogpt", "--checkpoint", "weights", "--output"),
    "book": ("export", "--format", "book", "--checkpoint", "weights", "--output"),
    "gguf": ("export", "--format", "gguf", "--checkpoint", "weights", "--output"),
    "import": ("import", "weights", "--output"),
    "attention": ("attention", "--checkpoint", "weights", "--text", "To be", "--output"),
    "prepare": ("prepare", "text.txt", "--vocab_size", "300", "--output"),
}
TO_A_FILE = {
    ".html": ("export", "--format", "html", "--checkpoint", "weights", "--output"),
    ".png": ("plot", "run", "--output"),
}
FROM_A_PATH = {
    "generate": ("generate", "--prompt", "The", "--max_new_tokens", "1", "--checkpoint"),
    "evaluate": ("evaluate", "--data", "text.txt", "--checkpoint"),
    "export": ("export", "--output", "new", "--checkpoint"),
    "import": ("import",),
    "plot": ("plot",),
}


@pytest.fixture(autouse=True)
def place(workplace, model) -> Path:
    """Weights, a run's metrics, a text, and a folder with a file that nothing may touch."""
    GPT.from_weights(model.config, model.state_dict()).save_pretrained("weights")
    (workplace / "run").mkdir()
    (workplace / "run" / "metrics.csv").write_text(
        "step,tokens,seconds,train_loss,val_loss\n1,9,1,5.0,5.0\n2,18,2,4.0,4.5\n", encoding="utf-8"
    )
    (workplace / "victim").mkdir()
    (workplace / "victim" / "keep").write_text("kept", encoding="utf-8")
    yield workplace
    assert os.listdir(workplace / "victim") == ["keep"]
    assert (workplace / "victim" / "keep").read_text(encoding="utf-8") == "kept"


@pytest.fixture
def refuses(capsys):
    """Checks that a command ends with one line that says so."""

    def check(*words: str) -> str:
        assert main(list(words)) == 2
        told = capsys.readouterr().err
        assert len([line for line in told.splitlines() if line.startswith(f"gpt {words[0]}: ")]) == 1, told
        return told

    return check


@pytest.mark.parametrize("kind", ["link to a folder", "link to nothing", "link to itself", "pipe", "file"])
@pytest.mark.parametrize("words", TO_A_FOLDER.values(), ids=TO_A_FOLDER)
def test_a_folder_is_written_where_nothing_is(words, kind, refuses):
    targets = {"link to a folder": "victim", "link to nothing": "nowhere", "link to itself": "out"}
    if kind == "pipe":
        os.mkfifo("out")
    elif kind == "file":
        Path("out").write_text("kept", encoding="utf-8")
    else:
        os.symlink(targets[kind], "out")
    refuses(*words, "out")
    assert not os.path.exists("nowhere")
    assert kind != "file" or Path("out").read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize("kind", ["link", "hard link", "link to nothing", "link to itself", "pipe"])
@pytest.mark.parametrize(("ending", "words"), TO_A_FILE.items())
def test_a_file_takes_the_place_of_a_link_and_not_of_what_it_leads_to(ending, words, kind, capsys):
    out = f"out{ending}"
    if kind == "pipe":
        os.mkfifo(out)
    elif kind == "hard link":
        os.link("victim/keep", out)
    else:
        os.symlink({"link": "victim/keep", "link to nothing": "nowhere"}.get(kind, out), out)
    if main([*words, out]) == 0:
        assert Path(out).stat().st_size > 100 and not Path(out).is_symlink()
    else:
        assert f"{out} exists already" in capsys.readouterr().err
    assert not os.path.exists("nowhere")


@pytest.mark.parametrize("kind", ["pipe", "link to itself", "device", "longer than a name can be"])
@pytest.mark.parametrize("words", FROM_A_PATH.values(), ids=FROM_A_PATH)
def test_what_is_read_is_a_file(words, kind, refuses):
    path = {"device": "/dev/zero", "longer than a name can be": LONGEST + "n"}.get(kind, "in")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to itself":
        os.symlink(path, path)
    refuses(*words, path)


@pytest.mark.parametrize("kind", ["pipe", "link to itself", "device"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_read_of_a_folder_is_a_file(name, kind, refuses):
    path = Path("weights", name)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else name)
    for words in FROM_A_PATH.values():
        refuses(*words, "weights")


@pytest.mark.parametrize("words", TO_A_FOLDER.values(), ids=TO_A_FOLDER)
def test_names_as_long_as_they_can_be(words):
    assert main([*words, LONGEST]) == 0
    assert list(Path(LONGEST).iterdir())
    assert not list(Path.cwd().glob(".*unfinished"))


@pytest.mark.parametrize(("ending", "words"), TO_A_FILE.items())
def test_names_of_files_as_long_as_they_can_be(ending, words):
    name = LONGEST[: -len(ending)] + ending
    assert main([*words, name]) == 0
    assert Path(name).stat().st_size > 100


@pytest.mark.parametrize("words", TO_A_FOLDER.values(), ids=TO_A_FOLDER)
def test_names_that_are_not_utf8(words):
    assert main([*words, NOT_UTF8]) == 0
    assert list(Path(NOT_UTF8).iterdir())


@pytest.mark.parametrize(("ending", "words"), TO_A_FILE.items())
def test_names_of_files_that_are_not_utf8(ending, words):
    assert main([*words, NOT_UTF8 + ending]) == 0
    assert Path(NOT_UTF8 + ending).stat().st_size > 100


@pytest.mark.parametrize("words", FROM_A_PATH.values(), ids=FROM_A_PATH)
def test_names_to_read_that_are_not_utf8(words):
    os.rename("run" if words == ("plot",) else "weights", NOT_UTF8)
    assert main([*words, NOT_UTF8]) == 0


@pytest.fixture
def unwritable(place) -> Path:
    """A folder in which nobody may write; nothing keeps root from writing into its own."""
    if os.geteuid() == 0:
        if not os.path.isdir("/sys"):
            pytest.skip("root may write anywhere")
        return Path("/sys")
    (place / "closed").mkdir(mode=0o500)
    return place / "closed"


@pytest.mark.parametrize("words", TO_A_FOLDER.values(), ids=TO_A_FOLDER)
def test_a_folder_that_nobody_may_write(words, unwritable, refuses):
    assert str(unwritable) in refuses(*words, str(unwritable / "out"))


@pytest.mark.parametrize(("ending", "words"), TO_A_FILE.items())
def test_a_file_in_a_folder_that_nobody_may_write(ending, words, unwritable, refuses):
    assert str(unwritable) in refuses(*words, str(unwritable / f"out{ending}"))


@pytest.mark.parametrize("name", [*TO_A_FOLDER, *TO_A_FILE])
def test_another_file_system(name, tmp_path):

    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        out = f"{folder}/new/out{name if name in TO_A_FILE else ''}"
        assert main([*(TO_A_FOLDER | TO_A_FILE)[name], out]) == 0
        assert os.path.exists(out)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_says_so(number, monkeypatch, capsys):
    import fcntl

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert main([*TO_A_FOLDER["prepare"], "out"]) == 0
    assert "has no locks: prepare this text in one process at a time" in capsys.readouterr().err
    assert (Path("out") / "train.bin").stat().st_size > 0


def test_the_lock_of_a_preparation_is_no_strangers_link(refuses):
    os.symlink("victim/keep", ".out.lock")
    assert ".out.lock" in refuses(*TO_A_FOLDER["prepare"], "out")


def test_a_file_system_that_knows_no_fsync_of_a_folder(monkeypatch):
    fsync = os.fsync

    def fsync_of_files(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_of_files)
    with atomic_write("a.txt") as file:
        file.write("whole")
    assert Path("a.txt").read_text(encoding="utf-8") == "whole"
