"""A copy of a model for decoding: packed matrices, and one product for queries, keys and values.

Shapes: B batch, T tokens, N rows with one new token each, H heads, S keys, K width of a head.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpt.attention import KeyValueCache, MultiHeadAttention
from gpt.errors import InputError
from gpt.generation.cache import StepCache
from gpt.generation.packed import Int8Linear, PackedLinear, can_pack
from gpt.model import GPT

Precision = Literal["float32", "bfloat16", "int8"]


class FusedAttention(MultiHeadAttention):
    """Attention for decoding: queries, keys and values come from one product rather than three.

    Args:
        attention: the module whose weights it takes.
        pack: makes the layer that computes what a given `nn.Linear` does.
    """

    def __init__(self, attention: MultiHeadAttention, pack: Callable[[nn.Linear], nn.Module]) -> None:
        nn.Module.__init__(self)  # that of MultiHeadAttention would initialise new weights
        self.__dict__.update(vars(attention), _modules=dict(attention._modules))
        three = (self.W_query, self.W_key, self.W_value)
        fused = nn.Linear(self.d_in, 3 * self.d_out, bias=three[0].bias is not None, device="meta")
        fused.weight = nn.Parameter(torch.cat([W.weight.detach() for W in three]))  # (3 * d_out, d_in)
        if fused.bias is not None:
            fused.bias = nn.Parameter(torch.cat([W.bias.detach() for W in three]))  # (3 * d_out,)
        del self.W_query, self.W_key, self.W_value
        self.W_qkv = pack(fused)
        self.out_proj = pack(attention.out_proj)  # type: ignore[assignment]

    def forward(self, x: Tensor, *, cache: KeyValueCache | None = None, **masks: Any) -> Any:
        """As `MultiHeadAttention`; one new token a row takes fewer calls, which bound the time of a step."""
        if not isinstance(cache, StepCache):
            return super().forward(x, cache=cache, **masks)
        query, key, value = (self._split(projected) for projected in self.project(x))  # (N, H, 1, K)
        keys, values = cache.update(key, value)  # (N, H, S, K)
        scores = query @ keys.transpose(2, 3) / math.sqrt(self.head_dim) + cache.bias  # (N, H, 1, S)
        return self.out_proj(self._join(scores.softmax(dim=-1) @ values))

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, d_in) -> (B, T, d_out) each; `context` is None in causal attention."""
        query, key, value = self.W_qkv(x).chunk(3, dim=-1)
        return query, key, value


def for_decoding(model: GPT, precision: Precision | None = None) -> GPT:
    """Return a copy of `model` in evaluation mode that decodes fast; it cannot be trained or saved.

    On a CPU only the matrices have the given precision. Activations, keys and values are float32: attention
    is faster in it there than in bfloat16, and int8 loses less. On other devices, or without oneDNN, the
    copy has plain layers. A copy that is prepared already is returned unchanged.

    Args:
        model: a GPT on any device; the copy shares the tensors it need not change.
        precision: of the matrices; the model's own if None. `int8` is for a CPU.

    Raises:
        InputError: an unknown precision, or int8 on another device than a CPU.
    """
    if any(isinstance(module, PackedLinear | Int8Linear) for module in model.modules()):
        return model
    embedding = model.token_embedding.weight
    if precision not in (None, "float32", "bfloat16", "int8"):
        raise InputError(f"unknown precision {precision!r}, expected float32, bfloat16 or int8")
    if precision == "int8" and embedding.device.type != "cpu":
        raise InputError(f"precision int8 is for a CPU, expected float32 or bfloat16 on {embedding.device}")
    dtypes = {None: embedding.dtype, "float32": torch.float32}
    dtype = dtypes.get(precision, torch.bfloat16)
    packable = embedding.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    packable = packable and can_pack(torch.float32)
    if precision != "int8" and not packable and dtype != embedding.dtype:
        return copy.deepcopy(model).to(dtype).eval()
    fast = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    if precision != "int8" and not packable:
        return fast.eval()

    def pack(linear: nn.Linear) -> nn.Module:
        if precision == "int8" and linear.in_features % Int8Linear.BLOCK == 0:
            return Int8Linear(linear)
        return PackedLinear(linear, dtype)

    for parent in list(fast.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, MultiHeadAttention):
                setattr(parent, name, FusedAttention(child, pack))
            elif isinstance(child, nn.Linear) and not isinstance(parent, MultiHeadAttention):
                setattr(parent, name, pack(child))
            elif isinstance(child, nn.Embedding | nn.LayerNorm) and child.weight.dtype != torch.float32:
                setattr(parent, name, copy.deepcopy(child).float())
    return fast.eval()
