"""Shared by all benchmarks: interleaved timing, the machine, the report."""

import os
import platform
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from gpt.files import write_json

ROOT = Path(__file__).parents[2]


class Seconds(float):
    """What a candidate returns that measures itself, such as another program that has to start first."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of each round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median

    def times_faster_than(self, other: "Timing") -> float:
        """How many times as long `other` takes: the median over the rounds.

        Candidates of one round run one after the other, so a slower machine affects both.
        """
        return statistics.median(
            theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True)
        )


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    before: Callable[[], object] = lambda: None,
    warm_up: bool = True,
) -> dict[str, Timing]:
    """Time all candidates, interleaved, for `rounds` rounds; every second round runs in the opposite order.

    Each candidate runs once before, untimed; `warm_up` is false where each call starts a new process.
    `before` is called before each measurement, untimed. A candidate that uses a GPU must synchronise it.
    """
    timings = {name: Timing(seconds=[]) for name in candidates}
    for call in candidates.values() if warm_up else ():
        call()
    for number in range(rounds):
        for name in candidates if number % 2 else reversed(list(candidates)):
            before()
            began = time.perf_counter()
            result = candidates[name]()
            seconds = result if isinstance(result, Seconds) else time.perf_counter() - began
            timings[name].seconds.append(seconds)
    return timings


def with_package(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that finds this checkout's package, and what PYTHONPATH names already."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **(more or {})}


def run_python(
    arguments: list[str], folder: Path, environment: Mapping[str, str] | None = None, status: int = 0
) -> str:
    """Run Python in `folder` with this checkout's package, and return what it prints.

    Exits with the last lines of the process unless it ends with the expected `status`.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=with_package(environment),
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    if done.returncode != status:
        raise SystemExit(f"{' '.join(arguments)}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def machine() -> dict[str, Any]:
    """The machine and the versions."""
    cpu, information = platform.machine(), Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def commit() -> str:
    """The commit of this checkout; it ends in "-dirty" where a file that is measured differs from it."""
    told = _git("rev-parse", "--short", "HEAD").strip() or "unknown"
    return f"{told}-dirty" if _git("status", "--porcelain", "--", "gpt", "configs", "scripts") else told


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=False, capture_output=True, encoding="utf-8")
    return done.stdout


def peak_flops(precision: str) -> float | None:
    """This GPU's dense FLOP/s by its data sheet, "fp32" as TF32; None where it is not known."""
    peaks = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12}  # the first name that matches
    peaks |= {"H100": 989e12, "H200": 989e12, "A100": 312e12}
    bfloat16 = next((peak for name, peak in peaks.items() if name in torch.cuda.get_device_name()), None)
    return bfloat16 / 2 if bfloat16 and precision == "fp32" else bfloat16


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@contextmanager
def listening(app: Any, limits: Any = None, log_level: str = "error") -> Iterator[str]:
    """The address of a server in a thread of this process."""
    from gpt.serve.limits import RequestLimits
    from gpt.serve.server import Server

    server = Server(app, limits or RequestLimits(), host="127.0.0.1", port=0, log_level=log_level)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def say(text: str) -> None:
    """Print progress on stderr; stdout contains only the report."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a benchmark."""

    title: str
    rows: list[dict[str, Any]]
    """The table: one dictionary of column to value per line."""
    ratios: dict[str, float]
    """By target; above 1 means that this program is faster or better."""
    notes: list[str] = field(default_factory=list)
    across: tuple[str, str] | None = None
    """For a page: the column whose values become columns, and the column with their figures."""

    def markdown(self, code: str) -> str:
        """The report for a terminal, as Markdown; `code` lists the paths that were measured."""
        return f"### {self.title}\n\n{self._body(self.rows, code)}"

    def section(self, code: str) -> str:
        """The report for a page of docs/: as `markdown`, without its title, in a wider table."""
        return self._body(self._wide(), code)

    def write(self, path: Path) -> None:
        """The report as JSON."""
        write_json(path, {**asdict(self), "machine": machine()})

    def _body(self, rows: list[dict[str, Any]], code: str) -> str:
        """Caption, table, ratios and notes. The caption's comment is read by tests/test_measured.py."""
        about, now, day = machine(), commit(), f"{datetime.now():%Y-%m-%d}"
        threads = f"{about['threads']} threads"
        where = ", ".join(filter(None, (about["cpu"], threads, about["gpu"], f"torch {about['torch']}")))
        parts = [f"*{where}, commit {now}, {day}.*", f"<!-- measured: {now}, {day}; code: {code} -->"]
        parts.append(_table(rows))
        ratios = [f"- {name.replace('_', ' ')}: {value:.3f}" for name, value in self.ratios.items()]
        if ratios:
            parts.append("\n".join(ratios))
        return "\n\n".join([*parts, *(textwrap.fill(note, 98) for note in self.notes)])

    def _wide(self) -> list[dict[str, Any]]:
        """Join the rows that differ only in the column `across` and in their figures, of which one stays."""
        if self.across is None:
            return self.rows
        name, figure = self.across
        lines: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
        for row in self.rows:
            shared = {
                key: value
                for key, value in row.items()
                if key not in (name, "spread") and not isinstance(value, float)
            }
            line = lines.setdefault(tuple(shared.items()), shared)
            line[row[name]] = row[figure]
        return list(lines.values())


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def timed_rows(
    timings: Mapping[str, Timing], amount: float, unit: str, **columns: Any
) -> list[dict[str, Any]]:
    """A row for each candidate: what it does of `amount` in a second, and the spread."""
    return [
        {**columns, "candidate": name, unit: amount / timing.median, "spread": f"{timing.spread:.1%}"}
        for name, timing in timings.items()
    ]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
