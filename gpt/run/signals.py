"""Ctrl-C, SIGTERM and SIGHUP: finish the step, save it, and exit; a second one exits at once."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from gpt.run.lightning_private import requeue_signal, skip_sigterm_broadcast


class Stopped(Exception):
    """The run ends before or after a step: a line that says why, and the exit status."""


class StopRequest(Callback):
    """Remembers a signal until the step is over.

    Lightning itself stops at SIGTERM only, without saving; its handler starts a collective while another may
    be running, and one more before each batch waits for the device. SLURM's signal goes to Lightning after
    the step: it saves and queues the job again.
    """

    def __init__(self) -> None:
        self._replaced: dict[int, Any] = {}  # the handlers of the signals

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._guard = pl_module.guard
        skip_sigterm_broadcast(trainer)
        if threading.current_thread() is not threading.main_thread():
            return
        hangup = getattr(signal, "SIGHUP", 0)  # the terminal was closed; Windows has no such signal
        for number in filter(None, (signal.SIGINT, signal.SIGTERM, requeue_signal(trainer), hangup)):
            if number != hangup or signal.getsignal(hangup) is not signal.SIG_IGN:  # nohup ignores it
                self._replaced[number] = signal.signal(number, self._receive)

    def act(self, trainer: Trainer, number: int, saved: Path) -> None:
        """End the run after it was saved, by raising `Stopped`, or let Lightning queue it again."""
        if number == requeue_signal(trainer):
            self._guard.received = 0
            self._replaced[number](number, None)
            return
        stopped = f"{signal.Signals(number).name}: stopped after step {trainer.global_step}, saved in {saved}"
        raise Stopped(f"{stopped}; continue with 'gpt fit --resume {saved.parents[1]}'", 128 + number)

    def _receive(self, number: int, _: Any) -> None:
        if number == self._guard.received:
            os._exit(128 + number)
        self._guard.received = number
        if number == signal.SIGINT:
            os.write(2, b"\nfinishing the step; press Ctrl-C again to exit at once\n")
