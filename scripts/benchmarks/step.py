"""`benchmark.py step`: one training step of GPT-2 small, beside other implementations of the same model.

Each candidate is a process of its own, so its peak memory can be measured, and the candidates step in turns.
A peer runs eager or compiled, whichever is faster on this machine.
"""

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Report, Seconds, Timing, interleave, peak_flops, say, timed_rows
from benchmarks.step_worker import BATCH, CONTEXT, flops_per_token

WORKER = Path(__file__).with_name("step_worker.py")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What a worker process builds."""

    peer: str
    precision: str
    compiled: bool
    folder: str
    device: str
    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.peer}, {self.precision}{', compiled' if self.compiled else ''}"


class Worker:
    """A process that takes one training step per request."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate, one = candidate, candidate
        command = [sys.executable, WORKER, one.peer, one.precision, str(int(one.compiled)), one.device]
        command += [str(one.batch), str(one.context), one.folder]
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
    shape: dict[str, Any] = {"device": device, "batch": batch, "context": context}
    for short, kinds in {"fp32": ["fp32"], "bf16": ["bf16-autocast", "bf16-master"]}.items():
        candidates = [
            Candidate(peer="ours", precision=kind, compiled=on_gpu or not quick, folder="", **shape)
            for kind in kinds
        ]
        for peer, folder in peers.items():
            eager = Candidate(peer=peer, precision=kinds[0], compiled=False, folder=folder, **shape)
            candidates.append(eager if quick else faster(eager, replace(eager, compiled=True)))
        timings, memory = measure(candidates, rounds)
        rows += timed_rows(timings, batch * context, "tokens/s")
        for row in rows[-len(candidates) :]:
            row["peak memory (MB)"] = round(memory[row["candidate"]] / 1e6)
        mine = min((c.name for c in candidates if c.peer == "ours"), key=lambda name: timings[name].median)
        others = [c.name for c in candidates if c.peer != "ours"]
        if others:
            ratios[f"step_{short}_vs_best_peer"] = min(
                timings[mine].times_faster_than(timings[name]) for name in others
            )
            ratios["step_memory_vs_leanest_peer"] = min(memory[name] for name in others) / memory[mine]
        if on_gpu and (peak := peak_flops(torch.cuda.get_device_name(device), short)):
            best = batch * context / timings[mine].median
            ratios[f"step_{short}_mfu"] = best * flops_per_token(context) / peak
    return Report(
        title=f"A training step of GPT-2 small, {batch} x {context} tokens, on {device}",
        rows=rows,
        ratios=ratios,
        notes=["Forward, backward, clipping and update with fused AdamW. The memory's ratio is bfloat16's."],
    )


def faster(*candidates: Candidate) -> Candidate:
    """The one that steps faster on its own."""
    seconds = {}
    for candidate in candidates:
        say(f"trying {candidate.name}")
        with Worker(candidate) as worker:
            worker.ask("step")
            seconds[candidate] = min(worker.ask("step") for _ in range(3))
    return min(seconds, key=seconds.__getitem__)


def measure(candidates: list[Candidate], rounds: int) -> tuple[dict[str, Timing], dict[str, float]]:
    """Seconds of each step and peak bytes, by name.

    On a CPU the candidates step in turns. On a GPU they run one by one: its memory may not hold all of them,
    and its speed hardly varies.
    """
    timings: dict[str, Timing] = {}
    memory: dict[str, float] = {}
    on_gpu = candidates[0].device.startswith("cuda")
    for some in [[candidate] for candidate in candidates] if on_gpu else [candidates]:
        with ExitStack() as stack:
            workers = [stack.enter_context(Worker(candidate)) for candidate in some]
            say(f"stepping {', '.join(candidate.name for candidate in some)}")
            for worker in workers:
                worker.ask("step")
            timings |= interleave(
                {worker.candidate.name: lambda w=worker: Seconds(w.ask("step")) for worker in workers}, rounds
            )
            memory |= {worker.candidate.name: worker.ask("memory") for worker in workers}
    return timings, memory
