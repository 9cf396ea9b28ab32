"""Inject faults into training: `python scripts/torture.py --kills 50`.

Kills runs with SIGKILL in steps, saves and validations, and damages checkpoints. Resumed runs must equal an
undisturbed one. Prints a table of injected, survived and lost faults; the exit status is 1 if any was lost.

Needs POSIX, because runs are forked.
"""

import argparse
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faults.fingerprint import fingerprint
from faults.forked import run

import gpt.run.fit  # noqa: F401 - once, before the processes that are killed are forked

MOMENTS = ("anywhere", "step", "write", "rename", "validation")
TEXT = "The quick brown fox jumps over the lazy dog, and on it goes.\n" * 300
RUN = shlex.split("""fit --run run --data.corpus text.txt --trainer.logger csv --log_every 3
--trainer.accelerator cpu --trainer.precision 32-true --model.compile false --data.vocabulary null
--model.config.vocab_size 300
--model.config.context_length 16 --model.config.emb_dim 32 --model.config.num_heads 2
--model.config.num_layers 1 --model.config.dropout 0.1 --trainer.max_steps 30
--trainer.accumulate_grad_batches 2 --checkpoint_every 4 --trainer.val_check_interval 7
--data.batch_size 16""")
TWO = [*RUN, "--data.batch_size=8", "--trainer.devices=2"]


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


class Faults:
    """One fault a call, in a folder with a text: what went wrong, or None."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder = folder
        self.chance = chance
        self.runs = folder / "runs"
        self.found: dict[int, Any] = {}

    def undisturbed(self, processes: int = 1) -> Any:
        """The fingerprint and the seconds of a run that nothing disturbs, and which is not left."""
        if processes not in self.found:
            began = time.monotonic()
            ended = run(self.folder, TWO if processes == 2 else RUN, processes=processes)
            if ended.status:
                raise SystemExit(f"the undisturbed run failed: {ended.err}")
            self.found[processes] = fingerprint(self.runs / "run"), time.monotonic() - began
            shutil.rmtree(self.runs)
        return self.found[processes]

    def resumed(self, command: list[str], processes: int = 1) -> str | None:
        """Resume the run and compare it with the undisturbed one."""
        wanted, _ = self.undisturbed(processes)
        ended = run(self.folder, command, processes=processes)
        if ended.status:
            return f"status {ended.status}: {ended.err[-300:]}"
        return None if fingerprint(self.runs / "run") == wanted else "differs from the undisturbed run"

    def kill(self, processes: int = 1) -> str | None:
        """Kill a run once or twice, and resume it."""
        _, seconds = self.undisturbed(processes)
        again = [*(TWO if processes == 2 else RUN), "--resume", "auto_or_new"]
        faults = []
        for _ in range(self.chance.choice((1, 1, 2))):
            moment, number = self.chance.choice(MOMENTS), self.chance.randint(1, 12)
            if moment == "anywhere":
                after = self.chance.uniform(0.1, 1.0) * seconds
                run(self.folder, again, processes=processes, kill_after=after)
            else:
                run(self.folder, again, processes=processes, sabotage=die_at(moment, number))
            faults.append(f"{moment} {number}")
        problem = self.resumed(again, processes)
        return problem and f"{faults}: {problem}"

    def kill_two(self) -> str | None:
        """The same with two processes, as by a power loss."""
        return self.kill(2)

    def damage(self) -> str | None:
        """Damage the newest checkpoint of a stopped run, which resumes from the one before."""
        self.undisturbed()
        chance = self.chance
        run(self.folder, RUN, sabotage=die_at("step", 2 * chance.randint(10, 28)))
        last = self.runs / "run" / "checkpoints" / "last.safetensors"
        data = bytearray(last.read_bytes())
        if chance.random() < 0.4:
            data = data[: chance.randrange(len(data))]
        else:
            for _ in range(chance.choice((1, 1, 8))):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        last.write_bytes(data)
        return self.resumed(["fit", "--resume", "auto", "--run", "run"])


KINDS: dict[str, tuple[int, str, Callable[[Faults], str | None]]] = {
    "kills": (50, "SIGKILL, one process", Faults.kill),
    "kills2": (0, "SIGKILL, two processes", Faults.kill_two),
    "damages": (20, "damaged checkpoint", Faults.damage),
}


def main() -> int:
    """Inject the requested faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (times, what, _) in KINDS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=times, help=what)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table, any_lost = [f"{'fault':<24}{'injected':>9}{'survived':>9}{'lost':>6}"], False
    with tempfile.TemporaryDirectory() as name:
        os.environ["GPT_CACHE"] = str(Path(name) / "cache")
        (Path(name) / "text.txt").write_text(TEXT, encoding="utf-8")
        faults = Faults(Path(name), random.Random(options.seed))
        for kind, (_, what, inject) in KINDS.items():
            times, lost = getattr(options, kind), 0
            for number in range(times):
                print(f"\r{what}: {number + 1} of {times}", end="", file=sys.stderr)
                if problem := inject(faults):
                    lost += 1
                    print(f"\nlost: {problem}", file=sys.stderr)
                shutil.rmtree(faults.runs, ignore_errors=True)
            if times:
                table.append(f"{what:<24}{times:>9}{times - lost:>9}{lost:>6}")
                any_lost = any_lost or lost > 0
    print(file=sys.stderr)
    print(*table, sep="\n")
    return int(any_lost)


if __name__ == "__main__":
    sys.exit(main())
