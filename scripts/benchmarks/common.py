"""Shared by all benchmarks: interleaved timing, the machine, the report."""

import os
import platform
import statistics
import subprocess
import sys
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
) -> dict[str, Timing]:
    """Time all candidates, interleaved, for `rounds` rounds; every second round runs in the opposite order.

    Each candidate runs once before, untimed. `before` is called before each measurement, untimed. A
    candidate that uses a GPU must synchronise it.
    """
    timings = {name: Timing(seconds=[]) for name in candidates}
    for call in candidates.values():
        call()
    for number in range(rounds):
        for name in candidates if number % 2 else reversed(candidates):
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


def run_python(arguments: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run Python in `folder` with this checkout's package, and return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=with_package(environment),
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    if done.returncode:
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


def caption(code: str) -> str:
    """The caption of a table in docs/: processor, commit, date, and in a comment the paths of the `code`."""
    asked = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    told = subprocess.run(asked, cwd=ROOT, check=False, capture_output=True, encoding="utf-8")
    commit, day = told.stdout.strip() or "unknown", f"{datetime.now():%Y-%m-%d}"
    return (
        f"*{machine()['cpu']}, commit {commit}, {day}.*\n\n<!-- measured: {commit}, {day}; code: {code} -->"
    )


def peak_flops(precision: str) -> float | None:
    """This GPU's dense FLOP/s by its data sheet, "fp32" as TF32; None where it is not known."""
    peaks = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
    bfloat16 = next((peak for name, peak in peaks.items() if name in torch.cuda.get_device_name()), None)
    return bfloat16 / 2 if bfloat16 and precision == "fp32" else bfloat16


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@contextmanager
def listening(app: Any, limits: Any = None, log_level: str = "error") -> Iterator[str]:
    """The address of a server in a thread of this process."""
    from gpt.serve.limits import Limits
    from gpt.serve.server import Server

    server = Server(app, limits or Limits(), host="127.0.0.1", port=0, log_level=log_level)
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

    def markdown(self, code: str = "gpt") -> str:
        """The table and its caption, the ratios and the machine, as Markdown; `code` was measured."""
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        rows = [[_cell(row.get(column)) for column in columns] for row in self.rows]
        lines = [columns, ["---"] * len(columns), *rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        ratios = "\n".join(f"- {name}: {value:.3f}" for name, value in self.ratios.items())
        where = ", ".join(f"{name} {value}" for name, value in machine().items() if value is not None)
        return "\n\n".join([f"### {self.title}", caption(code), table, ratios, *self.notes, where])

    def write(self, path: Path) -> None:
        """The report as JSON."""
        write_json(path, {**asdict(self), "machine": machine()})


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
