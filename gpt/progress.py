"""Progress on stderr: a bar with the time left on a terminal, a plain line every ten seconds elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TextIO
from unicodedata import category

_SECONDS_BETWEEN_LINES = 10.0


def is_first_process() -> bool:
    """Whether this is the first of the processes that train together: by what torchrun or Lightning says."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def report(*lines: str, prefix: str = "gpt fit: ") -> None:
    """Print lines on stderr, on the first process alone.

    Nothing happens where nobody reads them any more: `| head -1` has ended, a terminal has closed.
    """
    if not is_first_process():
        return
    for line in lines:
        try:
            print(for_terminal(f"{prefix}{line}", sys.stderr), file=sys.stderr, flush=True)
        except OSError:  # what is left of it would change the exit status, as Python flushes it at the end
            sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def notice(message: str) -> None:
    """Print a line that is of no command alone, as `report` does."""
    report(message, prefix="gpt: ")


@cache
def notice_once(message: str) -> None:
    """Print a line that several readers of the same text would repeat."""
    notice(message)


def for_terminal(text: str, stream: TextIO | None) -> str:
    """The text as it is; for a terminal with its control characters spelled out, but for newlines and tabs.

    A model's weights decide its text, and a terminal obeys control characters: some of them write to the
    clipboard or rename the window. A file or a pipe gets the text as it is.
    """
    return spell_out_controls(text) if stream is not None and stream.isatty() else text


def spell_out_controls(text: str) -> str:
    """The text with control characters as Python writes them, such as \\x1b; newlines and tabs stay."""
    return "".join(
        ascii(letter)[1:-1] if category(letter) == "Cc" and letter not in "\n\t" else letter
        for letter in text
    )


@contextmanager
def progress(
    label: str, total: int | None, *, done: int = 0, unit: str = "bytes"
) -> Iterator[Callable[..., None]]:
    """Show how much of `total` is done, how fast, and the time left; call what it yields with each increment.

    It takes `(more, figures="", total=None)`: text to show, and a new total where that is an estimate. What
    was `done` before this call does not count towards the speed. Bytes are shown as MB, with the speed.
    """
    if not sys.stderr.isatty():
        yield _plain_lines(label, total, done, unit)
        return
    from rich import progress as rich
    from rich.console import Console

    counts: list[str | rich.ProgressColumn] = [rich.DownloadColumn(), rich.TransferSpeedColumn()]
    if unit != "bytes":
        counts = [rich.MofNCompleteColumn(), unit, "{task.fields[figures]}"]
    name = rich.TextColumn("{task.description}", markup=False)  # `[a]` in a corpus's name is no style
    columns = [name, rich.BarColumn(), *counts, rich.TimeRemainingColumn(), "left"]
    with rich.Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task(label, total=total, completed=done, figures="")

        def advance(more: int, figures: str = "", total: int | None = None) -> None:
            bar.update(task, advance=more, figures=figures, total=total)

        yield advance


def _plain_lines(label: str, total: int | None, before: int, unit: str) -> Callable[..., None]:
    start = time.monotonic()
    last = start
    done = before

    def advance(more: int, figures: str = "", total: int | None = total) -> None:
        nonlocal done, last
        done += more
        if (now := time.monotonic()) - last < _SECONDS_BETWEEN_LINES:
            return
        last = now
        speed = (done - before) / (now - start)
        count = f"{done} of {total} {unit}" if total else f"{done} {unit}"
        if unit == "bytes":
            count = f"{done / 1e6:.0f} MB, {speed / 1e6:.1f} MB/s"
        left = f"{(total - done) / speed:.0f} s left" if total and total > done and speed else ""
        report(f"{label}: {', '.join(filter(None, (count, figures, left)))}", prefix="")

    return advance
