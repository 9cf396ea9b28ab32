"""Ctrl-C and SIGTERM: finish the step, save it, and leave; a second one leaves at once."""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer


class Stopped(Exception):
    """A run that a signal ended, between two steps.

    Args:
        signal_number: which.
        message: one line for the person who sent it.
    """

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.status = 128 + signal_number


class StopRequest(Callback):
    """Remembers a signal until the step is over.

    Lightning stops at SIGTERM only, after a validation, without saving, and answers it with a collective from
    within the handler, while another may be under way. The signal with which SLURM announces the end of a job
    stays Lightning's, which saves and queues the job again; it only waits for the end of the step.
    """

    def __init__(self) -> None:
        self.received = 0
        self._requeue: tuple[int, Any] = (0, None)  # SLURM's signal, and Lightning's handler of it

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the signals; Lightning gives them back when the run is over."""
        if threading.current_thread() is not threading.main_thread():
            return
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and sys.platform != "win32":
            number = environment.requeue_signal or signal.SIGUSR1
            self._requeue = number, signal.getsignal(number)
            signal.signal(number, self._receive)
        signal.signal(signal.SIGINT, self._receive)
        signal.signal(signal.SIGTERM, self._receive)

    def agreed(self, trainer: Trainer) -> int:
        """The signal that any of the processes received, or 0."""
        if trainer.world_size == 1:
            return self.received
        received = torch.tensor(self.received, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(received, reduce_op="max"))  # Lightning waits for all here anyway

    def now(self, trainer: Trainer, number: int, saved: Path) -> None:
        """End the run, or let Lightning queue it again.

        Raises:
            Stopped: always, but for SLURM's signal.
        """
        if number == self._requeue[0]:
            self.received = 0
            self._requeue[1](number, None)
            return
        name = signal.Signals(number).name
        raise Stopped(
            number,
            f"{name}: stopped after step {trainer.global_step}, saved in {saved}; "
            f"go on with 'gpt fit --resume {saved.parents[1]}'",
        )

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == self.received:
            os._exit(128 + number)
        self.received = number
        if number == signal.SIGINT:
            os.write(2, b"\nfinishing the step; press Ctrl-C again to leave at once\n")
