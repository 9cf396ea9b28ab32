"""A run's folder, and what is written into it while training goes on.

runs/NAME/config.yaml       every option, resolved
          checkpoints/      best.ckpt, last.ckpt, and the ones before it
          metrics.csv       a row a logging interval or validation
          loss.png          the same as a picture
          samples.txt       a text at each validation
          summary.json      how it ended
"""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from gpt.errors import InputError
from gpt.files import write_json
from gpt.pictures.runs import loss_curve
from gpt.training.record import GrowingText, Meter
from gpt.training.shard import is_sharded
from gpt.weights.load import RUNS


def folder_of(name: str) -> Path:
    """`runs/NAME`.

    Raises:
        InputError: the name is not that of a folder.
    """
    if not name or name.startswith(".") or set(name) & set("/\\"):
        raise InputError(f"expected a plain folder name for --run, got {name!r}")
    return RUNS / name


def new_folder(name: str) -> Path:
    """`runs/NAME`, or the first of `runs/NAME-2`, `runs/NAME-3`, ... that is not there yet.

    Raises:
        InputError: the name is not that of a folder.
    """
    folder, number = folder_of(name), 1
    while folder.exists():
        number += 1
        folder = RUNS / f"{name}-{number}"
    return folder


class ValidateAtEnd(Callback):
    """Has the last step validated too, whatever the interval, so that the best checkpoint can be the last."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask to stop where training stops anyway: Lightning validates before it stops on request."""
        if trainer.global_step >= pl_module.planned_steps:  # type: ignore[operator]
            trainer.should_stop = True


class Samples(Callback):
    """Writes a short text at each validation, to see what the numbers mean."""

    def __init__(self, folder: Path, max_new_tokens: int = 64, temperature: float = 0.8) -> None:
        self.file = GrowingText(folder / "samples.txt")
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.newest = ""

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue an empty document from one seed throughout, so that the texts can be compared."""
        if is_sharded(pl_module.model):  # type: ignore[arg-type]
            return  # no process could run it alone
        from gpt.generation import Sampling, stream

        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        pieces = stream(
            pl_module.model,  # type: ignore[arg-type]
            tokenizer,
            "",
            max_new_tokens=self.max_new_tokens,
            sampling=Sampling(temperature=self.temperature, top_k=50),
            seed=0,
        )
        self.newest = "".join(pieces).strip()
        self.file.text += f"--- step {trainer.global_step}\n{self.newest}\n\n"
        self.file.write()

    def state_dict(self) -> dict[str, Any]:
        """How much of the file is written by now."""
        return {"characters": len(self.file.text)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.file.cut(state_dict["characters"])


def write_summary(folder: Path, trainer: Trainer, parameters: int, meter: Meter) -> dict[str, Any]:
    """Write and return summary.json: how the run ended; sizes in bytes, times in seconds."""
    device = trainer.strategy.root_device
    summary = {
        "val_bits_per_byte": meter.last_validation.get("val_bits_per_byte"),
        "val_loss": meter.last_validation.get("val_loss"),
        "train_seconds": round(meter.train_seconds, 2),
        "steps": trainer.global_step,
        "tokens": meter.tokens,
        "tokens_per_second": round(meter.tokens / max(meter.train_seconds, 1e-9)),
        "peak_memory_bytes": peak_memory_bytes(device),
        "parameters": parameters,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": str(trainer.precision),
    }
    write_json(folder / "summary.json", summary)
    return summary


def draw_loss_curve(folder: Path) -> None:
    """loss.png from metrics.csv."""
    loss_curve(folder / "metrics.csv", folder / "loss.png", title=f"Loss of {folder.name}")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process held: on the GPU where it trains there, else in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0  # the standard library cannot tell
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
