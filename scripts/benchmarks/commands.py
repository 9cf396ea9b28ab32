"""`benchmark.py commands`: how long README's commands take, as whole processes, from an empty cache.

The text is the source of Python's standard library, cut to 200 KB.
"""

import os
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Report, Timing, run_python, say

from gpt.data.builtin import python_stdlib

BYTES = 200_000
TRAINING = {
    "gpt fit text.txt --trainer.max_steps 1": "one step, in all",
    "gpt fit text.txt --minutes {minutes} --run mine": "trains, and ends when the time is over",
}
USING = {
    "gpt generate --checkpoint runs/mine --prompt 'def '": "writes 128 tokens",
    "gpt prepare text.txt --output prepared": "makes files of tokens",
    "gpt attention --checkpoint runs/mine --text 'def add(a, b):' --output maps": "draws each head",
    "gpt plot runs/mine --output loss.png": "draws the losses",
    "gpt export --checkpoint runs/mine --format gguf --output exported": "writes llama.cpp's file",
    "gpt evaluate --checkpoint runs/mine --data text.txt": "scores the text",
    "gpt fit no-such-text.txt": "says in a line what is wrong",
    "gpt --help": "lists the commands",
}


def run(quick: bool, minutes: str = "1") -> Report:
    """Time every command: the training ones once, the others three times."""
    minutes = "0.3" if quick else minutes
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = "\n".join(python_stdlib()).encode()[:BYTES].decode(errors="ignore")
        (folder / "text.txt").write_text(text, encoding="utf-8")
        for form, what in TRAINING.items():
            rows.append(_row(form.format(minutes=minutes), what, folder, rounds=1))
        for command, what in USING.items():
            rows.append(_row(command, what, folder, rounds=1 if quick else 3))
    note = f"The text is {BYTES // 1000} KB of Python. Each process imports what it needs, torch included."
    return Report(title="README's commands", rows=rows, ratios={}, notes=[note])


def _row(command: str, what: str, folder: Path, rounds: int) -> dict[str, Any]:
    say(command)
    arguments = ["-m", "gpt", *shlex.split(command)[1:]]
    status = 2 if "no-such" in command else 0
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        run_python(arguments, folder, {"GPT_CACHE": str(folder / "cache")}, status)
        seconds.append(time.perf_counter() - began)
        for output in ("prepared", "maps", "loss.png", "exported"):
            if (folder / output).exists():  # a command writes no output that exists
                os.rename(folder / output, folder / f"{len(seconds)} {output}")
    return {
        "command": f"`{command}`",
        "what it does": what,
        "seconds": f"{Timing(seconds=seconds).median:.1f}",
    }
