"""A copy of a model for decoding on a CPU: packed matrices, and one product for queries, keys and values.

Decoding is memory-bandwidth bound: bfloat16 halves the bytes of float32, and int8 halves them again. Only
this file uses private operators of PyTorch (tried with 2.11 and 2.13): `torch._weight_int8pack_mm`, and of
oneDNN `_reorder_linear_weight` and `_linear_pointwise`, without which `for_decoding` keeps plain layers.

Shapes: B batch, T tokens, N rows with one new token each, H heads, S keys, K width of a head; of a linear
layer ... any leading dimensions, M rows, I in_features, O out_features.
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
from gpt.generation.cache import StepCache
from gpt.model import GPT
from gpt.weights.formats.table import on_meta
from gpt.weights.load import GPT as PretrainedGPT

Precision = Literal["float32", "bfloat16", "int8"]


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
        self.dtype = dtype if can_pack(dtype) else torch.float32
        self.weight = linear.weight.detach().to(dtype).contiguous()  # (O, I), which the compiled step reads
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.to(self.dtype), 2)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), in the type of the input."""
        rows = x.flatten(0, -2).to(self.dtype)  # (M, I)
        count = len(rows)
        if count == 1:  # oneDNN's kernel for a single row sums in another order
            rows = rows.repeat(2, 1)
        out = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return out[:count].view(*x.shape[:-1], -1).to(x.dtype)


class Int8Linear(nn.Module):
    """An `nn.Linear` with an int8 weight and a scale for each output.

    A weight is rounded to the nearest of 255 steps between plus and minus the largest weight of its output.
    """

    BLOCK = 16  # the kernel reads inputs in blocks, and past the end of a row that is not a multiple of them

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        if linear.in_features % self.BLOCK:
            raise InputError(f"in_features {linear.in_features} is not divisible by {self.BLOCK}")
        weight = linear.weight.detach().float()
        # The kernel takes the scale in bfloat16, so it is rounded before the weights are divided by it.
        self.scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12).bfloat16()  # (O,)
        steps = (weight / self.scale.float()[:, None]).round().clamp(-127, 127)
        self.weight = steps.to(torch.int8).contiguous()  # (O, I); of weights that are stored transposed too
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), in the type of the input."""
        rows = x.flatten(0, -2).bfloat16()  # (M, I)
        out = torch._weight_int8pack_mm(rows, self.weight, self.scale).to(x.dtype)  # (M, O)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], -1)


class FusedAttention(MultiHeadAttention):
    """Attention for decoding: queries, keys and values come from one product rather than three.

    `pack` makes the layer that computes what a given `nn.Linear` does.
    """

    def __init__(self, attention: MultiHeadAttention, pack: Callable[[nn.Linear], nn.Module]) -> None:
        vars(self).update(vars(attention))  # `MultiHeadAttention.__init__` would make new weights
        three = (self.W_query, self.W_key, self.W_value)
        fused = nn.Linear(self.d_in, 3 * self.d_out, bias=three[0].bias is not None, device="meta")
        joined = {name: torch.cat([W.state_dict()[name] for W in three]) for name in three[0].state_dict()}
        fused.load_state_dict(joined, assign=True)
        del self.W_query, self.W_key, self.W_value
        self.W_qkv = pack(fused)
        self.out_proj = pack(self.out_proj)  # type: ignore[assignment]

    def forward(self, x: Tensor, *, cache: KeyValueCache | None = None, **masks: Any) -> Any:
        """As `MultiHeadAttention`; one new token a row takes fewer calls, which bound the time of a step."""
        if not isinstance(cache, StepCache):
            return super().forward(x, cache=cache, **masks)
        query, key, value = (self._split(projected) for projected in self.project(x))  # (N, H, 1, K)
        keys, values = cache.update(key, value)  # (N, H, S, K)
        scores = query @ keys.transpose(2, 3) / math.sqrt(self.head_dim) + cache.bias  # (N, H, 1, S)
        return self.out_proj((scores.softmax(dim=-1) @ values).transpose(1, 2).flatten(2))

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, ...]:
        """(B, T, d_in) -> (B, T, d_out) each; `context` is None in causal attention."""
        return self.W_qkv(x).chunk(3, dim=-1)


def for_decoding(model: GPT, precision: Precision | None = None) -> GPT:
    """Return a copy of `model` in evaluation mode that decodes fast; it cannot be trained or changed.

    On a CPU with oneDNN, a model that computes exactly what `GPT` does is packed: its matrices have the given
    precision, and all else is float32, in which attention is faster there than in bfloat16. Any other model,
    with LoRA adapters, hooks or quantized layers for example, keeps its layers. The copy shares the tensors
    that need no change, and a packed copy is returned as it is.

    None is the model's own precision; int8 for a model that cannot be packed raises InputError.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper computes what the model in it does
    if is_packed(model):
        return model
    if precision not in (None, "float32", "bfloat16", "int8"):
        raise InputError(f"unknown precision {precision!r}, expected float32, bfloat16 or int8")
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    can_change = weight.device.type == "cpu" and is_as_built(model)
    if precision == "int8" and not can_change:
        raise InputError("precision int8 is for a CPU and an unchanged model, expected float32 or bfloat16")
    dtype = {None: weight.dtype, "float32": torch.float32}.get(precision, torch.bfloat16)
    packable = can_change and dtype in (torch.float32, torch.bfloat16) and can_pack(torch.float32)
    fast: Any = _copy(model)
    if not packable and precision != "int8":
        return (fast if precision is None else fast.to(dtype)).eval()

    def pack(linear: nn.Linear) -> nn.Module:
        if precision == "int8" and linear.in_features % Int8Linear.BLOCK == 0:
            return Int8Linear(linear)
        return PackedLinear(linear, dtype) if packable else linear

    for block in fast.blocks:
        block.attention = FusedAttention(block.attention, pack)
        block.feed_forward.up = pack(block.feed_forward.up)
        block.feed_forward.down = pack(block.feed_forward.down)
    fast.head = pack(fast.head)
    return fast.float().eval()


def is_packed(model: nn.Module) -> bool:
    """Whether `for_decoding` packed it, so that it computes exactly what `GPT` does."""
    return isinstance(getattr(model, "head", None), PackedLinear | Int8Linear)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered on the module or on all: private parts of PyTorch 2.11 and 2.13."""
    every = torch.nn.modules.module
    own = module._forward_hooks or module._forward_pre_hooks
    return bool(own or every._global_forward_hooks or every._global_forward_pre_hooks)


def is_as_built(model: GPT) -> bool:
    """Whether it has the modules and tensors that `GPT` makes, without hooks or replaced methods."""
    if type(model) not in (GPT, PretrainedGPT):
        return False
    with on_meta():
        built = type(model)(model.config)
    replaced = (callable(getattr(type(m), name, None)) for m in model.modules() for name in vars(m))
    ordinary = all(type(parameter) is nn.Parameter for parameter in model.parameters())
    hooked = any(map(has_hooks, model.modules()))
    return ordinary and not hooked and not any(replaced) and _structure(model) == _structure(built)


def _structure(model: GPT) -> list[tuple[Any, ...]]:
    """What decides, beside the values of the weights, what a model computes."""
    options = ("eps", "approximate", "num_heads")
    modules = ((path, type(m), *(getattr(m, o, None) for o in options)) for path, m in model.named_modules())
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [*modules, *((name, tensor.shape) for name, tensor in tensors)]


def _copy(model: GPT) -> GPT:
    """Copy a model's modules and parameters, which share the memory of its own, so that `.to` leaves those.

    `copy.deepcopy` alone fails on pruned modules, whose weights are results of computations. Needs of
    `torch.nn.Module` (tried with PyTorch 2.11 and 2.13): `_modules`, `_parameters`, `_buffers`.
    """
    held = ("_modules", "_parameters", "_buffers")
    shared = [value for m in model.modules() for name, value in vars(m).items() if name not in held]
    copies: dict[int, Any] = {id(value): value for value in (*shared, *model.buffers())}
    copies |= {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, copies)
