"""Find what a command line begins: a run from scratch, planned or not, a tuning, or a run to resume."""

import os
import time
from dataclasses import replace

from gpt.data.options import Reading
from gpt.data.prepare import check_reading
from gpt.errors import InputError
from gpt.plain import seconds_of
from gpt.plan.command import KEPT, Planner
from gpt.progress import report
from gpt.run.arguments import Given, Values, built, options_of, recipe, scan, typed
from gpt.run.folder import Claim, folder_of_checkpoint, folder_to_restart
from gpt.run.local import check_local
from gpt.run.options import LIMITS, StartOptions
from gpt.run.origin import HandedOn, Origin
from gpt.run.resumed import AUTO, AUTO_OR_NEW, newest_in, place_of, read_resumable, resumed
from gpt.run.tuned import tuned
from gpt.text.vocabulary import check_size_used
from gpt.weights.runs import checkpoints_of

_MOST_MINUTES = 1_000_000
_USUAL_MINUTES = 2.0  # for a run without any limit
_NO_END = f"no time and no other end is given, so the run takes --minutes {_USUAL_MINUTES:g}"
_CHECKPOINTS = ("resume", "ckpt_path")
_UNPLANNED = (
    "data.tokens_per_update",
    *LIMITS,
    "trainer.devices",
    "trainer.accumulate_grad_batches",
)
"""Options that a plan decides itself, or cannot keep."""


def start(
    command: str, arguments: list[str], claim: Claim | None = None, began: float | None = None
) -> Origin:
    """Read the command line, its files and its checkpoint, and make the plan for --minutes.

    With a `claim`, a resumed run's folder is locked before its checkpoints are read, so that no other process
    can save a newer one meanwhile. The minutes count from `began`, when the process started by
    `time.perf_counter`; by default now.
    """
    began = time.perf_counter() if began is None else began
    given = scan(arguments, command)
    check_local("--config", given.files, given.own.keys())
    asked = given.asked
    how = built(StartOptions, asked)
    minutes = _minutes(how, asked)
    typed_reading = Reading.of(given.own, "data.")  # recipes and resumed runs may have others
    if "data.corpus" in asked:
        check_reading(asked["data.corpus"], typed_reading)
    check_size_used(asked.get("data.vocabulary"), given.own.get("model.config.vocab_size"))
    saved = _saved(command, how, given, claim)
    if saved is not None:
        check_reading(saved.options.data.corpus, typed_reading)
        return saved
    has_end = minutes is not None or bool(asked.keys() & {"config", "model.init_from", *LIMITS})
    if not has_end:
        minutes = _usual_minutes(asked)
    if asked.get("trainer.deterministic"):  # has to be set before a plan first uses cuBLAS
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if "model.init_from" in asked:
        new = tuned(given, minutes)
    elif minutes is not None:
        new = _planned(given, minutes, began)
        if not has_end:
            report(_NO_END)
        report(str(new.plan))
    else:
        usual = {} if "config" in asked else _quick_recipe(asked)
        new = Origin(options=options_of({**usual, **given.all}))
    # With `auto_or_new` and no checkpoint, the run begins in its own folder.
    folder = folder_to_restart(new.options.run) if how.resume else None
    return replace(new, folder=folder, began=began, minutes=minutes, claim=claim or Claim())


def _saved(command: str, how: StartOptions, given: Given, claim: Claim | None) -> Origin | None:
    """Return the origin of a run that is resumed or validated; None for a new run."""
    wanted = how.ckpt_path if how.resume is None else how.resume
    if wanted is None and command == "validate":
        raise InputError("nothing to validate: give a checkpoint or a run's folder with --ckpt_path")
    if wanted is None:
        return None
    place = place_of(wanted, given.asked.get("run"))
    is_folder = place.is_dir() or wanted in (AUTO, AUTO_OR_NEW)
    if claim and command == "fit" and "print_config" not in given.own:
        claim.take_existing(place if is_folder else folder_of_checkpoint(place))
    if wanted == AUTO_OR_NEW and not checkpoints_of(place):
        if command == "validate":
            raise InputError(f"nothing to validate: {place} has no checkpoint")
        return None
    checkpoint = newest_in(place) if is_folder else read_resumable(place)
    return replace(resumed(command, given, checkpoint), claim=claim or Claim())


def _planned(given: Given, minutes: float, began: float) -> Origin:
    """Return the origin of a run whose options are planned around the given ones."""
    unchecked = (*KEPT, "data.val_fraction")  # the planner checks these
    checked = options_of({name: value for name, value in given.all.items() if name not in unchecked})
    asked = given.asked
    reading = replace(checked.data.reading, val_fraction=asked.get("data.val_fraction"))
    planner = Planner(asked, reading, began)
    plan = planner.plan(minutes)
    options = options_of({**typed(plan.options()), **given.all})
    return Origin(options=options, plan=plan, text=HandedOn(planner.text))


def _quick_recipe(asked: Values) -> Values:
    """Return the quick recipe. Its number of steps is no limit beside one that is asked for."""
    values = recipe("quick")
    if asked.keys() & set(LIMITS):
        values = {name: value for name, value in values.items() if name not in LIMITS}
    return values


def _minutes(how: StartOptions, asked: Values) -> float | None:
    """Return the minutes to plan for, if given; InputError if an option is given that the plan decides."""
    if how.minutes is None:
        return None
    if others := ", ".join(f"--{name}" for name in (*_CHECKPOINTS, *_UNPLANNED) if name in asked):
        raise InputError(f"--minutes plans a new run of one process to its end: leave {others} out")
    minutes = seconds_of("minutes", how.minutes) / 60
    if not 0 < minutes <= _MOST_MINUTES:
        raise InputError(f"--minutes {how.minutes}: expected a time above 0, such as 90s, 10m or 8h")
    return minutes


def _usual_minutes(asked: Values) -> float:
    """Return the minutes of a run without any limit; InputError for options that need a limit of steps."""
    if others := ", ".join(f"--{name}" for name in _UNPLANNED if name in asked):
        raise InputError(f"a run with {others} needs an end: give --trainer.max_steps, or a --config")
    return _USUAL_MINUTES
