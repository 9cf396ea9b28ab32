"""Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP: finish the update, save it, and exit."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt.training.guard import Guard


class Stopped(Exception):
    """The run ends before or after an update: a line that says why, and the exit status."""


@contextmanager
def remembered(guard: Guard) -> Iterator[None]:
    """Note a signal in `guard`, on which all processes agree after the update.

    A launcher may send SIGTERM more than once, and a cluster SIGUSR1 before it: that changes nothing. Only
    a second Ctrl-C exits at once. In any thread but the main one, signals are not touched.
    """

    def note(number: int, _: Any) -> None:
        if number == signal.SIGINT:
            if guard.received == signal.SIGINT:
                os._exit(128 + number)
            os.write(2, b"\nfinishing the step; press Ctrl-C again to exit at once\n")
        guard.received = number

    replaced: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):  # Windows lacks the last two
            number = getattr(signal, name, None)
            # nohup has SIGHUP ignored.
            if number is not None and not (name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN):
                replaced[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def told(number: int, step: int, saved: Path, run: Path) -> Stopped:
    """How a run ends that a signal stopped after `step`."""
    line = f"{signal.Signals(number).name}: stopped after step {step}, saved in {saved}"
    return Stopped(f"{line}; continue with 'gpt fit --resume {run}'", 128 + number)
