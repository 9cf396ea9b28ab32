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
from gpt.weights.formats.table import on_meta
from gpt.weights.load import GPT as PretrainedGPT

Precision = Literal["float32", "bfloat16", "int8"]


class FusedAttention(MultiHeadAttention):
    """Attention for decoding: queries, keys and values come from one product rather than three.

    `pack` makes the layer that computes what a given `nn.Linear` does.
    """

    def __init__(self, attention: MultiHeadAttention, pack: Callable[[nn.Linear], nn.Module]) -> None:
        nn.Module.__init__(self)  # that of MultiHeadAttention would initialise new weights
        self.__dict__.update(vars(attention), _modules=dict(attention._modules))
        three = (self.W_query, self.W_key, self.W_value)
        fused = nn.Linear(self.d_in, 3 * self.d_out, bias=three[0].bias is not None, device="meta")
        for name, _ in list(fused.named_parameters()):
            joined = torch.cat([getattr(W, name).detach() for W in three])  # (3 * d_out, d_in), (3 * d_out,)
            setattr(fused, name, nn.Parameter(joined))
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
    can_change = weight.device.type == "cpu" and _is_as_built(model)
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


def _is_as_built(model: GPT) -> bool:
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
