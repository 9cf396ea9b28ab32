"""`benchmark.py attention`: attention modules at GPT-2's sizes, forward and backward.

Shapes: B batch, T tokens, E width, H heads, K width of a head.
"""

from collections.abc import Callable
from itertools import product

import torch
from benchmarks.common import Report, geometric_mean, interleave, peak_memory, say, synchronize
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.attention import MultiHeadAttention, MultiHeadAttentionWrapper, MultiHeadAttn

WRAPPER, EXPLICIT, SPLIT = "wrapper (S6)", "split, explicit (S7)", "split (S7)"
FUSED_EXPLICIT, FUSED, TORCH = "fused, explicit (S9)", "fused, SDPA", "torch.nn.MultiheadAttention"
# These compute the weights explicitly. They are slow, and a rough figure is enough.
SLOW = (WRAPPER, EXPLICIT, FUSED_EXPLICIT)
RATIOS = {"split_vs_torch_mha": TORCH, "split_vs_fused": FUSED, "split_vs_wrapper": WRAPPER}
SIZES = {"GPT-2 small": (768, 12), "GPT-2 XL": (1600, 25)}


class FusedAttention(nn.Module):
    """The usual GPT layer: one projection for query, key and value, SDPA, an output projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out_proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)  # (B, H, T, K)
            for part in self.qkv(x).split(width, dim=2)
        )
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(context.transpose(1, 2).flatten(2))


def run(quick: bool) -> Report:
    """Time all modules at all sizes. `quick` takes the small model at 256 tokens."""
    settings = product(list(SIZES)[: 1 if quick else 2], (256,) if quick else (256, 1024), ("fp32", "bf16"))
    rows = []
    faster: dict[str, list[float]] = {name: [] for name in RATIOS}
    for size, tokens, precision in settings:
        setting = f"{size}, {tokens} tokens, {precision}"
        say(f"measuring {setting}")
        candidates = build(*SIZES[size], tokens, precision)
        timings = interleave(candidates, rounds=5 if quick else 15, every=dict.fromkeys(SLOW, 5))
        for name, other in RATIOS.items():
            faster[name].append(timings[SPLIT].times_faster_than(timings[other]))
        for name, timing in timings.items():
            figures = {"median ms": 1e3 * timing.median, "spread": f"{timing.spread:.1%}"}
            memory = {"peak MB": peak_memory(candidates[name]) / 1e6}
            times = {"times the split's": timings[SPLIT].times_faster_than(timing)}
            rows.append({"setting": setting, "module": name, **figures, **memory, **times})
    return Report(
        title="Attention, forward and backward",
        rows=rows,
        ratios={name: geometric_mean(values) for name, values in faster.items()},
        notes=[
            "A ratio is the geometric mean over all settings, of which each has 1,024 tokens in all. bf16 is "
            "autocast over fp32 weights. The wrapper and S9 have no output projection; one is added."
        ],
    )


def build(width: int, heads: int, tokens: int, precision: str) -> dict[str, Callable[[], object]]:
    """A function for each module that runs forward and backward, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(1024 // tokens, tokens, width, device=device, requires_grad=True)
    with torch.device(device):
        # S6 and S9 have no output projection. Adding one makes the work equal.
        wrapper = nn.Sequential(
            MultiHeadAttentionWrapper(width, width // heads, tokens, 0.0, heads, qkv_bias=True),
            nn.Linear(width, width),
        )
        fused_explicit = nn.Sequential(MultiHeadAttn(width, tokens, heads), nn.Linear(width, width))
        split = MultiHeadAttention(width, width, tokens, 0.0, heads, qkv_bias=True)
        fused = FusedAttention(width, heads)
        torchs = nn.MultiheadAttention(width, heads, batch_first=True)
    forward: dict[str, Callable[[], Tensor]] = {
        SPLIT: lambda: split(x),
        FUSED: lambda: fused(x),
        # is_causal without weights is its fastest path; the mask is only checked for its shape.
        TORCH: lambda: torchs(x, x, x, attn_mask=split.mask, is_causal=True, need_weights=False)[0],
        EXPLICIT: lambda: split(x, need_weights=True)[0],
        FUSED_EXPLICIT: lambda: fused_explicit(x),
        WRAPPER: lambda: wrapper(x),
    }
    gradient, modules = torch.randn_like(x), (wrapper, fused_explicit, split, fused, torchs)

    def step(call: Callable[[], Tensor]) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            out = call()
        out.backward(gradient.to(out.dtype))
        for module in modules:
            module.zero_grad()
        x.grad = None
        synchronize(device)

    return {name: lambda call=call: step(call) for name, call in forward.items()}
