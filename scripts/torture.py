"""Inject faults into training: `python scripts/torture.py --kills 50`.

Kills runs with SIGKILL in steps, saves and validations, fills the disk, damages checkpoints, feeds malformed
input and hostile files, starts two commands on one run, and sends hostile requests. Resumed runs must equal
an undisturbed one. Prints a table of injected, survived and lost faults; the exit status is 1 if any was
lost.

Needs POSIX, because runs are forked. Filling a disk needs root, to mount a small tmpfs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from faults.fingerprint import fingerprint
from faults.forked import run
from faults.hostile import meet
from faults.hostile_files import Hostile, chosen
from faults.malformed import malformed
from faults.meetings import Meetings

import gpt.run.fit  # noqa: F401 - once, before the processes that are killed are forked
from gpt.weights.checkpoint import read

ROOT = Path(__file__).parents[1]
MOMENTS = ("anywhere", "step", "write", "rename", "validation")
TEXT = "The quick brown fox jumps over the lazy dog, and on it goes.\n" * 300
RUN = [
    *("fit", "--data.corpus", "text.txt", "--trainer.logger", "csv", "--trainer.accelerator", "cpu"),
    *("--trainer.precision", "32-true", "--model.compile", "false", "--model.config.dropout", "0.1"),
    *("--data.vocabulary", "null", "--model.config.vocab_size", "300"),
    *("--model.config.context_length", "16", "--log_every", "3"),
    *("--model.config.emb_dim", "32", "--model.config.num_heads", "2", "--model.config.num_layers", "1"),
    *("--trainer.max_steps", "30", "--trainer.accumulate_grad_batches", "2", "--checkpoint_every", "4"),
    *("--trainer.val_check_interval", "14"),
]


@dataclass
class Tally:
    """Counts for one kind of fault."""

    injected: int = 0
    lost: list[str] = field(default_factory=list)

    def count(self, problem: str | None) -> None:
        self.injected += 1
        if problem:
            self.lost.append(problem)
            print(f"\nlost: {problem}", file=sys.stderr)


def fit(processes: int) -> list[str]:
    """Arguments of the run, with the same global batch for any number of processes."""
    several = ["--trainer.devices", str(processes), "--trainer.strategy", "ddp"] if processes > 1 else []
    return [*RUN, *several, "--data.batch_size", str(16 // processes), "--run", "run"]


def result(folder: Path) -> tuple[str, list[dict[str, str]]]:
    """The fingerprint of the run in `folder`."""
    return fingerprint(folder / "runs" / "run")


def die_at(moment: str, number: int) -> Callable[[int], None]:
    """Make rank 0 kill itself in the `number`-th step, write, rename or validation."""

    def patch(rank: int) -> None:
        if rank:
            return
        from gpt.run import checkpoint
        from gpt.training.module import LanguageModel

        owner, name = {
            "step": (LanguageModel, "training_step"),
            "write": (checkpoint, "write"),
            "rename": (os, "replace"),
            "validation": (LanguageModel, "validation_step"),
        }[moment]
        original, calls = getattr(owner, name), 0

        def dying(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number and moment == "write":  # with half of the file written
                args[0].write(b"PK" * 5000)
                args[0].flush()
            if calls >= number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, dying)

    return patch


def undisturbed_run(folder: Path, processes: int = 1) -> tuple[tuple[str, list[dict[str, str]]], float]:
    """The fingerprint of an undisturbed run, and its seconds."""
    began = time.monotonic()
    ended = run(folder, fit(processes), processes=processes)
    if ended.status:
        raise SystemExit(f"the undisturbed run failed: {ended.err}")
    found = result(folder)
    shutil.rmtree(folder / "runs")
    return found, time.monotonic() - began


def kill(
    folder: Path, tally: Tally, wanted: Any, seconds: float, processes: int, chance: random.Random
) -> None:
    """Kill a run once or twice, resume it, and compare."""
    again = [*fit(processes), "--resume", "auto_or_new"]
    faults = []
    for _ in range(chance.choice((1, 1, 2))):
        moment, number = chance.choice(MOMENTS), chance.randint(1, 12)
        after = chance.uniform(0.1, 1.0) * seconds if moment == "anywhere" else None
        sabotage = None if moment == "anywhere" else die_at(moment, number)
        run(folder, again, processes=processes, sabotage=sabotage, kill_after=after)
        faults.append(f"{moment} {after or number}")
    ended = run(folder, again, processes=processes)
    if ended.status:
        tally.count(f"{faults}: status {ended.status}: {ended.err[-300:]}")
    else:
        got = result(folder)
        tally.count(None if got == wanted else f"{faults}: differs from the undisturbed run")
    shutil.rmtree(folder / "runs")


def damage(folder: Path, tally: Tally, wanted: Any, chance: random.Random) -> None:
    """Damage the newest checkpoint of a stopped run, resume from the one before, and compare."""
    stopped = [*fit(1), "--trainer.max_steps", "30"]
    run(folder, stopped, sabotage=die_at("step", 2 * chance.randint(10, 28)))
    last = folder / "runs" / "run" / "checkpoints" / "last.safetensors"
    data = bytearray(last.read_bytes())
    if chance.random() < 0.4:
        data = data[: chance.randrange(len(data))]
    else:
        for _ in range(chance.choice((1, 1, 8))):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    last.write_bytes(data)
    ended = run(folder, ["fit", "--resume", "auto", "--run", "run"])
    if ended.status:
        tally.count(f"status {ended.status}: {ended.err[-300:]}")
    else:
        tally.count(None if result(folder) == wanted else "differs from the undisturbed run")
    shutil.rmtree(folder / "runs")


def fill_disk(folder: Path, tally: Tally, wanted: Any, chance: random.Random, other: Path) -> None:
    """Fill the disk: one clear line, intact checkpoints; then free it, resume, and compare."""
    disk = folder / "runs"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", str(disk)], check=True)
    try:
        filler = disk / "filler"
        filler.write_bytes(b"0" * chance.randint(600_000, 1_300_000))
        temporary = {"TMPDIR": str(chance.choice((other, disk)))}
        again = [*fit(1), "--keep_checkpoints", "2", "--resume", "auto_or_new"]
        ended = run(folder, again, environment=temporary)
        problem = None
        if ended.status == 0:
            problem = "the disk was never full"
        elif ended.status != 2 or "No space left on device" not in ended.err or "Traceback" in ended.err:
            problem = f"status {ended.status}: {ended.err[-300:]}"
        for file in disk.glob("run/checkpoints/*.safetensors"):
            read(file)
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        ended = run(folder, again)
        if ended.status or result(folder) != wanted:
            problem = problem or f"did not resume: {ended.err[-300:]}"
        tally.count(problem)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
        disk.rmdir()


def feed(folder: Path, tally: Tally, number: int, chance: random.Random) -> None:
    """Run a malformed command: it must print one line, exit with status 2 and run no code."""
    name, arguments = malformed(folder, number, chance)
    ended = run(folder, arguments)
    lines = [line for line in ended.err.splitlines() if line.startswith("gpt ")]
    if ended.status != 2 or len(lines) != 1 or "Traceback" in ended.err:
        tally.count(f"{name}: {' '.join(arguments)[:200]}: status {ended.status}: {ended.err[-300:]}")
    else:
        tally.count("code in a file was run" if list(folder.rglob("pwned")) else None)
    shutil.rmtree(folder / "runs", ignore_errors=True)


def refuse(folder: Path, tally: Tally, hostile: Hostile) -> None:
    """Give the command a hostile file: it must refuse it in one line and do nothing else."""
    problem = meet(hostile, folder, folder / "intact")
    tally.count(problem and f"{hostile.name}: gpt {hostile.command}: {problem}")


def meetings(folder: Path, wanted: Any, chance: random.Random) -> Meetings:
    """Pairs of commands around a run that was stopped midway."""
    run(folder, fit(1), sabotage=die_at("step", 30))
    (folder / "runs" / "run").rename(folder / "stopped")
    return Meetings(folder, fit(1), folder / "stopped", wanted, chance)


def attack(tally: Tally, number: int, seed: int) -> None:
    """Send hostile requests to a server in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "faults.hostile_requests", str(number), str(seed)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
    )
    found = json.loads(done.stdout or '{"counts": {}, "problems": ["the server ended"]}')
    print(f"\nhostile requests: {found}", file=sys.stderr)
    tally.injected, tally.lost = number, found["problems"]


def main() -> int:
    """Inject the requested faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="runs killed, on one process")
    parser.add_argument("--kills2", type=int, default=0, help="runs killed, on two processes")
    parser.add_argument("--damages", type=int, default=20, help="checkpoints truncated or altered")
    parser.add_argument("--full-disks", type=int, default=0, help="disks filled (needs root)")
    parser.add_argument("--malformed", type=int, default=200, help="malformed inputs")
    parser.add_argument("--hostile-checkpoints", type=int, default=0, help="hostile files")
    parser.add_argument("--meetings", type=int, default=0, help="pairs of commands on one run or data")
    parser.add_argument("--hostile-requests", type=int, default=0, help="requests to a server")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        folder = Path(name)
        os.environ["GPT_CACHE"] = str(folder / "cache")
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")
        tallies = inject(folder, Path(other), options, chance)
    print(f"{'fault':<32}{'injected':>9}{'survived':>9}{'lost':>6}")
    for kind, tally in tallies.items():
        print(f"{kind:<32}{tally.injected:>9}{tally.injected - len(tally.lost):>9}{len(tally.lost):>6}")
    return int(any(tally.lost for tally in tallies.values()))


def inject(folder: Path, other: Path, options: Any, chance: random.Random) -> dict[str, Tally]:
    """Inject all faults in turn, with progress on stderr."""
    tallies: dict[str, Tally] = {}

    def repeat(kind: str, times: int, fault: Callable[[Tally, int], None]) -> None:
        tally = tallies[kind] = Tally()
        for number in range(times):
            print(f"\r{kind}: {number + 1} of {times}, {len(tally.lost)} lost ", end="", file=sys.stderr)
            fault(tally, number)
        print(file=sys.stderr)

    if options.kills or options.damages or options.full_disks or options.meetings:
        one, seconds = undisturbed_run(folder)
    if options.kills:
        repeat("SIGKILL, one process", options.kills, lambda t, _: kill(folder, t, one, seconds, 1, chance))
    if options.kills2:
        two, seconds2 = undisturbed_run(folder, 2)
        repeat(
            "SIGKILL, two processes", options.kills2, lambda t, _: kill(folder, t, two, seconds2, 2, chance)
        )
    if options.damages:
        repeat("damaged checkpoint", options.damages, lambda t, _: damage(folder, t, one, chance))
    if options.full_disks:
        repeat("full disk", options.full_disks, lambda t, _: fill_disk(folder, t, one, chance, other))
    if options.malformed:
        repeat("malformed input", options.malformed, lambda t, n: feed(folder, t, n, chance))
    if options.hostile_checkpoints:
        run(folder, [*RUN, "--trainer.max_steps", "4", "--run", "intact"])
        (folder / "runs" / "intact").rename(folder / "intact")
        hostile = chosen(options.hostile_checkpoints, chance)
        repeat(
            "hostile checkpoint", options.hostile_checkpoints, lambda t, _: refuse(folder, t, next(hostile))
        )
    if options.meetings:
        pairs = meetings(folder, one, chance)

        def meet_once(tally: Tally, number: int) -> None:
            name, problem = pairs.meet()
            tally.count(problem and f"{name}: {problem}")

        repeat("meeting", options.meetings, meet_once)
    if options.hostile_requests:
        tallies["hostile request"] = Tally()
        attack(tallies["hostile request"], options.hostile_requests, options.seed)
    return tallies


if __name__ == "__main__":
    sys.exit(main())
