"""From a command line to what it starts: the options, the checkpoint that is resumed, the plan."""

import os
from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpt.config import GPTConfig
from gpt.data.split import held_out_bytes
from gpt.errors import InputError
from gpt.files import shipped
from gpt.plain import as_dict, seconds_of, shown
from gpt.plan.cost import Shape
from gpt.plan.law import Law
from gpt.plan.plan import VALIDATIONS, Plan
from gpt.plan.recommend import BYTES_PER_TOKEN, TUNED_CONTEXT, most_bytes, planner, time_machine
from gpt.progress import report
from gpt.run.arguments import Values, options_of, recipe, scan, typed
from gpt.run.folder import folder_of_checkpoint, folder_to_restart
from gpt.run.options import Options, TrainerOptions
from gpt.weights.checkpoint import RUNS, Checkpoint, RunPart, checkpoints_of, newest_run, read
from gpt.weights.load import Found, read_weights

AUTO_OR_NEW = "auto_or_new"
_MOST_MINUTES = 1_000_000
_CHOSEN_ANEW = ("resume", "ckpt_path", "minutes")  # by each start
_FIXED = ("model.config.", "model.optimizer.name", "model.lora.rank", "model.init_from")  # by the weights
_INTERVAL = "trainer.val_check_interval"
_LIMITS = {"trainer.max_steps", "trainer.max_epochs", "trainer.max_time"}
_UNPLANNED = (
    *("resume", "ckpt_path", "data.tokens_per_update", *sorted(_LIMITS)),
    *(f"trainer.{name}" for name in ("limit_val_batches", "devices", "num_nodes", "strategy")),
    "trainer.accumulate_grad_batches",
)
# What a tuning takes for GPT-2 small, if it is not given; smaller weights take more steps at higher rates.
_GPT2_SMALL = 124e6
_TUNING_RATE = 5e-5
_MOST_RATE = 6e-3
_TUNING_STEPS = 200
_TUNING_TOKENS = 1024  # of a batch: a gigabyte of activations
_LEAST_TUNED = 1 << 16  # bytes of text that a tuning for a time reads
_ADAPTERS = 8  # their rank, where there is no memory for all weights
_PATIENCE = 3  # validations in a row, each worse than the one before, end a tuning for a time


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a command line starts."""

    options: Options
    checkpoint: Checkpoint | None = None
    """The one that is resumed or validated."""
    run: RunPart = field(default_factory=RunPart)
    """Where the run stands."""
    weights: Found | None = None
    """Those that a new run begins with."""
    folder: Path | None = None
    """That of the run, if it has one."""
    notes: tuple[str, ...] = ()
    """What to tell of a run that is resumed."""
    plan: Plan | None = None
    """What --minutes has planned."""
    minutes: float | None = None
    """When the process has to end, after its start."""
    print_config: bool = False


def start(command: str, arguments: list[str]) -> Start:
    """Read the command line, its files and the checkpoint that it names, and plan what --minutes asks for."""
    own, files = scan(arguments, command)
    values = {**files, **own}
    asked = {name: value for name, value in values.items() if value is not None}
    minutes = asked.get("minutes")
    wanted = asked.get("resume", asked.get("ckpt_path"))
    if command == "validate" and wanted is None:
        raise InputError("nothing to validate: give a checkpoint or a run's folder with --ckpt_path")
    others = ", ".join(f"--{name}" for name in _UNPLANNED if name in asked)
    if minutes is not None and others:
        raise InputError(f"--minutes plans a new run of one process to its end: leave {others} out")
    _check_here("--config", files, own.keys())
    if wanted is not None:
        checkpoint, notes = find(wanted, asked.get("run"))
        if checkpoint is not None:
            return _resumed(own, values, checkpoint, notes)
    plan = None
    below = Values()
    time = None
    if minutes is not None:
        time = seconds_of("minutes", minutes) / 60
        if not 0 <= time <= _MOST_MINUTES:
            raise InputError(f"--minutes {minutes}: expected a time, such as 90s, 10m or 8h")
    weights = None
    if "model.init_from" in asked:
        weights = replace(read_weights(asked["model.init_from"]), weights={})  # which the model reads itself
    if time is not None and weights is None:
        plan = _plan(time, asked)
        below = typed(plan.options(Law.load()))
    elif "config" not in own:
        tuning = "lora" if "model.lora.rank" in asked else "finetune"
        below = recipe(tuning if weights else "quick")
    values = {**below, **values}
    if weights is not None:
        values = {**_of_weights(weights.config, values, time), **values}
    steps = own.get("trainer.max_steps") or -1
    if steps > 0 and _INTERVAL not in own:  # a short run has a curve, too
        fifth = steps * values.get("trainer.accumulate_grad_batches", 1) // VALIDATIONS
        usual = values.get(_INTERVAL, TrainerOptions.val_check_interval)
        values[_INTERVAL] = max(1, min(usual, fifth))
    options = _options(values)
    folder = folder_to_restart(options.run) if wanted else None
    shows = "print_config" in own
    return Start(options=options, weights=weights, folder=folder, plan=plan, minutes=time, print_config=shows)


def find(resume: str, run: str | None = None) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The checkpoint to resume from, a line for each newer one that is broken; InputError if none is intact.

    `resume` is a checkpoint, a run's folder, "auto" for the newest intact checkpoint of `run`, by default the
    newest run, or "auto_or_new", which gives None if `run` has no checkpoint.
    """
    if resume not in ("auto", AUTO_OR_NEW):
        return _newest(Path(resume)) if Path(resume).is_dir() else (_of_a_run(Path(resume)), ())
    if resume == AUTO_OR_NEW and run is None:
        raise InputError("--resume auto_or_new needs the name of the run: give it with --run")
    folder = RUNS / run if run is not None else newest_run()
    if folder is None:
        raise InputError(f"no checkpoint under {RUNS}/ to resume: start a run with 'gpt fit'")
    return (None, ()) if resume == AUTO_OR_NEW and not checkpoints_of(folder) else _newest(folder)


def changes(saved: Values, given: Values) -> Values:
    """Each option that is given with another value; InputError for one that the weights depend on."""
    found = {}
    for name in sorted(given.keys() & saved.keys() - {"run", *_CHOSEN_ANEW}):
        if given[name] == saved[name]:
            continue
        if name.startswith(_FIXED) and name != "model.config.dropout":
            what = f"the run that is resumed began with {str(saved[name])[:80]}, on which its weights depend"
            raise InputError(f"--{name} {given[name]}: {what}")
        found[name] = given[name]
    return found


def is_local_text(corpus: str) -> bool:
    """Whether a name that a file gives leads to plain text on this machine, or to a recipe of the package."""
    if (shipped("recipes") / f"{corpus}.yaml").is_file() and corpus.replace("-", "").isalnum():
        return True
    path = Path(corpus)
    return "://" not in corpus and "::" not in corpus and path.exists() and path.suffix != ".yaml"


def _options(values: Values) -> Options:
    """Those of a run, without what each start chooses anew."""
    kept = {name: value for name, value in values.items() if name not in _CHOSEN_ANEW}
    options: Options = options_of(kept)
    return options


def _resumed(own: Values, values: Values, checkpoint: Checkpoint, notes: tuple[str, ...]) -> Start:
    """The options that the checkpoint carries, below those that are given."""
    path = checkpoint.path
    run = checkpoint.run or RunPart()
    folder = folder_of_checkpoint(checkpoint.path)
    if folder and (other := own.get("run", folder.name)) != folder.name:
        raise InputError(f"--run {other} is not the run that is resumed, {folder}: leave --run out")
    try:
        checkpoint.all_weights()  # which are checked
        saved = typed(run.options)
        shape = as_dict(checkpoint.config)
        del shape["dropout"]
        saved |= typed({"model": {"config": shape}})
        saved["model.lora.rank"] = checkpoint.adapters.rank if checkpoint.adapters else 0
        before = _options(saved)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: {error}") from None
    _check_here(str(path), {"data.corpus": before.data.corpus}, values.keys())
    options = _options({**saved, **values})
    changed = changes(saved, values)
    if changed.keys() & _LIMITS:
        run.total = 0
    return Start(
        options=options,
        checkpoint=checkpoint,
        run=run,
        folder=folder,
        notes=(
            f"resuming {path}, after step {run.step}",
            *notes,
            *(f"changed {name}: {shown(saved[name])} -> {shown(value)}" for name, value in changed.items()),
        ),
        print_config="print_config" in own,
    )


def _check_here(source: str, values: Values, given: Set[str]) -> None:
    """An InputError where a file names what would have to be fetched, and nobody has given another."""
    for name in {"data.corpus", "model.init_from"} & values.keys() - given:
        value = values[name]
        here = is_local_text(value) if name == "data.corpus" else value is None or Path(value).exists()
        if not here:
            what = f"{name} {shown(value)} is not on this machine"
            how = f"nothing that a file names is fetched: give it yourself, --{name} ..., if you trust it"
            raise InputError(f"{source}: {what}, and {how}")


def _of_weights(config: GPTConfig, values: Values, minutes: float | None) -> Values:
    """What suits weights of this size, for options that nothing else decides: small ones learn faster."""
    weights = config.emb_dim * (12 * config.num_layers * config.emb_dim + config.vocab_size)
    smaller = max(1.0, _GPT2_SMALL / weights)
    steps = round(_TUNING_STEPS * smaller**0.5)
    rate = min(_TUNING_RATE * smaller ** (2 / 3), _MOST_RATE)
    context = values.get("model.config.context_length", min(TUNED_CONTEXT, config.context_length))
    found = {
        "model.config.context_length": context,
        "data.batch_size": max(1, _TUNING_TOKENS // context),
        _INTERVAL: steps // VALIDATIONS,
    }
    if minutes is not None:
        found |= _for_a_time(config, {**found, **values}, minutes)
        found["trainer.max_time"] = f"{60 * minutes}s"
        if values.get("data.val_fraction") != 0:
            found["early_stopping"] = _PATIENCE
    elif not _LIMITS & values.keys():
        found["trainer.max_steps"] = steps
    adapters = {**found, **values}.get("model.lora.rank")
    found["model.optimizer.lr"] = 10 * rate if adapters else rate  # adapters begin at zero
    return found


def _for_a_time(config: GPTConfig, values: Values, minutes: float) -> Values:
    """What speed and memory decide of a tuning for a time.

    As much text is read as can be trained on once, and a seventh of the time at most goes into validation.
    """
    cost = time_machine(values)
    sizes = (
        values["model.config.context_length"],
        config.emb_dim,
        config.num_layers,
        values["data.batch_size"],
    )
    shape = Shape(config.vocab_size, *sizes)
    most = most_bytes(cost, minutes, shape, _LEAST_TUNED)
    batches = held_out_bytes(most) / BYTES_PER_TOKEN / shape.tokens  # to validate, each a third of a step
    every = max(values[_INTERVAL], round(2 * batches))
    found = {"data.most_bytes": most, _INTERVAL: every}
    if shape.memory() > cost.memory and "model.lora.rank" not in values:
        found["model.lora.rank"] = _ADAPTERS
        what = f"all weights would take {shape.memory() / 1e9:.1f} GB of memory"
        report(f"{what}, and {cost.memory / 1e9:.1f} GB are free: adapters are trained")
    return found


def _plan(time: float, asked: Values) -> Plan:
    if asked.get("trainer.deterministic"):  # before cuBLAS multiplies anything
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    plan = planner(asked)(time)
    report(str(plan))
    return plan


def _newest(folder: Path) -> tuple[Checkpoint, tuple[str, ...]]:
    notes: list[str] = []
    for path in checkpoints_of(folder):
        try:
            return _of_a_run(path), tuple(notes)
        except InputError:
            notes.append(f"skipped {path}, which is broken")
    raise InputError(", ".join([f"no checkpoint in {folder} to resume", *notes]))


def _of_a_run(path: Path) -> Checkpoint:
    checkpoint = read(path)
    if checkpoint.run is None:
        raise InputError(f"{path} is a snapshot of the weights alone: it cannot be resumed")
    return checkpoint
