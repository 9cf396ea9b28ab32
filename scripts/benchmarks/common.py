"""Shared by all benchmarks: interleaved timing, peak memory, the machine, the report."""

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt.files import atomic_write, write_json

ROOT = Path(__file__).parents[2]


class Seconds(float):
    """What a candidate returns that measures itself, such as another program that has to start first."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of each repetition, by round."""

    seconds: dict[int, float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds.values())

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds.values(), n=4, method="inclusive")
        return (high - low) / 2 / self.median

    def times_faster_than(self, other: "Timing") -> float:
        """How many times as long `other` takes: the median over the rounds that contain both.

        Candidates of one round run one after the other, so a slower machine affects both.
        """
        both = self.seconds.keys() & other.seconds.keys()
        return statistics.median(other.seconds[i] / self.seconds[i] for i in both)


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    every: Mapping[str, int] | None = None,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time all candidates in turn for `rounds` rounds; every second round runs in the opposite order.

    Each candidate runs once before, untimed. `every` maps slow candidates to n: they run only in every
    n-th round. `before` is called before each measurement, untimed. A candidate that uses a GPU must
    synchronise it.
    """
    taken: dict[str, dict[int, float]] = {name: {} for name in candidates}
    for call in candidates.values():
        call()
    for i in range(rounds):
        for name in list(candidates)[:: 1 if i % 2 else -1]:
            if i % (every or {}).get(name, 1) == 0:
                before()
                began = time.perf_counter()
                result = candidates[name]()
                taken[name][i] = result if isinstance(result, Seconds) else time.perf_counter() - began
    return {name: Timing(seconds=seconds) for name, seconds in taken.items()}


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


def geometric_mean(values: list[float]) -> float:
    """The mean for ratios: the mean of 2 and 1/2 is 1."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def peak_memory(call: Callable[[], object]) -> int:
    """The most bytes of tensors that `call` holds at once, without those that exist before."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def machine() -> dict[str, Any]:
    """The machine and the versions."""
    import torch

    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


PEAKS = {  # dense FLOP/s from data sheets; float32 products run as TF32, as in every benchmark
    "H100": {"bf16": 989e12, "fp32": 494e12},
    "H200": {"bf16": 989e12, "fp32": 494e12},
    "A100": {"bf16": 312e12, "fp32": 156e12},
}


def peak_flops(gpu: str, precision: str) -> float | None:
    """The peak of a GPU by its device name, in "bf16" or "fp32"; None if it is not in `PEAKS`."""
    return next((peaks[precision] for name, peaks in PEAKS.items() if name in gpu), None)


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its work."""
    if device.startswith("cuda"):
        import torch

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
    bars: dict[str, dict[str, float]] = field(default_factory=dict)
    """For a chart: bar length by candidate, for each group."""
    unit: str = ""
    """Unit of the bars."""
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """The table, the ratios and the machine, as Markdown."""
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        rows = [[_cell(row.get(column)) for column in columns] for row in self.rows]
        lines = [columns, ["---"] * len(columns), *rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        ratios = "\n".join(f"- {name}: {value:.3f}" for name, value in self.ratios.items())
        where = ", ".join(f"{name} {value}" for name, value in machine().items() if value is not None)
        return "\n\n".join([f"### {self.title}", table, ratios, *self.notes, where])

    def write(self, path: Path) -> None:
        """The report as JSON."""
        values = {"title": self.title, "machine": machine(), "ratios": self.ratios, "rows": self.rows}
        write_json(path, {**values, "notes": self.notes})

    def draw(self, path: Path) -> None:
        """Write a bar chart with one diagram per group, as a PNG."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.0, 2.4 * len(self.bars) + 0.6), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(self.bars), squeeze=False).flatten()
        for axes, (group, lengths) in zip(grid, self.bars.items(), strict=True):
            drawn = axes.barh(list(lengths), list(lengths.values()))
            axes.bar_label(drawn, fmt="{:,.4g}", padding=3)
            axes.set_title(group)
            axes.set_xlabel(self.unit)
            axes.margins(x=0.25)
        figure.suptitle(self.title)
        with atomic_write(path, "wb") as file:
            figure.savefig(file, format="png", dpi=120)


def timed_rows(
    timings: Mapping[str, Timing], amount: float, unit: str, **columns: Any
) -> list[dict[str, Any]]:
    """A row for each candidate: what it does of `amount` in a second, and the spread."""
    return [
        {**columns, "candidate": name, unit: amount / timing.median, "spread": f"{timing.spread:.1%}"}
        for name, timing in timings.items()
    ]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
