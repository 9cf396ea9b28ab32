"""What a folder or a pattern stands for: each file once, and only what is text; the rest is counted."""

import gzip
import os
import socket
import sys
from pathlib import Path

import pytest
from corpora import write

from gpt.data.find import find_corpus
from gpt.data.folders import find_files
from gpt.data.prepare import prepare
from gpt.data.prepared import Prepared
from gpt.errors import InputError

POSIX = pytest.mark.skipif(os.name == "nt", reason="POSIX files")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a text, in which the test works."""
    write(tmp_path / "c" / "x.txt", "some text")
    monkeypatch.chdir(tmp_path / "c")
    return tmp_path / "c"


def names(pattern: Path | str) -> list[str]:
    return [os.path.relpath(file) for file in find_files(str(pattern))]


@POSIX
def test_links_are_followed_once(folder, tmp_path):
    """A folder in itself, two in each other, one under two names, one elsewhere, a file under three names."""
    (folder / "self").symlink_to(folder)
    for here, there in (("a", "b"), ("b", "a")):
        write(folder / here / "y.txt", f"in {here}")
        (folder / here / "other").symlink_to(folder / there)
    (folder / "0").symlink_to(folder / "b")
    os.link(folder / "x.txt", folder / "z.txt")
    (folder / "link.txt").symlink_to("x.txt")
    write(tmp_path / "elsewhere" / "deep" / "z.txt", "far")
    (folder / "far").symlink_to(tmp_path / "elsewhere")
    expected = ["a/y.txt", "b/y.txt", "far/deep/z.txt", "link.txt"]
    assert names(folder) == names("**/*") == names("**/*.txt") == expected
    assert names("**/y.txt") == expected[:2]
    assert find_corpus(str(folder)).size() == len("in a" + "in b" + "far" + "some text")


@POSIX
def test_what_is_no_file_is_counted_and_never_opened(folder, capsys):
    os.mkfifo("pipe.txt")
    Path("null").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.txt")
        assert names(folder) == names("*") == ["x.txt"]
        line = f"gpt: left out of {folder}: 1 device, 1 pipe, 1 socket"
        assert line in capsys.readouterr().err.splitlines()
        for name, kind in {"pipe.txt": "pipe", "null": "device", "socket.txt": "socket"}.items():
            with pytest.raises(InputError, match=f"{name} is a {kind}: write what it gives to a file"):
                find_corpus(name)
    write(folder / "r.yaml", "corpus: {files: [pipe.txt]}")
    with pytest.raises(InputError, match=r"pipe\.txt is not a file"):
        find_corpus("r.yaml")


@POSIX
def test_a_file_among_the_folders_of_a_pattern_is_passed_over(folder):
    for name in ("data/readme.txt", "data/deep/a.txt"):
        write(folder / name, "text")
    assert names("data/*/**/*.txt") == [os.path.join("data", "deep", "a.txt")]


@pytest.mark.parametrize("pattern", [".", "*.txt", "**/*.txt"])
@pytest.mark.parametrize("target", ["missing", "broken.txt"], ids=["to nothing", "to itself"])
def test_links_that_lead_nowhere_are_named(folder, target, pattern):
    Path("broken.txt").symlink_to(target)
    with pytest.raises(InputError, match=r"broken\.txt is not a file, or a link to one that is missing"):
        find_corpus(pattern)


@POSIX
@pytest.mark.skipif(sys.platform == "darwin", reason="its names are UTF-8")
def test_names_of_any_bytes_and_of_any_length(folder):
    for name in (b"caf\xe9/\xff.txt", b"n" * 255 + b"/\xff.txt", b"n" * 251 + b".txt"):
        write(Path(os.fsdecode(name)), "more text " * 9)
    counts = Prepared(prepare(str(folder), vocab_size=300)).counts
    assert counts["train"].bytes + counts["val"].bytes == 9 + 3 * 90


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="a user who may not read everything")
def test_a_folder_that_may_not_be_read_is_an_error(folder):
    (folder / "secret").mkdir(mode=0)
    with pytest.raises(PermissionError):
        find_files(str(folder))


PROJECT = {
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


def test_a_projects_folder_is_its_text(folder, capsys):
    """Pictures, archives and bytecode are left out, with a line that counts them by ending."""
    for name, content in PROJECT.items():
        write(folder / name, content)
    assert names(folder) == names("**/*") == [os.path.join("deep", "code.py"), "more.txt.gz", "x.txt"]
    counts = "2 hidden, 2 .png, 1 __pycache__, 1 node_modules, 1 .zip, 1 binary, 1 .pyc, 1 .gz"
    assert f"gpt: left out of {folder}: {counts}" in capsys.readouterr().err.splitlines()
    with pytest.raises(InputError, match="no file matches"):
        find_corpus("*.png")
    with pytest.raises(InputError, match=r"race\.png is binary"):
        find_corpus("race.png")
    assert names("**/.git/*") == [os.path.join(".git", "HEAD")]


PATTERNS = {
    "[D_DATA]/*.txt": ["[D_DATA]/[1] b.txt", "[D_DATA]/a.txt"],
    "[D_DATA]/**": ["[D_DATA]/[1] b.txt", "[D_DATA]/a.txt"],
    "[DA]/*.txt": ["A/a.txt", "D/a.txt"],
    "*/[[]1*.txt": ["[D_DATA]/[1] b.txt"],
    "**/[D]/?.txt": ["D/a.txt", "x/[D]/a.txt"],
    "?/a.txt": ["A/a.txt", "D/a.txt"],
    "x/**/[D]/**/*.txt": ["x/[D]/a.txt"],
    "x": ["x/[D]/a.txt"],
}


@pytest.mark.parametrize(("pattern", "expected"), PATTERNS.items(), ids=PATTERNS)
def test_brackets_are_those_of_a_name_where_one_has_them(folder, pattern, expected):
    for name in ("[D_DATA]/a.txt", "[D_DATA]/[1] b.txt", "D/a.txt", "A/a.txt", "x/[D]/a.txt"):
        write(folder / name, "text")
    assert find_files(pattern) == tuple(map(os.path.normpath, expected))  # relative, as the pattern is
    assert names(folder / pattern) == names(pattern)
