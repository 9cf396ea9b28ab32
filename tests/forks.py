"""Runs `gpt` in forked processes: a line of JSON on stdin asks for one, a line on stdout tells how it ended.

A process of its own, as the tests may open no socket, and one for all runs, as it imports for seconds.
"""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import torch
from faults.forked import run
from torch.nn.parallel import DistributedDataParallel

from gpt.run import checkpoint
from gpt.training.module import LanguageModel


def terminate(at_ranks: list[int], at_step: int) -> Callable[[int], None]:
    """Each of these processes sends itself SIGTERM in the step after `at_step` steps."""

    def patch(rank: int) -> None:
        step, sent = LanguageModel.training_step, False

        def training_step(self: LanguageModel, batch: Any, number: int) -> Any:
            nonlocal sent
            if rank in at_ranks and self.step == at_step and not sent:
                sent = True  # a second signal, from the step's next batch, would end the process at once
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, batch, number)

        LanguageModel.training_step = training_step

    return patch


def fill_disk(rank: int) -> None:
    """The disk of the first process is full from step 6 on."""
    if rank:
        return
    write = checkpoint.write

    def full(file: Any, tensors: Any, model: Any, run: Any) -> None:
        if run is not None and run.step >= 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, tensors, model, run)

    checkpoint.write = full


def diverge(rank: int) -> None:
    """The second process's weights get another last bit in its third step, as a faulty device would do."""
    if rank != 1:
        return
    step = LanguageModel.training_step

    def training_step(self: LanguageModel, batch: Any, number: int) -> Any:
        if self.trainer.global_step == 2:
            bits = self.model.final_norm.weight.data.view(torch.int32)
            bits[0] += 1
        return step(self, batch, number)

    LanguageModel.training_step = training_step


def forbid_sending_buffers(rank: int) -> None:
    """A forward pass in which buffers are sent around is an error."""

    def sync(self: DistributedDataParallel, *_: Any) -> None:
        raise AssertionError("buffers are sent to the other processes")

    DistributedDataParallel._sync_buffers = sync  # type: ignore[method-assign]


SABOTAGE = {"full": fill_disk, "diverge": diverge, "buffers": forbid_sending_buffers}


def main() -> None:
    """Serve until stdin ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        sabotage = terminate(*asked["terminate"]) if asked["terminate"] else None
        sabotage = SABOTAGE.get(asked["sabotage"], sabotage)
        ended = run(
            Path(asked["folder"]), asked["arguments"], processes=asked["processes"], sabotage=sabotage
        )
        answer = {"folder": asked["folder"], "statuses": ended.statuses, "err": ended.err}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
