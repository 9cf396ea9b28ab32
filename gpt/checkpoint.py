"""From a path to a model and its tokenizer, whatever a run or an export left there."""

import os
import pickle
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.model import GPT
from gpt.tokenizer import Tokenizer

RUNS = Path("runs")


def load(path: str | os.PathLike[str] | None = None) -> tuple[GPT, Tokenizer]:
    """The model, on the CPU and in evaluation mode, and its tokenizer.

    Args:
        path: a checkpoint file, a run folder (its best checkpoint is taken), a folder written by
            `GPT.save_pretrained`, or None for the newest run under `runs/`.

    Raises:
        InputError: there is no such thing, or it is not a checkpoint of this program.
    """
    path = find(path)
    if path.is_dir():
        model = GPT.from_pretrained(path)
    else:
        saved = read(path)
        prefix = "model."
        weights = {name.removeprefix(prefix): tensor for name, tensor in saved["state_dict"].items()}
        model = GPT.from_weights(GPTConfig.from_dict(saved["gpt"]["config"]), weights)
    return model, Tokenizer("gpt2", vocab_size=model.config.vocab_size)


def find(path: str | os.PathLike[str] | None = None) -> Path:
    """The checkpoint file, or the folder with weights, that `path` stands for; see `load`.

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
    path = Path(path)
    if path.is_file() or (path / "config.json").is_file():
        return path
    if not path.exists():
        raise InputError(f"no checkpoint at {path}, expected a .ckpt file, a run or an exported folder")
    for name in ("best.ckpt", "last.ckpt"):
        if (path / "checkpoints" / name).is_file():
            return path / "checkpoints" / name
    raise InputError(f"{path} holds neither checkpoints/best.ckpt nor checkpoints/last.ckpt nor config.json")


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a checkpoint file that `gpt fit` wrote, tensors on the CPU; no code in it is ever run.

    Raises:
        InputError: the file is missing, broken, or not such a checkpoint.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"no checkpoint at {path}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, BadZipFile, ValueError, KeyError):
        raise InputError(f"{path} is not a checkpoint, or a broken one") from None
    if not isinstance(saved, dict) or "gpt" not in saved or "state_dict" not in saved:
        raise InputError(f"{path} is not a checkpoint written by 'gpt fit'")
    return saved
