"""Make the missing trainings in processes, one after another."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import yaml

from gpt.compare.outcomes import DIVERGED, Outcome, diverged_file, read_outcome
from gpt.compare.trainings import Candidate, Text, Training, digest
from gpt.compare.variants import HELD_OUT, OUR_SOURCE, Variant, slug
from gpt.cores import cores
from gpt.errors import DivergedError, InputError
from gpt.files import atomic_write
from gpt.plain import JsonObject, parse_yaml
from gpt.progress import progress, report
from gpt.run.start import start

# Put the source first on the path, so that nothing in the current folder is imported.
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from gpt.cli import main; sys.exit(main())"
_SECONDS_BETWEEN_LOOKS = 1.0


class Runner(Protocol):
    """Reads the options of variants and trains them, in processes or, in tests, only in appearance."""

    def options(self, variant: Variant) -> JsonObject:
        """Return all options of a variant, with defaults; InputError for options that `gpt fit` rejects."""
        ...

    def train(self, training: Training, folder: Path, watch: Callable[[], None]) -> None:
        """Make or finish a run in `folder`/runs; call `watch` about every second. May raise DivergedError."""
        ...


class Processes:
    """Trains each run in its own process, one after another.

    So each run is isolated, and has all cores.
    """

    def options(self, variant: Variant) -> JsonObject:
        """Return a variant's options; an edited copy of the program is run to print its own."""
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
        """Run `python -m gpt fit ...` with its output in the run's .log; an error if it fails.

        The current folder is the comparison's, which has no package, so the source is imported.
        """
        source = str(training.candidate.variant.source)
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([source, before]) if before else source
        config = write_config(training.candidate, folder)
        corpus = corpus_for_runs(training.text, folder)
        log = folder / "runs" / f"{training.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpt", *training.words(config, corpus)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            try:
                while (status := _status(process)) is None:
                    watch()
            except BaseException:  # for example a signal: the run saves itself and can be resumed
                process.terminate()
                process.wait()
                raise
        if status:
            line = _last_line(log.read_text(encoding="utf-8", errors="replace"))
            if status == DivergedError.status:
                raise DivergedError(line)
            raise InputError(f"{training.name} failed: {line} (all that it printed: {log})")


def write_config(candidate: Candidate, folder: Path) -> Path:
    """Write the candidate's options to a file, without those that each run's command line gives."""
    options = {
        **candidate.options,
        "data": {**candidate.options["data"]},
        "model": {**candidate.options["model"]},
    }
    options["data"].pop("corpus", None)
    options["model"].pop("init_from", None)
    path = folder.resolve() / "variants" / f"{slug(candidate.variant.name)}-{candidate.digest}.yaml"
    with atomic_write(path) as file:
        yaml.safe_dump(options, file, sort_keys=False, allow_unicode=True)
    return path


def corpus_for_runs(text: Text, folder: Path) -> str:
    """Return the name of the corpus for runs, whose current folder is the comparison's.

    A corpus file that names files of the present folder is written there with their whole paths.
    """
    file = text.corpus_file
    if file is None or not text.names_relative_files:
        return text.corpus
    recipe = parse_yaml(file.read_text(encoding="utf-8"))["corpus"]
    corpus = {"corpus": {**recipe, "files": list(text.files)}}
    path = folder.resolve() / "texts" / f"{slug(text.name)}-{digest(corpus)}.yaml"
    with atomic_write(path) as output:
        yaml.safe_dump(corpus, output, sort_keys=False, allow_unicode=True)
    return str(path)


def candidates_of(variants: Iterable[Variant], runner: Runner) -> list[Candidate]:
    """Return the variants with all their options; the first one's decide which text is held out."""
    candidates: list[Candidate] = []
    for variant in variants:
        base = candidates[0] if candidates else None
        options = dict(runner.options(variant))
        if base:
            shared = {name: base.options["data"].get(name) for name in HELD_OUT}
            options["data"] = {**options["data"], **shared}
        candidate = Candidate.of(variant, options)
        if base and candidate.options == base.options and variant.source == base.variant.source:
            same = f"{variant.name} has the options and the source of {base.variant.name}: nothing is changed"
            report(same, prefix="gpt compare: ")
        candidates.append(candidate)
    return candidates


def train_all(trainings: Sequence[Training], folder: Path, runner: Runner) -> dict[Training, Outcome]:
    """Make the missing trainings, in order, and return the outcomes of all."""
    done = {training: outcome for training in trainings if (outcome := read_outcome(training, folder))}
    missing = [training for training in trainings if training not in done]
    total = sum(training.steps for training in trainings)
    before = total - sum(training.steps for training in missing)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has no such number
    warning = busy_warning(load, cores())
    if missing and warning:
        report(warning, prefix="gpt compare: ")
    with progress("comparing", total, done=before, unit="steps") as advance:
        for training in missing:
            watch = _watcher(training, folder, advance)
            watch(0)
            done[training] = _trained(training, folder, runner, watch)
            watch(training.steps)
    return done


def _trained(training: Training, folder: Path, runner: Runner, watch: Callable[[], None]) -> Outcome:
    """Make a training, and return its outcome."""
    try:
        runner.train(training, folder, watch)
    except DivergedError as error:
        with atomic_write(diverged_file(training, folder)) as file:
            file.write(f"{error}\n")
        return DIVERGED
    outcome = read_outcome(training, folder)
    if outcome is None:
        raise InputError(f"{folder / 'runs' / training.name} has no summary.json: the run did not end")
    return outcome


def _watcher(training: Training, folder: Path, advance: Callable[..., None]) -> Callable[..., None]:
    """Return a function that advances the progress to a step of the run, by default to its present one."""
    made = 0
    label = f"{training.candidate.variant.name}, {training.text.name}, seed {training.seed}"

    def watch(step: int | None = None) -> None:
        nonlocal made
        now = _step(training, folder) if step is None else step
        advance(max(0, now - made), label)
        made = max(made, now)

    return watch


def busy_warning(load: float, count: int) -> str | None:
    """Return a line if other programs use half of the `count` cores or more, so that times mislead.

    `load` is how many processes used or awaited a core in the last minute.
    """
    if load < count / 2:
        return None
    return (
        f"the machine is busy, a load of {load:.1f} for {count} cores: "
        "the losses stay right, the times of steps do not"
    )


def _status(process: "subprocess.Popen[bytes]") -> int | None:
    """Wait up to a second; return the exit status, or None if the process still runs."""
    try:
        return process.wait(_SECONDS_BETWEEN_LOOKS)
    except subprocess.TimeoutExpired:
        return None


def _step(training: Training, folder: Path) -> int:
    """Return the run's step by the last complete row of its metrics."""
    try:
        text = (folder / "runs" / training.name / "metrics.csv").read_text(encoding="utf-8")
        return int(text.split("\n")[-2].partition(",")[0])
    except (OSError, ValueError, IndexError):  # the run has not begun, or has no row yet
        return 0


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("gpt fit: ") if lines else "it printed nothing"
