"""The attention module in PyTorch programs, and its messages for bad input."""

import copy
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from gpt.attention import KeyValueCache, MultiHeadAttention
from gpt.errors import InputError

BATCH, TOKENS, D_IN, D_OUT, HEADS, CONTEXT = 2, 6, 5, 12, 3, 8


def build(dropout: float = 0.0, qkv_bias: bool = True) -> MultiHeadAttention:
    return MultiHeadAttention(D_IN, D_OUT, CONTEXT, dropout, HEADS, qkv_bias)


def every_mask() -> dict[str, Tensor]:
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[0, :2] = True  # left: its first two tokens attend to nothing
    padding[1, 4:] = True  # right
    return {
        "key_padding_mask": padding,
        "attn_mask": torch.rand(BATCH, HEADS, TOKENS, TOKENS) < 0.2,
    }


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()  # it counts graphs per function, and these tests compile one function many times


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, TOKENS, D_IN)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_paths_agree_with_single_precision(x: Tensor, masked: bool, dtype: torch.dtype) -> None:
    module, masks = build(), every_mask() if masked else {}
    expected = module(x, **masks)
    with torch.autocast("cpu", dtype):
        fast = module(x, **masks)
        explicit, weights = module(x, need_weights=True, **masks)
    assert fast.dtype == explicit.dtype == dtype
    assert weights.isfinite().all()
    torch.testing.assert_close(fast.float(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(explicit.float(), expected, atol=2e-2, rtol=2e-2)


def test_both_paths_drop_weights_in_training_only() -> None:
    module, x = build(dropout=0.5), torch.randn(1, TOKENS, D_IN).expand(200, -1, -1)
    for path in (module, lambda x: module(x, need_weights=True)[0]):
        module.train()
        assert not torch.allclose(path(x)[0], path(x)[1])
        mean = path(x).mean(dim=0)
        module.eval()
        torch.testing.assert_close(path(x)[0], path(x)[1])
        assert (mean - path(x)[0]).abs().max() < 0.2


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["none", "all"])
def test_one_compiled_module_takes_any_length(name: str, dynamic: bool | None) -> None:
    module = MultiHeadAttention(D_IN, D_OUT, 64, 0.0, HEADS)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend=counter)
    for length in (6, 7, 1, 40, 64):
        x, masks = torch.randn(BATCH, length, D_IN), {}
        if name == "all":
            masks["key_padding_mask"] = torch.rand(BATCH, length) < 0.3
            masks["attn_mask"] = torch.rand(BATCH, HEADS, length, length) < 0.2
        torch.testing.assert_close(compiled(x, **masks), module(x, **masks))
    assert counter.frame_count <= 4


@pytest.mark.parametrize("attached", ["hook", "pruning", "parametrization"])
def test_what_is_attached_to_a_projection_counts_when_compiled(attached: str, x: Tensor) -> None:
    module = build()
    query, plain = module.W_query, module(x)
    if attached == "hook":
        query.register_forward_hook(lambda *call: call[2] * 3)
    elif attached == "pruning":
        prune.l1_unstructured(query, "weight", amount=0.6)
    else:
        parametrize.register_parametrization(query, "weight", nn.ReLU())
    found = torch.compile(module, backend="aot_eager")(x)
    torch.testing.assert_close(found, module(x))
    assert not torch.allclose(found, plain, atol=1e-3)


def test_compiled_decoding_makes_few_graphs(x: Tensor) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    module = MultiHeadAttention(D_IN, D_OUT, 64, 0.0, HEADS)
    compiled, cache = torch.compile(module, fullgraph=True, backend=counter), module.new_cache(BATCH)
    x = torch.randn(BATCH, 40, D_IN)
    with torch.inference_mode():
        pieces = [compiled(x[:, :10], cache=cache)]
        pieces += [compiled(x[:, t : t + 1], cache=cache) for t in range(10, 40)]
    assert counter.frame_count <= 4
    torch.testing.assert_close(torch.cat(pieces, dim=1), module(x))


@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask", "need_weights"])
def test_exports_every_length_with_a_mask(name: str) -> None:
    """Up to the context length itself, at which a slice of the causal mask is the whole."""
    module = MultiHeadAttention(8, 8, 16, 0.0, 2).eval()
    tokens = torch.export.Dim("tokens", min=2, max=16)

    def inputs(length: int) -> dict[str, Any]:
        masks = {
            "key_padding_mask": torch.arange(length).expand(3, length) > 9,
            "attn_mask": torch.eye(length, dtype=torch.bool).roll(1, 0),
            "need_weights": True,
        }
        return {"x": torch.randn(3, length, 8), name: masks[name]}

    shapes = {"x": {1: tokens}, "attn_mask": {0: tokens, 1: tokens}}
    dims = {given: shapes.get(given, {1: tokens}) for given in inputs(2)} | (
        {"need_weights": None} if name == "need_weights" else {}
    )
    exported = torch.export.export(module, (), inputs(6), dynamic_shapes=dims).module()
    for length in (2, 11, 15, 16):
        given = inputs(length)
        torch.testing.assert_close(exported(**given), module(**given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [TOKENS, 1024])
def test_exports_any_batch_and_length(dtype: torch.dtype, tokens: int) -> None:
    module = MultiHeadAttention(D_IN, D_OUT, 1024, 0.0, HEADS).to(dtype).eval()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=1024)}
    example = torch.randn(BATCH, tokens, D_IN, dtype=dtype)
    exported = torch.export.export(module, (example,), dynamic_shapes=(dims,)).module()
    for length in (3, 700, 1024):
        other = torch.randn(5, length, D_IN, dtype=dtype)
        torch.testing.assert_close(exported(other), module(other), atol=2e-2, rtol=2e-2)


def test_mask_follows_the_module_and_comes_back_from_meta(x: Tensor) -> None:
    with torch.device("meta"):
        module = build()
    assert module.mask.is_meta
    assert module(x.to("meta"), need_weights=True)[0].shape == (BATCH, TOKENS, D_OUT)
    source = build()
    materialised = copy.deepcopy(module).to_empty(device="cpu")
    materialised.load_state_dict(source.state_dict())
    module.load_state_dict(source.state_dict(), assign=True)
    for other in (materialised, module):
        assert torch.equal(other.mask, source.mask)
        torch.testing.assert_close(other(x, need_weights=True), source(x, need_weights=True))
    assert source.to("meta").mask.is_meta


def test_the_mask_is_boolean_and_in_no_state_dict() -> None:
    module = build().half()
    assert module.mask.dtype == torch.bool
    names = "W_query", "W_key", "W_value", "out_proj"
    assert set(module.state_dict()) == {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}


def test_state_dict_of_the_chapter_loads(x: Tensor) -> None:
    source, model = build(), nn.ModuleDict({"att": build()})
    saved = {f"att.{name}": value for name, value in source.state_dict().items()}
    saved["att.mask"] = torch.triu(torch.ones(CONTEXT, CONTEXT), diagonal=1)
    model.load_state_dict(saved, strict=True)
    assert torch.equal(model["att"](x), source(x))
    assert model["att"].mask.dtype == torch.bool
    assert "att.mask" in saved
    with pytest.raises(RuntimeError, match="other"):
        model.load_state_dict({**saved, "att.other": torch.zeros(1)}, strict=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "d_out 12 is not divisible by num_heads 5"),
        ({"d_in": 0}, "d_in must be at least 1, got 0"),
        ({"context_length": 0}, "context_length must be at least 1, got 0"),
    ],
)
def test_bad_sizes(changes: dict[str, int], message: str) -> None:
    sizes = {"d_in": 5, "d_out": 12, "context_length": 8, "dropout": 0.0, "num_heads": 3}
    with pytest.raises(InputError, match=message):
        MultiHeadAttention(**(sizes | changes))


BOOL = {"dtype": torch.bool}
BAD_INPUTS = {
    "four dimensions": ((1, 2, 6, 5), {}, "(batch, tokens, 5), got (1, 2, 6, 5)"),
    "another width": ((2, 6, 4), {}, "(batch, tokens, 5), got (2, 6, 4)"),
    "too long": ((2, 9, 5), {}, "at most context_length 8 tokens, got 9"),
    "short padding": (
        (2, 6, 5),
        {"key_padding_mask": torch.zeros(2, 5, **BOOL)},
        "(2, 6), got torch.bool of shape (2, 5)",
    ),
    "padding as numbers": (
        (2, 6, 5),
        {"key_padding_mask": torch.zeros(2, 6)},
        "boolean key_padding_mask of shape (2, 6), got torch.float32",
    ),
    "short mask": (
        (2, 6, 5),
        {"attn_mask": torch.zeros(6, 5, **BOOL)},
        "(6, 6) or (2, 6, 6) or (2, 3, 6, 6), got torch.bool of shape (6, 5)",
    ),
    "a mask of numbers": ((2, 6, 5), {"attn_mask": torch.zeros(6, 6)}, "got torch.float32"),
    "a cache of another batch": (
        (2, 6, 5),
        {"cache": KeyValueCache(3, 3, 8, 4)},
        "(3, 3, T, 4), got (2, 3, 6, 4)",
    ),
    "a cache of other heads": (
        (2, 6, 5),
        {"cache": KeyValueCache(2, 2, 8, 6)},
        "(2, 2, T, 6), got (2, 3, 6, 4)",
    ),
    "a small cache": ((2, 6, 5), {"cache": KeyValueCache(2, 3, 5, 4)}, "at most 5 tokens, 6 more"),
    "a context of a causal one": (
        (2, 6, 5),
        {"context": torch.zeros(2, 6, 5)},
        "needs attention with causal",
    ),
}


@pytest.mark.parametrize(("shape", "arguments", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_input_names_both_shapes(shape: tuple, arguments: dict, message: str) -> None:
    with pytest.raises(InputError) as error:
        build()(torch.zeros(shape), **arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


BAD_CONTEXTS = {
    "another batch": ((1, 7, 5), {}, "a context of shape (2, tokens, 5), got (1, 7, 5)"),
    "another width": ((2, 7, 4), {}, "a context of shape (2, tokens, 5), got (2, 7, 4)"),
    "too long": ((2, 9, 5), {}, "at most context_length 8 tokens, got 9"),
    "mask of keys to queries": (
        (2, 7, 5),
        {"attn_mask": torch.zeros(7, 6, **BOOL)},
        "(6, 7) or (2, 6, 7) or (2, 3, 6, 7), got torch.bool of shape (7, 6)",
    ),
}


@pytest.mark.parametrize(("shape", "arguments", "message"), BAD_CONTEXTS.values(), ids=BAD_CONTEXTS)
def test_a_bad_context_is_named(shape: tuple, arguments: dict, message: str, x: Tensor) -> None:
    module = MultiHeadAttention(D_IN, D_OUT, CONTEXT, 0.0, HEADS, causal=False)
    with pytest.raises(InputError) as error:
        module(x, context=torch.zeros(shape), **arguments)
    assert message in str(error.value)


def test_without_a_mask_it_has_the_state_dict_of_a_causal_one_and_no_cache(x: Tensor) -> None:
    module = MultiHeadAttention(D_IN, D_OUT, CONTEXT, 0.0, HEADS, qkv_bias=True, causal=False)
    causal = build()
    causal.load_state_dict(module.state_dict())
    assert not torch.allclose(causal(x), module(x))
    with pytest.raises(InputError, match="a cache needs causal=True"):
        module.new_cache(BATCH)


def test_bad_input_leaves_the_cache_unchanged(x: Tensor) -> None:
    module = build()
    cache = module.new_cache(BATCH)
    module(x, cache=cache)
    keys = cache.keys.clone()
    for bad in (
        {"key_padding_mask": torch.zeros(BATCH, 1, **BOOL)},
        {"attn_mask": torch.zeros(1, 1, **BOOL)},
    ):
        with pytest.raises(InputError, match=r"7\), got torch.bool"):
            module(x[:, :1], cache=cache, **bad)
    with pytest.raises(InputError, match="holds 6 of at most 8 tokens, 3 more do not fit"):
        module(x[:, :3], cache=cache)
    assert cache.length == TOKENS
    assert torch.equal(cache.keys, keys)
