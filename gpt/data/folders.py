"""Find the files that a person means by a folder or a pattern.

Every folder and every file is visited once, whatever links there are. Files without text are left out:
pictures, archives, compiled code, pipes and hidden files. One line counts them.
"""

import os
import shlex
import stat
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from gpt.data.formats import endings_of, file_format
from gpt.data.text_file import is_binary
from gpt.errors import InputError
from gpt.progress import notice_once

_NOT_WRITTEN_BY_HAND = ("__pycache__", "node_modules")
_ANY_FOLDERS = "**"
_MAGIC = "*?["
_MOST_KINDS = 8  # the most kinds that the notice of left-out files names
_SPECIAL = {
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def is_pattern(name: str) -> bool:
    """Whether a name is a pattern, which may match several files."""
    return any(mark in name for mark in _MAGIC)


def special_kind(name: str) -> str | None:
    """Return `pipe`, `socket` or `device`; None for a file, for a folder, and if nothing has this name."""
    try:
        return _SPECIAL.get(stat.S_IFMT(os.stat(name).st_mode))
    except OSError:
        return None


def find_files(name: str) -> tuple[str, ...]:
    """Return the files of a folder or a pattern, in the order of their names.

    Broken links are included, so that the caller reports the missing file. Raises InputError if some files
    hold rows and others hold text.
    """
    left_out: Counter[str] = Counter()
    if os.path.isdir(name):
        paths = [os.path.join(name, path) for path in _walk(name, left_out)]
    else:
        paths = list(_matching("", Path(name).parts, left_out))
    files = list(_each_once(sorted(paths), left_out))
    if left_out:
        counts = [f"{count:,} {what}" for what, count in left_out.most_common(_MOST_KINDS)]
        more = ["others"] if len(left_out) > _MOST_KINDS else []
        notice_once(f"left out of {name}: {', '.join(counts + more)}")
    _check_one_kind(name, files)
    return tuple(files)


def _walk(folder: str, left_out: Counter[str], hidden: bool = False) -> Iterator[str]:
    """Yield the paths of the files below a folder, relative to it.

    Each folder is visited once. Links are followed last, so a folder appears under its own name.
    """
    visited: set[tuple[int, int]] = set()
    waiting = [""]
    links: list[str] = []
    while waiting or links:
        here = waiting.pop() if waiting else links.pop()
        place = os.path.join(folder, here) or os.curdir
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(place) as entries:
            # `waiting.pop` takes the last one, so the first name comes last.
            inside = sorted(entries, key=lambda entry: entry.name, reverse=True)
        for entry in inside:
            path = os.path.join(here, entry.name)
            if entry.name.startswith(".") and not hidden:
                left_out["hidden"] += 1
            elif not _is_folder(entry):
                yield path
            elif entry.name in _NOT_WRITTEN_BY_HAND:
                left_out[entry.name] += 1
            elif entry.is_symlink():
                links.append(path)
            else:
                waiting.append(path)
        links.sort(reverse=True)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _matching(folder: str, parts: tuple[str, ...], left_out: Counter[str]) -> Iterator[str]:
    """Yield the files below a folder that match a pattern.

    A part of the pattern that is the exact name of a file or folder matches only that one.
    """
    if not parts:
        if not os.path.isdir(folder):
            yield folder
        return
    first, *others = parts
    rest = tuple(others)
    if first == _ANY_FOLDERS and os.path.isdir(folder or os.curdir):
        hidden = any(part.startswith(".") for part in rest)
        below = _walk(folder, left_out, hidden)
        yield from (os.path.join(folder, path) for path in below if _fits(Path(path).parts, parts))
    elif os.path.lexists(os.path.join(folder, first)):
        yield from _matching(os.path.join(folder, first), rest, left_out)
    elif is_pattern(first) and os.path.isdir(folder or os.curdir):
        for name in sorted(os.listdir(folder or os.curdir)):
            if _fits((name,), (first,)):
                yield from _matching(os.path.join(folder, name), rest, left_out)


def _fits(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether the parts of a path match those of a pattern. Only a part that begins with a dot matches
    a hidden name.
    """
    if not pattern:
        return not names
    first, *rest = pattern
    if first == _ANY_FOLDERS:
        skipped = (names[count:] for count in range(len(names) + 1))
        return any(_fits(left, tuple(rest)) for left in skipped) if rest else True
    if not names or (names[0].startswith(".") and not first.startswith(".")):
        return False
    return (names[0] == first or fnmatch(names[0], first)) and _fits(names[1:], tuple(rest))


def _each_once(names: list[str], left_out: Counter[str]) -> Iterator[str]:
    """Yield the files that can be read as text or rows, each once, under its first name."""
    seen: set[tuple[int, int]] = set()
    for name in names:
        try:
            status = os.stat(name)
        except OSError:  # a broken link, which is reported when the file is read
            yield name
            continue
        if kind := _SPECIAL.get(stat.S_IFMT(status.st_mode)):
            left_out[kind] += 1
        elif (status.st_dev, status.st_ino) in seen:
            left_out["second name of a file"] += 1
        elif is_binary(name):
            left_out[Path(name).suffix.lower() or "binary"] += 1
        else:
            seen.add((status.st_dev, status.st_ino))
            yield name


def _check_one_kind(name: str, files: list[str]) -> None:
    """Raise InputError if some files hold rows and others text. It names a pattern of the more frequent."""
    texts = [file for file in files if file_format(file) == "text"]
    rows = [file for file in files if file_format(file) != "text"]
    if not texts or not rows:
        return
    folder = os.path.commonpath(list(map(os.path.dirname, files)))
    more = max(texts, rows, key=len)
    pattern = os.path.join(folder, "**", f"*{next(filter(None, map(endings_of, more)), '')}")
    raise InputError(
        f"{name} mixes files of rows ({rows[0]}) with texts ({texts[0]}): "
        f"name one kind with a pattern, such as {shlex.quote(pattern)}"
    )
