"""Compile `step.cpp` once for each kind of processor. The cache folder keeps it for later processes."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
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
_one_at_a_time = threading.Lock()
_temporary_folder = functools.cache(tempfile.TemporaryDirectory)  # one folder, deleted when the process ends


def program() -> ctypes.CDLL | None:
    """Return the built program; None if it is missing or cannot be loaded."""
    path = program_path()
    try:
        path.stat()  # raises if the file is gone; the loader would not notice if it has loaded it before
        return ctypes.CDLL(str(path))
    except OSError:  # a damaged program is built again
        return None


def program_path() -> Path:
    """Return the path of the program. It is the one for one thread only if there is no other."""
    path = _parallel_path()
    return path if path.exists() else next(_serial_paths(), path)


def build() -> ctypes.CDLL:
    """Return the program. Build it first if it does not exist.

    Raises InputError if that fails, or if a call of the compiler takes longer than `_COMPILER_SECONDS`.
    """
    with _one_at_a_time:
        if _is_to_be_compiled():
            _compile()
    if library := program():
        return library
    raise InputError(f"the program cannot be loaded: {program_path()}")


def build_first() -> None:
    """Build the program, unless it exists, before a process decodes for a long time. Lines say so."""
    if _is_to_be_compiled():
        if _compiler_file():
            notice("compiling the program that decodes, which takes some seconds and is done once")
        _build_or_tell()


@contextmanager
def built_meanwhile(wanted: bool, after: float = 1.0) -> Iterator[None]:
    """Build the program in a thread once the block has run for `after` seconds, unless it exists already.

    For a command that ends sooner, compiling is not worth the work. At the block's end a line says that the
    compiler still runs, and it is waited for until Ctrl-C. An exception that leaves the block does not wait.
    """
    timer = threading.Timer(after, _build_or_tell)
    timer.daemon = True  # so that the process can end before the compiler
    if wanted and _is_to_be_compiled():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if timer.is_alive() and _one_at_a_time.locked():
        notice("still compiling the program that makes decoding faster; Ctrl-C stops waiting")
        with suppress(KeyboardInterrupt):
            timer.join()


def _build_or_tell() -> None:
    try:
        build()
    except InputError as error:
        notice(f"decoding is slower than it could be: {error}")


def _is_to_be_compiled() -> bool:
    """Whether there is no program, or only one for one thread and a compiler that was not asked for more."""
    if program() is None:
        return True
    is_serial = program_path() != _parallel_path()
    return is_serial and _compiler_file() is not None and not _serial_path().exists()


def _compile() -> None:
    """Compile with OpenMP, or without it for one thread if that fails.

    There are two files, of which `program_path` prefers the first:

    - `_parallel_path()`, with OpenMP. A compiler that has OpenMP makes it, and then none is asked again.
    - `_serial_path()`, for one thread. A compiler without OpenMP makes it. The file has this compiler's name,
      so that the same one is not asked again. Another compiler that is asked later gives the file its own
      name. If it has no OpenMP either, it compiles nothing more.

    Raises InputError if both fail. A compiler that takes too long says nothing about OpenMP, so that is an
    error too.
    """
    # The option for this processor's own instructions has another name on ARM.
    arm = platform.machine().lower() in ("arm64", "aarch64")
    options = [*_OPTIONS, "-mcpu=native" if arm else "-march=native"]
    # Link torch's own OpenMP library, as idle threads of a second one would keep a core busy.
    openmp = ["-fopenmp", *map(str, _openmp_libraries())]
    openmp = ["-Xclang", *openmp] if sys.platform == "darwin" else [*openmp, "-Wl,--as-needed,-z,defs"]
    has_serial = program() is not None
    if has_serial:
        program_path().replace(_serial_path())  # so that this compiler is asked once
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "step.so")
        command = [*_compiler(), str(SOURCE), *options]
        output = ["-o", str(built)]
        without_openmp = _run([*command, *openmp, *output])
        if not without_openmp:
            _keep(built, _parallel_path())
            return
        if not has_serial:
            if reason := _run([*command, *output]):
                raise InputError(f"{_FAILED}: {reason}")
            _keep(built, _serial_path())
    _parallel_path().unlink(missing_ok=True)  # it was damaged, otherwise nothing had been compiled
    notice(f"decoding uses one thread, as it could not be compiled with OpenMP: {without_openmp}")


def _keep(built: Path, path: Path) -> None:
    with atomic_write(path, "wb") as file:
        file.write(built.read_bytes())


def _compiler() -> list[str]:
    """Return the words that call the compiler, by default the system's GCC or clang."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def _compiler_file() -> str | None:
    """Return the path of the compiler itself, behind all links; None if there is none."""
    found = shutil.which(_compiler()[0])
    return os.path.realpath(found) if found else None


def _openmp_libraries() -> list[Path]:
    return sorted(Path(torch.__file__).parent.glob("lib/lib*omp*"))


def _run(command: list[str]) -> str:
    """Run a command. Return in one line why it failed, or "" if it did not.

    Raises InputError if it cannot be started or takes longer than `_COMPILER_SECONDS`.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_COMPILER_SECONDS,
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
    return f"step-{_hash(SOURCE.read_bytes(), _OPTIONS, openmp, platform.machine(), processor)}"


def _parallel_path() -> Path:
    """Return the path of the program with OpenMP."""
    return _folder() / f"{_name()}.so"


def _serial_path() -> Path:
    """Return the path of the program for one thread. Its name tells which compiler had no OpenMP."""
    file = _compiler_file()
    version = os.stat(file).st_mtime_ns if file else None
    return _folder() / f"{_name()}-one-thread-{_hash(_compiler(), file, version)}.so"


def _serial_paths() -> Iterator[Path]:
    """Yield the paths of the programs for one thread that exist, whichever compiler made them."""
    return _folder().glob(f"{_name()}-one-thread-*.so")


def _hash(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _folder() -> Path:
    """Return the folder for programs: in the cache if no other user can write there, else a temporary one."""
    folder = cache_folder() / "compiled"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder) and os.access(folder, os.W_OK):
            return folder
    return Path(_temporary_folder().name)


def _is_private(folder: Path) -> bool:
    """Whether it is a folder of this user, and no link, in which no other user can write."""
    if os.name == "nt":
        return True
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
