"""summary.json and loss.png: how a run ended."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from gpt.files import write_json
from gpt.pictures.runs import loss_curve
from gpt.training.record import Meter


def write_summary(folder: Path, trainer: Trainer, parameters: int, meter: Meter) -> dict[str, Any]:
    """Write loss.png and summary.json, and return the latter; sizes in bytes, times in seconds."""
    loss_curve(folder / "metrics.csv", folder / "loss.png", title=f"Loss of {folder.name}")
    device = trainer.strategy.root_device
    summary = {
        "val_bits_per_byte": meter.last_validation.get("val_bits_per_byte"),
        "val_loss": meter.last_validation.get("val_loss"),
        "train_seconds": round(meter.train_seconds, 2),
        "steps": trainer.global_step,
        "tokens": meter.tokens,
        "tokens_per_second": round(meter.tokens / max(meter.train_seconds, 1e-9)),
        "peak_memory_bytes": _peak_memory_bytes(device),
        "parameters": parameters,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": str(trainer.precision),
    }
    write_json(folder / "summary.json", summary)
    return summary


def _peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process held: on the GPU where it trains on one, else in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0  # the standard library cannot tell
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
