"""On Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP: finish the update, save a checkpoint, and exit."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from gpt.progress import report
from gpt.training.guard import Guard
from gpt.weights.runs import CHECKPOINTS, NEWEST


class Stopped(Exception):
    """The end of a run between two updates, as an exception: a line that says why, and the exit status."""


@contextmanager
def remembered(guard: Guard) -> Iterator[None]:
    """Note a received signal in `guard`, so that all processes act on it after the same update.

    The first signal counts: a launcher may send SIGTERM more than once, a cluster SIGUSR1 before it. But a
    second Ctrl-C exits at once. The handler only stores a number, because printing can fail where the
    terminal is gone; a thread answers a Ctrl-C.
    """

    interrupted = False

    def note(number: int, _: FrameType | None) -> None:
        nonlocal interrupted
        if number == signal.SIGINT:
            if interrupted:
                os._exit(128 + number)
            interrupted = True
        guard.asked.signal = guard.asked.signal or number

    names = {"SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"}  # Windows lacks the last two
    known = [number for number in signal.Signals if number.name in names]
    ours = [number for number in known if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    with answered():
        replaced = {number: signal.signal(number, note) for number in ours}
        try:
            yield
        finally:
            for number, handler in replaced.items():
                signal.signal(number, handler)


@contextmanager
def answered() -> Iterator[None]:
    """Print what a Ctrl-C does while the main thread still computes its update."""
    sender, receiver = socket.socketpair()
    sender.setblocking(False)

    def answer() -> None:
        while numbers := receiver.recv(1):  # empty once the other end is closed
            if numbers[0] == signal.SIGINT:
                report("\nfinishing the step; press Ctrl-C again to exit at once", prefix="")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        sender.close()
        thread.join()
        receiver.close()


def stopped(number: int, step: int, run: Path) -> Stopped:
    """Return the exception for a run that a signal stopped after `step`."""
    line = f"{signal.Signals(number).name}: stopped after step {step}"
    saved = f"saved in {run / CHECKPOINTS / NEWEST}"
    return Stopped(f"{line}, {saved}; continue with 'gpt fit --resume {run}'", 128 + number)
