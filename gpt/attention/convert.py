"""Weights of the attention module from and to `torch.nn.MultiheadAttention` and the fused system.

Each function makes a new module that holds copies of the weights, on their device and in their type.

Shapes: E width, the same of what goes in and comes out. The fused weight (3 * E, E) and bias (3 * E) hold
query, key and value in this order.
"""

import torch
from torch import Tensor, nn

from gpt.attention.multi_head import MultiHeadAttention
from gpt.attention.steps import MultiHeadAttn
from gpt.errors import InputError


def from_torch(module: nn.MultiheadAttention, context_length: int) -> MultiHeadAttention:
    """The module that computes what a `torch.nn.MultiheadAttention` computes under a causal mask.

    Its input is (batch, tokens, E) whatever the given module's `batch_first`. An output projection without
    a bias gets one of zeros.

    Raises:
        InputError: the given module has `kdim`, `vdim`, `add_bias_kv` or `add_zero_attn`, for which there is
            no place here.
    """
    weight = module.in_proj_weight
    if weight is None or module.bias_k is not None or module.add_zero_attn:
        raise InputError("expected a MultiheadAttention without kdim, vdim, add_bias_kv and add_zero_attn")
    return _unfuse(
        MultiHeadAttention(
            module.embed_dim,
            module.embed_dim,
            context_length,
            module.dropout,
            module.num_heads,
            qkv_bias=module.in_proj_bias is not None,
        ),
        weight,
        module.in_proj_bias,
        module.out_proj.weight,
        module.out_proj.bias,
    )


def to_torch(module: MultiHeadAttention) -> nn.MultiheadAttention:
    """The `torch.nn.MultiheadAttention` that, given `attn_mask=module.mask`, computes what `module` computes.

    It is `batch_first`, and has biases: zeros where `module` has none.

    Raises:
        InputError: d_in is not d_out, which torch's module must have equal.
    """
    weight, bias = _fuse(module)
    converted = nn.MultiheadAttention(
        module.d_out, module.num_heads, dropout=module.dropout.p, batch_first=True
    ).to(weight)
    with torch.no_grad():
        converted.in_proj_weight.copy_(weight)
        converted.in_proj_bias.copy_(bias)
        converted.out_proj.load_state_dict(module.out_proj.state_dict())
    return converted


def from_fused(module: MultiHeadAttn) -> MultiHeadAttention:
    """The module that computes what the fused system computes; its output projection is the identity."""
    n_embd, context_length = module.c_attn.in_features, module.bias.shape[-1]
    return _unfuse(
        MultiHeadAttention(n_embd, n_embd, context_length, 0.0, module.n_heads, qkv_bias=True),
        module.c_attn.weight,
        module.c_attn.bias,
        torch.eye(n_embd),
        None,
    )


def to_fused(module: MultiHeadAttention) -> MultiHeadAttn:
    """The fused system with the query, key and value weights of `module`.

    It has no output projection, so that `module.out_proj(to_fused(module)(x))` equals `module(x)`, and no
    dropout.

    Raises:
        InputError: d_in is not d_out, which the fused system must have equal.
    """
    weight, bias = _fuse(module)
    converted = MultiHeadAttn(module.d_out, module.mask.shape[0], module.num_heads).to(weight)
    with torch.no_grad():
        converted.c_attn.weight.copy_(weight)
        converted.c_attn.bias.copy_(bias)
    return converted


def _fuse(module: MultiHeadAttention) -> tuple[Tensor, Tensor]:
    """Weight (3 * E, E) and bias (3 * E)."""
    parts = (module.W_query, module.W_key, module.W_value)
    weight = torch.cat([part.weight for part in parts])
    if weight.shape != (3 * module.d_out, module.d_out):
        raise InputError(f"expected d_in equal to d_out, got {weight.shape[1]} and {module.d_out}")
    bias = torch.cat([weight.new_zeros(module.d_out) if part.bias is None else part.bias for part in parts])
    return weight.detach(), bias.detach()


def _unfuse(
    module: MultiHeadAttention,
    weight: Tensor,
    bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
) -> MultiHeadAttention:
    """Put fused weights (3 * E, E) and (3 * E), and an output projection's, into `module`."""
    names = ("W_query", "W_key", "W_value")
    weights = {f"{name}.weight": part for name, part in zip(names, weight.chunk(3), strict=True)}
    if bias is not None:
        weights |= {f"{name}.bias": part for name, part in zip(names, bias.chunk(3), strict=True)}
    weights["out_proj.weight"] = out_weight
    weights["out_proj.bias"] = torch.zeros(module.d_out) if out_bias is None else out_bias
    module.to(weight).load_state_dict(weights)
    return module
