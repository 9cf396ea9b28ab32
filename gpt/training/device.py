"""The precision that suits a device."""

from typing import Any

import torch


def default_precision(accelerator: str | Any) -> str:
    """bf16-mixed where bfloat16 matrix products are faster than float32's, else 32-true.

    Args:
        accelerator: the Trainer's option; "auto" takes a GPU if there is one.
    """
    return "bf16-mixed" if _bfloat16_is_fast(accelerator) else "32-true"


def _bfloat16_is_fast(accelerator: str | Any) -> bool:
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if accelerator in ("auto", "cpu"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False
