"""From a path to a model and its tokenizer, whatever a run or an export left there."""

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.tokenizer import Tokenizer
from gpt.weights.checkpoint import RUNS, checkpoints_of, newest_run
from gpt.weights.hub import locate
from gpt.weights.pretrained import GPT
from gpt.weights.read import Found, crop, read_weights


def load(path: str | os.PathLike[str] | None = None) -> tuple[GPT, Tokenizer]:
    """The model, on the CPU and in evaluation mode, and its tokenizer.

    Rows that pad the vocabulary past the tokenizer's are left out, so no such id can ever be sampled.

    Args:
        path: a run folder (its best checkpoint is taken, else its newest), anything that
            `GPT.from_pretrained` reads, or None for the run under `runs/` that was started or resumed last.

    Raises:
        InputError: there is none, or it is not a model with GPT-2's tokens.
    """
    found = _read_cropped(path)
    return GPT.from_weights(found.config, found.weights), found.tokenizer


def start_from(path: str | os.PathLike[str], config: GPTConfig) -> GPT:
    """A model in training mode with the weights at `path`, see `load`.

    Raises:
        InputError: as `load`, or `config` has a longer context than the weights have positions.
    """
    found = _read_initial(str(path), config.context_length)
    _read_initial.cache_clear()
    loaded = GPT.from_weights(replace(found.config, dropout=config.dropout), found.weights)
    model = GPT(loaded.config)  # takes random numbers as a run from scratch does, so dropout's stay the same
    model.load_state_dict(loaded.state_dict())
    return model


def read_to_start_from(path: str | os.PathLike[str], config: GPTConfig) -> Found:
    """What `start_from` starts from, with its configuration; kept, so that it is read once."""
    found = _read_initial(str(path), config.context_length)
    return replace(found, config=replace(found.config, dropout=config.dropout))


def find(path: str | os.PathLike[str] | None = None) -> Path:
    """The checkpoint file, or the folder with weights, that `path` stands for; see `load`.

    A model of the hub is downloaded.

    Raises:
        InputError: there is none.
    """
    if path is None:
        path = newest_run()
        if path is None:
            raise InputError(
                f"no checkpoint under {RUNS}/: train a model with 'gpt fit' or name --checkpoint"
            )
    path = locate(path)
    if path.is_file() or (path / "config.json").is_file() or (path / "ckpt.pt").is_file():
        return path
    best = path / "checkpoints" / "best.ckpt"
    if best.is_file():
        return best
    if newest := checkpoints_of(path, broken_first=False):
        return newest[0]
    raise InputError(f"{path} holds neither checkpoints/best.ckpt nor another checkpoint nor config.json")


def _read_cropped(path: str | os.PathLike[str] | None, context_length: int | None = None) -> Found:
    """Weights without the rows that pad a vocabulary past the tokenizer's."""
    found = read_weights(find(path))
    config, weights = crop(
        found.config, found.weights, vocab_size=found.vocab_size, context_length=context_length
    )
    return replace(found, config=config, weights=weights)


@lru_cache(maxsize=1)
def _read_initial(path: str, context_length: int) -> Found:
    return _read_cropped(path, context_length)
