"""Record what a hostile file must not do: start a process, open a connection, unpickle, write elsewhere.

Python's audit events (PEP 578) report these before they happen, whichever library is the cause.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORBIDDEN = {
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"),
    *("socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto", "pty.spawn"),
    *("pickle.find_class", "urllib.Request", "webbrowser.open"),
}
# Events that change the file system, with the position of the path they change.
CHANGES = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "shutil.rmtree"), 0),
    **dict.fromkeys(("os.rename", "shutil.move", "os.link", "os.symlink", "shutil.copyfile"), 1),
}
_watching: list[tuple[Callable[[str], object], tuple[Path, ...]]] = []


def watch(report: Callable[[str], object], *writable: Path) -> None:
    """From now on, report processes, connections, unpickled classes and writes outside of `writable`."""
    _watching.append((report, tuple(path.resolve() for path in writable)))


@contextmanager
def watched(*writable: Path) -> Iterator[list[str]]:
    """Collect in a list what `watch` reports."""
    seen: list[str] = []
    watch(seen.append, *writable)
    try:
        yield seen
    finally:
        _watching.pop()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    report, writable = _watching[-1]
    if event in FORBIDDEN:
        report(f"{event} {arguments[:2]!r}")
        return
    if event == "open":
        path, mode, flags = arguments
        if mode is None:  # os.open
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        else:
            writes = set(mode) & set("wax+")
        changed = [path] if writes else []
    else:
        changed = [arguments[CHANGES[event]]] if event in CHANGES else []
    for path in changed:
        if isinstance(path, str | bytes | os.PathLike) and _outside(Path(os.fsdecode(path)), writable):
            report(f"{event} {os.fsdecode(path)}")


def _outside(path: Path, writable: tuple[Path, ...]) -> bool:
    path = Path(os.path.abspath(path))
    inside = any(folder in (path, *path.parents) for folder in (*writable, Path("/dev")))
    return not inside and "__pycache__" not in path.parts


sys.addaudithook(_hook)  # Python cannot remove an audit hook; it does nothing outside of `watched`
