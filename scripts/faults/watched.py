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
# Events that change the file system, with the position of the path they change, and of the descriptor of the
# folder that it is relative to, if the event tells one.
CHANGES: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("os.truncate", "shutil.rmtree"), (0, None)),
    **dict.fromkeys(("shutil.move", "shutil.copyfile"), (1, None)),
    **dict.fromkeys(("os.remove", "os.rmdir"), (0, 1)),
    **dict.fromkeys(("os.mkdir", "os.chmod"), (0, 2)),
    **dict.fromkeys(("os.rename", "os.link"), (1, 3)),
    "os.symlink": (1, 2),
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
            writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
            writes = isinstance(flags, int) and flags & writing != 0
        else:
            writes = not set(mode).isdisjoint("wax+")
        # The event does not tell the folder that a plain name is opened in without following a link: what is
        # made there is seen as it is renamed.
        within = isinstance(flags, int) and flags & getattr(os, "O_NOFOLLOW", 0) and os.sep not in str(path)
        changed = [path] if writes and not within else []
    elif event in CHANGES:
        place, folder = CHANGES[event]
        changed = [_in_folder(arguments[place], -1 if folder is None else arguments[folder])]
    else:
        changed = []
    follows = event in ("open", "os.truncate", "os.chmod")  # the others change the name, not what it leads to
    for path in changed:
        if isinstance(path, str | bytes | os.PathLike):
            name = os.fsdecode(path)
            if _outside(name, writable, follows):
                report(f"{event} {name}")


def _in_folder(path: Any, folder: int) -> Any:
    """A path that is relative to an open folder, if it is to any."""
    if folder < 0 or not isinstance(path, str | bytes | os.PathLike):
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))


def _outside(name: str, writable: tuple[Path, ...], follows: bool) -> bool:
    """Whether it lies outside of these folders, wherever links lead."""
    folder, last = os.path.split(os.path.abspath(name))
    path = Path(os.path.realpath(name) if follows else os.path.join(os.path.realpath(folder), last))
    inside = any(folder in (path, *path.parents) for folder in (*writable, Path("/dev")))
    return not inside and "__pycache__" not in path.parts


sys.addaudithook(_hook)  # Python cannot remove an audit hook; it does nothing outside of `watched`
