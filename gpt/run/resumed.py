"""Resume a run: find its checkpoint, and join its options with those that are given now."""

from pathlib import Path

from gpt.errors import InputError
from gpt.plain import as_dict, shown
from gpt.progress import counted, notice, report
from gpt.run.arguments import Given, Values, known, options_of, typed
from gpt.run.folder import folder_of_checkpoint
from gpt.run.local import check_local
from gpt.run.options import LIMITS, START_OPTIONS, Options
from gpt.run.origin import Origin
from gpt.text.tokenizer import Tokenizer
from gpt.weights.checkpoint import Checkpoint, LaterFormat, RunPart, read
from gpt.weights.formats.table import check_complete
from gpt.weights.runs import RUNS, checkpoints_of, newest_run

AUTO = "auto"
AUTO_OR_NEW = "auto_or_new"
_WHERE = ("trainer.devices", "trainer.accelerator", "trainer.logger")
"""Options that suit the machine that saved them. They are not taken from a checkpoint."""
_BY_WEIGHTS = (
    *("model.config.", "model.optimizer.name", "model.lora.rank", "model.init_from"),
    "data.vocabulary",
)
"""Options, or beginnings of their names, that the weights of a checkpoint decide."""
_NOT_BY_WEIGHTS = ("model.config.dropout", "model.config.window_dropout")
"""Exceptions from these."""


def place_of(resume: str, run: str | None) -> Path:
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


def newest_in(folder: Path) -> Checkpoint:
    """Read a run's newest intact checkpoint, and report newer ones that are broken."""
    for path in checkpoints_of(folder):
        try:
            return read_resumable(path)
        except LaterFormat:
            raise
        except InputError:
            notice(f"skipped {path}, which is broken")
    raise InputError(f"no checkpoint in {folder} to resume")


def read_resumable(path: Path) -> Checkpoint:
    """Read a checkpoint with the state of its run; InputError for a snapshot, which has none."""
    checkpoint = read(path)
    if checkpoint.run is None:
        what = "is a snapshot, which holds only weights: it can neither be resumed nor validated"
        raise InputError(f"{path} {what}; gpt evaluate scores it on a text")
    return checkpoint


def resumed(command: str, options_given: Given, checkpoint: Checkpoint) -> Origin:
    """Return the origin of a run with a checkpoint, whose options the given ones override."""
    path = checkpoint.path
    run = checkpoint.run or RunPart()
    own = options_given.own
    given = options_given.all
    if "trainer.precision" not in own and given.get("trainer.precision") is None:
        given.pop("trainer.precision", None)  # null in a file: the machine chooses, and it has chosen
    folder = folder_of_checkpoint(path)
    if folder and own.get("run", folder.name) != folder.name:
        raise InputError(f"--run {own['run']} is not the run that is resumed, {folder}: leave --run out")
    written, unknown = known(run.options)
    saved = _saved_options(checkpoint, written)
    if "data.corpus" not in {**saved, **given}:
        raise InputError(f"{path} does not name its text: give it with --data.corpus")
    check_local(str(path), {"data.corpus": saved.get("data.corpus")}, given.keys())
    given, decided = _without_decided(saved, own, given)
    lines = [f"resuming {path}, after step {run.step}", *decided]
    if names := ", ".join((*checkpoint.unknown, *unknown)):
        lines.append(f"ignored what a later version has saved and this one does not know: {names}")
    is_planned = run.planned_seconds is not None  # then its steps were a guess, and `total` is where it ends
    present = {**saved, "trainer.max_steps": run.total} if is_planned else saved
    changed = _changed(present, given)
    lines += [f"changed {name}: {shown(present[name])} -> {shown(given[name])}" for name in changed]
    options = options_of({**_without_replaced(saved, given, is_planned), **given})
    if given.keys() & set(LIMITS):
        run.forget_end()
    if command == "fit":
        report(*lines, *_other_processes(options, written))
    part = checkpoint.model
    tokenizer = Tokenizer.from_dict(part.tokenizer) if part.tokenizer else None
    return Origin(options=options, tokenizer=tokenizer, checkpoint=checkpoint, run=run, folder=folder)


def _saved_options(checkpoint: Checkpoint, written: Values) -> Values:
    """Return the options of a checkpoint, `written` as nested mappings, without those for another machine.

    The weights decide the model's shape. Raises InputError, which names the file, for weights or options that
    cannot be used.
    """
    try:
        check_complete(checkpoint.config, checkpoint.all_weights())
        left_out = {*_WHERE, *START_OPTIONS}  # earlier versions have saved the latter, too
        saved = {name: value for name, value in typed(written).items() if name not in left_out}
        shape = typed({"model": {"config": as_dict(checkpoint.config)}})
        saved = {**saved, **shape, **{name: saved[name] for name in _NOT_BY_WEIGHTS if name in saved}}
        saved["model.lora.rank"] = checkpoint.adapters.rank if checkpoint.adapters else 0
        options_of(saved)
    except (ValueError, TypeError) as error:
        raise InputError(f"{checkpoint.path}: {error}") from None
    return saved


def _without_decided(saved: Values, own: Values, given: Values) -> tuple[Values, list[str]]:
    """Leave out what files give and the weights decide. Return the rest, and a line that names differences.

    A recipe may ask for another size than the text allowed, so the same command has to go on after a kill.
    """
    decided = [name for name in given if name not in own and _is_by_weights(name)]
    rest = {name: value for name, value in given.items() if name not in decided}
    differing = [
        f"{name} {shown(saved[name])}" for name in decided if given[name] != saved.get(name, given[name])
    ]
    return rest, [f"the weights decide, not --config: {', '.join(differing)}"] if differing else []


def _without_replaced(saved: Values, given: Values, is_planned: bool) -> Values:
    """Leave out the saved options that given ones of other names replace.

    A run accumulates batches in one way. A plan's guess of its steps is no limit beside a given one.
    """
    ways = {"data.tokens_per_update", "trainer.accumulate_grad_batches"}
    replaced = set()
    if any(given.get(way) is not None for way in ways):
        replaced |= ways
    if is_planned and given.keys() & set(LIMITS):
        replaced.add("trainer.max_steps")
    return {name: value for name, value in saved.items() if name not in replaced}


def _is_by_weights(name: str) -> bool:
    return name.startswith(_BY_WEIGHTS) and name not in _NOT_BY_WEIGHTS


def _changed(saved: Values, given: Values) -> list[str]:
    """Return the options whose given values are not the saved ones; InputError if the weights fix one."""
    names = given.keys() & saved.keys() - {"run"}
    changed = sorted(name for name in names if given[name] != saved[name])
    for name in changed:
        if _is_by_weights(name):
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
