"""What a hostile file must not do, seen by the interpreter's own audit events."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FORBIDDEN = (
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"),
    *("socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto", "pty.spawn"),
    *("pickle.find_class", "urllib.Request", "webbrowser.open"),
)
_watching: list[tuple[list[str], tuple[Path, ...]]] = []


@contextmanager
def watched(*writable: Path) -> Iterator[list[str]]:
    """The processes, connections, pickled classes and files written outside of `writable`, meanwhile."""
    seen: list[str] = []
    _watching.append((seen, tuple(path.resolve() for path in writable)))
    try:
        yield seen
    finally:
        _watching.pop()


def _hook(event: str, arguments: tuple) -> None:
    if not _watching:
        return
    seen, writable = _watching[-1]
    if event in _FORBIDDEN:
        seen.append(f"{event} {arguments[:2]!r}")
    elif event == "open" and isinstance(arguments[0], str) and isinstance(arguments[1], str):
        path = Path(arguments[0]).absolute()
        inside = any(folder in (path, *path.parents) for folder in (*writable, Path("/dev")))
        if set(arguments[1]) & set("wax+") and not inside and "__pycache__" not in path.parts:
            seen.append(f"open {path} {arguments[1]}")


sys.addaudithook(_hook)  # an audit hook stays for the life of the process
