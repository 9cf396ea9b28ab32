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
    weights: Weights, x: np.ndarray, num_heads: int, masked: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (B, T, D) and `masked` (B, H, T, T) -> output (B, T, E) and attention weights (B, H, T, T)."""
    batch, length, _ = x.shape
    projected = [
        np.einsum("btd,ed->bte", x, weights[f"{name}.weight"]) + weights.get(f"{name}.bias", 0.0)
        for name in ("W_query", "W_key", "W_value")
    ]
    width = projected[0].shape[2] // num_heads
    out, attention = np.zeros_like(projected[0]), np.zeros((batch, num_heads, length, length))
    for b in range(batch):
        for t in range(length):
            context = []
            for h in range(num_heads):
                query, key, value = (part[b, :, h * width : (h + 1) * width] for part in projected)
                seen = [s for s in range(t + 1) if not masked[b, h, t, s]]
                if seen:
                    exponents = np.exp([query[t] @ key[s] / np.sqrt(width) for s in seen])
                    attention[b, h, t, seen] = exponents / exponents.sum()
                context.append(attention[b, h, t] @ value)
            if attention[b, :, t].any():  # a fully masked token gives zeros
                out[b, t] = weights["out_proj.weight"] @ np.concatenate(context) + weights["out_proj.bias"]
    return out, attention


@dataclass(frozen=True, kw_only=True)
class Case:
    """One drawn example: a module in float64, its input, and the masks given to it."""

    module: MultiHeadAttention
    x: torch.Tensor
    masks: dict[str, torch.Tensor]
    chunks: list[int]

    @property
    def weights(self) -> Weights:
        return {name: value.numpy() for name, value in self.module.state_dict().items()}

    @property
    def masked(self) -> np.ndarray:
        batch, length, _ = self.x.shape
        masked = np.zeros((batch, self.module.num_heads, length, length), dtype=bool)
        if "key_padding_mask" in self.masks:
            masked |= self.masks["key_padding_mask"].numpy().reshape(batch, 1, 1, length)
        if "attn_mask" in self.masks:
            pairs = self.masks["attn_mask"].numpy()
            masked |= pairs.reshape(batch, 1, length, length) if pairs.ndim == 3 else pairs
        return masked

    def masks_between(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """What a call with a cache of `start` tokens gets for those up to `end`."""
        queries = (..., slice(start, end), slice(end))
        return {
            name: mask[queries] if name == "attn_mask" else mask[:, :end] for name, mask in self.masks.items()
        }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Shapes, heads, biases, every subset of the masks, padding on any side, and a way to cut T in chunks."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    num_heads, width, d_in = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    module = MultiHeadAttention(
        d_in,
        num_heads * width,
        length + draw(st.integers(0, 3)),
        0.0,
        num_heads,
        qkv_bias=draw(st.booleans()),
    ).double()
    masks = {}
    side = draw(st.sampled_from(["none", "left", "right", "anywhere", "all"]))
    positions, real = torch.arange(length), torch.randint(0, length + 1, (batch, 1))
    if side != "none":
        masks["key_padding_mask"] = {
            "left": positions < length - real,
            "right": positions >= real,
            "anywhere": torch.rand(batch, length) < 0.5,
            "all": torch.ones(batch, length, dtype=torch.bool),
        }[side]
    leading = draw(st.sampled_from([None, (), (batch,), (batch, num_heads)]))
    if leading is not None:
        masks["attn_mask"] = torch.rand(*leading, length, length) < draw(st.sampled_from([0.1, 0.6]))
    cuts = draw(st.sets(st.integers(1, length)))
    chunks = sorted(cuts | {length})
    return Case(
        module=module, x=torch.randn(batch, length, d_in, dtype=torch.double), masks=masks, chunks=chunks
    )


many = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(cases())
def test_both_paths_equal_the_reference(case: Case) -> None:
    expected, expected_weights = reference(case.weights, case.x.numpy(), case.module.num_heads, case.masked)
    fast = case.module(case.x, **case.masks)
    explicit, weights = case.module(case.x, need_weights=True, **case.masks)
    np.testing.assert_allclose(fast.detach().numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(explicit.detach().numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(weights.detach().numpy(), expected_weights, atol=1e-12)


@many
@given(cases())
def test_decoding_in_chunks_equals_the_reference(case: Case) -> None:
    expected, expected_weights = reference(case.weights, case.x.numpy(), case.module.num_heads, case.masked)
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
    """Directional derivatives along random directions of x and of every weight, by central differences."""
    leaves = {"x": case.x.requires_grad_(), **dict(case.module.named_parameters())}
    weight_of_out = torch.randn(*case.x.shape[:2], case.module.d_out, dtype=torch.double)
    directions = {name: torch.randn_like(leaf) for name, leaf in leaves.items()}

    def shifted(step: float) -> float:
        values = {name: (leaf.detach() + step * directions[name]).numpy() for name, leaf in leaves.items()}
        out, _ = reference(values, values["x"], case.module.num_heads, case.masked)
        return float((out * weight_of_out.numpy()).sum())

    expected = (shifted(1e-5) - shifted(-1e-5)) / 2e-5
    outputs = {
        "SDPA": case.module(case.x, **case.masks),
        "explicit": case.module(case.x, need_weights=True, **case.masks)[0],
    }
    for name, out in outputs.items():
        gradients = torch.autograd.grad((out * weight_of_out).sum(), list(leaves.values()))
        derivative = sum(
            float((gradient * directions[leaf]).sum())
            for leaf, gradient in zip(leaves, gradients, strict=True)
        )
        assert derivative == pytest.approx(expected, rel=1e-5, abs=1e-6), name
