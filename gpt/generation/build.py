"""Compile `step.cpp` once for each kind of processor. The cache folder keeps it for later processes."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
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
_COMPILER_SECONDS = 120.0  # it usually takes about three
_FAILED = "the program cannot be compiled"
_SERIAL = "-one-thread.so"  # ends the name of a program without OpenMP
_one_at_a_time = threading.Lock()


def program() -> ctypes.CDLL | None:
    """Return the built program; None if it is missing or cannot be loaded."""
    path = program_path()
    try:
        path.stat()  # raises if the file is gone; the loader would not notice if it has loaded it before
        return ctypes.CDLL(str(path))
    except OSError:  # a damaged program is built again
        return None


@contextmanager
def built_meanwhile(wanted: bool, after: float = 1.0) -> Iterator[None]:
    """Build the program in a thread once the block has run for `after` seconds, unless it exists already.

    For a command that ends sooner, compiling is not worth the work.
    """
    timer = threading.Timer(after, _build_quietly)
    if wanted and program() is None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def build(seconds: float = _COMPILER_SECONDS) -> ctypes.CDLL:
    """Return the program. Build it first if it does not exist.

    Raises InputError if that fails, or if a call of the compiler takes longer than `seconds`.
    """
    with _one_at_a_time:
        if program() is None:
            _compile(seconds)
    if library := program():
        return library
    raise InputError(f"the program cannot be loaded: {program_path()}")


def _build_quietly() -> None:
    try:
        build()
    except InputError as error:
        notice(f"decoding is slower than it could be: {error}")


def _compile(seconds: float) -> None:
    """Compile with OpenMP, or without it for one thread if that fails.

    Raises InputError if both fail. A compiler that takes too long says nothing about OpenMP, so that is an
    error too.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]  # by default the system's GCC or clang
    # The option for this processor's own instructions has another name on ARM.
    arm = platform.machine().lower() in ("arm64", "aarch64")
    options = [*_OPTIONS, "-mcpu=native" if arm else "-march=native"]
    # Link torch's own OpenMP library, as idle threads of a second one would keep a core busy.
    openmp = ["-fopenmp", *map(str, _openmp_libraries())]
    openmp = ["-Xclang", *openmp] if sys.platform == "darwin" else [*openmp, "-Wl,--as-needed,-z,defs"]
    parallel, serial = _paths()
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "step.so")
        command = [*compiler, str(SOURCE), *options]
        output = ["-o", str(built)]
        path = parallel
        if without_openmp := _run([*command, *openmp, *output], seconds):
            path = serial
            if reason := _run([*command, *output], seconds):
                raise InputError(f"{_FAILED}: {reason}")
        with atomic_write(path, "wb") as file:
            file.write(built.read_bytes())
    if path == serial:
        parallel.unlink(missing_ok=True)  # it was damaged, otherwise nothing had been compiled
        notice(f"decoding uses one thread, as it could not be compiled with OpenMP: {without_openmp}")


def _openmp_libraries() -> list[Path]:
    return sorted(Path(torch.__file__).parent.glob("lib/lib*omp*"))


def _run(command: list[str], seconds: float) -> str:
    """Run a command. Return in one line why it failed, or "" if it did not.

    Raises InputError if it cannot be started or takes longer than `seconds`.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            start_new_session=True,  # so that Ctrl-C, which ends a text, does not end the compiler
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{_FAILED}: {error}") from None
    status = f"the compiler ended with status {done.returncode}"
    return (done.stderr.partition("\n")[0] or status) if done.returncode else ""


@functools.cache
def _name() -> str:
    """Return the program's name, without a suffix, for this processor and OpenMP library."""
    described = Path("/proc/cpuinfo")
    lines = set(described.read_text(encoding="utf-8").splitlines() if described.exists() else ())
    processor = sorted(line for line in lines if line.startswith(("model name", "flags", "Features")))
    openmp = [(str(path), path.stat().st_size) for path in _openmp_libraries()]
    key = repr((SOURCE.read_bytes(), _OPTIONS, openmp, platform.machine(), processor))
    return f"step-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def program_path() -> Path:
    """Return the path of the program. It is the one for one thread only if there is no other."""
    parallel, serial = _paths()
    return serial if serial.exists() and not parallel.exists() else parallel


def _paths() -> tuple[Path, Path]:
    """Return the paths of the program with OpenMP, and of the one for one thread.

    They are in the cache folder if no other user can write there, else in a new temporary folder.
    """
    folder = _folder()
    return folder / f"{_name()}.so", folder / f"{_name()}{_SERIAL}"


def _folder() -> Path:
    folder = cache_folder() / "compiled"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name != "nt":
            folder = _private(folder)
        if os.access(folder, os.W_OK):
            return folder
    return Path(_private_folder().name)


def _private(folder: Path) -> Path:
    """Return a path that always means this very folder, even if its name is later given to another one.

    On Linux it is the path of the open folder in /proc. On other systems it is just the name. Raises
    PermissionError if other users can write to the folder.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(opened)
    held = _held.setdefault((status.st_dev, status.st_ino), opened)
    if held != opened:
        os.close(opened)
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"others can write {folder}")
    descriptors = Path("/proc/self/fd")
    return descriptors / str(held) if descriptors.is_dir() else folder


_held: dict[tuple[int, int], int] = {}  # descriptors of opened folders, which stay open, by device and inode
_private_folder = functools.cache(tempfile.TemporaryDirectory)  # one folder, deleted when the process ends
