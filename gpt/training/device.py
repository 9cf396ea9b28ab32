"""What suits a device: precision, and TF32."""

from typing import Any

import torch


def default_precision(accelerator: str | Any) -> str:
    """bf16-mixed where bfloat16 matrix products are fast, 16-mixed on older GPUs, else 32-true.

    Args:
        accelerator: the Trainer's option; "auto" takes a GPU if there is one.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
    if accelerator == "auto" and torch.backends.mps.is_available():
        return "32-true"
    cpu_is_fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16-mixed" if accelerator in ("auto", "cpu") and cpu_is_fast else "32-true"


def allow_tf32() -> None:
    """Let NVIDIA GPUs multiply float32 matrices in TF32: several times faster, with 10 bits of mantissa."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
