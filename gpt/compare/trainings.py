"""The trainings of a comparison: each is a run of `gpt fit` in a process of its own, made once.

A training's folder is named by a hash of all that decides it: the source, the options, the text, the steps
and the seed. So what is finished is not run again, what was killed resumes, and what was edited since is new.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import yaml

from gpt.compare.variants import OUR_SOURCE, Variant, slug
from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.pictures.runs import Metrics
from gpt.plain import parse_json, parse_yaml
from gpt.progress import progress
from gpt.run.start import start

# With the source first on the path, whatever the current folder holds.
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from gpt.cli import main; sys.exit(main())"
_SOURCE_FILES = (".py", ".cpp", ".json")
_PATHS = (("data", "vocabulary"), ("model", "init_from"))  # options that may name a file
# What of the options decides which text is held out: bits per byte of another one compare nothing.
HELD_OUT = (("data", "val_fraction"), ("data", "most_bytes"), ("data", "text_column"), ("data", "template"))
_SECONDS_BETWEEN_LOOKS = 1.0
_HASH = 10  # characters


@dataclass(frozen=True, eq=False)  # options are no key of a mapping
class Recipe:
    """A variant with all its options, as its own source understands them."""

    variant: Variant
    options: dict[str, Any]

    @cached_property
    def digest(self) -> str:
        """A hash of the source and the options."""
        return digest(source_digest(self.variant.source), self.options)


@dataclass(frozen=True)
class Text:
    """A corpus as `gpt fit` names it, and options for runs on it."""

    name: str
    corpus: str
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, options: tuple[str, ...] = ()) -> "Text":
        """What a command line names: a file, folder, pattern, recipe or hub's name."""
        is_pattern = "://" not in name and any(mark in name for mark in "*?[")
        is_path = is_pattern or os.path.exists(name)
        return cls(Path(name).stem if is_path else name, os.path.abspath(name) if is_path else name, options)

    @property
    def version(self) -> list[int]:
        """The size and time of a file."""
        if not os.path.isfile(self.corpus):
            return []
        stat = os.stat(self.corpus)
        return [stat.st_size, stat.st_mtime_ns]


@dataclass(frozen=True)
class Training:
    """One run."""

    recipe: Recipe
    text: Text
    seed: int
    steps: int

    @cached_property
    def name(self) -> str:
        """Of the run's folder."""
        text = self.text
        key = digest(self.recipe.digest, text.corpus, text.options, text.version, self.seed, self.steps)
        return "-".join(
            map(slug, (self.recipe.variant.name, text.name, str(self.steps), str(self.seed), key))
        )

    def words(self, config: Path) -> list[str]:
        """The command line of `gpt fit`; what a file must not name is given here."""
        weights = self.recipe.options["model"].get("init_from")
        return [
            *("fit", "--config", str(config), *self.text.options, "--data.corpus", self.text.corpus),
            *(() if weights is None else ("--model.init_from", weights)),
            *("--seed_everything", str(self.seed), "--trainer.max_steps", str(self.steps)),
            *("--trainer.max_epochs", "-1", "--trainer.max_time", "null", "--early_stopping", "null"),
            *("--snapshot_megabytes", "0", "--run", self.name, "--resume", "auto_or_new"),
        ]


@dataclass(frozen=True)
class Outcome:
    """What a run reached; infinite where it diverged."""

    bits: float
    """Bits per byte of held-out text, of the best checkpoint."""
    milliseconds: float
    """A step, without validations."""
    curve: dict[int, float]
    """Bits per byte of held-out text after steps."""

    @property
    def is_finite(self) -> bool:
        """Whether it did not diverge."""
        return math.isfinite(self.bits)


class Machine(Protocol):
    """What reads options and trains."""

    def options(self, variant: Variant) -> dict[str, Any]:
        """All options of a variant, with the defaults; an InputError where `gpt fit` takes them not."""
        ...

    def train(self, training: Training, folder: Path, watch: Callable[[], None]) -> None:
        """Make or finish a run in `folder`/runs, and call `watch` now and then meanwhile."""
        ...


class Processes:
    """A process for each run, one after another: nothing leaks between them, and each has the machine."""

    def options(self, variant: Variant) -> dict[str, Any]:
        """Those that this program reads; an edited copy prints its own."""
        if variant.source == OUR_SOURCE:
            try:
                return asdict(start("fit", list(variant.words)).options)
            except InputError as error:
                raise InputError(f"{variant.name}: {error}") from error
        command = [sys.executable, "-c", _START, str(variant.source), "fit", *variant.words, "--print_config"]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode:
            raise InputError(f"{variant.name}: {_last_line(done.stderr)}")
        return dict(parse_yaml(done.stdout))

    def train(self, training: Training, folder: Path, watch: Callable[[], None]) -> None:
        """`python -m gpt fit ...`, with what it prints in the run's .log; an InputError where it fails.

        The current folder is the comparison's, which holds no package: the source is the first on the path.
        """
        source = str(training.recipe.variant.source)
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        config = write_config(training.recipe, folder)
        log = folder / "runs" / f"{training.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpt", *training.words(config)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            try:
                while (status := _status(process)) is None:
                    watch()
            except BaseException:  # a signal: the run saves itself, and resumes later
                process.terminate()
                process.wait()
                raise
        if status:
            line = _last_line(log.read_text(encoding="utf-8", errors="replace"))
            raise InputError(f"{training.name} failed: {line} (all that it printed: {log})")


def write_config(recipe: Recipe, folder: Path) -> Path:
    """The recipe's options as a file, without what is given on the command line of each run."""
    options = {**recipe.options, "data": {**recipe.options["data"]}, "model": {**recipe.options["model"]}}
    options["data"].pop("corpus", None)
    options["model"].pop("init_from", None)
    path = folder.resolve() / "variants" / f"{slug(recipe.variant.name)}-{recipe.digest}.yaml"
    with atomic_write(path) as file:
        yaml.safe_dump(options, file, sort_keys=False, allow_unicode=True)
    return path


def recipes_of(variants: Iterable[Variant], machine: Machine) -> list[Recipe]:
    """The variants with all their options; InputError where they do not hold out the same text."""
    recipes = [Recipe(variant, with_whole_paths(machine.options(variant))) for variant in variants]
    base, *others = recipes
    for recipe in others:
        for room, name in HELD_OUT:
            ours, theirs = (one.options.get(room, {}).get(name) for one in (base, recipe))
            if ours != theirs:
                what = f"{recipe.variant.name} has --{room}.{name} {theirs}, {base.variant.name} {ours}"
                raise InputError(f"{what}: all variants are scored on the same text, give all the same")
    return recipes


def with_whole_paths(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the paths of files that exist from the root: runs have another current folder."""
    found = dict(options)
    for room, name in _PATHS:
        value = found[room].get(name)
        if value is not None and os.path.exists(value):
            found[room] = {**found[room], name: os.path.abspath(value)}
    return found


def train_all(trainings: Sequence[Training], folder: Path, machine: Machine) -> dict[Training, Outcome]:
    """The outcomes of all trainings, of which those that are missing are made, in this order."""
    done = {training: outcome for training in trainings if (outcome := read_outcome(training, folder))}
    missing = [training for training in trainings if training not in done]
    total = sum(training.steps for training in trainings)
    before = total - sum(training.steps for training in missing)
    with progress("comparing", total, done=before, unit="steps") as advance:
        for training in missing:
            made = 0
            label = f"{training.recipe.variant.name}, {training.text.name}, seed {training.seed}"

            def watch(step: int | None = None) -> None:
                nonlocal made
                now = _step(training, folder) if step is None else step  # noqa: B023 - called in the loop
                advance(max(0, now - made), label)  # noqa: B023
                made = max(made, now)

            watch(0)
            machine.train(training, folder, watch)
            outcome = read_outcome(training, folder)
            if outcome is None:
                raise InputError(
                    f"{folder / 'runs' / training.name} has no summary.json: the run did not end"
                )
            done[training] = outcome
            watch(training.steps)
    return done


def read_outcome(training: Training, folder: Path) -> Outcome | None:
    """What a finished run reached; None for one that has not ended. InputError where it held out nothing."""
    run = folder / "runs" / training.name
    try:
        summary = parse_json((run / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputError(f"{run / 'summary.json'}: {error}") from None
    metrics = Metrics.read(run)
    steps, values = metrics.points("step", "val_bits_per_byte")
    if "val_bits_per_byte" not in metrics.rows[0] or "val_loss" not in summary:
        raise InputError(f"{run}: no text is held out, give a --data.val_fraction above 0")
    bits = math.inf
    if all(summary.get(name) for name in ("val_loss", "val_bits_per_byte", "best_loss")):
        bits = summary["best_loss"] * summary["val_bits_per_byte"] / summary["val_loss"]
    curve = {int(step): value for step, value in zip(steps, values, strict=True)}
    return Outcome(bits, milliseconds_per_step(metrics), curve)


def milliseconds_per_step(metrics: Metrics) -> float:
    """Of the rows after the first, which has the start; a run's rows leave validations out of the speed."""
    rows = [row for row in metrics.rows if row["tokens_per_second"]]
    first = int(rows[0]["step"]) if len(rows) > 1 else 0
    counted = rows[1:] or rows
    seconds = 0.0
    before = first
    for row in counted:
        step = int(row["step"])
        tokens = float(row["tokens"]) / step
        seconds += (step - before) * tokens / float(row["tokens_per_second"])
        before = step
    return 1000 * seconds / (before - first)


def digest(*values: object) -> str:
    """A short hash of plain values."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH]


@cache
def source_digest(source: Path) -> str:
    """A hash of the package in this folder."""
    found = hashlib.sha256()
    for path in sorted((source / "gpt").rglob("*")):
        if path.suffix in _SOURCE_FILES and path.is_file():
            found.update(f"{path.relative_to(source).as_posix()}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def _status(process: "subprocess.Popen[bytes]") -> int | None:
    """The exit status, or None after a second in which the process did not end."""
    try:
        return process.wait(_SECONDS_BETWEEN_LOOKS)
    except subprocess.TimeoutExpired:
        return None


def _step(training: Training, folder: Path) -> int:
    """How far the run has come, by the last whole row of its metrics."""
    try:
        text = (folder / "runs" / training.name / "metrics.csv").read_text(encoding="utf-8")
        return int(text.split("\n")[-2].partition(",")[0])
    except (OSError, ValueError, IndexError):  # not begun, or no row yet
        return 0


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("gpt fit: ") if lines else "it printed nothing"
