"""A progress bar on a terminal, a rare plain line elsewhere; both on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_SECONDS = 15.0


@contextmanager
def byte_progress(label: str, total: int | None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show how many bytes are done, how fast, and the time left; call what it yields with each bytes more.

    Args:
        label: what is being done.
        total: bytes in all, None if unknown.
        done: bytes done before, which do not count towards the speed.
    """
    if not sys.stderr.isatty():
        yield _plain_lines(label, total, done)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total, completed=done)
        yield lambda more: progress.advance(task, more)


def _plain_lines(label: str, total: int | None, done: int) -> Callable[[int], None]:
    began = last = time.monotonic()
    before = done

    def advance(more: int) -> None:
        nonlocal done, last
        done += more
        now = time.monotonic()
        if now - last < _QUIET_SECONDS:
            return
        last = now
        speed = (done - before) / (now - began)
        left = f", {(total - done) / speed:.0f} s left" if total and speed else ""
        print(f"{label}: {done / 1e6:.0f} MB, {speed / 1e6:.1f} MB/s{left}", file=sys.stderr, flush=True)

    return advance
