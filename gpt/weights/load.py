"""From a path to a model and its tokenizer, whatever a run or an export left there."""

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.tokenizer import Tokenizer
from gpt.weights.formats.table import Weights
from gpt.weights.hub import locate
from gpt.weights.pretrained import GPT
from gpt.weights.read import crop, read_weights
from gpt.weights.tensors import load_pickle

RUNS = Path("runs")


def load(path: str | os.PathLike[str] | None = None) -> tuple[GPT, Tokenizer]:
    """The model, on the CPU and in evaluation mode, and its tokenizer.

    Rows that pad the vocabulary past the tokenizer's are left out, so no such id can ever be sampled.

    Args:
        path: a run folder (its best checkpoint is taken), anything that `GPT.from_pretrained` reads, or None
            for the newest run under `runs/`.

    Raises:
        InputError: there is no such thing, or it is not a model with GPT-2's tokens.
    """
    config, weights = _read_cropped(path)
    return GPT.from_weights(config, weights), Tokenizer("gpt2", vocab_size=config.vocab_size)


def start_from(path: str | os.PathLike[str], config: GPTConfig) -> GPT:
    """A model in training mode with the weights at `path`, see `load`.

    Raises:
        InputError: as `load`, or `config` has a longer context than the weights have positions.
    """
    shape, weights = _read_initial(str(path), config.context_length)
    _read_initial.cache_clear()
    return GPT.from_weights(replace(shape, dropout=config.dropout), weights).train()


def config_to_start_from(path: str | os.PathLike[str], config: GPTConfig) -> GPTConfig:
    """The configuration of `start_from`'s model; the weights are kept for it, so that they are read once."""
    return replace(_read_initial(str(path), config.context_length)[0], dropout=config.dropout)


def find(path: str | os.PathLike[str] | None = None) -> Path:
    """The checkpoint file, or the folder with weights, that `path` stands for; see `load`.

    A model of the hub is downloaded.

    Raises:
        InputError: there is none.
    """
    if path is None:
        runs = [file.parent.parent for file in RUNS.glob("*/checkpoints/*.ckpt")]
        if not runs:
            raise InputError(
                f"no checkpoint under {RUNS}/: train a model with 'gpt fit' or name --checkpoint"
            )
        path = max(runs, key=lambda run: run.stat().st_mtime)
    path = locate(path)
    if path.is_file() or (path / "config.json").is_file() or (path / "ckpt.pt").is_file():
        return path
    for name in ("best.ckpt", "last.ckpt"):
        if (path / "checkpoints" / name).is_file():
            return path / "checkpoints" / name
    raise InputError(f"{path} holds neither checkpoints/best.ckpt nor checkpoints/last.ckpt nor config.json")


def _read_cropped(
    path: str | os.PathLike[str] | None, context_length: int | None = None
) -> tuple[GPTConfig, Weights]:
    """Weights without the rows that pad a vocabulary past the tokenizer's."""
    found = read_weights(find(path))
    return crop(found.config, found.weights, vocab_size=Tokenizer().n_vocab, context_length=context_length)


@lru_cache(maxsize=1)
def _read_initial(path: str, context_length: int) -> tuple[GPTConfig, Weights]:
    return _read_cropped(path, context_length)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a checkpoint file that `gpt fit` wrote, tensors on the CPU; no code in it is ever run.

    Raises:
        InputError: the file is missing, broken, or not such a checkpoint.
    """
    if not Path(path).is_file():
        raise InputError(f"no checkpoint at {path}")
    try:
        saved = load_pickle(Path(path))
    except InputError:
        raise InputError(f"{path} is not a checkpoint, or a broken one") from None
    if not isinstance(saved, dict) or "gpt" not in saved or "state_dict" not in saved:
        raise InputError(f"{path} is not a checkpoint written by 'gpt fit'")
    return saved
