"""Load a model and its tokenizer from a path or a hub name, in any known format."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import StrPath, write_json
from gpt.model import GPT
from gpt.plain import build, is_hub_name
from gpt.progress import notice, notice_once
from gpt.text.template import Template
from gpt.text.tokenizer import SMALLEST_SIZE, Tokenizer
from gpt.weights.checkpoint import Checkpoint, read_model
from gpt.weights.formats import book, hf, nanogpt
from gpt.weights.formats.table import HEADS, Weights, check_complete, on_meta
from gpt.weights.runs import BEST, CHECKPOINTS, RUNS, SUFFIX, checkpoints_of, newest_run, snapshots_of
from gpt.weights.tensors import read_json, read_pickle, read_tensors, write_tensors

Device = Literal["auto", "cpu", "cuda", "mps"]
Accelerator = Literal["auto", "cpu", "cuda", "gpu", "mps"]
"""Where a run computes, by its name in a Trainer; `gpu` is CUDA or MPS."""
Format = Literal["gpt", "hf", "nanogpt", "book"]
_SHORT_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
_GPT2_ROWS = (50257, 50304)  # those of the vocabulary, and nanoGPT's, which are a multiple of 64
_POSITIONS = "position_embedding.weight"
_OTHER_FILES = ("ckpt.pt", "model.pth")
"""The usual names of nanoGPT's and the book's files. In a folder they come before `model.safetensors`."""
_FILES = ["config.json", "model.safetensors", *hf.TOKENIZER_FILES]


@dataclass(frozen=True)
class StoredModel:
    """A model as it is stored, and the format, which for this project's files is `gpt`.

    Raises InputError for weights that are missing, unknown or of another shape.
    """

    format: Format
    config: GPTConfig
    weights: Weights  # by their names in a GPT, without a tied head
    own_tokenizer: Tokenizer | None = None  # None if the weights come without one
    template: Template | None = None  # template of the training's examples, if any

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", check_complete(self.config, self.weights))

    def build(self, kind: "type[PretrainedGPT] | None" = None) -> "PretrainedGPT":
        """Build the model in float32 and in evaluation mode; InputError if memory does not suffice.

        `kind` may be a class derived from `PretrainedGPT`.
        """
        with on_meta():
            model = (kind or PretrainedGPT)(self.config)
        try:
            copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in self.weights.items()}
            model.load_state_dict({"head.weight": copies["token_embedding.weight"], **copies}, assign=True)
        except RuntimeError as error:
            raise InputError(f"the model does not fit into memory: {error}") from None
        return model.eval()

    def num_parameters(self) -> int:
        """Return the number of weights; tied embeddings count once."""
        return sum(tensor.numel() for tensor in self.weights.values())

    @property
    def tokenizer(self) -> Tokenizer:
        """The weights' own tokenizer, or GPT-2's of their size; InputError if they have too few rows."""
        rows = self.config.vocab_size
        if self.own_tokenizer:
            return self.own_tokenizer
        if rows < SMALLEST_SIZE:
            least = f"GPT-2's needs at least {SMALLEST_SIZE} rows"
            raise InputError(f"these weights have no tokenizer of their own, and {rows} rows: {least}")
        return Tokenizer(vocab_size=min(rows, Tokenizer().n_vocab))

    def cropped(self) -> "StoredModel":
        """Drop rows that pad the vocabulary; InputError if the tokenizer has more tokens than rows."""
        rows = self.config.vocab_size
        size = self.own_tokenizer.n_vocab if self.own_tokenizer else min(rows, Tokenizer().n_vocab)
        if size > rows:
            raise InputError(f"the tokenizer has {size} tokens, but the weights have {rows} rows")
        cut = {name: self.weights[name][:size] for name in HEADS if name in self.weights}
        config = replace(self.config, vocab_size=size)
        return replace(self, config=config, weights=self.weights | cut)

    def with_positions(self, context_length: int) -> "StoredModel":
        """Return the weights with `context_length` positions: the first ones, or more, interpolated from all.

        Raises InputError for so many that the attention mask would be larger than the weights.
        """
        config = replace(self.config, context_length=context_length)
        weights = {**self.weights, _POSITIONS: _resized(self.weights[_POSITIONS], context_length)}
        return replace(self, config=config, weights=weights)


class PretrainedGPT(GPT):
    """A GPT that can read its weights from any known format and write them. It is `gpt.GPT` for users."""

    def save_pretrained(self, path: StrPath) -> None:
        """Write `model.safetensors` and `config.json` into the folder `path`; a tied head is not repeated."""
        write_tensors(Path(path), check_complete(self.config, self.state_dict()))
        write_json(Path(path) / "config.json", {"model_type": "minimal-gpt", **self.config.to_dict()})

    @classmethod
    def from_pretrained(cls, path: StrPath) -> "PretrainedGPT":
        """Load the model that `find` finds at a path, in any known format, on the CPU in evaluation mode.

        The formats are a folder of `save_pretrained`, a run of `gpt fit` or its checkpoint, a Hugging Face
        folder of GPT-2, a nanoGPT checkpoint, and a state dict of the book's GPTModel. Raises InputError for
        any other.
        """
        return read_weights(path).build(cls)

    @classmethod
    def from_weights(cls, config: GPTConfig, weights: Weights) -> "PretrainedGPT":
        """Build a GPT in evaluation mode with these weights; a tied head may be left out.

        Raises the errors of `StoredModel` and of its `build`.
        """
        return StoredModel("gpt", config, weights).build(cls)


def load_with_template(
    path: StrPath | None = None, device: Device = "cpu"
) -> tuple[PretrainedGPT, Tokenizer, Template | None]:
    """Like `load`, and return the template too, if the model was trained on examples."""
    stored = read_weights(path).cropped()
    return stored.build().to(choose_device(device)), stored.tokenizer, stored.template


def load(path: StrPath | None = None, device: Device = "cpu") -> tuple[PretrainedGPT, Tokenizer]:
    """Load the model that `find` finds at `path` and its tokenizer; InputError if that fails.

    The model has no rows that pad the vocabulary, and is in evaluation mode.
    """
    return load_with_template(path, device)[:2]


def start_from(weights: StoredModel, config: GPTConfig) -> PretrainedGPT:
    """Build a model in training mode from weights, with the context length and dropout of `config`."""
    stored = weights.cropped().with_positions(config.context_length)
    # Initialise as a run from scratch does: it uses as many random numbers, so dropout's stay the same.
    model = PretrainedGPT(stored.config.with_dropout_of(config))
    model.load_state_dict(stored.weights, strict=False)  # a tied head is missing
    return model


def choose_device(name: Accelerator = "auto") -> torch.device:
    """Return the device of that name; InputError if it is not available.

    `auto` takes a CUDA GPU, else Apple's MPS, else the CPU. `gpu` takes either kind of GPU, as in a Trainer.
    """
    gpus = []
    if torch.cuda.is_available():
        gpus.append("cuda")
    if torch.backends.mps.is_available():
        gpus.append("mps")
    usable = [*gpus, "cpu"]
    if name == "auto" or (name == "gpu" and gpus):
        return torch.device(usable[0])
    if name not in usable:
        raise InputError(f"there is no device {name} here, expected auto or one of {', '.join(usable)}")
    return torch.device(name)


def find(path: StrPath | None = None) -> Path:
    """Find the file or folder of the weights that `path` names; InputError if there is none.

    Without a path it is the newest run. A run's folder stands for its best checkpoint, else its newest. Names
    of GPT-2's sizes, such as `gpt2`, and `OWNER/NAME` are downloaded once into the hub's cache, unless such a
    path, or a folder OWNER, exists here. `NAME@REVISION` names a commit, a branch or a tag of the hub.
    """
    if path is None:
        path = newest_run()
        if path is None:
            raise InputError(f"no checkpoint under {RUNS}/: train with 'gpt fit' or name --checkpoint")
        notice(f"taking the newest run, {path}")
    name = str(path).replace(os.sep, "/")
    path = Path(path)
    hub_name, _, revision = name.partition("@")
    is_short = hub_name in _SHORT_NAMES
    if not path.exists() and (is_short or (is_hub_name(hub_name) and path.parent != RUNS)):
        folder = cached(hub_name) if is_short and not revision else None
        return folder or _download(hub_name, revision or None)
    if path.name == "config.yaml":
        raise InputError(f"{path} holds the options of a run: give the run's folder, {path.parent}")
    meant = next(_meant(path), None)
    if meant is None:
        expected = "expected a run (gpt runs lists them), a file, gpt2 or the hub's OWNER/NAME"
        raise InputError(f"no checkpoint at {path}, {expected}")
    return meant


def _meant(path: Path) -> Iterator[Path]:
    """Yield all that a path may mean, what comes first before the others. A file means itself."""
    if path.is_file():
        yield path
    yield from (path / name for name in _OTHER_FILES if (path / name).is_file())
    if (path / "config.json").is_file():  # model.safetensors belongs to it
        yield path
    best = path / CHECKPOINTS / BEST
    if best.is_file():
        yield best
    yield from checkpoints_of(path, broken_first=False)
    yield from (file for _, _, file in reversed(snapshots_of(path)))


def cached(name: str) -> Path | None:
    """Return the cached folder of a hub's model; None if it was never downloaded. Nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(name, "model.safetensors")
    return Path(file).parent if isinstance(file, str) else None


@cache
def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    print(f"looking for {name} on the Hugging Face hub", file=sys.stderr)
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        wanted = f"{name}@{revision}" if revision else name
        raise InputError(f"no file or folder {wanted}, and not available on the hub: {reason}") from None
    if revision is None:  # the cache names a folder by its commit
        notice(f"taking the newest {name}; {name}@{folder.name} takes the same weights at any time")
    return folder


def read_weights(path: StrPath | None) -> StoredModel:
    """Read the weights that `find` finds at `path`; InputError if they cannot be used."""
    path = find(path)
    if path.name == "model.safetensors" and path.with_name("config.json").is_file():
        path = path.parent
    checkpoint = read_model(path) if path.suffix == SUFFIX else None
    try:
        return _from_checkpoint(checkpoint) if checkpoint else _read_other(path)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _resized(table: Tensor, length: int) -> Tensor:
    """Return a table of positions (N, D) with `length` rows: the first ones, or more, linearly interpolated.

    A stretched table keeps its first and last row. It learns longer texts faster than one with copied rows.
    """
    if length <= table.shape[0]:
        return table[:length]
    columns = table.float().T[None]  # (1, D, N)
    return interpolate(columns, size=length, mode="linear", align_corners=True)[0].T.contiguous()


def _from_checkpoint(checkpoint: Checkpoint) -> StoredModel:
    part = checkpoint.model
    own = Tokenizer.from_dict(part.tokenizer) if part.tokenizer else None
    template = build(Template, part.template) if part.template else None
    return StoredModel("gpt", checkpoint.config, checkpoint.all_weights(), own, template)


def _read_other(path: Path) -> StoredModel:
    """Read the weights of another program, or of `save_pretrained`, and the tokenizer's files beside them."""
    stored = _read_folder(path) if path.is_dir() else _read_file(path)
    folder = path if path.is_dir() else path.parent
    stored = replace(stored, template=hf.read_template(folder))
    if file := hf.tokenizer_file(folder):
        weights, own = hf.with_tokens(stored.weights, file)
        return replace(stored, weights=weights, own_tokenizer=own)
    size = stored.config.vocab_size
    # Those of this program without a tokenizer have GPT-2's tokens. With too few tokens no text is written.
    if stored.format != "gpt" and size >= SMALLEST_SIZE and size not in _GPT2_ROWS:
        notice_once(
            f"{path} has no tokenizer: its {size:,} tokens are taken for the first of GPT-2's. If they "
            "are others, put their tokenizer.json beside the weights"
        )
    return stored


def _read_folder(folder: Path) -> StoredModel:
    values = read_json(folder / "config.json")
    state = read_tensors(folder)
    if values.get("model_type") != "minimal-gpt":
        return StoredModel("hf", *hf.read(values, state))
    del values["model_type"]
    return StoredModel("gpt", GPTConfig.from_dict(values), state)


def _read_file(path: Path) -> StoredModel:
    saved, state = read_pickle(path)
    if "model_args" in saved:
        return StoredModel("nanogpt", *nanogpt.read(saved, state))
    beside = path.with_name("config.json")
    return StoredModel("book", *book.read(state, read_json(beside) if beside.is_file() else {}))
