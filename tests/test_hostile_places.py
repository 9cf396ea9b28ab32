"""What the commands beside a run read and write, in places that work against them: one line, or it works.

Links, pipes, names that are not UTF-8 or as long as names can be, folders that nobody may write, another file
system, and calls that a file system does not know. tests/test_home.py has a user without a home.
"""

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_runs import gpt

from gpt import GPT

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX")

LONGEST = "n" * 255
NOT_UTF8 = os.fsdecode(b"o\xff")


@dataclass(frozen=True)
class Writer:
    """A command that writes to the place after it: a folder, or a file whose name ends like this."""

    command: str
    ending: str = ""

    def name(self, name: str) -> str:
        """A name for what it writes, of at most as many bytes."""
        return name[: 255 - len(self.ending)] + self.ending

    def has_written(self, path: str) -> bool:
        return Path(path).stat().st_size > 100 if self.ending else bool(os.listdir(path))


PREPARE = "prepare text.txt --vocab_size 300 --output"
TO_A_FOLDER = {
    "hf": Writer("export weights --format hf --output"),
    "nanogpt": Writer("export weights --format nanogpt --output"),
    "book": Writer("export weights --format book --output"),
    "gguf": Writer("export weights --format gguf --output"),
    "import": Writer("import weights --output"),
    "attention": Writer("attention --checkpoint weights --text To --output"),
    "prepare": Writer(PREPARE),
}
TO_A_FILE = {
    "html": Writer("export weights --format html --output", ".html"),
    "plot": Writer("plot run --output", ".png"),
}
WRITERS = TO_A_FOLDER | TO_A_FILE
READERS = {
    "generate": "generate --prompt The --max_new_tokens 1 --checkpoint",
    "evaluate": "evaluate --data text.txt --checkpoint",
    "export": "export --output new --checkpoint",
    "import": "import",
    "plot": "plot",
}
all_writers = pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
all_readers = pytest.mark.parametrize("command", READERS.values(), ids=READERS)


@pytest.fixture(autouse=True)
def place(workplace, model) -> Path:
    """Weights, a run's metrics, a text, and a folder with a file that nothing may touch."""
    GPT.from_weights(model.config, model.state_dict()).save_pretrained("weights")
    (workplace / "run").mkdir()
    (workplace / "run" / "metrics.csv").write_text(
        "step,tokens,seconds,train_loss,val_loss\n1,9,1,5.0,5.0\n2,18,2,4.0,4.5\n", "utf-8"
    )
    (workplace / "victim").mkdir()
    (workplace / "victim" / "keep").write_text("kept", "utf-8")
    yield workplace
    assert os.listdir(workplace / "victim") == ["keep"]
    assert (workplace / "victim" / "keep").read_text("utf-8") == "kept"


LINKS = {
    "link to a folder": "victim",
    "link to a file": "victim/keep",
    "link to nothing": "nowhere",
    "link to a device": "/dev/zero",
}


def put(kind: str, path: str) -> None:
    """Put something else than a plain new name at `path`."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "file":
        Path(path).write_text("kept", "utf-8")
    elif kind == "hard link":
        os.link("victim/keep", path)
    else:  # or a link to itself
        os.symlink(LINKS.get(kind, os.path.basename(path)), path)


@pytest.mark.parametrize("kind", ["link to a folder", "link to nothing", "link to itself", "pipe", "file"])
@pytest.mark.parametrize("writer", TO_A_FOLDER.values(), ids=TO_A_FOLDER)
def test_a_folder_is_written_where_nothing_is(writer, kind, refusal):
    put(kind, "out")
    refusal(f"{writer.command} out")
    assert not os.path.exists("nowhere")
    assert kind != "file" or Path("out").read_text("utf-8") == "kept"


@pytest.mark.parametrize("kind", ["link to a file", "hard link", "link to nothing", "link to itself", "pipe"])
@pytest.mark.parametrize("writer", TO_A_FILE.values(), ids=TO_A_FILE)
def test_a_file_takes_the_place_of_a_link_and_not_of_what_it_leads_to(writer, kind, capsys):
    out = writer.name("out")
    put(kind, out)
    if gpt(f"{writer.command} {out}") == 0:
        assert writer.has_written(out) and not Path(out).is_symlink()
    else:
        assert f"{out} exists already" in capsys.readouterr().err
    assert not os.path.exists("nowhere")


@pytest.mark.parametrize("kind", ["pipe", "link to itself", "device", "name too long"])
@all_readers
def test_what_is_read_is_a_file(command, kind, refusal):
    paths = {"device": "/dev/zero", "name too long": LONGEST + "n"}
    if kind not in paths:
        put(kind, "in")
    refusal(f"{command} {paths.get(kind, 'in')}")


@pytest.mark.parametrize("kind", ["pipe", "link to itself", "link to a device"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_read_of_a_folder_is_a_file(name, kind, refusal):
    path = Path("weights", name)
    path.unlink()
    put(kind, str(path))
    for command in READERS.values():
        refusal(f"{command} weights")


@pytest.mark.parametrize("name", [LONGEST, NOT_UTF8], ids=["255 bytes", "not UTF-8"])
@all_writers
def test_names_as_long_as_they_can_be(writer, name):
    out = writer.name(name)
    assert gpt(f"{writer.command} {out}") == 0
    assert writer.has_written(out)
    assert not list(Path.cwd().glob(".*unfinished"))


@all_readers
def test_names_to_read_that_are_not_utf8(command):
    os.rename("run" if command == "plot" else "weights", NOT_UTF8)
    assert gpt(f"{command} {NOT_UTF8}") == 0


@pytest.fixture
def unwritable(place) -> Path:
    """A folder in which nobody may write; nothing keeps root from writing into its own."""
    if os.geteuid() == 0:
        if not os.path.isdir("/sys"):
            pytest.skip("root may write anywhere")
        return Path("/sys")
    (place / "closed").mkdir(mode=0o500)
    return place / "closed"


@all_writers
def test_a_folder_that_nobody_may_write(writer, unwritable, capsys):
    assert gpt(f"{writer.command} {unwritable / writer.name('out')}") == 2
    assert str(unwritable) in capsys.readouterr().err.splitlines()[-1]


@all_writers
def test_another_file_system(writer, tmp_path):
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        out = f"{folder}/new/{writer.name('out')}"
        assert gpt(f"{writer.command} {out}") == 0
        assert writer.has_written(out)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_file_system_without_locks_says_so(number, monkeypatch, capsys):
    import fcntl

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert gpt(f"{PREPARE} out") == 0
    assert "has no locks: prepare this text in one process at a time" in capsys.readouterr().err
    assert (Path("out") / "train.bin").stat().st_size > 0


def test_the_lock_of_a_preparation_is_no_strangers_link(refusal):
    put("link to a file", ".out.lock")
    assert ".out.lock" in refusal(f"{PREPARE} out")
