"""Inject faults into training: `python scripts/torture.py --kills 50`.

Kills runs with SIGKILL in steps, saves and validations, and damages checkpoints. Kills resumes at a random
moment of their first two seconds, and starts two processes on one run. Resumed runs must equal an undisturbed
one, and so must a future that was left for another and is taken up again, with its metrics.csv. Prints a
table of injected, survived and lost faults; the exit status is 1 if any was lost.

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
from faults.forked import run, run_beside

import gpt.run.fit  # noqa: F401 - once, before the processes that are killed are forked
from gpt.weights.runs import checkpoints_of, order_of

MOMENTS = ("anywhere", "step", "write", "rename", "validation")
TEXT = "The quick brown fox jumps over the lazy dog, and on it goes.\n" * 300
RUN = shlex.split("""fit --run run --data.corpus text.txt --trainer.logger csv --log_every 3
--trainer.accelerator cpu --trainer.precision 32-true --model.compile false --data.vocabulary null
--model.config.vocab_size 300
--model.config.context_length 16 --model.config.emb_dim 32 --model.config.num_heads 2
--model.config.num_layers 1 --model.config.dropout 0.1 --trainer.max_steps 30
--trainer.accumulate_grad_batches 2 --checkpoint_every 4 --trainer.val_check_interval 7
--data.batch_size 16""")
CUT_AT = 22  # updates of the run whose resumes are killed
STARTING = 2.0  # seconds
OTHER = ["--model.optimizer.lr", "0.01"]  # of another future
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
        self.others: dict[str, Any] = {}

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

    def ends(self, command: list[str], wanted: Any = None, processes: int = 1) -> str | None:
        """Run the command to its end, and compare it with what is wanted, by default the undisturbed run."""
        wanted = wanted or self.undisturbed(processes)[0]
        ended = run(self.folder, command, processes=processes)
        if ended.status:
            return f"status {ended.status}: {ended.err[-300:]}"
        return self.differs(wanted)

    def differs(self, wanted: Any) -> str | None:
        """Compare what is left of the run with the fingerprint of one that nothing has disturbed."""
        return None if fingerprint(self.runs / "run") == wanted else "differs from the undisturbed run"

    def kill(self, processes: int = 1) -> str | None:
        """Kill a run once or twice, and resume it."""
        _, seconds = self.undisturbed(processes)
        again = [*(TWO if processes == 2 else RUN), "--resume", "auto_or_new"]
        faults: list[str] = []
        kills = self.chance.choice((1, 1, 2))
        while len(faults) < kills:
            moment, number = self.chance.choice(MOMENTS), self.chance.randint(1, 12)
            how: dict[str, Any] = {"sabotage": die_at(moment, number)}
            if moment == "anywhere":
                how = {"kill_after": self.chance.uniform(0.1, 1.0) * seconds}
            ended = run(self.folder, again, processes=processes, **how)
            if ended.status > 0:
                return f"{moment} {number}: status {ended.status}: {ended.err[-300:]}"
            if ended.is_late and "kill_after" not in how:
                return f"{moment} {number}: it never ended: {ended.err[-300:]}"
            if ended.status == 0:  # it has ended before it was killed
                shutil.rmtree(self.runs)
                faults.clear()
            else:
                faults.append(f"{moment} {number}")
        problem = self.ends(again, processes=processes)
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
        return self.ends(["fit", "--resume", "auto", "--run", "run"])

    def kill_early(self, command: list[str]) -> str | None:
        """Kill a resume of the cut run as it starts; one that has ended before begins again."""
        while True:
            self.cut()
            ended = run(self.folder, command, kill_after=self.chance.uniform(0, STARTING))
            if ended.status > 0:
                return f"status {ended.status} of a resume that was to be killed: {ended.err[-300:]}"
            if ended.status < 0:
                return None

    def kill_resume(self) -> str | None:
        """Kill a resume of the newest checkpoint as it starts: it ends as if nothing had been."""
        command = ["fit", "--resume", str(self.runs / "run")]
        return self.kill_early(command) or self.ends(command)

    def kill_return(self) -> str | None:
        """Kill a resume of an earlier checkpoint, with another option, as it starts; end both futures."""
        self.cut()
        folder = self.runs / "run"
        newest, *earlier = checkpoints_of(folder)
        left = order_of(newest)
        name = self.chance.choice([path.name for path in earlier if path.name.startswith("step-")])
        command = ["fit", "--resume", str(folder / "checkpoints" / name), *OTHER]
        wanted = self.other_future(command, name)
        if problem := self.kill_early(command) or self.ends(command, wanted):
            return f"another future from {name}: {problem}"
        kept = [path for path in checkpoints_of(folder) if order_of(path) == left]
        if not kept:
            return f"the newest checkpoint is gone after a resume from {name}"
        problem = self.ends(["fit", "--resume", str(kept[0])])
        return problem and f"the future that was left for {name}: {problem}"

    def race(self) -> str | None:
        """Two processes that start or resume one run: one trains, the other is refused or finds it done."""
        wanted, seconds = self.undisturbed()
        if self.chance.random() < 0.5:
            self.cut()
        command = [*RUN, "--resume", "auto_or_new"]
        ended = run_beside(self.folder, [command, command], self.chance.uniform(0, seconds))
        refusals = ("in use by another process", "has begun this run meanwhile")
        for status, err in zip(ended.statuses, ended.errs, strict=True):
            if status and not (status == 2 and any(refusal in err for refusal in refusals)):
                return f"status {status}: {err[-300:]}"
        if all(ended.statuses):
            return f"both were refused: {ended.errs}"
        return self.differs(wanted)

    def cut(self) -> None:
        """The run as a kill after `CUT_AT` updates has left it, with all of its checkpoints."""
        kept = self.folder / "cut"
        if not kept.exists():
            self.undisturbed()
            many = [*RUN, "--keep_checkpoints", "100"]
            run(self.folder, many, sabotage=die_at("step", 2 * CUT_AT + 1))
            shutil.move(self.runs, kept)
        shutil.rmtree(self.runs, ignore_errors=True)
        shutil.copytree(kept, self.runs)

    def other_future(self, command: list[str], name: str) -> Any:
        """The fingerprint of a resume from the checkpoint of this name that nothing disturbs."""
        if name not in self.others:
            ended = run(self.folder, command)
            if ended.status:
                raise SystemExit(f"the undisturbed resume failed: {ended.err}")
            self.others[name] = fingerprint(self.runs / "run")
        return self.others[name]


KINDS: dict[str, tuple[int, str, Callable[[Faults], str | None]]] = {
    "kills": (50, "SIGKILL, one process", Faults.kill),
    "kills2": (0, "SIGKILL, two processes", Faults.kill_two),
    "damages": (20, "damaged checkpoint", Faults.damage),
    "resumes": (50, "killed resume", Faults.kill_resume),
    "returns": (50, "killed return", Faults.kill_return),
    "races": (50, "two processes", Faults.race),
}


def main() -> int:
    """Inject the requested faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (times, what, _) in KINDS.items():
        parser.add_argument(f"--{name}", type=int, default=times, help=what)
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
