"""`benchmark.py step`: one training step of GPT-2 small, beside other implementations of the same model.

Each candidate is a process of its own, so its peak memory can be measured, and the candidates step in turns.
A peer runs eager or compiled, whichever is faster on this machine.
"""

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Report, Timing, peak_flops, say
from benchmarks.step_worker import BATCH, CONTEXT, flops_per_token, matrix_limit

WORKER = Path(__file__).with_name("step_worker.py")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What a worker process builds."""

    peer: str
    precision: str
    compiled: bool
    folder: str = ""

    @property
    def name(self) -> str:
        return f"{self.peer}, {self.precision}{', compiled' if self.compiled else ''}"


class Worker:
    """A process that takes one training step per request."""

    def __init__(
        self, candidate: Candidate, device: str, batch: int, context: int, tiny: bool = False
    ) -> None:
        self.candidate = candidate
        command = [
            sys.executable,
            str(WORKER),
            candidate.peer,
            candidate.precision,
            str(int(candidate.compiled)),
        ]
        command += [device, str(batch), str(context), candidate.folder, str(int(tiny))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def ask(self, word: str) -> float:
        """Send a word and read the number that answers it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
            return float(self.process.stdout.readline())
        except (BrokenPipeError, ValueError):
            raise SystemExit(f"{self.candidate.name} failed: see its message above") from None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()


def run(
    quick: bool,
    device: str = "cpu",
    batch: int | None = None,
    nanogpt: Path | None = None,
    book: Path | None = None,
) -> Report:
    """Measure every available peer in float32 and in bfloat16."""
    on_gpu = device.startswith("cuda")
    batch, context = (batch or 32, 1024) if on_gpu else (batch or BATCH, CONTEXT)
    rounds = 3 if quick else 20 if on_gpu else 9
    folders = {"transformers": "" if find_spec("transformers") else None, "nanogpt": nanogpt, "book": book}
    peers = {peer: str(folder) for peer, folder in folders.items() if folder is not None}
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    bars: dict[str, dict[str, float]] = {}
    for precision in ("fp32", "bf16"):
        limit = matrix_limit(device, precision)
        candidates = _ours(precision, on_gpu, quick)
        candidates += [
            _faster_of(peer, precision, folder, device, batch, context, quick)
            for peer, folder in peers.items()
        ]
        timings, memory = measure(candidates, device, batch, context, rounds)
        tokens = batch * context
        for candidate in candidates:
            timing = timings[candidate.name]
            speed = tokens / timing.median
            rows.append(
                {
                    "candidate": candidate.name,
                    "tokens/s": round(speed),
                    "spread": f"{timing.spread:.1%}",
                    "peak memory (MB)": round(memory[candidate.name] / 1e6),
                    "of the matrix limit": f"{speed * flops_per_token(context) / limit:.0%}",
                }
            )
        bars[f"{precision}, {batch} x {context} tokens"] = {
            candidate.name: tokens / timings[candidate.name].median for candidate in candidates
        }
        mine = min((c for c in candidates if c.peer == "ours"), key=lambda c: timings[c.name].median)
        others = [c for c in candidates if c.peer != "ours"]
        if others:
            ratios[f"step_{precision}_vs_best_peer"] = min(
                timings[mine.name].times_faster_than(timings[c.name]) for c in others
            )
        if others and precision == "bf16":
            ratios["step_memory_vs_leanest_peer"] = min(memory[c.name] for c in others) / memory[mine.name]
        if on_gpu and (peak := peak_flops(torch.cuda.get_device_name(device), precision)):
            best = tokens / timings[mine.name].median
            ratios[f"step_{precision}_mfu"] = best * flops_per_token(context) / peak
    return Report(
        title=f"A training step of GPT-2 small, {batch} x {context} tokens, on {device}",
        rows=rows,
        ratios=ratios,
        bars=bars,
        unit="tokens/s",
        notes=[
            "Forward, backward, clipping and update with fused AdamW. A token costs 6 N + 12 L d T "
            "operations; the matrix limit is the speed of one large product in the same run."
        ],
    )


def _ours(precision: str, on_gpu: bool, quick: bool) -> list[Candidate]:
    compiled = [True] if on_gpu or not quick else [False]
    kinds = ["bf16-autocast", "bf16-master"] if precision == "bf16" else ["fp32"]
    return [Candidate(peer="ours", precision=kind, compiled=flag) for kind in kinds for flag in compiled]


def _faster_of(
    peer: str, precision: str, folder: str, device: str, batch: int, context: int, quick: bool
) -> Candidate:
    """The peer eager or compiled, whichever steps faster on its own."""
    kind = "bf16-autocast" if precision == "bf16" else "fp32"
    eager = Candidate(peer=peer, precision=kind, compiled=False, folder=folder)
    if quick:
        return eager
    compiled = Candidate(peer=peer, precision=kind, compiled=True, folder=folder)
    seconds = {}
    for candidate in (eager, compiled):
        say(f"trying {candidate.name}")
        with Worker(candidate, device, batch, context) as worker:
            worker.ask("step")
            seconds[candidate] = min(worker.ask("step") for _ in range(3))
    return min(seconds, key=seconds.__getitem__)


def measure(
    candidates: list[Candidate], device: str, batch: int, context: int, rounds: int
) -> tuple[dict[str, Timing], dict[str, float]]:
    """Seconds of each step and peak bytes, by name.

    On a CPU the candidates step in turns, every second round in the opposite order. On a GPU they run one by
    one: its memory may not hold all of them, and its speed hardly varies.
    """
    if device.startswith("cuda") and len(candidates) > 1:
        alone = [measure([candidate], device, batch, context, rounds) for candidate in candidates]
        timings = {name: timing for found, _ in alone for name, timing in found.items()}
        return timings, {name: peak for _, found in alone for name, peak in found.items()}
    taken: dict[str, dict[int, float]] = {candidate.name: {} for candidate in candidates}
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(c, device, batch, context)) for c in candidates]
        for worker in workers:
            say(f"warming up {worker.candidate.name}")
            for _ in range(2):
                worker.ask("step")
        for i in range(rounds):
            for worker in workers[:: 1 if i % 2 else -1]:
                taken[worker.candidate.name][i] = worker.ask("step")
        memory = {worker.candidate.name: worker.ask("memory") for worker in workers}
    return {name: Timing(seconds=seconds) for name, seconds in taken.items()}, memory
