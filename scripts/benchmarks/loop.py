"""`benchmark.py loop`: the cost of the Trainer with a run's callbacks, beside a bare loop of the same step.

The two take turns in one process with the quick configuration: the same module, batches, optimizer, schedule
and clipping, without validation. Also measures the optimizer's fraction of a step.
"""

import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Report, Timing, say, synchronize, timed_rows
from torch.optim.lr_scheduler import LambdaLR

from gpt.data.module import TokenData
from gpt.run.fit import assemble, prepare_process
from gpt.run.start import start
from gpt.training.module import LanguageModel


def run(quick: bool, device: str = "cpu") -> Report:
    """Alternate rounds of several hundred steps, so that start-up hardly counts."""
    steps, rounds = (20, 2) if quick else (300, 7)
    trainer: dict[int, float] = {}
    bare: dict[int, float] = {}
    shares: list[list[float]] = []
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for i in range(rounds):
                say(f"round {i + 1} of {rounds}")
                taken, module, data = _fit(steps, device)
                seconds, share = _bare_loop(module, data, steps, device)
                trainer[i], bare[i] = taken / steps, seconds / steps
                shares.append(share)
        finally:
            os.chdir(before)
    timings = {"Trainer": Timing(seconds=trainer), "bare loop": Timing(seconds=bare)}
    return Report(
        title="The Trainer beside a bare loop, quick configuration",
        rows=timed_rows(timings, 1.0, "steps/s"),
        ratios={
            "trainer_vs_bare_loop": timings["Trainer"].times_faster_than(timings["bare loop"]),
            "muon_fraction_of_step": statistics.median(share for share, _ in shares),
            "optimizers_fraction_of_step": statistics.median(sum(both) for both in shares),
        },
        notes=[
            "muon_fraction_of_step is Muon's step (the blocks' matrices) as a fraction of a step of the bare "
            "loop; optimizers_fraction_of_step adds AdamW's step (all other weights)."
        ],
    )


def _fit(steps: int, device: str) -> tuple[float, LanguageModel, TokenData]:
    """Train with the Trainer, off a terminal, without validation: seconds, and what was trained."""
    options = ["--trainer.max_steps", str(steps), "--trainer.limit_val_batches", "0"]
    options += ["--trainer.enable_progress_bar", "false", "--checkpoint_every", str(10 * steps)]
    options += ["--trainer.accelerator", device.partition(":")[0], "--snapshot_megabytes", "0"]
    prepare_process()
    trainer, loop, module, data = assemble(start("fit", ["--config", "quick", *options]))
    try:
        trainer.fit(module, datamodule=data)
    finally:
        loop.close()
    return loop.run.seconds, module, data


def _bare_loop(module: LanguageModel, data: TokenData, steps: int, device: str) -> tuple[float, list[float]]:
    """The same steps without a Trainer: seconds, and the fractions that Muon and AdamW take."""
    module = module.to(device)
    bfloat16 = "bf16" in str(module.trainer.precision)
    optimizer = module.configure_optimizers()["optimizer"]
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    autocast = torch.autocast(device.partition(":")[0], torch.bfloat16) if bfloat16 else nullcontext()
    batches = iter(data.train_dataloader())
    module.train()
    stepping: list[list[Any]] = [[], []]
    began = time.perf_counter()
    for _ in range(steps):
        batch = [part.to(device, non_blocking=True) for part in next(batches)]
        with autocast:
            loss = module.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        for i, part in enumerate(optimizer.parts):  # Muon, AdamW
            before = _mark(device)
            part.step()
            stepping[i].append((before, _mark(device)))
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
    synchronize(device)
    total = time.perf_counter() - began
    return total, [sum(_seconds(*pair) for pair in pairs) / total for pairs in stepping]


def _mark(device: str) -> Any:
    """A moment, on a GPU one of its own: to wait for it within a step would slow the loop."""
    if not device.startswith("cuda"):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(before: Any, after: Any) -> float:
    return after - before if isinstance(before, float) else before.elapsed_time(after) / 1000
