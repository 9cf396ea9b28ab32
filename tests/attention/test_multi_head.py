"""The attention module in PyTorch programs, and its messages for bad input."""

import copy
import re
from collections.abc import Callable
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


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "written out"])
def test_weights_are_dropped_in_training_only(x: Tensor, need_weights: bool) -> None:
    module = build(dropout=0.5)

    def context() -> Tensor:
        out = module(x, need_weights=need_weights)
        return out[0] if need_weights else out

    assert not torch.allclose(context(), context())
    module.eval()
    torch.testing.assert_close(context(), context())


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("masked", [False, True])
def test_one_compiled_module_takes_any_length(masked: bool, dynamic: bool | None) -> None:
    module = MultiHeadAttention(D_IN, D_OUT, 64, 0.0, HEADS)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend=counter)
    for length in (6, 7, 1, 40, 64):
        x, masks = torch.randn(BATCH, length, D_IN), {}
        if masked:
            masks["key_padding_mask"] = torch.rand(BATCH, length) < 0.3
            masks["attn_mask"] = torch.rand(BATCH, HEADS, length, length) < 0.2
        torch.testing.assert_close(compiled(x, **masks), module(x, **masks))
    assert counter.frame_count <= 4


@pytest.mark.parametrize(
    "attach",
    [
        pytest.param(lambda query: query.register_forward_hook(lambda *call: call[2] * 3), id="hook"),
        pytest.param(lambda query: prune.l1_unstructured(query, "weight", amount=0.6), id="pruning"),
        pytest.param(
            lambda query: parametrize.register_parametrization(query, "weight", nn.ReLU()),
            id="parametrization",
        ),
    ],
)
def test_what_is_attached_to_a_projection_counts_when_compiled(
    attach: Callable[[nn.Linear], object], x: Tensor
) -> None:
    module = build()
    plain = module(x)
    attach(module.W_query)
    compiled = torch.compile(module, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, module(x))
    assert not torch.allclose(compiled, plain, atol=1e-3)


def test_compiled_decoding_makes_few_graphs() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    module = MultiHeadAttention(D_IN, D_OUT, 64, 0.0, HEADS)
    compiled, cache = torch.compile(module, fullgraph=True, backend=counter), module.new_cache(BATCH)
    x = torch.randn(BATCH, 40, D_IN)
    with torch.inference_mode():
        pieces = [compiled(x[:, :10], cache=cache)]
        pieces += [compiled(x[:, t : t + 1], cache=cache) for t in range(10, 40)]
    assert counter.frame_count <= 4
    torch.testing.assert_close(torch.cat(pieces, dim=1), module(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [TOKENS, 1024], ids=["a short example", "the longest example"])
def test_an_exported_module_takes_any_batch_and_length(dtype: torch.dtype, tokens: int) -> None:
    module = MultiHeadAttention(D_IN, D_OUT, 1024, 0.0, HEADS).to(dtype).eval()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=1024)}
    example = torch.randn(BATCH, tokens, D_IN, dtype=dtype)
    exported = torch.export.export(module, (example,), dynamic_shapes=(dims,)).module()
    for length in (3, 700, 1024):
        other = torch.randn(5, length, D_IN, dtype=dtype)
        torch.testing.assert_close(exported(other), module(other), atol=2e-2, rtol=2e-2)


LENGTH = torch.export.Dim("tokens", min=2, max=16)


@pytest.mark.parametrize(
    ("name", "value_for", "dims"),
    [
        ("key_padding_mask", lambda length: torch.arange(length).expand(3, length) > 9, {1: LENGTH}),
        (
            "attn_mask",
            lambda length: torch.eye(length, dtype=torch.bool).roll(1, 0),
            {0: LENGTH, 1: LENGTH},
        ),
        ("need_weights", lambda length: True, None),
    ],
    ids=["padding", "pairs", "weights"],
)
def test_an_exported_module_takes_masks_of_any_length(
    name: str, value_for: Callable[[int], Any], dims: dict[int, Any] | None
) -> None:
    """Up to the context length itself, at which a slice of the causal mask is the whole."""
    module = MultiHeadAttention(8, 8, 16, 0.0, 2).eval()

    def inputs(length: int) -> dict[str, Any]:
        return {"x": torch.randn(3, length, 8), name: value_for(length)}

    shapes = {"x": {1: LENGTH}, name: dims}
    exported = torch.export.export(module, (), inputs(6), dynamic_shapes=shapes).module()
    for length in (2, 11, 15, 16):
        given = inputs(length)
        torch.testing.assert_close(exported(**given), module(**given))


def test_an_exported_module_attends_over_a_context() -> None:
    module = MultiHeadAttention(8, 12, 32, 0.0, 3, causal=False).eval()
    x, context = torch.randn(2, 4, 8), torch.randn(2, 9, 8)
    exported = torch.export.export(module, (x,), {"context": context}).module()
    torch.testing.assert_close(exported(x, context=context), module(x, context=context))


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


def refused(message: str) -> Any:
    """Expect an InputError of one line with this text."""
    return pytest.raises(InputError, match=rf"\A[^\n]*{re.escape(message)}[^\n]*\Z")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "d_out 12 is not divisible by num_heads 5"),
        ({"num_heads": 0}, "d_out 12 is not divisible by num_heads 0"),
        ({"d_in": 0}, "d_in must be at least 1, got 0"),
        ({"context_length": 0}, "context_length must be at least 1, got 0"),
    ],
    ids=str,
)
def test_bad_sizes(changes: dict[str, int], message: str) -> None:
    sizes = {"d_in": 5, "d_out": 12, "context_length": 8, "dropout": 0.0, "num_heads": 3}
    with refused(message):
        MultiHeadAttention(**(sizes | changes))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        pytest.param((1, 2, 6, 5), "(batch, tokens, 5), got (1, 2, 6, 5)", id="four dimensions"),
        pytest.param((2, 6, 4), "(batch, tokens, 5), got (2, 6, 4)", id="another width"),
        pytest.param((2, 9, 5), "at most context_length 8 tokens, got 9", id="too long"),
    ],
)
def test_an_input_of_another_shape_is_named(shape: tuple[int, ...], message: str) -> None:
    with refused(message):
        build()(torch.zeros(shape))


def mask(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            {"key_padding_mask": mask(2, 5)}, "(2, 6), got torch.bool of shape (2, 5)", id="short padding"
        ),
        pytest.param(
            {"key_padding_mask": torch.zeros(2, 6)},
            "boolean key_padding_mask of shape (2, 6), got torch.float32",
            id="padding as numbers",
        ),
        pytest.param(
            {"attn_mask": mask(6, 5)},
            "(6, 6) or (2, 6, 6) or (2, 3, 6, 6), got torch.bool of shape (6, 5)",
            id="short mask",
        ),
        pytest.param(
            {"cache": KeyValueCache(2, 2, 8, 6)}, "(2, 2, T, 6), got (2, 3, 6, 4)", id="cache of other heads"
        ),
        pytest.param({"context": torch.zeros(2, 6, 5)}, "needs attention with causal=False", id="context"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(arguments: dict[str, Any], message: str, x: Tensor) -> None:
    with refused(message):
        build()(x, **arguments)


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        pytest.param((1, 7, 5), {}, "a context of shape (2, tokens, 5), got (1, 7, 5)", id="another batch"),
        pytest.param((2, 7, 4), {}, "a context of shape (2, tokens, 5), got (2, 7, 4)", id="another width"),
        pytest.param((2, 9, 5), {}, "at most context_length 8 tokens, got 9", id="too long"),
        pytest.param(
            (2, 7, 5),
            {"attn_mask": mask(7, 6)},
            "(6, 7) or (2, 6, 7) or (2, 3, 6, 7), got torch.bool of shape (7, 6)",
            id="mask of keys to queries",
        ),
    ],
)
def test_a_context_that_does_not_fit_is_named(
    shape: tuple[int, ...], arguments: dict[str, Tensor], message: str, x: Tensor
) -> None:
    module = MultiHeadAttention(D_IN, D_OUT, CONTEXT, 0.0, HEADS, causal=False)
    with refused(message):
        module(x, context=torch.zeros(shape), **arguments)


def test_without_a_mask_it_has_the_state_dict_of_a_causal_one_and_no_cache(x: Tensor) -> None:
    module = MultiHeadAttention(D_IN, D_OUT, CONTEXT, 0.0, HEADS, qkv_bias=True, causal=False)
    causal = build()
    causal.load_state_dict(module.state_dict())
    assert not torch.allclose(causal(x), module(x))
    with refused("a cache needs causal=True"):
        module.new_cache(BATCH)


def test_bad_input_leaves_the_cache_unchanged(x: Tensor) -> None:
    module = build()
    cache = module.new_cache(BATCH)
    module(x, cache=cache)
    keys = cache.keys.clone()
    with refused("7), got torch.bool"):
        module(x[:, :1], cache=cache, key_padding_mask=mask(BATCH, 1))
    with refused("7), got torch.bool"):
        module(x[:, :1], cache=cache, attn_mask=mask(1, 1))
    with refused("holds 6 of at most 8 tokens, 3 more do not fit"):
        module(x[:, :3], cache=cache)
    assert cache.length == TOKENS
    assert torch.equal(cache.keys, keys)
