"""The attention module against a reference in numpy, over random shapes, masks and head counts.

The reference is written from the paper's formula, one query of one head at a time, in float64, and shares
nothing with the package.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt.attention import MultiHeadAttention


def reference(
    values: dict[str, np.ndarray], num_heads: int, hidden: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return output (B, T, E) and attention weights (B, H, T, S).

    `values` has the parameters, the tokens x (B, T, D), and perhaps a context (B, S, D). `hidden`
    (B, H, T, S) has every key that a query may not attend to, later ones too.
    """
    x = values["x"]
    context = values.get("context", x)
    query, key, value = (
        np.einsum("btd,ed->bte", tokens, values[f"{name}.weight"]) + values.get(f"{name}.bias", 0.0)
        for name, tokens in (("W_query", x), ("W_key", context), ("W_value", context))
    )
    width = query.shape[2] // num_heads
    out, attention = np.zeros_like(query), np.zeros(hidden.shape)
    for b, t in np.ndindex(*x.shape[:2]):
        heads = []
        for h in range(num_heads):
            columns = slice(h * width, (h + 1) * width)
            seen = np.flatnonzero(~hidden[b, h, t])
            if len(seen):
                scores = [query[b, t, columns] @ key[b, s, columns] / np.sqrt(width) for s in seen]
                attention[b, h, t, seen] = np.exp(scores) / np.exp(scores).sum()
            heads.append(attention[b, h, t] @ value[b, :, columns])
        if attention[b, :, t].any():  # a fully masked token gives zeros
            out[b, t] = values["out_proj.weight"] @ np.concatenate(heads) + values["out_proj.bias"]
    return out, attention


@dataclass(frozen=True, kw_only=True)
class Case:
    """One drawn example: a module in float64, and what it is called with."""

    module: MultiHeadAttention
    tokens: dict[str, torch.Tensor]
    """x (B, T, D), and perhaps a context (B, S, D)."""
    masks: dict[str, torch.Tensor]
    hidden: np.ndarray
    """What all masks together hide, as in `reference`."""
    chunks: list[int]
    """Where to cut T tokens, and T itself."""

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        return {**self.tokens, **dict(self.module.named_parameters())}

    def expected(self, leaves: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """The reference's output and weights for these tokens and parameters."""
        values = {name: leaf.detach().numpy() for name, leaf in leaves.items()}
        return reference(values, self.module.num_heads, self.hidden)


@st.composite
def cases(draw: st.DrawFn, *, cached: bool = False) -> Case:
    """Shapes, heads, biases, every subset of the masks, padding anywhere, and a way to cut T in chunks.

    Causal or not, and then perhaps with a context; only a causal one takes a cache.
    """
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    num_heads, width, d_in = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    causal = cached or draw(st.booleans())
    keys = length if causal else draw(st.one_of(st.just(length), st.integers(1, 7)))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    module = MultiHeadAttention(
        d_in,
        num_heads * width,
        keys + draw(st.integers(0, 3)),
        0.0,
        num_heads,
        qkv_bias=draw(st.booleans()),
        causal=causal,
    ).double()
    tokens = {"x": torch.randn(batch, length, d_in, dtype=torch.double)}
    if keys != length or (not causal and draw(st.booleans())):
        tokens["context"] = torch.randn(batch, keys, d_in, dtype=torch.double)

    hidden = np.zeros((batch, num_heads, length, keys), dtype=bool)
    if causal:
        hidden |= np.triu(np.ones((length, keys), dtype=bool), k=1)
    masks = {}
    padded = draw(st.sampled_from([None, 0.3, 1.0]))
    if padded is not None:
        masks["key_padding_mask"] = torch.rand(batch, keys) < padded
        hidden |= masks["key_padding_mask"].numpy()[:, None, None]
    leading = draw(st.sampled_from([None, (), (batch,), (batch, num_heads)]))
    if leading is not None:
        pairs = torch.rand(*leading, length, keys) < draw(st.sampled_from([0.1, 0.6]))
        masks["attn_mask"] = pairs
        hidden |= (pairs[:, None] if len(leading) == 1 else pairs).numpy()
    chunks = sorted(draw(st.sets(st.integers(1, length))) | {length})
    return Case(module=module, tokens=tokens, masks=masks, hidden=hidden, chunks=chunks)


many = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(cases())
def test_values_and_gradients_equal_the_reference(case: Case) -> None:
    """The gradients along random directions of all tokens and parameters together, by central differences."""
    for tensor in case.tokens.values():
        tensor.requires_grad_()
    leaves = case.leaves
    directions = {name: torch.randn_like(leaf) for name, leaf in leaves.items()}
    expected, expected_weights = case.expected(leaves)
    weight_of_out = torch.randn(expected.shape, dtype=torch.double)

    def shifted(step: float) -> float:
        out, _ = case.expected({name: leaf + step * directions[name] for name, leaf in leaves.items()})
        return float((out * weight_of_out.numpy()).sum())

    expected_derivative = (shifted(1e-5) - shifted(-1e-5)) / 2e-5
    fast = case.module(**case.tokens, **case.masks)
    explicit, weights = case.module(**case.tokens, **case.masks, need_weights=True)
    np.testing.assert_allclose(weights.detach().numpy(), expected_weights, atol=1e-12)
    for out in (fast, explicit):
        np.testing.assert_allclose(out.detach().numpy(), expected, atol=1e-12)
        gradients = torch.autograd.grad((out * weight_of_out).sum(), list(leaves.values()))
        pairs = zip(gradients, directions.values(), strict=True)
        derivative = sum(float((gradient * direction).sum()) for gradient, direction in pairs)
        assert derivative == pytest.approx(expected_derivative, rel=1e-5, abs=1e-6)


@many
@given(cases(cached=True))
def test_decoding_in_chunks_equals_the_reference(case: Case) -> None:
    expected, expected_weights = case.expected(case.leaves)
    x = case.tokens["x"]
    caches = [case.module.new_cache(len(x), max_length=x.shape[1]) for _ in range(2)]
    start = 0
    with torch.inference_mode():
        for end in case.chunks:
            chunk = slice(start, end)
            masks = {name: mask[..., :end] for name, mask in case.masks.items()}
            if "attn_mask" in masks:
                masks["attn_mask"] = masks["attn_mask"][..., chunk, :]
            fast = case.module(x[:, chunk], cache=caches[0], **masks)
            explicit, weights = case.module(x[:, chunk], cache=caches[1], need_weights=True, **masks)
            np.testing.assert_allclose(fast.numpy(), expected[:, chunk], atol=1e-12)
            np.testing.assert_allclose(explicit.numpy(), expected[:, chunk], atol=1e-12)
            np.testing.assert_allclose(weights.numpy(), expected_weights[:, :, chunk, :end], atol=1e-12)
            start = end
