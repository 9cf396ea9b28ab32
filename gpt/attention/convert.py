"""The attention module from and to `torch.nn.MultiheadAttention` and the chapters' fused system, as copies.

Shapes: E width of input and output. Fused weight (3 * E, E) and bias (3 * E) stack query, key and value.
"""

import torch
from torch import Tensor, nn

from ..errors import InputError
from .multi_head import MultiHeadAttention
from .steps import MultiHeadAttn

_PARTS = ("W_query", "W_key", "W_value")


def from_torch(module: nn.MultiheadAttention, context_length: int, causal: bool = True) -> MultiHeadAttention:
    """The module that computes what a `torch.nn.MultiheadAttention` computes under a causal mask, or without.

    Its input is (batch, tokens, E) in any case; `module(x, y, y)` becomes `converted(x, context=y)`.
    """
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if weight is None or module.bias_k is not None or module.add_zero_attn:
        raise InputError("expected a MultiheadAttention without kdim, vdim, add_bias_kv and add_zero_attn")
    sizes = (module.embed_dim, module.embed_dim, context_length, module.dropout, module.num_heads)
    converted = MultiHeadAttention(*sizes, qkv_bias=bias is not None, causal=causal).train(module.training)
    return _unfuse(converted, weight, bias, module.out_proj.state_dict())


def to_torch(module: MultiHeadAttention) -> nn.MultiheadAttention:
    """The `torch.nn.MultiheadAttention` that, given `attn_mask=module.mask`, computes what `module` computes.

    It is `batch_first` and has biases, zeros where `module` has none. Pass `mask[:T, :T]` for T tokens.
    """
    weight, bias = _fuse(module)
    converted = nn.MultiheadAttention(module.d_out, module.num_heads, module.dropout.p, batch_first=True)
    out_proj = {f"out_proj.{name}": tensor for name, tensor in module.out_proj.state_dict().items()}
    converted.to(weight).load_state_dict({"in_proj_weight": weight, "in_proj_bias": bias, **out_proj})
    return converted.train(module.training)


def from_fused(module: MultiHeadAttn) -> MultiHeadAttention:
    """The module that computes what the fused system computes; its output projection is the identity."""
    width, weight = module.c_attn.in_features, module.c_attn.weight
    converted = MultiHeadAttention(width, width, module.bias.shape[-1], 0.0, module.n_heads, qkv_bias=True)
    return _unfuse(converted, weight, module.c_attn.bias, {"weight": torch.eye(width)})


def to_fused(module: MultiHeadAttention) -> MultiHeadAttn:
    """The fused system, without dropout, for which `module.out_proj(to_fused(module)(x))` is `module(x)`."""
    weight, bias = _fuse(module)
    converted = MultiHeadAttn(module.d_out, module.context_length, module.num_heads).to(weight)
    converted.c_attn.load_state_dict({"weight": weight, "bias": bias})
    return converted


def _fuse(module: MultiHeadAttention) -> tuple[Tensor, Tensor]:
    """Fused weight and bias, zeros if `module` has none; InputError if d_in is not d_out."""
    if module.d_in != module.d_out:
        raise InputError(f"expected d_in equal to d_out, got {module.d_in} and {module.d_out}")
    state = module.state_dict()
    weight = torch.cat([state[f"{part}.weight"] for part in _PARTS])
    zeros = weight.new_zeros(module.d_out)
    return weight, torch.cat([state.get(f"{part}.bias", zeros) for part in _PARTS])


def _unfuse(
    module: MultiHeadAttention, weight: Tensor, bias: Tensor | None, out_proj: dict[str, Tensor]
) -> MultiHeadAttention:
    """Load fused weights, and an output projection's, into `module`."""
    state = {"out_proj.bias": weight.new_zeros(module.d_out)}  # for one without
    state |= {f"out_proj.{name}": tensor for name, tensor in out_proj.items()}
    for kind, fused in (("weight", weight), ("bias", bias)):
        if fused is not None:
            state |= {f"{part}.{kind}": rows for part, rows in zip(_PARTS, fused.chunk(3), strict=True)}
    module.to(weight).load_state_dict(state)
    return module
