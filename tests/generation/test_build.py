"""How the program is built, kept and found."""

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpt.errors import InputError
from gpt.generation import build

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="the stand-ins for compilers are shell scripts"
)


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("GPT_CACHE", str(tmp_path / "cache"))
    _forget_temporary_folder()
    yield tmp_path / "cache"
    _forget_temporary_folder()


def _forget_temporary_folder() -> None:
    build._temporary_folder().cleanup()
    build._temporary_folder.cache_clear()


@pytest.fixture(scope="module")
def library(cache_with_program):
    """The built program, which is not built again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_CACHE", cache_with_program)
        written = build.program_path().stat().st_mtime_ns
        assert build.build() and build.program_path().stat().st_mtime_ns == written
        yield build.program_path().resolve()  # a name for other processes


@pytest.fixture
def compiler(monkeypatch, tmp_path, library):
    """Makes a script the compiler: it runs some lines, and then gives the built program as its result."""
    path = tmp_path / "compile"
    give = f'while [ "$1" != -o ]; do shift; done; cp {library} "$2"'

    def install(lines: str = "") -> Path:
        path.write_text(f"#!/bin/sh\n{lines}\n{give}\n", encoding="utf-8")
        path.chmod(0o700)
        monkeypatch.setenv("CXX", str(path))
        return path

    install()
    return install


def test_what_others_can_write_is_not_run(library, monkeypatch):
    assert build.program()
    library.parent.chmod(0o777)
    assert not build.program() and build.program_path().resolve().parent != library.parent
    library.parent.chmod(0o700)
    assert build.program()
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # whose files are not those of this user
    assert not build.program()
    _forget_temporary_folder()


def test_two_processes_with_one_number_do_not_write_one_file(cache, compiler, tmp_path):
    """As in two containers with a common cache: what a compiler writes has a name of its own."""
    compiler(f'for last; do :; done; echo "$last" >> {tmp_path}/names')
    for _ in range(2):
        build.build()
        build.program_path().unlink()
    first, second = (tmp_path / "names").read_text("utf-8").split()
    assert first != second and str(cache) not in first


def test_a_program_is_kept_where_others_cannot_write(cache, compiler):
    before = os.umask(0o002)
    try:
        build.build()
    finally:
        os.umask(before)
    (path,) = (cache / "compiled").iterdir()
    assert build.program() and path.samefile(build.program_path())
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("is_there", [True, False], ids=["read-only", "a name that is too long"])
def test_a_home_that_cannot_be_written(is_there, cache, compiler, monkeypatch):
    """The program is kept for the process."""
    if is_there:
        (cache / "compiled").mkdir(parents=True)
        monkeypatch.setattr(os, "access", lambda *_: False)  # what a process of root may write is no test
    else:
        monkeypatch.setenv("GPT_CACHE", str(cache / ("x" * 300)))
    assert build.build() and build.program()
    assert cache not in build.program_path().resolve().parents


WITHOUT_OPENMP = 'case "$*" in *fopenmp*) echo no -fopenmp >&2; exit 1;; esac'


def test_without_openmp_it_is_compiled_for_one_thread(cache, compiler, capsys):
    """One line says so, and a program with OpenMP that is there later is used instead."""
    compiler(WITHOUT_OPENMP)
    (cache / "compiled").mkdir(parents=True, mode=0o700)
    build.program_path().write_bytes(b"damaged")
    assert build.build() and build.program()
    (path,) = (cache / "compiled").iterdir()
    assert "-one-thread-" in path.name and path.samefile(build.program_path())
    line = "gpt: decoding uses one thread, as it could not be compiled with OpenMP: no -fopenmp\n"
    assert capsys.readouterr().err == line
    parallel = path.with_name(f"{path.name.partition('-one-thread')[0]}.so")
    parallel.write_bytes(path.read_bytes())
    assert build.program() and parallel.samefile(build.program_path())


def test_a_compiler_that_is_installed_later_is_asked_for_openmp_once(cache, compiler, tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    called = f"echo >> {calls}; {WITHOUT_OPENMP}"
    compiler(called)
    for _ in range(2):  # with OpenMP and without, and then not again
        build.build()
    assert len(calls.read_text("utf-8")) == 2
    os.utime(compiler(called), ns=(0, 0))  # another version, which lacks OpenMP too
    for _ in range(2):
        build.build()
    assert len(calls.read_text("utf-8")) == 3
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "/no/such/compiler")
        assert build.build() and "-one-thread-" in build.program_path().name
    os.utime(compiler(), ns=(1, 1))
    assert build.build() and "-one-thread-" not in build.program_path().name


def test_a_compiler_that_takes_too_long_is_ended(cache, compiler, tmp_path, monkeypatch):
    """It is not asked again without OpenMP: it may be slow only because others use the machine."""
    compiler(f"echo $$ >> {tmp_path}/pids; exec sleep 60")
    monkeypatch.setattr(build, "_COMPILER_SECONDS", 1.0)
    with pytest.raises(InputError, match="timed out after 1"):
        build.build()
    (number,) = (tmp_path / "pids").read_text("utf-8").split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)


@pytest.mark.parametrize("command", ["/no/such/compiler", "false"])
def test_without_a_compiler_one_line_says_so(cache, command, monkeypatch, capsys):
    monkeypatch.setenv("CXX", command)
    with build.built_meanwhile(True, after=0.0):
        _wait_for_threads()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpt: decoding is slower than it could be: the program cannot be compiled")
    assert not list(cache.rglob("*.so"))


def test_what_is_built_first_is_said_once(cache, compiler, capsys):
    build.build_first()
    build.build_first()
    (line,) = capsys.readouterr().err.splitlines()
    assert build.program() and line.startswith("gpt: compiling the program")


@pytest.mark.parametrize(
    ("wanted", "after", "is_built"),
    [(False, 0.0, False), (True, 100.0, False), (True, 0.0, True)],
    ids=["not wanted", "ended sooner", "built"],
)
def test_it_is_built_only_for_what_runs_long_enough(wanted, after, is_built, cache, compiler):
    with build.built_meanwhile(wanted, after):
        if after == 0.0:
            _wait_for_threads()
    assert bool(build.program()) == is_built


def test_an_end_waits_for_the_compiler_with_a_line(cache, compiler, tmp_path, capsys):
    compiler(f"touch {tmp_path}/begun; sleep 0.3")
    with build.built_meanwhile(True, after=0.0):
        _wait_for(tmp_path / "begun")
    assert build.program()
    assert "still compiling" in capsys.readouterr().err


def test_ctrl_c_does_not_wait_for_the_compiler(tmp_path):
    """A process whose compiler takes a minute."""
    path = tmp_path / "compile"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun; exec sleep 60\n", encoding="utf-8")
    path.chmod(0o700)
    program = f"""if True:
        from pathlib import Path
        from gpt.generation import build
        with build.built_meanwhile(True, after=0.0):
            while not Path({str(tmp_path / "begun")!r}).exists():
                pass
            raise KeyboardInterrupt
    """
    environment = {**os.environ, "CXX": str(path), "GPT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, timeout=50, check=False
    )
    assert b"KeyboardInterrupt" in done.stderr


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _wait_for_threads() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(30)


def test_a_program_that_cannot_be_loaded_is_built_anew(cache, compiler):
    (cache / "compiled").mkdir(parents=True, mode=0o700)
    build.program_path().write_bytes(b"damaged")
    assert not build.program()
    assert build.build() and build.program()
