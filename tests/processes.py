"""Scripts in processes of their own, and `gpt` in forked ones.

A fork of a process that has imported everything starts at once, where a new interpreter spends eight seconds
on imports. Needs POSIX.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRELOAD = ["gpt.run.fit", "gpt.generation.write", "gpt.pictures.runs"]


class Stream:
    """An open file descriptor, which the other process gets a duplicate of."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> object:
        from multiprocessing.reduction import DupFd  # Windows has none

        return DupFd(self.number)

    def __setstate__(self, state: object) -> None:
        self.number = state.detach()


@contextmanager
def forked(
    words: Sequence[str] = (),
    *,
    code: str = "",
    streams: Mapping[int, int] | None = None,
    folder: Path | str = ".",
    environment: Mapping[str, str] = os.environ,
) -> Iterator[BaseProcess]:
    """A process in a session of its own that runs `code`, and then `gpt WORDS` if there are any.

    `streams` are its standard streams by number, instead of nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    passed = {number: Stream(stream) for number, stream in (streams or {}).items()}
    arguments = list(words), code, passed, os.path.abspath(folder), dict(environment)
    process = context.Process(target=_work, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _work(
    words: list[str], code: str, streams: dict[int, Stream], folder: str, environment: dict[str, str]
) -> None:
    import torch

    import gpt.cli

    multiprocessing.set_start_method("fork", force=True)  # as in a new interpreter, for data workers
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the tests' own parent may ignore
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        os.dup2(streams[number].number if number in streams else nothing, number)
        buffering = 1 if name == "stderr" else -1
        setattr(sys, name, open(number, mode, buffering, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in streams.values():
        os.close(stream.number)
    torch.set_num_threads(1)
    exec(code, {"__name__": "__main__"})
    if words:
        sys.exit(gpt.cli.main(words))


def run_script(name: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run a script of scripts/ with one thread, and return its output and status; it may open sockets."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=600,
        check=False,
    )
