"""What the attention layer returns, how it behaves in PyTorch programs, and its messages for bad input."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from gpt.attention import KeyValueCache, MultiHeadAttention
from gpt.errors import InputError

BATCH, TOKENS, D_IN, D_OUT, HEADS, CONTEXT = 2, 6, 5, 12, 3, 8


def build(context_length: int = CONTEXT, dropout: float = 0.0, causal: bool = True) -> MultiHeadAttention:
    return MultiHeadAttention(D_IN, D_OUT, context_length, dropout, HEADS, qkv_bias=True, causal=causal)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, TOKENS, D_IN)


def test_weights_are_dropped_in_training_only(x: Tensor) -> None:
    module = build(dropout=0.5)
    assert not torch.allclose(module(x), module(x))
    module.eval()
    torch.testing.assert_close(module(x), module(x))


def every_mask(length: int) -> dict[str, Tensor]:
    """Random masks, which leave some tokens nothing to attend to."""
    return {
        "key_padding_mask": torch.rand(BATCH, length) < 0.3,
        "attn_mask": torch.rand(BATCH, HEADS, length, length) < 0.2,
    }


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "masks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_paths_agree_with_single_precision(masked: bool, dtype: torch.dtype) -> None:
    """Over 300 tokens, which a CPU computes in two blocks in bfloat16."""
    module, x = build(300), torch.randn(BATCH, 300, D_IN)
    masks = every_mask(300) if masked else {}
    expected = module(x, **masks)
    with torch.autocast("cpu", dtype):
        fast = module(x, **masks)
        explicit, _ = module(x, need_weights=True, **masks)
    assert fast.dtype == explicit.dtype == dtype
    torch.testing.assert_close(fast.float(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(explicit.float(), expected, atol=2e-2, rtol=2e-2)


def test_a_cache_keeps_its_memory_and_bad_input_leaves_it_unchanged(x: Tensor) -> None:
    module = build()
    cache = module.new_cache(BATCH)
    memory = cache.keys.data_ptr()
    module(x, cache=cache)
    keys = cache.keys.clone()

    with refused("(1, 7) or (2, 1, 7) or (2, 3, 1, 7), got torch.bool"):
        module(x[:, :1], cache=cache, attn_mask=mask(1, 1))
    with refused("holds 6 of at most 8 tokens, 3 more do not fit"):
        module(x[:, :3], cache=cache)

    assert cache.length == 6
    assert torch.equal(cache.keys, keys)
    assert cache.keys.data_ptr() == memory


@pytest.fixture
def _no_graphs_of_other_tests() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("_no_graphs_of_other_tests")
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "masks"])
def test_one_compiled_module_takes_any_length(masked: bool) -> None:
    module, compiler = build(64), CompileCounter()
    compiled = torch.compile(module, fullgraph=True, backend=compiler)
    for length in (6, 7, 1, 40, 64):
        x = torch.randn(BATCH, length, D_IN)
        masks = every_mask(length) if masked else {}
        torch.testing.assert_close(compiled(x, **masks), module(x, **masks))
    assert compiler.frame_count <= 4


@pytest.mark.usefixtures("_no_graphs_of_other_tests")
def test_compiled_decoding_makes_few_graphs() -> None:
    module, compiler = build(64), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=compiler)
    x, cache = torch.randn(BATCH, 40, D_IN), module.new_cache(BATCH)
    with torch.inference_mode():
        pieces = [compiled(piece, cache=cache) for piece in x.split([10] + [1] * 30, dim=1)]
    assert compiler.frame_count <= 4
    torch.testing.assert_close(torch.cat(pieces, dim=1), module(x))


@pytest.mark.usefixtures("_no_graphs_of_other_tests")
def test_a_hook_of_a_projection_counts_when_compiled(x: Tensor) -> None:
    """So do pruning and adapters: the projections are called, and not only their weights read."""
    module = build()
    plain = module(x)
    module.W_query.register_forward_hook(lambda *call: call[2] * 3)
    compiled = torch.compile(module, backend="eager")(x)
    torch.testing.assert_close(compiled, module(x))
    assert not torch.allclose(compiled, plain, atol=1e-3)


EXPORTED: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "no mask": lambda batch, length: {},
    "weights": lambda batch, length: {"need_weights": True},
    "padding": lambda batch, length: {"key_padding_mask": torch.arange(length).expand(batch, length) > 9},
    "pairs": lambda batch, length: {"attn_mask": torch.eye(length, dtype=torch.bool).roll(1, 0)},
}


@pytest.mark.parametrize("arguments_for", EXPORTED.values(), ids=EXPORTED)
def test_an_exported_module_takes_any_batch_and_length(
    arguments_for: Callable[[int, int], dict[str, Any]],
) -> None:
    """Up to the context length itself, at which a slice of the causal mask is the whole."""
    module = build(16).bfloat16().eval()

    def inputs(batch: int, length: int) -> dict[str, Any]:
        x = torch.randn(batch, length, D_IN, dtype=torch.bfloat16)
        return {"x": x, **arguments_for(batch, length)}

    example = inputs(3, 6)
    any_size = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    shapes = {name: any_size if torch.is_tensor(value) else None for name, value in example.items()}
    exported = torch.export.export(module, (), example, dynamic_shapes=shapes).module()
    for batch, length in ((1, 2), (5, 15), (2, 16)):
        given = inputs(batch, length)
        torch.testing.assert_close(exported(**given), module(**given), atol=2e-2, rtol=2e-2)


def test_the_mask_comes_back_from_meta_with_the_weights(x: Tensor) -> None:
    source = build()
    with torch.device("meta"):
        module = build()
    module.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert torch.equal(module.mask, source.mask)
    torch.testing.assert_close(module(x), source(x))


def test_a_state_dict_of_the_chapter_loads_without_its_mask(x: Tensor) -> None:
    source, model = build(), nn.ModuleDict({"att": build()})
    saved = {f"att.{name}": value for name, value in source.state_dict().items()}
    saved["att.mask"] = torch.triu(torch.ones(CONTEXT, CONTEXT), diagonal=1)
    model.load_state_dict(saved, strict=True)
    assert torch.equal(model["att"](x), source(x))
    assert model["att"].mask.dtype == torch.bool


def refused(message: str) -> Any:
    """Expect an InputError of one line with this text."""
    return pytest.raises(InputError, match=rf"\A[^\n]*{re.escape(message)}[^\n]*\Z")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "d_out 12 is not divisible by num_heads 5"),
        ({"num_heads": 0}, "d_out 12 is not divisible by num_heads 0"),
        ({"d_in": 0}, "d_in must be at least 1, got 0"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_named(changes: dict[str, int], message: str) -> None:
    sizes = {"d_in": 5, "d_out": 12, "context_length": 8, "dropout": 0.0, "num_heads": 3}
    with refused(message):
        MultiHeadAttention(**(sizes | changes))


def mask(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def tokens(*shape: int) -> Tensor:
    return torch.zeros(shape)


MISFITS = {
    "four dimensions": ({"x": tokens(1, 2, 6, 5)}, "(batch, tokens, 5), got (1, 2, 6, 5)"),
    "another width": ({"x": tokens(2, 6, 4)}, "(batch, tokens, 5), got (2, 6, 4)"),
    "too long": ({"x": tokens(2, 9, 5)}, "at most context_length 8 tokens, got 9"),
    "padding as numbers": (
        {"key_padding_mask": tokens(2, 6)},
        "boolean key_padding_mask of shape (2, 6), got torch.float32",
    ),
    "a short mask": (
        {"attn_mask": mask(6, 5)},
        "(6, 6) or (2, 6, 6) or (2, 3, 6, 6), got torch.bool of shape (6, 5)",
    ),
    "a cache of other heads": ({"cache": KeyValueCache(2, 2, 8, 6)}, "(2, 2, T, 6), got (2, 3, 6, 4)"),
    "a context": ({"context": tokens(2, 6, 5)}, "needs attention with causal=False"),
}


@pytest.mark.parametrize(("arguments", "message"), MISFITS.values(), ids=MISFITS)
def test_an_argument_that_does_not_fit_is_named(arguments: dict[str, Any], message: str, x: Tensor) -> None:
    with refused(message):
        build()(**{"x": x, **arguments})


def test_what_does_not_fit_without_a_causal_mask_is_named(x: Tensor) -> None:
    module = build(causal=False)
    with refused("a cache needs causal=True"):
        module.new_cache(2)
    with refused("a context of shape (2, tokens, 5), got (1, 7, 5)"):
        module(x, context=tokens(1, 7, 5))
    with refused("(6, 7) or (2, 6, 7) or (2, 3, 6, 7), got torch.bool of shape (7, 6)"):
        module(x, context=tokens(2, 7, 5), attn_mask=mask(7, 6))
