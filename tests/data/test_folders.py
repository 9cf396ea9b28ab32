"""What a folder or a pattern stands for: each file once, and only what is text; the rest is counted."""

import gzip
import os
import socket
import sys

import pytest

from gpt.data.find import find_corpus
from gpt.data.folders import find_files
from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.errors import InputError

POSIX = pytest.mark.skipif(os.name == "nt", reason="POSIX files")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "c"
    made.mkdir()
    (made / "x.txt").write_text("some text", encoding="utf-8")
    return made


def names(folder, pattern=""):
    found = find_files(os.path.join(folder, pattern) if pattern else str(folder))
    return [os.path.relpath(file, folder) for file in found]


@POSIX
def test_links_that_lead_back_are_followed_once(folder):
    """A folder in itself, two in each other, one under two names, a file under three."""
    (folder / "self").symlink_to(folder)
    for here, there in (("a", "b"), ("b", "a")):
        (folder / here).mkdir()
        (folder / here / "y.txt").write_text(f"in {here}", encoding="utf-8")
        (folder / here / "other").symlink_to(folder / there)
    (folder / "0").symlink_to(folder / "b")
    os.link(folder / "x.txt", folder / "z.txt")
    (folder / "link.txt").symlink_to("x.txt")
    expected = ["a/y.txt", "b/y.txt", "link.txt"]
    assert names(folder) == names(folder, "**/*") == names(folder, "**/*.txt") == expected
    assert names(folder, "**/y.txt") == expected[:2]
    assert find_corpus(str(folder)).size() == len("in ain bsome text")


@POSIX
def test_a_folder_behind_a_link_is_read(folder, tmp_path):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "y.txt").write_text("far", encoding="utf-8")
    (folder / "far").symlink_to(tmp_path / "elsewhere")
    assert names(folder) == ["far/deep/y.txt", "x.txt"]


@POSIX
def test_what_is_no_file_is_counted_and_never_opened(folder, capsys):
    os.mkfifo(folder / "pipe.txt")
    (folder / "null").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(folder)  # a socket's path has at most 108 bytes
        server.bind("socket.txt")
        os.chdir(here)
        assert names(folder) == names(folder, "*") == ["x.txt"]
        line = f"gpt: left out of {folder}: 1 device, 1 pipe, 1 socket"
        assert line in capsys.readouterr().err.splitlines()
        for name, kind in (("pipe.txt", "pipe"), ("null", "device"), ("socket.txt", "socket")):
            with pytest.raises(InputError, match=f"{name} is a {kind}: write what it gives to a file"):
                find_corpus(str(folder / name))
        (folder / "r.yaml").write_text("corpus: {files: [pipe.txt]}", encoding="utf-8")
        with pytest.raises(InputError, match=r"pipe\.txt is not a file"):
            find_corpus(str(folder / "r.yaml"))


@POSIX
def test_links_that_lead_nowhere_are_named(folder):
    for target in ("missing", "broken.txt"):
        (folder / "broken.txt").symlink_to(target)
        for name in (folder, folder / "*.txt", folder / "**" / "*.txt"):
            with pytest.raises(
                InputError, match=r"broken\.txt is not a file, or a link to one that is missing"
            ):
                find_corpus(str(name))
        (folder / "broken.txt").unlink()


@POSIX
@pytest.mark.skipif(sys.platform == "darwin", reason="its names are UTF-8")
def test_names_of_any_bytes_and_of_any_length(folder):
    for name in (b"caf\xe9", b"n" * 255):
        path = os.path.join(os.fsencode(folder), name)
        os.mkdir(path)
        with open(os.path.join(path, b"\xff.txt"), "wb") as file:
            file.write(b"more text " * 9)
    with open(os.path.join(os.fsencode(folder), b"n" * 251 + b".txt"), "wb") as file:
        file.write(b"long name " * 9)
    counts = Prepared(prepare(str(folder), vocab_size=300)).counts
    assert sum(counts[split].bytes for split in counts) == 9 + 3 * 90


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="a user who may not read everything")
def test_a_folder_that_may_not_be_read_is_an_error(folder):
    (folder / "secret").mkdir(mode=0)
    with pytest.raises(PermissionError):
        find_files(str(folder))


def test_a_projects_folder_is_its_text(folder, capsys):
    """Pictures, archives and bytecode are left out, with a line that counts them by ending."""
    files = {
        "race.png": b"\x89PNG\r\n",
        "deep/b.PNG": b"x",
        "a.zip": b"PK",
        "m.pyc": b"x",
        "data": b"text \0",
        "t.gz": gzip.compress(b"\0 tar"),
        "__pycache__/m.pyc": b"x",
        "deep/node_modules/left/pad.js": b"x",
        ".git/HEAD": b"ref",
        ".env": b"key",
        "deep/code.py": b"print()",
        "more.txt.gz": gzip.compress(b"more text"),
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    expected = [os.path.join("deep", "code.py"), "more.txt.gz", "x.txt"]
    assert names(folder) == names(folder, "**/*") == expected
    told = "2 hidden, 2 .png, 1 __pycache__, 1 node_modules, 1 .zip, 1 binary, 1 .pyc, 1 .gz"
    (line, *_) = [line for line in capsys.readouterr().err.splitlines() if line.endswith(told)]
    assert line == f"gpt: left out of {folder}: {told}"
    with pytest.raises(InputError, match="no file matches"):
        find_corpus(str(folder / "*.png"))
    with pytest.raises(InputError, match=r"race\.png is binary"):
        find_corpus(str(folder / "race.png"))
    assert find_files(str(folder / "**" / ".git" / "*")) == (str(folder / ".git" / "HEAD"),)


def test_brackets_are_those_of_a_name_where_one_has_them(tmp_path):
    for name in ("[D_DATA]/a.txt", "[D_DATA]/[1] b.txt", "D/a.txt", "A/a.txt", "x/[D]/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text", encoding="utf-8")
    for pattern, expected in {
        "[D_DATA]/*.txt": ["[D_DATA]/[1] b.txt", "[D_DATA]/a.txt"],
        "[D_DATA]/**": ["[D_DATA]/[1] b.txt", "[D_DATA]/a.txt"],
        "[DA]/*.txt": ["A/a.txt", "D/a.txt"],
        "*/[[]1*.txt": ["[D_DATA]/[1] b.txt"],
        "**/[D]/?.txt": ["D/a.txt", "x/[D]/a.txt"],
        "?/a.txt": ["A/a.txt", "D/a.txt"],
        "x/**/[D]/**/*.txt": ["x/[D]/a.txt"],
    }.items():
        assert names(tmp_path, pattern) == [os.path.normpath(name) for name in expected], pattern


def test_names_are_relative_where_the_pattern_is(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert find_files("**/*.txt") == find_files("*.txt") == ("x.txt",)
    assert find_files(".") == (os.path.join(".", "x.txt"),)
