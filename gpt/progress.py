"""Print lines, tables and progress on a terminal.

Progress is a bar with the time left on a terminal, and a plain line every ten seconds elsewhere.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TextIO
from unicodedata import category

_SECONDS_BETWEEN_LINES = 10.0


def is_first_process() -> bool:
    """Whether this is the first of the processes that train together, according to torchrun or Lightning."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def report(*lines: str, prefix: str = "gpt fit: ") -> None:
    """Print lines on stderr, only on the first process.

    It does nothing if the reader is gone, because `| head -1` has ended or the terminal was closed.
    """
    if not is_first_process():
        return
    for line in lines:
        try:
            print(for_terminal(f"{prefix}{line}", sys.stderr), file=sys.stderr, flush=True)
        except OSError:  # Python flushes stderr at exit: unwritten text would change the exit status
            sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def notice(message: str) -> None:
    """Print a line like `report`, with the program's name in front instead of the command's."""
    report(message, prefix="gpt: ")


@cache
def notice_once(message: str) -> None:
    """Print a line only the first time: several readers of the same text would repeat it."""
    notice(message)


def counted(number: int, name: str) -> str:
    """Return a number of things of a name in the singular, such as `1 row` or `2,000 rows`."""
    if number == 1:
        return f"1 {name}"
    return f"{number:,} {name}{'es' if name.endswith('s') else 's'}"


def short(value: float, unit: str = "") -> str:
    """Shorten a number to three digits and a letter, such as 1500000 to 1.5M, or to 1.5 MB of the unit B."""
    space = " " if unit else ""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # what is rounded up to it
            scaled = value / size
            digits = f"{scaled:.3g}" if abs(scaled) < 999.5 else f"{scaled:,.0f}"
            return f"{digits}{space}{letter}{unit}"
    return f"{value:.3g}{space}{unit}"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return the lines of a table: the first `left` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(cells)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def labelled(lines: Sequence[tuple[str, str]], stream: TextIO | None) -> list[str]:
    """Return lines that begin with a label, as wide as the widest one, and emphasised on a terminal."""
    width = max(len(label) for label, _ in lines)
    return [
        f"{emphasised(label.ljust(width), stream)}  {for_terminal(text, stream)}" for label, text in lines
    ]


def emphasised(text: str, stream: TextIO | None) -> str:
    """Return the text in bold cyan if the stream is a terminal with colours; `NO_COLOR` turns them off."""
    has_colours = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    return f"\x1b[1;36m{text}\x1b[0m" if has_colours and not os.environ.get("NO_COLOR") else text


def for_terminal(text: str, stream: TextIO | None) -> str:
    """Return text that is safe to print: for a terminal, control characters are escaped.

    A model can generate any character, and a terminal obeys control characters: some write to the clipboard
    or rename the window. Newlines and tabs stay. For a file or a pipe the text is unchanged.
    """
    return spell_out_controls(text) if stream is not None and stream.isatty() else text


def spell_out_controls(text: str) -> str:
    """Return the text with control characters escaped as in Python, such as \\x1b; newlines and tabs stay."""
    return "".join(
        ascii(letter)[1:-1] if category(letter) == "Cc" and letter not in "\n\t" else letter
        for letter in text
    )


@contextmanager
def progress(
    label: str, total: int | None, *, done: int = 0, unit: str = "bytes"
) -> Iterator[Callable[..., None]]:
    """Show how much of `total` is done, the speed and the time left; yield a function that advances it.

    The function takes `(more, figures="", total=None)`: the increment, text to show, and a new total where
    that is an estimate; None keeps the last one. A `total` of None is not known yet. The part already `done`
    does not count towards the speed. Bytes are shown in a larger unit, with the speed.
    """
    if sys.stderr is None or not sys.stderr.isatty():  # a process may be started without stderr
        yield _plain_lines(label, total, done, unit)
        return
    from rich import progress as rich
    from rich.console import Console

    counts: list[str | rich.ProgressColumn] = [rich.DownloadColumn(), rich.TransferSpeedColumn()]
    if unit != "bytes":
        counts = [rich.MofNCompleteColumn(), unit, "{task.fields[figures]}"]
    name = rich.TextColumn("{task.description}", markup=False)  # `[a]` in a corpus's name is not markup
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
    known = total

    def advance(more: int, figures: str = "", total: int | None = None) -> None:
        nonlocal done, known, last
        done += more
        known = total or known
        now = time.monotonic()
        if now - last < _SECONDS_BETWEEN_LINES:
            return
        last = now
        speed = (done - before) / (now - start)
        count = f"{done} of {known} {unit}" if known else f"{done} {unit}"
        if unit == "bytes":
            count = f"{done / 1e6:.0f} MB, {speed / 1e6:.1f} MB/s"
        left = f"{(known - done) / speed:.0f} s left" if known and known > done and speed else ""
        told = [part for part in (count, figures, left) if part]
        report(f"{label}: {', '.join(told)}", prefix="")

    return advance
