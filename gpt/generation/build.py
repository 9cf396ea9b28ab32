"""Builds `step.cpp` once for a processor and keeps it in the cache folder, where every process finds it."""

import ctypes
import functools
import hashlib
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from gpt.errors import InputError
from gpt.files import cache_folder
from gpt.progress import notice

SOURCE = Path(__file__).with_name("step.cpp")
_OPTIONS = ["-O2", "-std=gnu++17", "-fPIC", "-shared"]
_LIMIT = 120.0  # seconds for the compiler, which takes about three
_SOON = 1.0  # seconds that a command runs before it is worth the compiler's work
_one_at_a_time = threading.Lock()


def program() -> ctypes.CDLL | None:
    """The built program; None where it is not there or cannot be loaded."""
    path = _path()
    try:
        path.stat()  # the loader does not look, where it has loaded this path before
        return ctypes.CDLL(str(path))
    except OSError:  # damaged, it is built anew
        return None


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


def build() -> ctypes.CDLL:
    """The program, built now unless it is there; InputError says why it cannot be."""
    with _one_at_a_time:
        if program() is None:
            _compile(_path())
    if library := program():
        return library
    raise InputError(f"the program cannot be loaded: {_path()}")


def _build_quietly() -> None:
    try:
        build()
    except InputError as error:
        notice(f"decoding is slower than it could be: {error}")


def _compile(path: Path) -> None:
    """Compile with OpenMP, or else without, which means one thread; InputError for neither."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]  # the system's own, GCC or clang
    # A processor's own instructions have one option on ARM and another elsewhere.
    arm = platform.machine().lower() in ("arm64", "aarch64")
    options = [*_OPTIONS, "-mcpu=native" if arm else "-march=native"]
    # By torch's own OpenMP library: idle threads of a second one would keep a core busy.
    openmp = ["-fopenmp", *map(str, _openmp_libraries())]
    openmp = ["-Xclang", *openmp] if sys.platform == "darwin" else [*openmp, "-Wl,--as-needed,-z,defs"]
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "step.so")
        for parallel in (openmp, []):
            reason = _run([*compiler, str(SOURCE), *options, *parallel, "-o", str(built)])
            if not reason:
                temporary = path.with_suffix(f".{secrets.token_hex(8)}")
                shutil.copyfile(built, temporary)
                temporary.replace(path)
                return
    raise InputError(f"the program cannot be compiled: {reason}")


def _openmp_libraries() -> list[Path]:
    return sorted(Path(torch.__file__).parent.glob("lib/lib*omp*"))


def _run(command: list[str]) -> str:
    """Why a command failed, in one line; "" if it did not."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LIMIT,
            start_new_session=True,  # Ctrl-C ends a text, not the compiler
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    status = f"the compiler ended with status {done.returncode}"
    return (done.stderr.partition("\n")[0] or status) if done.returncode else ""


@functools.cache
def _name() -> str:
    """Of the program for this processor and OpenMP library."""
    described = Path("/proc/cpuinfo")
    lines = set(described.read_text(encoding="utf-8").splitlines() if described.exists() else ())
    processor = sorted(line for line in lines if line.startswith(("model name", "flags", "Features")))
    openmp = [(str(path), path.stat().st_size) for path in _openmp_libraries()]
    key = repr((SOURCE.read_bytes(), _OPTIONS, openmp, platform.machine(), processor))
    return f"step-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


def _path() -> Path:
    """Where the program is kept: where nobody else can write, or else in a new folder of this process."""
    folder = cache_folder() / "compiled"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name != "nt":
            folder = _private(folder)
        if os.access(folder, os.W_OK):
            return folder / _name()
    return Path(_private_folder().name, _name())


def _private(folder: Path) -> Path:
    """A path of this very folder, whatever its name comes to mean; PermissionError where others can write.

    Linux has such paths: those of open folders. Elsewhere it is the name.
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


_held: dict[tuple[int, int], int] = {}  # the folders that were opened, which stay open
_private_folder = functools.cache(tempfile.TemporaryDirectory)  # until the process ends
