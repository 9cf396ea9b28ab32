"""A copy of a model whose weights are laid out for decoding.

Decoding reads every weight for every token and computes next to nothing with it: the time is that of the
memory. oneDNN keeps a matrix in the order in which its kernels read it, in float32 or bfloat16; int8 halves
the bytes once more.

Shapes: ... any leading dimensions, M rows, I in_features, O out_features.
"""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpt.attention import KeyValueCache, MultiHeadAttention
from gpt.errors import InputError
from gpt.generation.cache import OneMore
from gpt.model import GPT

Precision = Literal["float32", "bfloat16", "int8"]


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight lies in oneDNN's order: (..., I) -> (..., O), in the type of what comes in.

    A row's result does not depend on the rows beside it. oneDNN has another kernel for a single row, which
    adds up in another order, so a single row is computed twice: the weights are read once all the same.

    Args:
        linear: the layer to pack.
        dtype: the weights are rounded to this type. The products are computed in it where the processor can,
            and in float32 where it cannot: that is faster there than PyTorch's emulation, and as exact.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = dtype if can_pack(dtype) else torch.float32
        weight = linear.weight.detach().to(dtype).to(self.dtype)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        rows = x.to(self.dtype)
        single = x.numel() == self.in_features
        if single:
            rows = torch.cat((rows.view(1, -1),) * 2)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        if single:
            out = out[0].view(*x.shape[:-1], self.out_features)
        return out.to(x.dtype)


class Int8Linear(nn.Module):
    """An `nn.Linear` with an int8 weight and a scale for each output: (..., I) -> (..., O).

    A weight becomes the nearest of 255 steps between plus and minus the largest of its output.
    """

    BLOCK = 16
    """The kernel reads inputs in blocks of so many, and past the end of a row that is no multiple of it."""

    weight: Tensor
    """(O, I) int8."""
    scale: Tensor
    """(O,) bfloat16: what a step is worth."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        if linear.in_features % self.BLOCK:
            raise InputError(f"in_features {linear.in_features} is not divisible by {self.BLOCK}")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        # The kernel wants the scale in bfloat16: rounded first, so that the steps are counted in what it is.
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12).bfloat16()  # (O,)
        steps = (weight / scale.float()[:, None]).round().clamp(-127, 127)
        self.register_buffer("weight", steps.to(torch.int8), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        rows = x.reshape(-1, self.in_features).bfloat16()  # (M, I)
        out = torch._weight_int8pack_mm(rows, self.weight, self.scale).to(x.dtype)  # (M, O)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], self.out_features)


class FusedAttention(MultiHeadAttention):
    """An attention for decoding: queries, keys and values come from one product rather than three.

    Args:
        attention: the one whose weights it takes.
        lay_out: makes the layer that computes what a given `nn.Linear` does.
    """

    def __init__(self, attention: MultiHeadAttention, lay_out: Callable[[nn.Linear], nn.Module]) -> None:
        nn.Module.__init__(self)  # MultiHeadAttention's own would make weights anew
        self.d_in, self.d_out = attention.d_in, attention.d_out
        self.num_heads, self.head_dim = attention.num_heads, attention.head_dim
        three = (attention.W_query, attention.W_key, attention.W_value)
        fused = nn.Linear(self.d_in, 3 * self.d_out, bias=three[0].bias is not None, device="meta")
        fused.weight = nn.Parameter(torch.cat([W.weight.detach() for W in three]))  # (3 * d_out, d_in)
        if fused.bias is not None:
            fused.bias = nn.Parameter(torch.cat([W.bias.detach() for W in three]))  # (3 * d_out,)
        self.W_qkv = lay_out(fused)
        self.out_proj = lay_out(attention.out_proj)  # type: ignore[assignment]
        self.dropout = attention.dropout
        self.register_buffer("mask", attention.mask, persistent=False)

    def forward(self, x: Tensor, *, cache: KeyValueCache | None = None, **masks: Any) -> Any:
        """As any attention; for one new token a row in fewer calls, which a token's time hangs on."""
        if not isinstance(cache, OneMore):
            return super().forward(x, cache=cache, **masks)
        query, key, value = (self._split(projected) for projected in self.project(x))  # (N, H, 1, K)
        keys, values = cache.update(key, value)  # (N, H, S, K)
        scores = query @ keys.transpose(2, 3) / math.sqrt(self.head_dim) + cache.bias  # (N, H, 1, S)
        return self.out_proj(self._join(scores.softmax(dim=-1) @ values))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, d_in) -> (B, T, d_out) each."""
        query, key, value = self.W_qkv(x).chunk(3, dim=-1)
        return query, key, value


def for_decoding(model: GPT, precision: Precision | None = None) -> GPT:
    """A copy of `model` that decodes fast, in evaluation mode; it cannot be trained or saved.

    On a CPU only the matrices have the given precision: activations, and with them keys and values, are
    float32, in which attention is faster there than in bfloat16 and exact enough for int8 to lose little.
    Off the CPU, or without oneDNN, the copy has plain layers. Such a copy itself comes back as it is.

    Args:
        model: a GPT on any device; what the copy need not change, it shares with it.
        precision: of the matrices; that of `model` if left out. `int8` is for a CPU.

    Raises:
        InputError: an unknown precision, or int8 off the CPU.
    """
    if any(isinstance(module, PackedLinear | Int8Linear) for module in model.modules()):
        return model
    dtype, device = model.token_embedding.weight.dtype, model.token_embedding.weight.device
    if precision not in (None, "float32", "bfloat16", "int8"):
        raise InputError(f"unknown precision {precision!r}, expected float32, bfloat16 or int8")
    if precision == "int8" and device.type != "cpu":
        raise InputError(f"precision int8 is for a CPU, expected float32 or bfloat16 on {device}")
    if precision is not None:
        dtype = torch.bfloat16 if precision != "float32" else torch.float32
    # A copy with modules of its own and the tensors of `model`.
    fast = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    if precision != "int8" and not (
        device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and can_pack(torch.float32)
    ):
        # Conversion works in place, so it needs tensors of its own.
        return (fast if dtype == fast.token_embedding.weight.dtype else copy.deepcopy(model).to(dtype)).eval()

    def lay_out(linear: nn.Linear) -> nn.Module:
        if precision == "int8" and linear.in_features % Int8Linear.BLOCK == 0:
            return Int8Linear(linear)
        return PackedLinear(linear, dtype)

    for parent in list(fast.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, MultiHeadAttention):
                setattr(parent, name, FusedAttention(child, lay_out))
            elif isinstance(child, nn.Linear) and not isinstance(parent, MultiHeadAttention):
                setattr(parent, name, lay_out(child))
            elif isinstance(child, nn.Embedding | nn.LayerNorm) and child.weight.dtype != torch.float32:
                setattr(parent, name, copy.deepcopy(child).float())
    return fast.eval()


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs and multiplies matrices of this type here, found out by trying it once.

    `torch.ops.mkldnn._is_mkldnn_bf16_supported()` is no answer: PyTorch 2.13 says yes on a processor with
    AVX2 alone, where packing raises.
    """
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), 2)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(2, 16, dtype=dtype), packed, None, "none", [], "")
    except (RuntimeError, AttributeError):  # no kernel for the type, or no oneDNN in this build
        return False
    return True
