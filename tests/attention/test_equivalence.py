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

Weights = dict[str, np.ndarray]


def reference(
    weights: Weights, x: np.ndarray, context: np.ndarray, num_heads: int, masked: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return output (B, T, E) and attention weights (B, H, T, S) of tokens (B, T, D) to a context (B, S, D).

    `masked` (B, H, T, S) has every key that a query may not attend to, later ones too.
    """
    query, key, value = (
        np.einsum("btd,ed->bte", tokens, weights[f"{name}.weight"]) + weights.get(f"{name}.bias", 0.0)
        for name, tokens in (("W_query", x), ("W_key", context), ("W_value", context))
    )
    width = query.shape[2] // num_heads
    out, attention = np.zeros_like(query), np.zeros(masked.shape)
    for b, t in np.ndindex(*x.shape[:2]):
        heads = []
        for h in range(num_heads):
            columns = slice(h * width, (h + 1) * width)
            seen = np.flatnonzero(~masked[b, h, t])
            if len(seen):
                scores = [query[b, t, columns] @ key[b, s, columns] / np.sqrt(width) for s in seen]
                attention[b, h, t, seen] = np.exp(scores) / np.exp(scores).sum()
            heads.append(attention[b, h, t] @ value[b, :, columns])
        if attention[b, :, t].any():  # a fully masked token gives zeros
            out[b, t] = weights["out_proj.weight"] @ np.concatenate(heads) + weights["out_proj.bias"]
    return out, attention


@dataclass(frozen=True, kw_only=True)
class Case:
    """One drawn example: a module in float64, its input, and the masks given to it."""

    module: MultiHeadAttention
    x: torch.Tensor
    context: torch.Tensor | None
    masks: dict[str, torch.Tensor]
    chunks: list[int]

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What the module is called with."""
        return {"x": self.x, **self.masks} | ({} if self.context is None else {"context": self.context})

    def expected(self, changes: Weights | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The reference's output and weights; `changes` has other weights, and x or a context."""
        tensors = {**self.module.state_dict(), "x": self.x}
        if self.context is not None:
            tensors["context"] = self.context
        values = {name: tensor.detach().numpy() for name, tensor in tensors.items()} | (changes or {})
        context = values.get("context", values["x"])
        return reference(values, values["x"], context, self.module.num_heads, self.masked)

    @property
    def masked(self) -> np.ndarray:
        batch, length, _ = self.x.shape
        keys = length if self.context is None else self.context.shape[1]
        masked = np.zeros((batch, self.module.num_heads, length, keys), dtype=bool)
        if self.module.mask is not None:
            masked |= np.triu(np.ones((length, keys), dtype=bool), k=1)
        if "key_padding_mask" in self.masks:
            masked |= self.masks["key_padding_mask"].numpy().reshape(batch, 1, 1, keys)
        if "attn_mask" in self.masks:
            pairs = self.masks["attn_mask"].numpy()
            masked |= pairs.reshape(batch, 1, length, keys) if pairs.ndim == 3 else pairs
        return masked

    def masks_between(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """What a call with a cache of `start` tokens gets for those up to `end`."""
        queries = (..., slice(start, end), slice(end))
        return {
            name: mask[queries] if name == "attn_mask" else mask[:, :end] for name, mask in self.masks.items()
        }


@st.composite
def cases(draw: st.DrawFn, *, cached: bool = False) -> Case:
    """Shapes, heads, biases, every subset of the masks, padding on any side, and a way to cut T in chunks.

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
    masks = {}
    side = draw(st.sampled_from(["none", "left", "right", "anywhere", "all"]))
    positions, real = torch.arange(keys), torch.randint(0, keys + 1, (batch, 1))
    if side != "none":
        masks["key_padding_mask"] = {
            "left": positions < keys - real,
            "right": positions >= real,
            "anywhere": torch.rand(batch, keys) < 0.5,
            "all": torch.ones(batch, keys, dtype=torch.bool),
        }[side]
    leading = draw(st.sampled_from([None, (), (batch,), (batch, num_heads)]))
    if leading is not None:
        masks["attn_mask"] = torch.rand(*leading, length, keys) < draw(st.sampled_from([0.1, 0.6]))
    has_context = keys != length or (not causal and draw(st.booleans()))
    return Case(
        module=module,
        x=torch.randn(batch, length, d_in, dtype=torch.double),
        context=torch.randn(batch, keys, d_in, dtype=torch.double) if has_context else None,
        masks=masks,
        chunks=sorted(draw(st.sets(st.integers(1, length))) | {length}),
    )


many = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(cases())
def test_both_paths_equal_the_reference(case: Case) -> None:
    expected, expected_weights = case.expected()
    fast = case.module(**case.inputs)
    explicit, weights = case.module(**case.inputs, need_weights=True)
    np.testing.assert_allclose(fast.detach().numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(explicit.detach().numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(weights.detach().numpy(), expected_weights, atol=1e-12)


@many
@given(cases(cached=True))
def test_decoding_in_chunks_equals_the_reference(case: Case) -> None:
    expected, expected_weights = case.expected()
    caches = [case.module.new_cache(len(case.x), max_length=case.x.shape[1]) for _ in range(2)]
    start = 0
    with torch.inference_mode():
        for end in case.chunks:
            x, masks = case.x[:, start:end], case.masks_between(start, end)
            fast = case.module(x, cache=caches[0], **masks)
            explicit, weights = case.module(x, cache=caches[1], need_weights=True, **masks)
            np.testing.assert_allclose(fast.numpy(), expected[:, start:end], atol=1e-12)
            np.testing.assert_allclose(explicit.numpy(), expected[:, start:end], atol=1e-12)
            np.testing.assert_allclose(weights.numpy(), expected_weights[:, :, start:end, :end], atol=1e-12)
            start = end


@many
@given(cases())
def test_gradients_equal_finite_differences_of_the_reference(case: Case) -> None:
    """Directional derivatives along random directions of each input and weight, by central differences."""
    leaves = {"x": case.x.requires_grad_(), **dict(case.module.named_parameters())}
    if case.context is not None:
        leaves["context"] = case.context.requires_grad_()
    weight_of_out = torch.randn(*case.x.shape[:2], case.module.d_out, dtype=torch.double)
    directions = {name: torch.randn_like(leaf) for name, leaf in leaves.items()}

    def shifted(step: float) -> float:
        values = {name: (leaf.detach() + step * directions[name]).numpy() for name, leaf in leaves.items()}
        out, _ = case.expected(values)
        return float((out * weight_of_out.numpy()).sum())

    expected = (shifted(1e-5) - shifted(-1e-5)) / 2e-5
    outputs = {
        "SDPA": case.module(**case.inputs),
        "explicit": case.module(**case.inputs, need_weights=True)[0],
    }
    for name, out in outputs.items():
        gradients = torch.autograd.grad((out * weight_of_out).sum(), list(leaves.values()))
        derivative = sum(
            float((gradient * directions[leaf]).sum())
            for leaf, gradient in zip(leaves, gradients, strict=True)
        )
        assert derivative == pytest.approx(expected, rel=1e-5, abs=1e-6), name
