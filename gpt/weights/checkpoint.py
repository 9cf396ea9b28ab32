"""A checkpoint of `gpt fit`: a safetensors file with JSON in its header, and which of a run's is the newest.

Its tensors are the weights by a GPT's names, `optimizer/WEIGHT/STATE`, and `random/PROCESS/DEVICE` with
`random/PROCESS/losses`. The
header's metadata has four texts: `version`, the number of this format; `model`, what the weights alone need
to be used; `run`, where the run stands, which a snapshot lacks; `checksum`, of these texts and all tensors.
Nothing in it is code, and any program that reads safetensors opens it.

What earlier versions wrote can be read: a field that they did not know takes its default. A field that this
version does not know is ignored, and named; what must not be ignored takes a higher `version`.
"""

import errno
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import InputError, check_least
from gpt.files import StrPath
from gpt.plain import as_dict, build, build_known, parse_json
from gpt.weights.adapters import AdapterPart, with_base
from gpt.weights.formats.table import Weights, check_complete
from gpt.weights.temperature import with_temperature

RUNS = Path("runs")
SUFFIX = ".safetensors"
VERSION = 2  # of the format; files from before there was a number are of version 1
Snapshot = tuple[int, float, Path]  # a step, the loss of its batch in nats per token, the weights after it
Order = tuple[int, int, float]  # session, save and time of a checkpoint: no two of a run share them
_MOST_HEADER = 64 << 20  # bytes
_MOST_RUN = 1 << 20  # bytes
_MOST_COUNTED = 1 << 48  # by a run: what it adds stays below the largest whole number in JSON
_BROKEN = (0, 0, 0.0)  # the order of a checkpoint whose header cannot be read
_RETIRED = {"temperature"}  # fields of a run in earlier versions, which nothing needs any more
_TYPES = {  # of tensors, by their names in safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
    """Of late, in a run limited by time; in the last fifth as if it were before."""
    best_loss: float | None = None
    """The lowest validation loss so far, in nats per token: where the run scales its temperature, scaled."""
    best_step: int = 0
    """The update after which it was the lowest."""
    stalled: int = 0
    """Validations since, none of which was lower."""
    validation: dict[str, float | None] = field(default_factory=dict)
    """The figures of the last one; None for one that is not finite."""
    batches: int = 0
    """Of each process, since the last row of metrics.csv."""
    csv: int = 0
    """Bytes of metrics.csv."""
    samples: int = 0
    """Bytes of samples.txt."""
    csv_sum: int = 0
    """The CRC-32 of these bytes of metrics.csv; earlier versions have none."""
    samples_sum: int = 0
    """The same of samples.txt."""

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in as_dict(self).items() if isinstance(value, int | float)}
        numbers.pop("best_loss", None)
        check_least(0, **numbers)
        for name in ("step", "place", "session", "save", "best_step", "stalled", "batches", "csv", "samples"):
            if numbers[name] > _MOST_COUNTED:
                raise InputError(f"{name} is {numbers[name]}, more than a run can count")

    @property
    def order(self) -> Order:
        """What tells it from all others of the run, the newest of which is the largest."""
        return self.session, self.save, self.saved_at


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A file's contents. The tensors are mapped from the file, not in memory."""

    path: Path
    tensors: Weights
    model: ModelPart
    run: RunPart | None
    unknown: tuple[str, ...] = ()
    """Fields of its header that this version does not know, and ignores."""

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
    with _opened(path) as name:
        texts = _metadata(path, name)
        try:
            tensors = load_file(name)
            if texts.get("checksum") != _checksum(tensors, texts):
                raise InputError("its contents are not those of its checksum")
            model, run, unknown = _parts(texts)
        except OSError:
            raise
        except Exception as error:  # a damaged file can raise anything
            raise InputError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    return Checkpoint(path=path, tensors=tensors, model=model, run=run, unknown=unknown)


def write(file: IO[bytes], tensors: Mapping[str, Tensor], model: ModelPart, run: RunPart | None) -> None:
    """Write a checkpoint, or without a `run` a snapshot, to an empty file with a name.

    What is written can be read: its header is read back. An InputError for numbers that no reader takes.
    """
    texts = {"format": "pt", "version": str(VERSION), "model": _text(model)}
    if run is not None:
        texts["run"] = _text(run)
    weights = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    texts["checksum"] = _checksum(weights, texts)
    header: dict[str, object] = {"__metadata__": texts}
    largest_first = sorted(weights.items(), key=lambda item: (-item[1].element_size(), item[0]))
    end = 0
    for name, tensor in largest_first:
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # numbers are aligned
    _parts(texts)
    # safetensors' own writer makes a file of its own, which nobody would flush to the disk, and renames it.
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in largest_first:
        file.write(_bytes(tensor))
    file.flush()
    name = _name_of(file.fileno(), Path(file.name))
    if _metadata(Path(file.name), name) != texts:
        raise OSError(errno.EIO, os.strerror(errno.EIO), file.name)


def checkpoints_of(run: Path, *, broken_first: bool = True) -> list[Path]:
    """The checkpoints of a run, the newest first, those whose header cannot be read before or after them."""
    orders = _orders(run)
    # Two names of one file: by name, so that the order does not depend on the folder's; `last` before `best`.
    found = sorted(orders, key=lambda path: (orders[path], path.name), reverse=True)
    return sorted(found, key=lambda path: orders[path] != _BROKEN) if broken_first else found


def newest_text(run: Path) -> str:
    """The hash of the training tokens of a run's newest checkpoint; "" where there is none."""
    for path in checkpoints_of(run, broken_first=False):
        with suppress(ValueError, OSError):
            if run_part := parts_of(path)[1]:
                return run_part.corpus
    return ""


def newest_run() -> Path | None:
    """The run in `runs/` with the newest checkpoint, by the clocks that wrote them."""
    found = [(order[2], run) for run in RUNS.glob("*") for order in _orders(run).values()]
    return max(found)[1] if found else None


def order_of(path: Path) -> Order:
    """The order of a checkpoint, by its header alone; an InputError for what is none."""
    _, run = parts_of(path)
    if run is None:
        raise InputError(f"{path} is a snapshot of the weights alone")
    return run.order


def parts_of(path: Path) -> tuple[ModelPart, RunPart | None]:
    """What the header of a checkpoint or a snapshot says; an InputError for a file that is neither."""
    with _opened(path) as name:
        model, run, _ = _parts(_metadata(path, name))
    return model, run


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


def _orders(run: Path) -> dict[Path, Order]:
    """Session, save and time of each checkpoint of a run."""
    found = {}
    for path in run.glob(f"checkpoints/*{SUFFIX}"):
        if path.is_file():
            found[path] = _BROKEN
            with suppress(ValueError, OSError):
                found[path] = order_of(path)
    return found


@contextmanager
def _opened(path: Path) -> Iterator[str]:
    """A name of the file that is at `path` now, under which it can be opened again though it is replaced."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise InputError(f"no checkpoint at {path}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe or a device may never end
            raise InputError(f"no checkpoint at {path}")
        yield _name_of(descriptor, path)
    finally:
        os.close(descriptor)


def _name_of(descriptor: int, path: Path) -> str:
    """A name of an open file, at whatever path it is meanwhile; where the system has none, the path."""
    name = f"/dev/fd/{descriptor}"
    return name if os.path.exists(name) else str(path)  # Windows replaces no open file


def _metadata(path: Path, name: str) -> dict[str, str]:
    """The texts in a safetensors header of bounded size, which is all that is read of the file of this name.

    `path` is for an error's line.
    """
    with open(name, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    try:
        if length > _MOST_HEADER:
            raise SafetensorError
        with safe_open(name, "pt") as opened:
            texts: dict[str, str] = opened.metadata() or {}
        if "model" not in texts or len(texts.get("run", "")) > _MOST_RUN:
            raise SafetensorError
    except SafetensorError:
        others = "of another program, give the folder with its config.json"
        raise InputError(f"{path} is no checkpoint of gpt fit, or a broken one; {others}") from None
    version = texts.get("version", "1")
    if version.isdecimal() and int(version) > VERSION:
        later = f"was written by a later version of this program, in its format {version}"
        raise InputError(f"{path} {later}; this one reads those up to {VERSION}: update it")
    return texts


def _parts(texts: Mapping[str, str]) -> tuple[ModelPart, RunPart | None, tuple[str, ...]]:
    """What the texts of a header say, and the fields that are unknown."""
    model, unknown = build_known(ModelPart, parse_json(texts["model"]))
    if "run" not in texts:
        return model, None, unknown
    run, others = build_known(RunPart, parse_json(texts["run"]))
    return model, run, (*unknown, *(name for name in others if name not in _RETIRED))


def _text(part: ModelPart | RunPart) -> str:
    return json.dumps(as_dict(part), allow_nan=False, separators=(",", ":"))


def _checksum(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    """Of names and bytes of all tensors, whose CRC-32 are computed on all cores, and of the texts."""
    names = sorted(tensors)
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(_crc, (tensors[name] for name in names)))
    parts = [texts.get("model"), texts.get("run"), names, sums]
    parts += [texts["version"]] if "version" in texts else []
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor))


def _bytes(tensor: Tensor) -> Any:
    """Those of a contiguous tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
