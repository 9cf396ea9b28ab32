"""From a command line to what it starts: the options, the checkpoint that is resumed, the plan."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gpt.errors import InputError
from gpt.files import shipped
from gpt.plain import parse_yaml, shown
from gpt.plan.command import PLANNED_AROUND, planner
from gpt.plan.law import Law
from gpt.plan.plan import Plan
from gpt.run.arguments import Given, Texts, as_texts, recipe_file, scan, typed
from gpt.run.folder import folder_of_checkpoint
from gpt.run.options import Options, flat, from_flat, to_dict
from gpt.training.output import report
from gpt.weights.checkpoint import RUNS, Checkpoint, checkpoints_of, newest_run, read
from gpt.weights.formats.table import check_complete

AUTO_OR_NEW = "auto_or_new"
_CHOSEN_ANEW = ("resume", "ckpt_path", "minutes")  # by each start
_FIXED = ("model.config.", "model.optimizer.name", "model.lora.rank")  # what the saved tensors depend on
_NOT_COMPARED = (*_CHOSEN_ANEW, "run", "snapshot_megabytes", "model.init_from")
_UNPLANNED = (
    *("resume", "ckpt_path", "model.init_from", "data.tokens_per_update"),
    *(f"trainer.{name}" for name in ("max_steps", "max_epochs", "max_time", "limit_val_batches")),
    *(f"trainer.{name}" for name in ("devices", "num_nodes", "strategy", "accumulate_grad_batches")),
)


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a command line starts."""

    options: Options
    checkpoint: Checkpoint | None = None
    """The one that is resumed or validated."""
    before: Options | None = None
    """The options that it carries."""
    skipped: tuple[Path, ...] = ()
    """Newer checkpoints, which are broken."""
    plan: Plan | None = None
    """What --minutes has planned."""
    print_config: bool = False

    @property
    def step(self) -> int:
        """Updates that are made already."""
        return self.checkpoint.run.step if self.checkpoint and self.checkpoint.run else 0

    def lines(self) -> Iterator[str]:
        """What to tell of a run that is resumed."""
        if self.checkpoint and self.before:
            yield f"resuming {self.checkpoint.path}, after step {self.step}"
            yield from (f"skipped {path}, which is broken" for path in self.skipped)
            yield from (f"changed {change}" for change in changes(self.before, self.options))


def start(command: str, arguments: list[str]) -> Start:
    """Read the command line, its files and the checkpoint that it names, and plan what --minutes asks for."""
    given = scan(arguments, command)
    wanted = given.texts.get("ckpt_path")
    if command == "fit":
        wanted = given.texts.get("resume", wanted)
    elif wanted is None:
        raise InputError("nothing to validate: give a checkpoint or a run's folder with --ckpt_path")
    elif "minutes" in given.texts:
        raise InputError(f"--minutes {given.texts['minutes']} plans a training: it is for gpt fit")
    planned = given.texts.get("minutes", "null") != "null"
    if planned:
        _check_unplanned(given)
    for name in ("data.corpus", "model.init_from"):  # a file may name what is here, and fetch nothing
        if name in given.texts and name not in given.own and not _is_here(name, given.texts[name]):
            raise InputError(
                f"{name} {shown(given.texts[name])} is not on this machine, and nothing that a file names is "
                f"fetched: give it yourself, --{name} ..."
            )
    checkpoint: Checkpoint | None = None
    skipped: tuple[Path, ...] = ()
    if wanted not in (None, "null"):
        checkpoint, skipped = find(wanted, given.texts.get("run"))
    if checkpoint is not None:
        return _resumed(given, checkpoint, skipped)
    plan, below = None, {}
    if planned:
        plan = _plan(given)
        below = as_texts(plan.options(Law.load()))
    elif not given.recipe:
        below = as_texts(parse_yaml(recipe_file(_recipe(given))))
    options = from_flat(typed({**below, **given.texts}))
    return Start(options=options, plan=plan, print_config=given.print_config)


def find(resume: str, run: str | None = None) -> tuple[Checkpoint | None, tuple[Path, ...]]:
    """The checkpoint to resume from and newer ones that are broken; InputError if there is none intact.

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


def changes(before: Options, now: Options) -> list[str]:
    """The options that differ, as `name: old -> new`; InputError for one that the weights depend on."""
    old, new = dict(flat(to_dict(before))), dict(flat(to_dict(now)))
    found = []
    for name in sorted(old.keys() - set(_NOT_COMPARED)):
        if old[name] == new[name]:
            continue
        masters = name == "trainer.precision" and "bf16-true" in (old[name], new[name])
        if masters or (name.startswith(_FIXED) and name != "model.config.dropout"):
            raise InputError(f"{name} is {old[name]} in the checkpoint and cannot become {new[name]}")
        found.append(f"{name}: {old[name]} -> {new[name]}".replace("\n", "\\n"))
    return found


def _resumed(given: Given, checkpoint: Checkpoint, skipped: tuple[Path, ...]) -> Start:
    """The options that the checkpoint carries, below those that are given."""
    assert checkpoint.run is not None
    path, own = checkpoint.path, given.own
    folder = folder_of_checkpoint(path)
    if folder and (other := own.get("run", folder.name)) != folder.name:
        raise InputError(f"--run {other} is not the run that is resumed, {folder}: leave --run out")
    try:
        saved = as_texts(checkpoint.run.options)
        before = from_flat(typed(saved))
        if replace(checkpoint.config, dropout=before.model.config.dropout) != before.model.config:
            raise InputError("its settings are not those of its options")
        check_complete(checkpoint.config, checkpoint.all_weights())
        rank = checkpoint.adapters.rank if checkpoint.adapters else 0
        if rank != before.model.lora.rank:
            raise InputError(f"it has adapters of rank {rank}, its options {before.model.lora.rank}")
    except (InputError, TypeError, AttributeError, LookupError, ValueError) as error:
        raise InputError(f"{path}: {error}") from None
    began = before.model.init_from
    if (asked := own.get("model.init_from", began)) != began:  # one command may start and resume a run
        raise InputError(
            f"--model.init_from {asked}: the run that is resumed began from {began}: leave it out"
        )
    if "data.corpus" not in given.texts and not is_local_text(before.data.corpus):
        raise InputError(
            f"{path}: its text {shown(before.data.corpus)} is no local file or folder, and nothing that a "
            "file names is fetched. If you trust it, give it yourself: --data.corpus ..."
        )
    texts = {**saved, **dict.fromkeys(_CHOSEN_ANEW, "null"), **given.texts}
    options = from_flat(typed(texts))
    if options.model.lora.rank != rank:
        raise InputError(f"{path} has adapters of rank {rank}: give --model.lora.rank {rank}")
    changes(before, options)  # refuses those that the weights do not allow
    return Start(
        options=options,
        checkpoint=checkpoint,
        before=before,
        skipped=skipped,
        print_config=given.print_config,
    )


def is_local_text(corpus: str) -> bool:
    """Whether a name that a file gives leads to plain text on this machine, or to a recipe of the package."""
    if (shipped("recipes") / f"{corpus}.yaml").is_file() and corpus.replace("-", "").isalnum():
        return True
    path = Path(corpus)
    return "://" not in corpus and "::" not in corpus and path.exists() and path.suffix != ".yaml"


def _is_here(name: str, text: str) -> bool:
    return text == "null" or (is_local_text(text) if name == "data.corpus" else Path(text).exists())


def _recipe(given: Given) -> str:
    if given.texts.get("model.init_from", "null") == "null":
        return "quick"
    return "lora" if "model.lora.rank" in given.texts else "finetune"


def _check_unplanned(given: Given) -> None:
    asked = {name for name, text in given.texts.items() if text != "null"}
    if others := ", ".join(f"--{name}" for name in _UNPLANNED if name in asked):
        raise InputError(f"--minutes plans a new run of one process to its end: leave {others} out")


def _plan(given: Given) -> Plan:
    around: Texts = {
        name: text for name, text in given.texts.items() if name in PLANNED_AROUND and text != "null"
    }
    minutes = typed({"minutes": given.texts["minutes"]})["minutes"]
    if given.texts.get("trainer.deterministic") == "true":  # before cuBLAS multiplies anything
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    plan = planner(around)(minutes)
    report(str(plan))
    return plan


def _newest(folder: Path) -> tuple[Checkpoint, tuple[Path, ...]]:
    broken: list[Path] = []
    for path in checkpoints_of(folder):
        try:
            return _of_a_run(path), tuple(broken)
        except InputError:
            broken.append(path)
    why = f", these are broken: {', '.join(file.name for file in broken)}" if broken else ""
    raise InputError(f"no checkpoint in {folder} to resume{why}")


def _of_a_run(path: Path) -> Checkpoint:
    checkpoint = read(path)
    if checkpoint.run is None:
        raise InputError(f"{path} is a snapshot of the weights alone: it cannot be resumed")
    return checkpoint
