"""Attention modules at GPT-2's sizes, forward and backward.

Shapes: B batch, T tokens, E width, H heads, K width of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from benchmarks.common import Report, geometric_mean, interleave, peak_memory, say
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.attention import MultiHeadAttention, MultiHeadAttentionWrapper, MultiHeadAttn

WRAPPER, EXPLICIT, SPLIT = "wrapper (S6)", "split, explicit (S7)", "split (S7)"
FUSED_EXPLICIT, FUSED, TORCH = "fused, explicit (S9)", "fused, SDPA", "torch.nn.MultiheadAttention"
# These compute the weights explicitly. They are slow, and a rough figure is enough.
SLOW = (WRAPPER, EXPLICIT, FUSED_EXPLICIT)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size, length and precision; a batch always has 1,024 tokens."""

    model: str
    width: int
    heads: int
    tokens: int
    precision: str

    @property
    def name(self) -> str:
        return f"{self.model}, {self.tokens} tokens, {self.precision}"


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
    models = [("GPT-2 small", 768, 12)] if quick else [("GPT-2 small", 768, 12), ("GPT-2 XL", 1600, 25)]
    lengths = [256] if quick else [256, 1024]
    settings = [
        Setting(model=model, width=width, heads=heads, tokens=tokens, precision=precision)
        for (model, width, heads), tokens, precision in product(models, lengths, ("fp32", "bf16"))
    ]
    rows, bars = [], {}
    faster: dict[str, list[float]] = {TORCH: [], FUSED: [], WRAPPER: []}
    for setting in settings:
        say(f"measuring {setting.name}")
        candidates = build(setting)
        timings = interleave(candidates, rounds=5 if quick else 15, every=dict.fromkeys(SLOW, 5))
        bars[setting.name] = {name: 1e3 * timing.median for name, timing in timings.items()}
        for name, timing in timings.items():
            ratio = timings[SPLIT].times_faster_than(timing)
            if name in faster:
                faster[name].append(ratio)
            rows.append(
                {
                    "setting": setting.name,
                    "module": name,
                    "median ms": 1e3 * timing.median,
                    "spread %": round(100 * timing.spread, 1),
                    "peak MB": round(peak_memory(candidates[name]) / 1e6, 1),
                    "times the split's": round(ratio, 3),
                }
            )
    return Report(
        title="Attention, forward and backward",
        rows=rows,
        ratios={
            "split_vs_torch_mha": geometric_mean(faster[TORCH]),
            "split_vs_fused": geometric_mean(faster[FUSED]),
            "split_vs_wrapper": geometric_mean(faster[WRAPPER]),
        },
        bars=bars,
        unit="milliseconds, forward and backward",
        notes=[
            "A ratio is the geometric mean over all settings; the lowest are "
            f"{min(faster[TORCH]):.3f} against torch and {min(faster[FUSED]):.3f} against fused SDPA. "
            "Every setting has 1,024 tokens in all. bf16 is autocast over fp32 weights. "
            "The wrapper and S9 have no output projection; the benchmark adds one."
        ],
    )


def build(setting: Setting) -> dict[str, Callable[[], object]]:
    """A function for each module that runs forward and backward, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, heads, tokens = setting.width, setting.heads, setting.tokens
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
    forward: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
        SPLIT: (split, lambda: split(x)),
        FUSED: (fused, lambda: fused(x)),
        TORCH: (
            torchs,
            # is_causal without weights is its fastest path; the mask is only checked for its shape.
            lambda: torchs(x, x, x, attn_mask=split.mask, is_causal=True, need_weights=False)[0],
        ),
        EXPLICIT: (split, lambda: split(x, need_weights=True)[0]),
        FUSED_EXPLICIT: (fused_explicit, lambda: fused_explicit(x)),
        WRAPPER: (wrapper, lambda: wrapper(x)),
    }
    gradient = torch.randn_like(x)

    def step(module: nn.Module, call: Callable[[], Tensor]) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=setting.precision == "bf16"):
            out = call()
        out.backward(gradient.to(out.dtype))
        module.zero_grad()
        x.grad = None
        if device == "cuda":
            torch.cuda.synchronize()

    return {name: lambda pair=pair: step(*pair) for name, pair in forward.items()}
