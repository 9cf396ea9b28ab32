"""`benchmark.py loop`: the cost of the Trainer with a run's callbacks, beside a bare loop of the same step.

The two take turns in one process with the quick configuration: the same module, batches, optimizer, schedule
and clipping, without validation.
"""

import os
import tempfile
import time
from contextlib import nullcontext

import torch
from benchmarks.common import Report, Timing, say, synchronize, timed_rows
from torch.optim.lr_scheduler import LambdaLR

from gpt.data.module import TokenData
from gpt.data.windows import WeightedBatch
from gpt.run.fit import assemble, prepare_process
from gpt.run.start import start
from gpt.training.module import LanguageModel


def run(quick: bool, device: str = "cpu") -> Report:
    """Alternate rounds of several hundred steps, so that start-up hardly counts."""
    steps, rounds = (20, 2) if quick else (300, 7)
    ours, bare = Timing(seconds=[]), Timing(seconds=[])
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            seconds, module, data = _fit(steps, device)
            ours.seconds.append(seconds / steps)
            bare.seconds.append(_bare_loop(module, data, steps, device) / steps)
        os.chdir(before)
    return Report(
        title="The Trainer beside a bare loop, quick configuration",
        rows=timed_rows({"Trainer": ours, "bare loop": bare}, 1.0, "steps/s"),
        ratios={"trainer_vs_bare_loop": ours.times_faster_than(bare)},
    )


def _fit(steps: int, device: str) -> tuple[float, LanguageModel, TokenData]:
    """Train with the Trainer, off a terminal, without validation: seconds, and what was trained."""
    options = ["--trainer.max_steps", str(steps), "--data.val_fraction", "0"]
    options += ["--checkpoint_every", str(10 * steps)]
    options += ["--trainer.accelerator", device.partition(":")[0], "--snapshot_megabytes", "0"]
    prepare_process()
    training = assemble(start("fit", ["--config", "quick", *options]))
    training.fit()
    return training.loop.run.seconds, training.module, training.data


def _bare_loop(module: LanguageModel, data: TokenData, steps: int, device: str) -> float:
    """The seconds of the same steps without a Trainer."""
    module = module.to(device)
    bfloat16 = "bf16" in str(module.trainer.precision)
    optimizer = module.configure_optimizers()["optimizer"]
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    autocast = torch.autocast(device.partition(":")[0], torch.bfloat16) if bfloat16 else nullcontext()
    batches = iter(data.train_dataloader())
    module.train()
    began = time.perf_counter()
    for _ in range(steps):
        batch = next(batches)
        assert not isinstance(batch, WeightedBatch), "only examples have weights"
        moved = tuple(part.to(device, non_blocking=True) for part in batch)
        with autocast:
            loss = module.loss(moved)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
    synchronize(device)
    return time.perf_counter() - began
