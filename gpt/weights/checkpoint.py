"""Checkpoints of `gpt fit`: safetensors files with JSON in the header. Snapshots are those without a `run`.

The tensors, and who reads them:

- the weights by their names in a GPT: `gpt/weights/load.py`, for every command; `gpt/run/fit.py`, to resume
- `optimizer/WEIGHT/STATE`: `load_optimizer` of `gpt/run/checkpoint.py`, to resume
- `random/PROCESS/DEVICE`, the state of a process's random generator, and `random/PROCESS/losses`, its sum of
  losses since the last row of metrics.csv: `on_train_start` of `gpt/run/loop.py`, to resume

The header's metadata has these texts, besides safetensors' own `format`:

- `version`, the number of this format
- `model`, a `ModelPart`, all that is needed to use the weights: `gpt/weights/load.py`, for every command;
  `gpt/run/resumed.py` and `gpt/run/fit.py`, to resume and to tell the temperature
- `run`, a `RunPart`, the state of the run, which a snapshot lacks: `gpt/run/resumed.py`, to resume;
  `gpt/weights/runs.py`, to find the newest checkpoint; `gpt/run/listing.py`, `gpt/serve/start.py` and
  `gpt/share/export.py`, to show figures of the run
- `sums`, the CRC-32 of each tensor: `read_model` checks the weights by it and reads no optimizer's state
- `checksum`, of these texts and the tensors' names: `read` and `read_model`, before anything is used.
  `parts_of`, with which the newest checkpoint is found and figures are shown, does not check it

The file contains no code, and any program that reads safetensors can open it.

Files of earlier versions can be read: fields that they lack take their defaults. Unknown fields of later
versions are ignored and reported. A later version that adds a field which must not be ignored increases
`version`.
"""

import errno
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import InputError, check_least
from gpt.files import StrPath
from gpt.plain import LARGEST, JsonObject, as_dict, build, build_known, parse_json
from gpt.weights.adapters import AdapterPart, with_base
from gpt.weights.formats.table import Weights

VERSION = 2  # version of the format; files without a number have version 1
Order = tuple[int, int, float]  # session, save and time: no two checkpoints of a run share all three
_MOST_HEADER = 64 << 20  # bytes, the largest header that is read
_MOST_RUN = 1 << 20  # bytes, the largest text `run`
_MOST_COUNTED = 1 << 48  # largest count in a file, so that sums stay exact in JSON
_LONGEST_VERSION = 9  # digits
_RETIRED = {"temperature"}  # fields of earlier versions that are dropped without a notice
_TYPES = {  # tensor types by their names in safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class LaterFormat(InputError):
    """The error for a checkpoint of a later version of this program, which is not broken."""


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """The description of a model: all that is needed, besides the weights, to use it."""

    config: JsonObject
    """The fields of `GPTConfig`."""
    tokenizer: JsonObject | None
    """The tokenizer, for `Tokenizer.from_dict`."""
    template: JsonObject | None
    """The fields of the examples' `Template`; None if the run was not trained on examples."""
    adapters: JsonObject | None
    """The fields of `AdapterPart`, if the run trains adapters: then its checkpoints hold only these."""
    temperature: float = 1.0
    """The logits are divided by this number wherever the weights are used; training continues from undivided
    weights. A validation of these very weights found it; it is 1 without one, and in files that lack it."""

    def __post_init__(self) -> None:
        check_least(1, temperature=self.temperature)


@dataclass(kw_only=True)
class RunPart:
    """The state of a run between two updates. With the tensors, it is all that an exact resume needs.

    All parts of a run keep their counts in this one object: saving a run writes it, resuming reads it.
    """

    options: JsonObject = field(default_factory=dict)
    """All options of the run, as nested mappings."""
    step: int = 0
    """Updates made so far."""
    total: int = 0
    """Updates to make in all, as planned at this step; 0 before the run has begun."""
    place: int = 0
    """Windows of the text that all processes together have used."""
    session: int = 0
    """Number of starts and resumes of the run."""
    save: int = 0
    """Number of checkpoints saved."""
    saved_at: float = 0.0
    """When it was saved, in seconds since 1970 (UTC); tells which of several runs is the newest."""
    corpus: str = ""
    """Hash of the prepared text."""
    scale: JsonObject | None = None
    """State of float16's loss scaler."""
    seconds: float = 0.0
    """Seconds of training and validation."""
    seconds_per_step: float | None = None
    """Recent seconds per update in a run with a time limit; for the last fifth, those of an early update."""
    planned_seconds: float | None = None
    """Seconds of training and validation that --minutes allows, over all resumes; None without a plan. The
    `trainer.max_steps` of such a run are a guess."""
    is_part: bool = False
    """Whether `total` ends only a part of these seconds: see `gpt.run.limits.next_part`."""
    best_loss: float | None = None
    """Lowest validation loss so far, in nats per token; with temperature scaling, the scaled loss."""
    best_step: int = 0
    """The update with the lowest validation loss."""
    stalled: int = 0
    """Validations since `best_step`, none of which was lower."""
    validation: dict[str, float | None] = field(default_factory=dict)
    """The metrics of the last validation; None stands for a number that is not finite, or above 2**53."""
    batches: int = 0
    """Batches of each process since the last row of metrics.csv."""
    csv: int = 0
    """Size of metrics.csv in bytes."""
    samples: int = 0
    """Size of samples.txt in bytes."""
    csv_sum: int = 0
    """CRC-32 of these bytes of metrics.csv; earlier versions have none."""
    samples_sum: int = 0
    """CRC-32 of these bytes of samples.txt."""

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in as_dict(self).items() if isinstance(value, int | float)}
        numbers.pop("best_loss", None)
        check_least(0, **numbers)
        for name in ("step", "place", "session", "save", "best_step", "stalled", "batches", "csv", "samples"):
            if numbers[name] > _MOST_COUNTED:
                raise InputError(f"{name} is {numbers[name]}, more than a run can count")

    @property
    def known_total(self) -> int | None:
        """Updates to make in all; None while a run with a limit of time does not know its speed."""
        return None if self.total >= LARGEST else self.total

    def forget_end(self) -> None:
        """Forget where the run was to end: the options decide it again."""
        self.total = 0
        self.planned_seconds = None
        self.is_part = False

    def begin_best_again(self) -> None:
        """Forget the best validation so far: the next one is the best."""
        self.best_loss = None
        self.best_step = 0
        self.stalled = 0

    @property
    def text(self) -> str:
        """The name of the corpus; of a path only the last part. Empty if the options have none."""
        data = self.options.get("data")
        corpus = data.get("corpus") if isinstance(data, dict) else None
        return Path(corpus).name if isinstance(corpus, str) else ""

    @property
    def order(self) -> Order:
        """The checkpoint's order, unique within its run; the newest checkpoint has the largest."""
        return self.session, self.save, self.saved_at


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The contents of a checkpoint. The tensors are memory-mapped from the file."""

    path: Path
    tensors: Weights
    model: ModelPart
    run: RunPart | None
    unknown: tuple[str, ...] = ()
    """Fields of its header that this version does not know and ignores."""

    @property
    def weights(self) -> Weights:
        """The trained weights (with adapters, only the adapters), without the temperature."""
        return {name: tensor for name, tensor in self.tensors.items() if not _is_state(name)}

    @property
    def adapters(self) -> AdapterPart | None:
        """The metadata of its adapters; None if it has none."""
        return build(AdapterPart, self.model.adapters) if self.model.adapters else None

    @property
    def config(self) -> GPTConfig:
        """The model's shape."""
        return GPTConfig.from_dict(self.model.config)

    def all_weights(self) -> Weights:
        """Return all weights of the model for use, with the logits divided by the temperature.

        Adapters are merged with the base in the run's folder. Whether a weight is missing is not checked.
        """
        weights = self.weights
        if self.adapters:
            weights = with_base(self.path, self.config, self.adapters, weights)
        if self.model.temperature == 1:
            return weights
        # The logits are linear in the last norm's tensors, so the result is an ordinary GPT.
        last_norm = [name for name in weights if name.startswith("final_norm.")]
        return weights | {name: weights[name] / self.model.temperature for name in last_norm}


def read(path: StrPath) -> Checkpoint:
    """Read the checkpoint or snapshot at `path`; InputError if it is none, or if any part is damaged."""
    return _read(Path(path), with_state=True)


def read_model(path: StrPath) -> Checkpoint:
    """Read the checkpoint at `path` as if it was a snapshot: without the state for resuming.

    The optimizer's state is twice as large as the weights; it is neither read nor checked.
    """
    return replace(_read(Path(path), with_state=False), run=None)


def _read(path: Path, with_state: bool) -> Checkpoint:
    with _opened(path) as (name, texts):
        tensors = _intact_tensors(name, texts, with_state)
        model, run, unknown = _parts(texts)
    return Checkpoint(path=path, tensors=tensors, model=model, run=run, unknown=unknown)


def _intact_tensors(file_name: str, texts: Mapping[str, str], with_state: bool) -> Weights:
    """Map all tensors, or only the weights, into memory; InputError unless they have their checksums."""
    with safe_open(file_name, "pt") as file:
        names = sorted(file.keys())
        # Files of earlier versions have no `sums`, so all tensors are needed to know the checksum.
        needed = [name for name in names if with_state or "sums" not in texts or not _is_state(name)]
        tensors = {name: file.get_tensor(name) for name in needed}
    actual = _sums(tensors)
    expected = dict(zip(names, parse_json(texts["sums"]), strict=True)) if "sums" in texts else actual
    is_intact = all(actual[name] == expected[name] for name in needed)
    if not is_intact or texts.get("checksum") != _checksum(texts, expected):
        raise InputError("its contents are not those of its checksum")
    return {name: tensor for name, tensor in tensors.items() if with_state or not _is_state(name)}


def write(file: IO[bytes], tensors: Mapping[str, Tensor], model: ModelPart, run: RunPart | None) -> None:
    """Write a checkpoint, or without a `run` a snapshot, to an empty file that has a name.

    The header is read back, so that what is written can be read. Raises InputError for numbers out of range.
    """
    texts = {"format": "pt", "version": str(VERSION), "model": _text(model)}
    if run is not None:
        texts["run"] = _text(run)
    weights = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    sums = _sums(weights)
    texts["sums"] = json.dumps(list(sums.values()), separators=(",", ":"))
    texts["checksum"] = _checksum(texts, sums)
    header: dict[str, object] = {"__metadata__": texts}
    largest_first = sorted(weights.items(), key=lambda item: (-item[1].element_size(), item[0]))
    end = 0
    for name, tensor in largest_first:
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    _parts(texts)
    # safetensors' own writer would make and rename a file of its own, without a flush to the disk.
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in largest_first:
        file.write(_bytes(tensor))
    file.flush()
    name = _name_of(file.fileno(), Path(file.name))
    if _metadata(Path(file.name), name) != texts:
        raise OSError(errno.EIO, os.strerror(errno.EIO), file.name)


def parts_of(path: Path) -> tuple[ModelPart, RunPart | None]:
    """Read the header of a checkpoint or snapshot; InputError for a file that is neither, or damaged there.

    The error is a LaterFormat for a file of a later version.
    """
    with _opened(path) as (_, texts):
        model, run, _ = _parts(texts)
    return model, run


@contextmanager
def _opened(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a name by which the file now at `path` can be reopened if it is replaced, and its header's texts.

    Raises InputError, which names the file, for whatever its contents raise.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise InputError(f"no checkpoint at {path}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # reading a pipe or a device may never end
            raise InputError(f"no checkpoint at {path}")
        name = _name_of(descriptor, path)
        texts = _metadata(path, name)
        try:
            yield name, texts
        except OSError:
            raise
        except Exception as error:  # a damaged file can raise anything
            raise InputError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    finally:
        os.close(descriptor)


def _name_of(descriptor: int, path: Path) -> str:
    """Return a name of an open file that stays valid if it is moved; without such names, the path."""
    name = f"/dev/fd/{descriptor}"
    return name if os.path.exists(name) else str(path)  # Windows cannot replace open files


def _metadata(path: Path, name: str) -> dict[str, str]:
    """Read only the header of the file `name`, which has to be of bounded size; return its texts.

    `path` names the file in error messages.
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
    # Python refuses to convert thousands of digits.
    if version.isdecimal() and (len(version) > _LONGEST_VERSION or int(version) > VERSION):
        later = f"was written by a later version of this program, in its format {version:.20}"
        raise LaterFormat(f"{path} {later}; this one reads those up to {VERSION}: update it")
    return texts


def _parts(texts: Mapping[str, str]) -> tuple[ModelPart, RunPart | None, tuple[str, ...]]:
    """Parse the texts of a header; also return the names of unknown fields."""
    model, unknown = build_known(ModelPart, parse_json(texts["model"]))
    if "run" not in texts:
        return model, None, unknown
    run, others = build_known(RunPart, parse_json(texts["run"]))
    return model, run, (*unknown, *(name for name in others if name not in _RETIRED))


def _text(part: ModelPart | RunPart) -> str:
    return json.dumps(as_dict(part), allow_nan=False, separators=(",", ":"))


def _is_state(name: str) -> bool:
    """Whether a tensor is part of the state for resuming, and none of the weights."""
    return "/" in name


def _checksum(texts: Mapping[str, str], sums: Mapping[str, int]) -> str:
    """Return a checksum of a header: of its texts, and of all tensors' names and CRC-32."""
    names = sorted(sums)
    parts = [texts.get("model"), texts.get("run"), names, [sums[name] for name in names]]
    if "version" in texts:
        parts.append(texts["version"])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the CRC-32 of each tensor, in the order of the names. All cores compute them."""
    names = sorted(tensors)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(zlib.crc32, (_bytes(tensors[name]) for name in names)), strict=True))


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor without copying them."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
