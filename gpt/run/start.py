"""Find what a command line starts: the options, the checkpoint to resume, the plan."""

import os
import time
from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from gpt.data.find import shipped_corpora
from gpt.data.prepare import prepare_named
from gpt.data.prepared import Prepared, positions_for
from gpt.data.split import Divided, held_out_bytes
from gpt.errors import InputError
from gpt.plain import as_dict, seconds_of, shown
from gpt.plan.command import GIVEN, TUNED_CONTEXT, Planner
from gpt.plan.rule import BYTES_PER_TOKEN, Plan, bytes_to_read
from gpt.progress import counted, notice, report
from gpt.run.arguments import Values, known, options_of, recipe, scan, typed
from gpt.run.folder import Claim, folder_of_checkpoint, folder_to_restart
from gpt.run.options import Options
from gpt.text.tokenizer import Tokenizer
from gpt.training.speed import Shape, time_machine
from gpt.weights.checkpoint import Checkpoint, LaterFormat, RunPart, read
from gpt.weights.formats.table import check_complete
from gpt.weights.load import StoredModel, read_weights
from gpt.weights.runs import RUNS, checkpoints_of, newest_run

T = TypeVar("T")
AUTO = "auto"
AUTO_OR_NEW = "auto_or_new"
_MOST_MINUTES = 1_000_000
_USUAL_MINUTES = 2.0  # for a run without any limit
_NO_END = f"no time and no other end is given, so the run takes --minutes {_USUAL_MINUTES:g}"
_CHOSEN_ANEW = ("resume", "ckpt_path", "minutes")  # never taken from a checkpoint
# Nor these, which suit the machine that saved them.
_WHERE = ("trainer.devices", "trainer.accelerator", "trainer.logger")
_FIXED = (  # set by weights
    *("model.config.", "model.optimizer.name", "model.lora.rank", "model.init_from"),
    "data.vocabulary",
)
_NOT_FIXED = ("model.config.dropout", "model.config.window_dropout")
_LIMITS = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time")
_UNPLANNED = (
    "resume",
    "ckpt_path",
    "data.tokens_per_update",
    *_LIMITS,
    "trainer.devices",
    "trainer.accumulate_grad_batches",
)
# Defaults for tuning GPT-2 small. Smaller models take more steps, at higher learning rates.
_GPT2_SMALL = 124e6
_TUNING_RATE = 5e-5
_MOST_RATE = 6e-3
_TUNING_STEPS = 200
_VALIDATIONS = 5  # during a tuning
_TUNING_TOKENS = 1024  # per batch, which take a gigabyte of activations
_LEAST_TUNED = 1 << 16  # bytes of text that a tuning with a time limit reads at least
_ADAPTERS = 8  # rank of the adapters that are tuned where memory is too small for all weights


class HandedOn(Generic[T]):
    """A value that was read on the way to a run, for whoever needs it next; None if nothing was read.

    `take` gives it away, so that its memory is free again as soon as its taker has used it.
    """

    def __init__(self, value: T | None = None) -> None:
        self._value = value

    def take(self) -> T | None:
        """Return the value, the first time; then None."""
        value = self._value
        self._value = None
        return value


@dataclass(frozen=True, kw_only=True)
class Start:
    """All that a run starts from."""

    options: Options
    tokenizer: Tokenizer | None = None
    """The tokenizer of the initial weights, if there are any."""
    weights: HandedOn[StoredModel] = field(default_factory=HandedOn, compare=False)
    """The initial weights, as they were read."""
    text: HandedOn[Divided | Prepared] = field(default_factory=HandedOn, compare=False)
    """The corpus, as it was divided or prepared to plan the run."""
    checkpoint: Checkpoint | None = None
    """The checkpoint that is resumed or validated."""
    run: RunPart = field(default_factory=RunPart)
    """The state of the run."""
    folder: Path | None = None
    """The run's folder, if it has one."""
    plan: Plan | None = None
    """The plan made for --minutes."""
    began: float = 0.0
    """When the process began, in seconds by `time.perf_counter`; 0 in a resumed run."""
    minutes: float | None = None
    """Minutes after `began` when the run has to end."""
    claim: Claim = field(default_factory=Claim, compare=False)
    """The folder that this process has locked."""

    @property
    def is_timed_tuning(self) -> bool:
        """Whether given weights are tuned for --minutes."""
        return self.minutes is not None and self.plan is None

    @property
    def left(self) -> float | None:
        """Seconds until the run has to end; None without a time limit."""
        return None if self.minutes is None else self.began + 60 * self.minutes - time.perf_counter()


def start(
    command: str, arguments: list[str], claim: Claim | None = None, began: float | None = None
) -> Start:
    """Read the command line, its files and its checkpoint, and make the plan for --minutes.

    With a `claim`, a resumed run's folder is locked before its checkpoints are read, so that no other process
    can save a newer one meanwhile. The minutes count from `began`, when the process started by
    `time.perf_counter`; by default now.
    """
    began = time.perf_counter() if began is None else began
    locks = claim is not None
    own, files = scan(arguments, command)  # options of the command line, and those of --config
    given = {**files, **own}
    asked = {name: value for name, value in given.items() if value is not None}  # null stands for the default
    if {"resume", "ckpt_path"} <= asked.keys():
        raise InputError("--resume and --ckpt_path name a checkpoint: give only one of them")
    wanted = asked.get("resume", asked.get("ckpt_path"))
    if command == "validate" and wanted is None:
        raise InputError("nothing to validate: give a checkpoint or a run's folder with --ckpt_path")
    _check_here("--config", files, own.keys())
    minutes = _minutes(asked)
    claim = claim or Claim()
    if wanted is not None:
        place = _place_of(wanted, asked.get("run"))
        is_folder = place.is_dir() or wanted in (AUTO, AUTO_OR_NEW)
        if locks and command == "fit" and "print_config" not in own:
            claim.take_existing(place if is_folder else folder_of_checkpoint(place))
        if wanted != AUTO_OR_NEW or checkpoints_of(place):
            checkpoint = _newest(place) if is_folder else _of_a_run(place)
            return replace(_resumed(command, own, given, checkpoint), claim=claim)
        if command == "validate":
            raise InputError(f"nothing to validate: {place} has no checkpoint")
    has_end = minutes is not None or bool(asked.keys() & {"config", "model.init_from", *_LIMITS})
    if not has_end:
        minutes = _usual_minutes(asked)
    if asked.get("trainer.deterministic"):  # has to be set before a plan first uses cuBLAS
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if "model.init_from" in asked:
        begun = _tuned(own, given, minutes)
    elif minutes is not None:
        begun = _planned(given, minutes, began)
        if not has_end:
            report(_NO_END)
        report(str(begun.plan))
    else:
        usual = {} if "config" in own else _quick_recipe(asked)
        begun = Start(options=_options({**usual, **given}))
    # With `auto_or_new` and no checkpoint, the run begins in its own folder.
    folder = folder_to_restart(begun.options.run) if wanted else None
    return replace(begun, folder=folder, began=began, minutes=minutes, claim=claim)


def _quick_recipe(asked: Values) -> Values:
    """Return the quick recipe. Its number of steps is no limit beside one that is asked for."""
    values = recipe("quick")
    if asked.keys() & set(_LIMITS):
        values = {name: value for name, value in values.items() if name not in _LIMITS}
    return values


def _planned(given: Values, minutes: float, began: float) -> Start:
    """Start a run from scratch whose options are planned around the given ones."""
    unchecked = (*GIVEN, "data.val_fraction")  # the planner checks these
    checked = _options({name: value for name, value in given.items() if name not in unchecked})
    asked = {name: value for name, value in given.items() if value is not None}
    reading = replace(checked.data.reading, val_fraction=asked.get("data.val_fraction"))
    planner = Planner(asked, reading, began)
    plan = planner.plan(minutes)
    options = _options({**typed(plan.options()), **given})
    return Start(options=options, plan=plan, text=HandedOn(planner.text))


def _tuned(own: Values, given: Values, minutes: float | None) -> Start:
    """Start a run from the weights that `model.init_from` names."""
    _options(given)  # report errors before the weights are read
    weights = read_weights(given["model.init_from"])
    if weights.template:
        given = {**typed({"data": {"template": as_dict(weights.template)}}), **given}
    context, text = _positions(weights, given, minutes)
    values = {**_of_weights(weights, given, context, minutes), **given}
    if "config" not in own:
        is_lora = bool(values.get("model.lora.rank"))
        values = {**recipe("lora" if is_lora else "finetune"), **values}
    options = _on_weights(_options(values), weights)
    report(*_positions_line(weights.config.context_length, options.model.config.context_length))
    return Start(options=options, tokenizer=weights.tokenizer, weights=HandedOn(weights), text=HandedOn(text))


def _place_of(resume: str, run: str | None) -> Path:
    """Return the checkpoint to resume from, or the folder of a run that has one.

    `resume` is one of these, or "auto" for the folder of `run`, by default of the newest run. "auto_or_new"
    is like "auto", but needs `run`, which may have no checkpoint yet.
    """
    if resume not in (AUTO, AUTO_OR_NEW):
        return Path(resume)
    if run is not None:
        return RUNS / run
    if resume == AUTO_OR_NEW:
        raise InputError("--resume auto_or_new needs the name of the run: give it with --run")
    newest = newest_run()
    if newest is None:
        raise InputError(f"no checkpoint under {RUNS}/ to resume: start a run with 'gpt fit'")
    return newest


def is_local(name: str) -> bool:
    """Whether a corpus named in a file is plain data on this machine, or a corpus of the package."""
    if name in shipped_corpora():
        return True
    path = Path(name)
    return "://" not in name and "::" not in name and path.exists() and path.suffix != ".yaml"


def _minutes(asked: Values) -> float | None:
    """Return the minutes to plan for, if given; InputError if an option is given that the plan decides."""
    if "minutes" not in asked:
        return None
    if others := ", ".join(f"--{name}" for name in _UNPLANNED if name in asked):
        raise InputError(f"--minutes plans a new run of one process to its end: leave {others} out")
    minutes = seconds_of("minutes", asked["minutes"]) / 60
    if not 0 <= minutes <= _MOST_MINUTES:
        raise InputError(f"--minutes {asked['minutes']}: expected a time, such as 90s, 10m or 8h")
    return minutes


def _usual_minutes(asked: Values) -> float:
    """Return the minutes of a run without any limit; InputError for options that need a limit of steps."""
    if others := ", ".join(f"--{name}" for name in _UNPLANNED if name in asked.keys() - {"resume"}):
        raise InputError(f"a run with {others} needs an end: give --trainer.max_steps, or a --config")
    return _USUAL_MINUTES


def _options(values: Values) -> Options:
    """Build a run's options, without those that each start chooses again."""
    return options_of({name: values[name] for name in values.keys() - _CHOSEN_ANEW})


def _resumed(command: str, own: Values, given: Values, checkpoint: Checkpoint) -> Start:
    """Resume a run with its checkpoint's options, which the given ones override."""
    path = checkpoint.path
    run = checkpoint.run or RunPart()
    folder = folder_of_checkpoint(path)
    if folder and own.get("run", folder.name) != folder.name:
        raise InputError(f"--run {own['run']} is not the run that is resumed, {folder}: leave --run out")
    written, unknown = known(run.options)
    saved = _saved_options(checkpoint, written)
    if "data.corpus" not in {**saved, **given}:
        raise InputError(f"{path} does not name its text: give it with --data.corpus")
    _check_here(str(path), {"data.corpus": saved.get("data.corpus")}, given.keys())
    options = _options({**saved, **given})
    lines = [f"resuming {path}, after step {run.step}"]
    if names := ", ".join((*checkpoint.unknown, *unknown)):
        lines.append(f"ignored what a later version has saved and this one does not know: {names}")
    if run.planned_seconds is not None:
        saved["trainer.max_steps"] = run.total  # where the run ends at present; a plan's steps were a guess
    lines += [
        f"changed {name}: {shown(saved[name])} -> {shown(given[name])}" for name in _changed(saved, given)
    ]
    if given.keys() & set(_LIMITS):
        run.forget_end()
    if command == "fit":
        report(*lines, *_other_processes(options, written))
    part = checkpoint.model
    tokenizer = Tokenizer.from_dict(part.tokenizer) if part.tokenizer else None
    return Start(options=options, tokenizer=tokenizer, checkpoint=checkpoint, run=run, folder=folder)


def _saved_options(checkpoint: Checkpoint, written: Values) -> Values:
    """Return the options of a checkpoint, `written` as nested mappings, without those for another machine.

    The weights decide the model's shape. Raises InputError, which names the file, for weights or options that
    cannot be used.
    """
    try:
        check_complete(checkpoint.config, checkpoint.all_weights())
        saved = {name: value for name, value in typed(written).items() if name not in _WHERE}
        shape = typed({"model": {"config": as_dict(checkpoint.config)}})
        saved = {**saved, **shape, **{name: saved[name] for name in _NOT_FIXED if name in saved}}
        saved["model.lora.rank"] = checkpoint.adapters.rank if checkpoint.adapters else 0
        _options(saved)
    except (ValueError, TypeError) as error:
        raise InputError(f"{checkpoint.path}: {error}") from None
    return saved


def _changed(saved: Values, given: Values) -> list[str]:
    """Return the options whose given values are not the saved ones; InputError if the weights fix one."""
    names = given.keys() & saved.keys() - {"run", *_CHOSEN_ANEW}
    changed = sorted(name for name in names if given[name] != saved[name])
    for name in changed:
        if name.startswith(_FIXED) and name not in _NOT_FIXED:
            before = str(saved[name])[:80]
            what = f"the run that is resumed began with {before}, on which its weights depend"
            raise InputError(f"--{name} {given[name]}: {what}")
    return changed


def _other_processes(options: Options, written: Values) -> list[str]:
    """Return a line to report if the number of processes, and so the size of an update, has changed."""
    before = written.get("trainer", {}).get("devices") or 1
    now = options.trainer.processes
    if before == now or options.data.tokens_per_update is not None:
        return []
    how = f"for updates of the same size give --trainer.devices {before}, or a larger or smaller batch"
    return [f"the run had {counted(before, 'process')} on a machine, and this start has {now}: {how}"]


def _check_here(source: str, values: Values, given: Set[str]) -> None:
    """Raise InputError if a file names something to download that the command line has not given."""
    for name in {"data.corpus", "model.init_from"} & values.keys() - given:
        value = values[name]
        if value is not None and not is_local(value):
            what = f"{name} {shown(value)} is not on this machine"
            how = f"nothing that a file names is fetched: give it yourself, --{name} ..., if you trust it"
            raise InputError(f"{source}: {what}, and {how}")


def _of_weights(weights: StoredModel, given: Values, context: int, minutes: float | None) -> Values:
    """Return defaults for tuning weights of this size with this context length.

    With a time limit, a tuning reads as much text as it can train on once, and validates for at most a
    seventh of the time. It trains adapters where memory is too small for all weights.
    """
    config = weights.config
    windows = given.get("data.batch_size", max(1, _TUNING_TOKENS // context))
    shape = Shape(
        vocab_size=config.vocab_size,
        context_length=context,
        emb_dim=config.emb_dim,
        num_layers=config.num_layers,
        batch_size=windows,
    )
    smaller = max(1.0, _GPT2_SMALL / (shape.blocks + shape.table))  # by this factor than GPT-2 small
    steps = round(_TUNING_STEPS * smaller**0.5)
    values: Values = {"model.config.context_length": context, "data.batch_size": windows}
    if minutes is not None:
        machine = time_machine(given.get("trainer.accelerator"), given.get("trainer.precision"))
        most = bytes_to_read(machine, minutes, _LEAST_TUNED, shape)
        batches = held_out_bytes(most) / BYTES_PER_TOKEN / shape.tokens  # of held-out text
        # To score a batch takes a third of a step. With two steps for each, a validation takes a seventh.
        values |= {
            "data.most_bytes": most,
            "trainer.max_time": f"{60 * minutes}s",
            "trainer.val_check_interval": max(steps // _VALIDATIONS, round(2 * batches)),
        }
        if shape.memory() > machine.memory and "model.lora.rank" not in given:
            values["model.lora.rank"] = _ADAPTERS
            what = f"all weights would take {shape.memory() / 1e9:.1f} GB of memory"
            report(f"{what}, and {machine.memory / 1e9:.1f} GB are free: adapters are trained")
    elif not given.keys() & _LIMITS:
        values["trainer.max_steps"] = steps
    is_lora = bool({**values, **given}.get("model.lora.rank"))
    values["model.optimizer.lr"] = _tuning_rate(smaller, is_lora)
    return values


def _tuning_rate(smaller: float, is_lora: bool) -> float:
    """Return the peak learning rate for weights `smaller` times as few as GPT-2 small's: they take more."""
    rate = min(_TUNING_RATE * smaller ** (2 / 3), _MOST_RATE)
    return 10 * rate if is_lora else rate  # adapters start at zero


def _positions(weights: StoredModel, given: Values, minutes: float | None) -> tuple[int, Prepared | None]:
    """Return the positions to tune, and the text if it had to be prepared to know them.

    By default they are as many as the examples need, if the weights have them.
    """
    most = weights.config.context_length
    usual = min(TUNED_CONTEXT, most)
    if asked := given.get("model.config.context_length"):
        return asked, None
    if usual == most or minutes is not None:  # with a time limit, the positions decide how much is read
        return usual, None
    data = _on_weights(_options({**given, "model.config.context_length": usual}), weights).data
    prepared = prepare_named(data.corpus, weights.tokenizer, data.reading)
    return min(most, max(usual, positions_for(prepared.example_lengths()))), prepared


def _on_weights(options: Options, weights: StoredModel) -> Options:
    """Complete the options by what the weights decide; InputError for options that contradict them."""
    if options.data.vocabulary not in (None, "learn"):  # recipes say `learn`, which is for runs from scratch
        raise InputError("--data.vocabulary: weights to start from keep their own, leave it out")
    shape = options.model.config
    own = weights.cropped().config
    config = replace(own.with_dropout_of(shape), context_length=shape.context_length)
    data = replace(options.data, vocabulary=None)
    return replace(options, model=replace(options.model, config=config), data=data)


def _positions_line(before: int, now: int) -> list[str]:
    """Return a line that says how the table of positions is cropped or stretched, if it is."""
    if now > before:
        how = "the weights need some hundred steps to suit it"
        return [f"the weights' table of {before} positions is interpolated to {now}: {how}"]
    if now < before:
        how = f"--model.config.context_length {before} keeps all"
        return [f"of the weights' {before} positions the first {now} are kept: {how}"]
    return []


def _newest(folder: Path) -> Checkpoint:
    """Read a run's newest intact checkpoint, and report newer ones that are broken."""
    for path in checkpoints_of(folder):
        try:
            return _of_a_run(path)
        except LaterFormat:
            raise
        except InputError:
            notice(f"skipped {path}, which is broken")
    raise InputError(f"no checkpoint in {folder} to resume")


def _of_a_run(path: Path) -> Checkpoint:
    checkpoint = read(path)
    if checkpoint.run is None:
        raise InputError(f"{path} is a snapshot, which holds only weights: it cannot be resumed")
    return checkpoint
