"""A checkpoint of `gpt fit`: a safetensors file with JSON in its header, and which of a run's is the newest.

Its tensors are the weights by a GPT's names, `optimizer/WEIGHT/STATE`, and `random/PROCESS/DEVICE` with
`random/PROCESS/losses`. The
header's metadata has three texts: `model`, what the weights alone need to be used; `run`, where the run
stands, which a snapshot lacks; `checksum`, of both texts and all tensors. Nothing in it is code, and any
program that reads safetensors opens it.
"""

import errno
import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import InputError, check_least
from gpt.files import StrPath
from gpt.plain import as_dict, build, parse_json
from gpt.weights.adapters import AdapterPart, with_base
from gpt.weights.formats.table import Weights, check_complete
from gpt.weights.temperature import with_temperature

RUNS = Path("runs")
SUFFIX = ".safetensors"
Snapshot = tuple[int, float, Path]  # a step, the loss of its batch in nats per token, the weights after it
_MOST_HEADER = 64 << 20  # bytes
_MOST_RUN = 1 << 20  # bytes
_BROKEN = (0, 0, 0.0)  # in place of session, save and time, where a header cannot be read


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """What the weights alone need to be used."""

    config: dict[str, Any]
    """The fields of `GPTConfig`."""
    tokenizer: dict[str, Any] | None
    """For `Tokenizer.from_dict`."""
    template: dict[str, Any] | None
    """The fields of a `Template`: of the examples, if the run was trained on any."""
    adapters: dict[str, Any] | None
    """The fields of `AdapterPart`, of a run that trains adapters: its checkpoints hold them alone."""
    temperature: float = 1.0
    """What the logits are divided by wherever the weights are used; training goes on from the weights as
    they are. A validation of these very weights found it; 1 where none did, and in files without it."""

    def __post_init__(self) -> None:
        check_least(1, temperature=self.temperature)


@dataclass(kw_only=True)
class RunPart:
    """Where a run stands between two updates: with the tensors, all that it needs to continue exactly.

    The parts of a run count in this one object, so that saving is writing it, and resuming is reading it.
    """

    options: dict[str, Any] = field(default_factory=dict)
    """All of the run, as `gpt.run.options.to_dict` gives them."""
    step: int = 0
    """Updates made."""
    total: int = 0
    """Updates to make, as it was planned after this one; 0 for a run that has not begun."""
    place: int = 0
    """Windows of the text that all processes together have taken."""
    session: int = 0
    """Counts the starts and resumes of the run."""
    save: int = 0
    """Counts the checkpoints."""
    saved_at: float = 0.0
    """Seconds since 1970; tells which of several runs is the newest."""
    corpus: str = ""
    """A hash of the prepared text."""
    scale: dict[str, Any] | None = None
    """The state of float16's loss scale."""
    seconds: float = 0.0
    """Of training and validation."""
    seconds_per_step: float | None = None
    """Of late, in a run limited by time."""
    best_loss: float | None = None
    """The lowest validation loss so far, in nats per token."""
    best_step: int = 0
    """The update after which it was the lowest."""
    stalled: int = 0
    """Validations since."""
    validation: dict[str, float | None] = field(default_factory=dict)
    """The figures of the last one; None for one that is not finite."""
    batches: int = 0
    """Of each process, since the last row of metrics.csv."""
    csv: int = 0
    """Bytes of metrics.csv."""
    samples: int = 0
    """Bytes of samples.txt."""

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in as_dict(self).items() if isinstance(value, int | float)}
        numbers.pop("best_loss", None)
        check_least(0, **numbers)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A file's contents. The tensors are mapped from the file, not in memory."""

    path: Path
    tensors: Weights
    model: ModelPart
    run: RunPart | None

    @property
    def weights(self) -> Weights:
        """Those of the model, of a run with adapters those of the adapters, as training left them."""
        return {name: tensor for name, tensor in self.tensors.items() if "/" not in name}

    @property
    def adapters(self) -> AdapterPart | None:
        """What it says of its adapters; None where it has none."""
        return build(AdapterPart, self.model.adapters) if self.model.adapters else None

    @property
    def config(self) -> GPTConfig:
        """The shape of the model."""
        return GPTConfig.from_dict(self.model.config)

    def all_weights(self) -> Weights:
        """All weights of the model for use: the logits are divided by the temperature.

        Those of a run with adapters are merged with the base in its folder.
        """
        whole = with_base(self.path, self.config, self.adapters, self.weights)
        return with_temperature(check_complete(self.config, whole), self.model.temperature)


def read(path: StrPath) -> Checkpoint:
    """The checkpoint or snapshot at `path`; an InputError if it is none, or not as it was written."""
    path = Path(path)
    texts = _metadata(path)
    try:
        tensors = load_file(path)
        if texts.get("checksum") != _checksum(tensors, texts):
            raise InputError("its contents are not those of its checksum")
        model = build(ModelPart, {"temperature": 1.0, **parse_json(texts["model"])})
        run = _run_part(texts["run"]) if "run" in texts else None
    except OSError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise InputError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    return Checkpoint(path=path, tensors=tensors, model=model, run=run)


def write(file: IO[bytes], tensors: Mapping[str, Tensor], model: ModelPart, run: RunPart | None) -> None:
    """Write a checkpoint, or without a `run` a snapshot, to an empty file with a name."""
    texts = {"format": "pt", "model": _text(model)}
    if run is not None:
        texts["run"] = _text(run)
    weights = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    texts["checksum"] = _checksum(weights, texts)
    try:
        save_file(weights, file.name, metadata=texts)
    except SafetensorError as error:  # of the disk: what is written has been checked
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number)) from None


def checkpoints_of(run: Path, *, broken_first: bool = True) -> list[Path]:
    """The checkpoints of a run, the newest first, those whose header cannot be read before or after them."""
    orders = _orders(run)
    # Two names of one file: by name, so that the order does not depend on the folder's; `last` before `best`.
    found = sorted(orders, key=lambda path: (orders[path], path.name), reverse=True)
    return sorted(found, key=lambda path: orders[path] != _BROKEN) if broken_first else found


def newest_run() -> Path | None:
    """The run in `runs/` with the newest checkpoint, by the clocks that wrote them."""
    found = [(order[2], run) for run in RUNS.glob("*") for order in _orders(run).values()]
    return max(found)[1] if found else None


def next_session(run: Path) -> int:
    """A number above that of every session in the run's checkpoints."""
    return 1 + max((order[0] for order in _orders(run).values()), default=0)


def snapshots_of(run: Path) -> list[Snapshot]:
    """The snapshots of a run in the order of their steps."""
    name = re.compile(r"step-(\d{1,15})-loss-(\d+\.\d+|nan|inf)\.safetensors")
    found = [(name.fullmatch(path.name), path) for path in run.glob(f"snapshots/*{SUFFIX}") if path.is_file()]
    return sorted((int(match[1]), float(match[2]), path) for match, path in found if match)


def most_crowded(found: list[Snapshot]) -> int:
    """Which of at least three is the closest to its neighbours, in the logarithm of steps; never an end."""
    gaps = [after[0] / before[0] for before, after in zip(found, found[2:], strict=False)]
    return 1 + gaps.index(min(gaps))


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run in which a checkpoint or a snapshot is; None for one moved elsewhere."""
    inside = checkpoint.suffix == SUFFIX and checkpoint.parent.name in ("checkpoints", "snapshots")
    return checkpoint.parent.parent if inside else None


def _orders(run: Path) -> dict[Path, tuple[int, int, float]]:
    """Session, save and time of each checkpoint of a run."""
    found = {}
    for path in run.glob(f"checkpoints/*{SUFFIX}"):
        if path.is_file():  # a pipe or a device may never end
            found[path] = _BROKEN
            with suppress(ValueError, OSError):
                part = _run_part(_metadata(path).get("run", ""))
                found[path] = part.session, part.save, part.saved_at
    return found


def _metadata(path: Path) -> dict[str, str]:
    """The texts in a safetensors header of bounded size, which is all that is read."""
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    try:
        if length > _MOST_HEADER:
            raise SafetensorError
        with safe_open(path, "pt") as opened:
            texts: dict[str, str] = opened.metadata() or {}
        if "model" not in texts or len(texts.get("run", "")) > _MOST_RUN:
            raise SafetensorError
    except SafetensorError:
        others = "of another program, give the folder with its config.json"
        raise InputError(f"{path} is no checkpoint of gpt fit, or a broken one; {others}") from None
    return texts


def _run_part(text: str) -> RunPart:
    """The run of a header; its temperature, which older files have, was not yet one of their weights."""
    values = parse_json(text)
    if isinstance(values, dict):
        values.pop("temperature", None)
    return build(RunPart, values)


def _text(part: ModelPart | RunPart) -> str:
    return json.dumps(as_dict(part), allow_nan=False, separators=(",", ":"))


def _checksum(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    """Of names and bytes of all tensors, whose CRC-32 are computed on all cores, and of the texts."""
    names = sorted(tensors)
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(_crc, (tensors[name] for name in names)))
    parts = [texts.get("model"), texts.get("run"), names, sums]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _crc(tensor: Tensor) -> int:
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data)
