"""Ends the processes that a test process started, once that process has ended, however it did.

    python watch.py PID

Its descendants inherit the environment variable GPT_TESTS=PID, also where they are in sessions of their own.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path


def descendants(mark: bytes) -> list[int]:
    """The processes with the mark in their environment."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in file.read_bytes().split(b"\0"):
                pids.append(int(file.parent.name))
    return pids


def main() -> None:
    parent = int(sys.argv[1])
    while os.getppid() == parent:
        time.sleep(0.2)
    while left := [pid for pid in descendants(f"GPT_TESTS={parent}".encode()) if pid != os.getpid()]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
