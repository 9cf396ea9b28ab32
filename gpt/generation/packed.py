"""Linear layers for decoding on a CPU, packed in the order in which the kernels read them.

Decoding is memory-bandwidth bound: bfloat16 halves the bytes of float32, and int8 halves them again. Only
this file uses private operators of PyTorch (tried with 2.11 and 2.13): `torch._weight_int8pack_mm`, and of
oneDNN `_reorder_linear_weight` and `_linear_pointwise`, without which `for_decoding` keeps plain layers.

Shapes: ... any leading dimensions, M rows, I in_features, O out_features.
"""

import functools

import torch
from torch import Tensor, nn

from gpt.errors import InputError


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs and multiplies matrices of this type on this processor: it is tried once.

    `torch.ops.mkldnn._is_mkldnn_bf16_supported()` does not tell: in PyTorch 2.13 it is true on a processor
    with AVX2 only, where packing raises.
    """
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), 2)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(2, 16, dtype=dtype), packed, None, "none", [], "")
    except (RuntimeError, AttributeError):  # no kernel for the type, or no oneDNN in this build
        return False
    return True


class PackedLinear(nn.Module):
    """An `nn.Linear` in oneDNN's layout. A row's result does not depend on the other rows.

    The weights are rounded to `dtype`. The products are computed in it where the processor can, and in
    float32 where it cannot, which is faster there than PyTorch's emulation.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = dtype if can_pack(dtype) else torch.float32
        self.weight = linear.weight.detach().to(dtype).contiguous()  # (O, I), which the compiled step reads
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.to(self.dtype), 2)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), in the type of the input."""
        rows = x.reshape(-1, self.in_features).to(self.dtype)  # (M, I)
        count = len(rows)
        if count == 1:  # oneDNN's kernel for a single row sums in another order
            rows = rows.repeat(2, 1)
        out = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return out[:count].view(*x.shape[:-1], self.out_features).to(x.dtype)


class Int8Linear(nn.Module):
    """An `nn.Linear` with an int8 weight and a scale for each output.

    A weight is rounded to the nearest of 255 steps between plus and minus the largest weight of its output.
    """

    BLOCK = 16  # the kernel reads inputs in blocks, and past the end of a row that is not a multiple of them

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        if linear.in_features % self.BLOCK:
            raise InputError(f"in_features {linear.in_features} is not divisible by {self.BLOCK}")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        # The kernel takes the scale in bfloat16, so it is rounded before the weights are divided by it.
        self.scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12).bfloat16()  # (O,)
        steps = (weight / self.scale.float()[:, None]).round().clamp(-127, 127)
        self.weight = steps.to(torch.int8).contiguous()  # (O, I); of weights that are stored transposed too
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), in the type of the input."""
        rows = x.reshape(-1, self.in_features).bfloat16()  # (M, I)
        out = torch._weight_int8pack_mm(rows, self.weight, self.scale).to(x.dtype)  # (M, O)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], self.out_features)
