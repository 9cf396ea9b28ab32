"""Load a model and its tokenizer from a path or a hub name, in any known format."""

import os
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from gpt import model
from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import StrPath, write_json
from gpt.plain import build, is_hub_name
from gpt.progress import notice
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer
from gpt.weights.checkpoint import RUNS, SUFFIX, Checkpoint, checkpoints_of, newest_run, read, snapshots_of
from gpt.weights.formats import book, hf, nanogpt
from gpt.weights.formats.table import Weights, check_complete, on_meta
from gpt.weights.tensors import read_json, read_pickle, read_tensors, write_tensors

Device = Literal["auto", "cpu", "cuda", "mps"]
Format = Literal["gpt", "hf", "nanogpt", "book"]
_SHORT_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
_POSITIONS = "position_embedding.weight"
_FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@dataclass(frozen=True)
class Found:
    """Weights by their names in a GPT, and the format they were stored in; this project's is `gpt`."""

    format: Format
    config: GPTConfig
    weights: Weights
    own_tokenizer: Tokenizer | None = None  # None if the weights come without one
    template: Template | None = None  # template of the training's examples, if any

    @property
    def tokenizer(self) -> Tokenizer:
        """The weights' own tokenizer, or GPT-2's of their size; InputError if they have too few rows."""
        return self.own_tokenizer or Tokenizer(vocab_size=min(self.config.vocab_size, Tokenizer().n_vocab))

    def cropped(self) -> "Found":
        """Drop rows that pad the vocabulary; InputError if the tokenizer has more tokens than rows."""
        rows = self.config.vocab_size
        size = self.own_tokenizer.n_vocab if self.own_tokenizer else min(rows, Tokenizer().n_vocab)
        if size > rows:
            raise InputError(f"the tokenizer has {size} tokens, but the weights have {rows} rows")
        lengths = {"token_embedding.weight": size, "head.weight": size}
        weights = {name: tensor[: lengths.get(name)] for name, tensor in self.weights.items()}
        return replace(self, config=replace(self.config, vocab_size=size), weights=weights)

    def with_positions(self, context_length: int) -> "Found":
        """Return the weights with `context_length` positions: the first ones, or more, interpolated from all.

        Raises InputError for so many that the attention mask would be larger than the weights.
        """
        config = replace(self.config, context_length=context_length)
        weights = {**self.weights, _POSITIONS: _resized(self.weights[_POSITIONS], context_length)}
        return replace(self, config=config, weights=weights)


class GPT(model.GPT):
    """A `gpt.model.GPT` that can read its weights from any known format and write them to a folder."""

    def save_pretrained(self, path: StrPath) -> None:
        """Write `model.safetensors` and `config.json` into the folder `path`; a tied head is not repeated."""
        write_tensors(Path(path), check_complete(self.config, self.state_dict()))
        write_json(Path(path) / "config.json", {"model_type": "minimal-gpt", **self.config.to_dict()})

    @classmethod
    def from_pretrained(cls, path: StrPath) -> "GPT":
        """Load the model that `find` finds at a path, in any known format, on the CPU in evaluation mode.

        The formats are a folder of `save_pretrained`, a run of `gpt fit` or its checkpoint, a Hugging Face
        folder of GPT-2, a nanoGPT checkpoint, and a state dict of the book's GPTModel. Raises InputError for
        any other.
        """
        found = read_weights(path)
        return cls.from_weights(found.config, found.weights)

    @classmethod
    def from_weights(cls, config: GPTConfig, weights: Weights) -> "GPT":
        """Build a GPT in evaluation mode with these weights; a tied head may be left out.

        Raises InputError for weights that are missing, unknown or of another shape, or that do not fit into
        memory.
        """
        weights = check_complete(config, weights)
        with on_meta():
            model = cls(config)
        try:
            copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in weights.items()}
            model.load_state_dict({"head.weight": copies["token_embedding.weight"], **copies}, assign=True)
        except RuntimeError as error:
            raise InputError(f"the model does not fit into memory: {error}") from None
        return model.eval()


def load_with_template(
    path: StrPath | None = None, device: Device = "cpu"
) -> tuple[GPT, Tokenizer, Template | None]:
    """Like `load`, and return the template too, if the model was trained on examples."""
    found = read_weights(path).cropped()
    model = GPT.from_weights(found.config, found.weights).to(choose_device(device))
    return model, found.tokenizer, found.template


def load(path: StrPath | None = None, device: Device = "cpu") -> tuple[GPT, Tokenizer]:
    """Load the model that `find` finds at `path` and its tokenizer; InputError if that fails.

    The model has no rows that pad the vocabulary, and is in evaluation mode.
    """
    return load_with_template(path, device)[:2]


def start_from(weights: Found, config: GPTConfig) -> GPT:
    """Build a model in training mode from weights, with the context length and dropout of `config`."""
    found = weights.cropped().with_positions(config.context_length)
    # Initialise as a run from scratch does: it uses as many random numbers, so dropout's stay the same.
    model = GPT(replace(found.config, dropout=config.dropout))
    model.load_state_dict(found.weights, strict=False)  # only a tied head may be missing
    return model


def choose_device(name: Device = "auto") -> torch.device:
    """Return the device of that name; InputError if it is not available.

    `auto` takes a CUDA GPU, else Apple's MPS, else the CPU. `gpu` takes either kind of GPU, as in a Trainer.
    """
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    usable = [device for device, available in found.items() if available]
    best = ("auto", "gpu")[: len(usable)]  # with only a CPU, `gpu` is not available
    if name not in (*best, *usable):
        raise InputError(f"there is no device {name} here, expected auto or one of {', '.join(usable)}")
    return torch.device(usable[0] if name in best else name)


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
    model, _, revision = name.partition("@")
    if not path.exists() and (model in _SHORT_NAMES or (is_hub_name(model) and path.parent != RUNS)):
        folder = cached(model) if model in _SHORT_NAMES and not revision else None
        return folder or _download(model, revision or None)
    if path.name == "config.yaml":
        raise InputError(f"{path} holds the options of a run: give the run's folder, {path.parent}")
    if path.is_file() or (path / "config.json").is_file() or (path / "ckpt.pt").is_file():
        return path
    best = path / "checkpoints" / f"best{SUFFIX}"
    found = [best] if best.is_file() else checkpoints_of(path, broken_first=False)
    found = found or [file for _, _, file in snapshots_of(path)[::-1]]
    if not found:
        raise InputError(f"no checkpoint at {path}, expected a file, a folder, gpt2 or the hub's OWNER/NAME")
    return found[0]


def cached(name: str) -> Path | None:
    """Return the cached folder of a hub's model; None if it was never downloaded. Nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "model.safetensors")
    return Path(found).parent if isinstance(found, str) else None


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


def read_weights(path: StrPath | None) -> Found:
    """Read the weights that `find` finds at `path`; InputError if they cannot be used."""
    path = find(path)
    if path.name == "model.safetensors" and path.with_name("config.json").is_file():
        path = path.parent
    for name in ("ckpt.pt", "model.pth"):  # usual names in other programs' folders
        if (path / name).is_file():
            path = path / name
    saved = read(path) if path.suffix == SUFFIX else None
    try:
        if saved is not None:
            return _from_checkpoint(saved)
        found = _read_folder(path) if path.is_dir() else _read_file(path)
        folder = path if path.is_dir() else path.parent
        table = folder / "tokenizer.json"
        own = Tokenizer.from_file(table) if table.is_file() else None
        return replace(found, own_tokenizer=own, template=hf.read_template(folder))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (TypeError, AttributeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        # For example a text in place of a number, or a list in place of a mapping.
        raise InputError(f"{path}: its settings are not a GPT-2's") from error


def _resized(table: Tensor, length: int) -> Tensor:
    """Return a table of positions (N, D) with `length` rows: the first ones, or more, linearly interpolated.

    A stretched table keeps its first and last row. It learns longer texts faster than one with copied rows.
    """
    if length <= table.shape[0]:
        return table[:length]
    columns = table.float().T[None]  # (1, D, N)
    return interpolate(columns, size=length, mode="linear", align_corners=True)[0].T.contiguous()


def _from_checkpoint(saved: Checkpoint) -> Found:
    part = saved.model
    own = Tokenizer.from_dict(part.tokenizer) if part.tokenizer else None
    template = build(Template, part.template) if part.template else None
    return Found("gpt", saved.config, saved.all_weights(), own, template)


def _read_folder(folder: Path) -> Found:
    values = read_json(folder / "config.json")
    state = read_tensors(folder)
    if values.get("model_type") != "minimal-gpt":
        return Found("hf", *hf.read(values, state))
    del values["model_type"]
    config = GPTConfig.from_dict(values)
    return Found("gpt", config, check_complete(config, state))


def _read_file(path: Path) -> Found:
    saved, state = read_pickle(path)
    if "model_args" in saved:
        return Found("nanogpt", *nanogpt.read(saved, state))
    beside = path.with_name("config.json")
    return Found("book", *book.read(state, read_json(beside) if beside.is_file() else {}))
