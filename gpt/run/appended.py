"""Files that grow while a run trains: metrics.csv and samples.txt.

A resumed run continues them as they were when its checkpoint was written; later rows are dropped. It writes
new files instead of appending to old ones, so a link in their place changes nothing elsewhere.
"""

import csv
import io
import os
import zlib
from collections.abc import Iterator
from typing import IO

from gpt.files import Folder
from gpt.run.folder import RunFolder
from gpt.weights.checkpoint import RunPart


class Appended:
    """A file that a run appends to: a new file, which begins with the `kept` part of the old one."""

    def __init__(self, folder: Folder, name: str, kept: bytes) -> None:
        with folder.write(name, "wb") as file:
            file.write(kept)
        self._file: IO[bytes] = os.fdopen(folder.open(name, os.O_WRONLY | os.O_APPEND), "ab")
        self._size = len(kept)
        self._sum = zlib.crc32(kept)

    def __enter__(self) -> "Appended":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, text: str) -> None:
        """Append text, at once visible to readers of the file."""
        data = text.encode("utf-8", "backslashreplace")
        self._file.write(data)
        self._file.flush()
        self._size += len(data)
        self._sum = zlib.crc32(data, self._sum)

    def flush(self) -> tuple[int, int]:
        """Flush the file to disk; return its size in bytes and its CRC-32."""
        os.fsync(self._file.fileno())
        return self._size, self._sum


def kept_rows(folder: RunFolder, run: RunPart) -> bytes:
    """Return the content of metrics.csv when `run` was saved.

    The saved CRC-32 identifies it: in this file, or in one that was set aside when the run was resumed from
    an older checkpoint. If no file matches (its columns have changed since, or an earlier version saved no
    CRC-32), it is the complete rows up to the step.
    A new run has saved no byte, whose CRC-32 is 0: it keeps nothing of a file that is there.
    """
    for data in _records(folder, "metrics.csv"):
        if zlib.crc32(data[: run.csv]) == run.csv_sum:
            return data[: run.csv]
    lines = next(_records(folder, "metrics.csv"), b"").splitlines(keepends=True)
    kept = lines[:1]
    for line in lines[1:]:
        step = line.partition(b",")[0]
        whole = line.endswith(b"\n") and line.count(b",") == kept[0].count(b",") and step.isdigit()
        if not whole or int(step) > run.step:
            break
        kept.append(line)
    return b"".join(kept)


def kept_samples(folder: RunFolder, run: RunPart) -> bytes:
    """Return the content of samples.txt when `run` was saved, found like `kept_rows`."""
    for data in _records(folder, "samples.txt"):
        if zlib.crc32(data[: run.samples]) == run.samples_sum:
            return data[: run.samples]
    return next(_records(folder, "samples.txt"), b"")[: run.samples]


def with_columns(table: bytes, columns: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
    """Return a table with these columns first, then an earlier version's others, and all names."""
    head = ",".join(columns)
    text = table.decode("utf-8", "replace")
    if not text:
        return f"{head}\n".encode(), columns
    rows = csv.DictReader(io.StringIO(text))
    names = tuple(rows.fieldnames or ())
    if names[: len(columns)] == columns:
        return table, names
    columns += tuple(name for name in names if name not in columns)
    changed = io.StringIO()
    writer = csv.DictWriter(changed, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return changed.getvalue().encode(), columns


def _records(folder: RunFolder, name: str) -> Iterator[bytes]:
    """Yield the contents of the file of this name, and of those set aside with a checkpoint."""
    if name in folder.top.names():
        yield folder.top.read(name)
    for other in folder.checkpoints.names():
        if other.endswith(f".{name}"):
            yield folder.checkpoints.read(other)
