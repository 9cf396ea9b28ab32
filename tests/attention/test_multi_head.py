"""The attention module in PyTorch programs, and its messages for bad input."""

import copy
import re
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from gpt.attention import KeyValueCache, MultiHeadAttention
from gpt.errors import InputError

BATCH, TOKENS, D_IN, D_OUT, HEADS, CONTEXT = 2, 6, 5, 12, 3, 8


def build(dropout: float = 0.0, causal: bool = True) -> MultiHeadAttention:
    return MultiHeadAttention(D_IN, D_OUT, CONTEXT, dropout, HEADS, qkv_bias=True, causal=causal)


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()  # it counts graphs per function, and these tests compile one function many times


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, TOKENS, D_IN)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("masked", [False, True])
def test_one_compiled_module_takes_any_length(masked, dynamic):
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
        lambda query: query.register_forward_hook(lambda *call: call[2] * 3),
        lambda query: prune.l1_unstructured(query, "weight", amount=0.6),
        lambda query: parametrize.register_parametrization(query, "weight", nn.ReLU()),
    ],
    ids=["hook", "pruning", "parametrization"],
)
def test_what_is_attached_to_a_projection_counts_when_compiled(attach, x):
    module = build()
    plain = module(x)
    attach(module.W_query)
    compiled = torch.compile(module, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, module(x))
    assert not torch.allclose(compiled, plain, atol=1e-3)


def test_compiled_decoding_makes_few_graphs():
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
def test_an_exported_module_takes_any_batch_and_length(dtype, tokens):
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
def test_an_exported_module_takes_masks_of_any_length(name, value_for, dims):
    """Up to the context length itself, at which a slice of the causal mask is the whole."""
    module = MultiHeadAttention(8, 8, 16, 0.0, 2).eval()

    def inputs(length: int) -> dict[str, Any]:
        return {"x": torch.randn(3, length, 8), name: value_for(length)}

    shapes = {"x": {1: LENGTH}, name: dims}
    exported = torch.export.export(module, (), inputs(6), dynamic_shapes=shapes).module()
    for length in (2, 11, 15, 16):
        given = inputs(length)
        torch.testing.assert_close(exported(**given), module(**given))


def test_mask_follows_the_module_and_comes_back_from_meta(x):
    source = build()
    with torch.device("meta"):
        module = build()
    assert module.mask.is_meta
    materialised = copy.deepcopy(module).to_empty(device="cpu")
    materialised.load_state_dict(source.state_dict())
    module.load_state_dict(source.state_dict(), assign=True)
    for other in (materialised, module):
        torch.testing.assert_close(other(x, need_weights=True), source(x, need_weights=True))
    assert source.to("meta").mask.is_meta


def test_state_dict_of_the_chapter_loads(x):
    """Its float mask is left out; the mask here is boolean, and in no state dict."""
    source, model = build(), nn.ModuleDict({"att": build().half().float()})
    saved = {f"att.{name}": value for name, value in source.state_dict().items()}
    assert len(saved) == 8
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


def mask(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


SIZES = {"d_in": D_IN, "d_out": D_OUT, "context_length": CONTEXT, "dropout": 0.0, "num_heads": HEADS}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "d_out 12 is not divisible by num_heads 5"),
        ({"num_heads": 0}, "d_out 12 is not divisible by num_heads 0"),
        ({"d_in": 0}, "d_in must be at least 1, got 0"),
        ({"context_length": 0}, "context_length must be at least 1, got 0"),
    ],
    ids=str,
)
def test_bad_sizes(change, message):
    with refused(message):
        MultiHeadAttention(**SIZES | change)


REFUSED = {
    "four dimensions": ({"x": torch.zeros(1, 2, 6, 5)}, "(batch, tokens, 5), got (1, 2, 6, 5)"),
    "another width": ({"x": torch.zeros(2, 6, 4)}, "(batch, tokens, 5), got (2, 6, 4)"),
    "too long": ({"x": torch.zeros(2, 9, 5)}, "at most context_length 8 tokens, got 9"),
    "short padding": ({"key_padding_mask": mask(2, 5)}, "(2, 6), got torch.bool of shape (2, 5)"),
    "padding as numbers": (
        {"key_padding_mask": torch.zeros(2, 6)},
        "boolean key_padding_mask of shape (2, 6), got torch.float32",
    ),
    "short mask": (
        {"attn_mask": mask(6, 5)},
        "(6, 6) or (2, 6, 6) or (2, 3, 6, 6), got torch.bool of shape (6, 5)",
    ),
    "cache of other heads": ({"cache": KeyValueCache(2, 2, 8, 6)}, "(2, 2, T, 6), got (2, 3, 6, 4)"),
    "context": ({"context": torch.zeros(2, 6, 5)}, "needs attention with causal=False"),
}
REFUSED_CONTEXTS = {
    "another batch": ({"context": torch.zeros(1, 7, 5)}, "a context of shape (2, tokens, 5), got (1, 7, 5)"),
    "too many keys": ({"context": torch.zeros(2, 9, 5)}, "at most context_length 8 tokens, got 9"),
    "mask of keys to queries": (
        {"context": torch.zeros(2, 7, 5), "attn_mask": mask(7, 6)},
        "(6, 7) or (2, 6, 7) or (2, 3, 6, 7), got torch.bool of shape (7, 6)",
    ),
}


@pytest.mark.parametrize(
    ("causal", "given", "message"),
    [
        pytest.param(causal, *case, id=name)
        for causal, cases in ((True, REFUSED), (False, REFUSED_CONTEXTS))
        for name, case in cases.items()
    ],
)
def test_what_does_not_fit_is_named(causal, given, message):
    with refused(message):
        build(causal=causal)(**{"x": torch.zeros(BATCH, TOKENS, D_IN)} | given)


def test_without_a_mask_it_has_the_state_dict_of_a_causal_one_and_no_cache(x):
    module, causal = build(causal=False), build()
    causal.load_state_dict(module.state_dict())
    assert not torch.allclose(causal(x), module(x))
    with refused("a cache needs causal=True"):
        module.new_cache(BATCH)


def test_a_cache_takes_no_new_memory_and_bad_input_leaves_it_unchanged(x):
    module = build()
    cache = module.new_cache(BATCH)
    memory = cache.keys.data_ptr()
    module(x, cache=cache)
    keys = cache.keys.clone()
    with refused("7), got torch.bool"):
        module(x[:, :1], cache=cache, key_padding_mask=mask(BATCH, 1))
    with refused("7), got torch.bool"):
        module(x[:, :1], cache=cache, attn_mask=mask(1, 1))
    with refused("holds 6 of at most 8 tokens, 3 more do not fit"):
        module(x[:, :3], cache=cache)
    assert cache.length == TOKENS and cache.keys.data_ptr() == memory
    assert torch.equal(cache.keys, keys)
