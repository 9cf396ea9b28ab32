"""What a checkpoint of `gpt fit` holds, and which checkpoint is the newest.

To store something new, add it here, and save and restore it in `gpt/run/save.py` (the run), `resume.py`
(the processes) or `module.py` (the model).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import StrPath
from gpt.weights.adapters import AdapterPart, base_folder, with_base
from gpt.weights.formats.table import Weights, check_complete
from gpt.weights.tensors import load_pickle, strip_prefixes

RUNS = Path("runs")
Snapshot = tuple[int, float, Path]  # a step, the loss of its batch in nats per token, the weights after it


class ModelPart(TypedDict):
    """What `LanguageModel` adds, so that the file alone is enough to use its weights."""

    config: dict[str, Any]  # the fields of `GPTConfig`
    tokenizer: dict[str, Any]  # for `Tokenizer.from_dict`; older files lack it: theirs is GPT-2's
    bytes_per_token: float  # of the text trained on: far fewer on a text that the tokenizer does not suit
    template: dict[str, str] | None  # for `Template.from_dict`: of the examples, if it was trained on any
    skipped: int  # updates that were skipped because their loss or gradient was not finite


class RunPart(TypedDict):
    """What the `Checkpoints` callback adds."""

    options: str  # all of the run, as YAML: read with `gpt.run.saved_options.plain_options` alone
    validated: bool  # whether a validation that was due after this step is part of the checkpoint
    session: int  # counts starts and resumes over all runs in the folder `runs/`
    save: int  # counts the checkpoints written in this session
    corpus: str  # a hash of the prepared text, so that a resumed run notices another one
    saved_at: float  # seconds since 1970; orders only checkpoints from before there were sessions


class Checkpoint(TypedDict):
    """The file: a dictionary of tensors and plain values, written by `torch.save`."""

    state_dict: dict[str, Tensor]  # the weights, each name with the prefix `model.`
    optimizer_states: list[dict[str, Any]]
    lr_schedulers: list[dict[str, Any]]
    global_step: int  # updates so far
    loops: dict[str, Any]  # Lightning's counters, and the windows that the data loader has given out
    callbacks: dict[str, Any]  # the meter's counts, the lengths of metrics.csv and samples.txt, the best loss
    gpt: ModelPart
    adapters: AdapterPart  # only of a run that trains low-rank adapters: `state_dict` has them alone
    run: RunPart
    # Of each process `random`, the states of its generators (`random_state` in `gpt.run.resume`), and
    # `loss_sum`, the losses since the last row of metrics.csv.
    processes: list[dict[str, Any]]
    step: dict[str, int]  # what one update took: `batches` of one process, `windows` of all together


def read(path: StrPath, *, checksums: bool = True) -> Checkpoint:
    """A checkpoint of `gpt fit`; without `checksums` its tensors are not read until they are used."""
    if not Path(path).is_file():
        raise InputError(f"no checkpoint at {path}")
    try:
        saved = load_pickle(Path(path), checksums=checksums)
    except InputError:
        raise InputError(f"{path} is not a checkpoint, or a broken one") from None
    if not isinstance(saved, dict) or not isinstance(saved.get("gpt"), dict) or "state_dict" not in saved:
        raise InputError(f"{path} is not a checkpoint written by 'gpt fit'")
    step = saved.get("global_step", 0)
    if not isinstance(step, int) or step < 0:
        raise InputError(f"{path} is damaged: its global_step is not a number of updates")
    return saved  # type: ignore[return-value]  # older files lack some of the keys


def unpack(path: StrPath, saved: Mapping[str, Any]) -> tuple[GPTConfig, Weights]:
    """The shape and all weights of the checkpoint at `path`; wrong types raise any error."""
    config, state = GPTConfig.from_dict(saved["gpt"]["config"]), strip_prefixes(saved["state_dict"], "model.")
    return config, with_base(path, config, saved.get("adapters"), state)


def check_shape(path: StrPath, config: GPTConfig, rank: int = 0) -> Path | None:
    """Check that a checkpoint fits `config` and adapters of `rank`; return the folder of its base, if any."""
    saved = read(path, checksums=False)
    try:
        stored, weights = unpack(path, saved)
        if replace(stored, dropout=config.dropout) != config:
            raise InputError("its settings are not those of its options")
        check_complete(config, weights)
    except (InputError, TypeError, AttributeError, LookupError, ValueError) as error:
        raise InputError(f"{path}: {error}") from None
    if (found := saved["adapters"]["rank"] if saved.get("adapters") else 0) != rank:
        raise InputError(f"{path} has adapters of rank {found}: give --model.lora.rank {found}")
    return base_folder(path) if rank else None


def checkpoints_of(run: Path, *, broken_first: bool = True) -> list[Path]:
    """The checkpoints of a run, the newest first, those that cannot be read before or after them."""
    broken = float("inf") if broken_first else 0.0
    return sorted(_files(run), key=lambda file: _order(file, broken), reverse=True)


def newest_run() -> Path | None:
    """The run in `runs/` that was started or resumed last, of those that have a checkpoint."""
    found = [(_order(file), run) for run in RUNS.glob("*") for file in _files(run)]
    return max(found)[1] if found else None


def next_session(run: Path) -> int:
    """A number above the session of every checkpoint of this run and of all runs in `runs/`."""
    files = [file for folder in {run, *RUNS.glob("*")} for file in _files(folder)]
    return 1 + int(max((_order(file)[0] for file in files), default=0))


def snapshots_of(run: Path) -> list[Snapshot]:
    """The snapshots of a run in the order of their steps."""
    name = re.compile(r"step-(\d{1,15})-loss-(\d+\.\d+|nan|inf)\.ckpt")
    found = [(name.fullmatch(path.name), path) for path in run.glob("snapshots/*.ckpt")]
    return sorted((int(match[1]), float(match[2]), path) for match, path in found if match)


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run in which a checkpoint or a snapshot is; None for one moved elsewhere."""
    inside = checkpoint.suffix == ".ckpt" and checkpoint.parent.name in ("checkpoints", "snapshots")
    return checkpoint.parent.parent if inside else None


def _files(run: Path) -> list[Path]:
    return [*run.glob("checkpoints/*.ckpt"), *run.glob("hpc_ckpt_*.ckpt")]  # the latter are SLURM's


def _order(path: Path, broken: float = 0.0) -> tuple[float, float, float]:
    """Session, save and time as stored; `broken` in place of the session for a broken file."""
    try:
        run: RunPart = load_pickle(path, checksums=False)["run"]
        return float(run.get("session", 0)), float(run.get("save", 0)), float(run["saved_at"])
    except Exception:  # a broken file can fail in any way
        return broken, -1.0, 0.0
