"""Builds `step.cpp` once for a processor and keeps it in the cache folder, where every process finds it."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from gpt.errors import InputError
from gpt.files import atomic_write, cache_folder
from gpt.progress import notice

SOURCE = Path(__file__).with_name("step.cpp")
_OPTIONS = ["-O2", "-std=gnu++17", "-fPIC", "-shared"]
_COMPILERS = "g++", "clang++", "c++"
_LIMIT = 120.0  # seconds for the compiler, which takes about three
_SOON = 1.0  # seconds that a command runs before it is worth the compiler's work
_one_at_a_time = threading.Lock()
Program = ctypes.CDLL


def program() -> Program | None:
    """The built program; None where it is not there or cannot be loaded."""
    path = _path()
    return _load(path) if _is_mine(path) else None


@contextmanager
def built_meanwhile(wanted: bool) -> Iterator[None]:
    """Build the program in a thread, unless it is there, once the block has run for a second."""
    timer = threading.Timer(_SOON, _build_quietly)
    if wanted and program() is None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def build() -> Program:
    """The program, built now unless it is there; InputError says why it cannot be."""
    with _one_at_a_time:
        path = _path()
        if program() is None:
            _compile(path)
            _load.cache_clear()
    library = program()
    if library is None:
        raise InputError(f"the program cannot be loaded, delete it: {path}")
    return library


def _build_quietly() -> None:
    try:
        build()
    except InputError as error:
        notice(f"decoding is slower than it could be: {error}")


def _compile(path: Path) -> None:
    """Compile with OpenMP, or else without, which means one thread; InputError for neither."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [next(filter(shutil.which, _COMPILERS), "g++")]
    # A processor's own instructions have one option on ARM and another elsewhere.
    arm = platform.machine().lower() in ("arm64", "aarch64")
    options = [*_OPTIONS, "-mcpu=native" if arm else "-march=native"]
    if shutil.which("nice"):  # what is decoded meanwhile comes first
        compiler = ["nice", "-n", "19", *compiler]
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, path.name)
        for parallel in (_openmp(), []):
            command = [*compiler, str(SOURCE), *options, *parallel, "-o", str(built)]
            reason = _run(command)
            if not reason:
                break
        else:
            raise InputError(f"the program cannot be compiled: {reason}")
        try:
            with atomic_write(path, "wb") as file:
                file.write(built.read_bytes())
            path.chmod(0o700)  # for a umask that lets the group write
        except OSError as error:
            raise InputError(f"the program cannot be kept: {error}") from None


def _openmp() -> list[str]:
    """Options for OpenMP, by torch's own library: idle threads of a second one would keep a core busy."""
    libraries = [str(path) for path in _openmp_libraries()]
    if sys.platform == "darwin":
        return ["-Xclang", "-fopenmp", *libraries]
    return ["-fopenmp", *libraries, "-Wl,--as-needed,-z,defs"]


def _openmp_libraries() -> list[Path]:
    folder = Path(torch.__file__).parent / "lib"
    return sorted(path for name in ("libgomp*", "libomp*") for path in folder.glob(name))


def _run(command: list[str]) -> str:
    """Why a command failed, in one line; "" if it did not. All that it started ends with the time limit."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C ends a text, not the compiler
        )
    except OSError as error:
        return str(error)
    with process:
        try:
            told = process.communicate(timeout=_LIMIT)[1]
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                process.kill() if os.name == "nt" else os.killpg(process.pid, signal.SIGKILL)
            return f"the compiler took more than {_LIMIT:.0f} s"
    if process.returncode == 0:
        return ""
    return told.partition("\n")[0] or f"the compiler ended with status {process.returncode}"


def _path() -> Path:
    return _folder() / _name()


@functools.cache
def _name() -> str:
    """Of the program for this processor and OpenMP library."""
    described = Path("/proc/cpuinfo")
    lines = set(described.read_text(encoding="utf-8").splitlines() if described.exists() else ())
    processor = sorted(line for line in lines if line.startswith(("model name", "flags", "Features")))
    openmp = [(str(path), path.stat().st_size) for path in _openmp_libraries()]
    key = repr((SOURCE.read_bytes(), _OPTIONS, openmp, platform.machine(), platform.processor(), processor))
    return f"step-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


def _folder() -> Path:
    """Where the program is kept: it is run, so where others can write it is made anew for each process.

    So it is where this process cannot write.
    """
    folder = cache_folder() / "compiled"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = _is_mine(folder) and (os.access(folder, os.W_OK) or _is_mine(folder / _name()))
    return folder if kept else Path(_private_folder().name)


_private_folder = functools.cache(tempfile.TemporaryDirectory)  # until the process ends


def _is_mine(path: Path) -> bool:
    """Whether it exists and nobody else can have written it."""
    try:
        status = path.stat()
    except OSError:
        return False
    return os.name == "nt" or (status.st_uid == os.getuid() and not status.st_mode & 0o022)


@functools.cache
def _load(path: Path) -> Program | None:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # of another machine, for example
        notice(f"decoding is slower than it could be: its program cannot be loaded, delete it: {error}")
        return None
