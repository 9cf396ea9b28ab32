"""Two commands on the same run or data, started together: neither may lose or spoil the other's work.

A command may win, wait, or be refused in one line with status 2. Whatever completed must equal the work of a
command that ran alone.
"""

import hashlib
import random
import shutil
from pathlib import Path
from typing import Any

from faults.fingerprint import fingerprint
from faults.forked import together

PREPARE = ["prepare", "text.txt", "--vocab_size", "300", "--output", "tokens"]


class Meetings:
    """Starts pairs of commands in a folder that has `text.txt`.

    Args:
        folder: where they run.
        fit: the arguments of a run named `run`.
        stopped: a copy of that run, stopped midway.
        wanted: the fingerprint of the run, undisturbed.
        chance: decides which pair is next, and how much later the second command starts.
    """

    def __init__(
        self, folder: Path, fit: list[str], stopped: Path, wanted: Any, chance: random.Random
    ) -> None:
        self.folder, self.stopped, self.wanted, self.chance = folder, stopped, wanted, chance
        resume, auto = ["fit", "--resume", "runs/run"], [*fit, "--resume", "auto_or_new"]
        self.pairs: dict[str, tuple[bool, list[str], list[str]]] = {  # begin with the stopped run?
            "two new runs of one name": (False, fit, fit),
            "two that resume one run": (True, resume, resume),
            "a resumed run and a new one": (True, resume, fit),
            "two of auto_or_new": (False, auto, auto),
            "auto_or_new and a resumed run": (True, auto, resume),
            "two preparations": (False, PREPARE, PREPARE),
            "a preparation and a run": (False, PREPARE, fit),
        }
        self.prepared = self._alone()

    def meet(self) -> str | None:
        """One pair: what went wrong, or None."""
        name = self.chance.choice(list(self.pairs))
        stopped, *commands = self.pairs[name]
        self._clear(cache=self.chance.random() < 0.5)
        if stopped:
            shutil.copytree(self.stopped, self.folder / "runs" / "run")
        ended = together(self.folder, commands, later=self.chance.choice((0.0, 0.0, 0.2, 1.0)))
        for command, (status, err) in zip(commands, ended, strict=True):
            last = err.rstrip().rpartition("\n")[2]  # after lines that name the checkpoint and options
            if status not in (0, 2) or "Traceback" in err or (status == 2 and not last.startswith("gpt ")):
                return f"{name}: {command[0]}: status {status}: {err[-400:]}"
        if all(status for status, _ in ended):
            return f"{name}: both were refused: {ended[0][1][-200:]} {ended[1][1][-200:]}"
        problem = self._spoiled(["fit" in command for command in commands])
        return problem and f"{name}: {problem}"

    def _spoiled(self, fits: list[bool]) -> str | None:
        runs = sorted((self.folder / "runs").glob("*/checkpoints/last.safetensors"))
        if any(fits) and not runs:
            return "no run is left"
        for last in runs:
            if fingerprint(last.parents[1]) != self.wanted:
                return f"{last.parents[1].name} differs from an undisturbed run"
            if left := [file.name for file in last.parent.iterdir() if file.suffix != ".safetensors"]:
                return f"left behind: {left}"
        if not all(fits) and contents(self.folder / "tokens") != self.prepared:
            return "the prepared data differs"
        return None

    def _alone(self) -> dict[str, str]:
        self._clear(cache=True)
        ((status, err),) = together(self.folder, [PREPARE])
        if status:
            raise SystemExit(f"the undisturbed preparation failed: {err}")
        return contents(self.folder / "tokens")

    def _clear(self, cache: bool) -> None:
        for name in ("runs", "tokens", *(["cache"] if cache else [])):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def contents(folder: Path) -> dict[str, str]:
    """The hash of every visible file of a folder."""
    files = [path for path in folder.glob("[!.]*") if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
