"""Trainings in processes, one after another, those that are missing."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import yaml

from gpt.compare.outcomes import Outcome, read_outcome
from gpt.compare.trainings import Recipe, Training
from gpt.compare.variants import HELD_OUT, OUR_SOURCE, Variant, slug
from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.plain import parse_yaml
from gpt.progress import progress
from gpt.run.start import start

# With the source first on the path, whatever the current folder holds.
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from gpt.cli import main; sys.exit(main())"
_PATHS = (("data", "vocabulary"), ("model", "init_from"))  # options that may name a file
_SECONDS_BETWEEN_LOOKS = 1.0


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
    """The variants with all their options; what is held out of a text is decided by the first one's."""
    recipes: list[Recipe] = []
    for variant in variants:
        options = with_whole_paths(machine.options(variant))
        if recipes:
            shared = {name: recipes[0].options["data"].get(name) for name in HELD_OUT}
            options["data"] = {**options["data"], **shared}
        recipes.append(Recipe(variant, options))
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
