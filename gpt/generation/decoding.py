"""A copy of a model for decoding: packed matrices, and one product for queries, keys and values.

Shapes: B batch, T tokens, N rows with one new token each, H heads, S keys, K width of a head.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn

from gpt.attention import KeyValueCache, MultiHeadAttention
from gpt.errors import InputError
from gpt.generation.cache import StepCache
from gpt.generation.packed import Int8Linear, PackedLinear, can_pack
from gpt.model import GPT, FeedForward, TransformerBlock
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
        with on_meta():
            fused = nn.Linear(self.d_in, 3 * self.d_out, bias=three[0].bias is not None)
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
        return self.out_proj((scores.softmax(dim=-1) @ values).transpose(1, 2).flatten(2))

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, d_in) -> (B, T, d_out) each; `context` is None in causal attention."""
        query, key, value = self.W_qkv(x).chunk(3, dim=-1)
        return query, key, value


def for_decoding(model: GPT, precision: Precision | None = None) -> GPT:
    """Return a copy of `model` in evaluation mode that decodes fast; it cannot be trained or saved.

    A layer is packed only where it provably computes what its weight says: its type is exactly the one that
    `GPT` builds, its parent too, and it has no hook, no parametrization and no replaced method. All other
    layers, such as LoRA adapters, pruned or quantized ones, are called as they are.

    On a CPU only the matrices have the given precision. Activations, keys and values are float32: attention
    is faster in it there than in bfloat16, and int8 loses less. On other devices, or without oneDNN, the
    copy has plain layers. It shares the tensors that need no change. A copy that is prepared already is
    returned unchanged. None is the model's own precision; an unknown one, or int8 on another device than a
    CPU, raises InputError.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper computes what the model in it does
    if any(isinstance(module, PackedLinear | Int8Linear) for module in model.modules()):
        return model
    if precision not in (None, "float32", "bfloat16", "int8"):
        raise InputError(f"unknown precision {precision!r}, expected float32, bfloat16 or int8")
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    if precision == "int8" and weight.device.type != "cpu":
        raise InputError(f"precision int8 is for a CPU, expected float32 or bfloat16 on {weight.device}")
    dtype = {None: weight.dtype, "float32": torch.float32}.get(precision, torch.bfloat16)
    known_type = dtype in (torch.float32, torch.bfloat16)
    packable = weight.device.type == "cpu" and known_type and can_pack(torch.float32)
    if precision != "int8" and not packable:
        fast = _copy_modules(model, own_parameters=dtype != weight.dtype)
        return (fast if dtype == weight.dtype else fast.to(dtype)).eval()
    fast = _copy_modules(model)

    def pack(linear: nn.Linear) -> nn.Module:
        if precision == "int8" and linear.in_features % Int8Linear.BLOCK == 0:
            return Int8Linear(linear)
        return PackedLinear(linear, dtype) if packable else linear

    def pack_children(parent: nn.Module) -> None:
        for name, child in list(parent.named_children()):
            if _is_plain(parent, (TransformerBlock,)) and _can_fuse(child):
                setattr(parent, name, FusedAttention(child, pack))
            elif _is_plain(parent, _CALLERS_OF_LINEAR) and _is_plain_linear(child):
                setattr(parent, name, pack(child))
            else:
                pack_children(child)

    pack_children(fast)
    if is_packed(fast):
        for module in fast.modules():
            if isinstance(module, nn.Embedding | nn.LayerNorm):
                for name, parameter in module.named_parameters():
                    setattr(module, name, nn.Parameter(parameter.detach().float(), requires_grad=False))
    return fast.eval()


_CALLERS_OF_LINEAR = (GPT, PretrainedGPT, FeedForward, MultiHeadAttention)
_KNOWN = (
    *(GPT, PretrainedGPT, nn.ModuleList, TransformerBlock, FeedForward, FusedAttention, PackedLinear),
    *(Int8Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.GELU),
)


def is_packed(model: nn.Module) -> bool:
    """Whether the model computes exactly what `GPT` does, with layers that `for_decoding` made."""
    return all(_is_plain(module, _KNOWN) for module in model.modules())


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered on the module or on all modules.

    PyTorch has no public way to ask; the attributes are those of versions 2.11 and 2.13.
    """
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    every = torch.nn.modules.module
    return any(getattr(module, f"_{kind}") or getattr(every, f"_global_{kind}") for kind in kinds)


def _is_plain(module: Any, types: tuple[type[nn.Module], ...]) -> bool:
    """Whether it is a module of exactly one of the types, without hooks or replaced methods."""
    if type(module) not in types or has_hooks(module):
        return False
    return not any(callable(getattr(type(module), name, None)) for name in vars(module))


def _is_plain_linear(module: Any) -> TypeGuard[nn.Linear]:
    """Whether a module is an `nn.Linear` with nothing but an ordinary weight and bias."""
    if not _is_plain(module, (nn.Linear,)) or module._parameters.keys() != {"weight", "bias"}:
        return False
    weight, bias = module.weight, module.bias
    ordinary = type(weight) is nn.Parameter and type(bias) in (nn.Parameter, type(None))
    return ordinary and weight.is_floating_point() and not (module._buffers or module._modules)


def _can_fuse(attention: nn.Module) -> TypeGuard[MultiHeadAttention]:
    children = dict(attention.named_children())
    layers = [children.get(name) for name in ("W_query", "W_key", "W_value", "out_proj")]
    biases = {layer.bias is None for layer in layers[:3] if isinstance(layer, nn.Linear)}
    plain = _is_plain(attention, (MultiHeadAttention,)) and all(_is_plain_linear(layer) for layer in layers)
    return plain and len(biases) == 1


def _copy_modules(model: GPT, *, own_parameters: bool = False) -> GPT:
    """Copy a model's modules, not their tensors; own parameters share the memory, for `.to`.

    `copy.deepcopy` alone fails on pruned modules, whose weights are results of computations. Needs of
    `torch.nn.Module` (tried with PyTorch 2.11 and 2.13): `_modules`, `_parameters`, `_buffers`.
    """
    held = ("_modules", "_parameters", "_buffers")
    shared = [value for m in model.modules() for name, value in vars(m).items() if name not in held]
    copies = {id(value): value for value in (*shared, *model.parameters(), *model.buffers())}
    if own_parameters:
        copies |= {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, copies)
