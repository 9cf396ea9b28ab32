"""`benchmark.py attention`: attention modules at GPT-2's sizes, forward and backward.

Shapes: B batch, T tokens, E width, H heads, K width of a head.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import geometric_mean

import torch
from benchmarks.common import Report, interleave, say, synchronize
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.attention import MultiHeadAttention, MultiHeadAttentionWrapper

SPLIT = "split (S7)"
RATIOS = {
    "split_vs_torch_mha": "torch.nn.MultiheadAttention",
    "split_vs_fused": "fused, SDPA",
    "split_vs_wrapper": "wrapper (S6)",
}
SIZES = {"GPT-2 small": (768, 12), "GPT-2 XL": (1600, 25)}


class FusedAttention(nn.Module):
    """The usual GPT layer: one projection for query, key and value, SDPA, an output projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.heads = heads

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
        timings = interleave(build(*SIZES[size], tokens, precision), rounds=3 if quick else 9)
        for name, other in RATIOS.items():
            faster[name].append(timings[SPLIT].times_faster_than(timings[other]))
        for name, timing in timings.items():
            figures = {"median ms": 1e3 * timing.median, "spread": f"{timing.spread:.1%}"}
            times = {"times the split's": timings[SPLIT].times_faster_than(timing)}
            rows.append({"setting": setting, "module": name, **figures, **times})
    return Report(
        title="Attention, forward and backward",
        rows=rows,
        ratios={name: geometric_mean(values) for name, values in faster.items()},
        notes=[
            "A ratio is the geometric mean over all settings, of which each has 1,024 tokens in all. bf16 is "
            "autocast over fp32 weights."
        ],
        across=("module", "times the split's"),
    )


def build(width: int, heads: int, tokens: int, precision: str) -> dict[str, Callable[[], object]]:
    """A function for each module that runs forward and backward, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(1024 // tokens, tokens, width, device=device, requires_grad=True)
    split = MultiHeadAttention(width, width, tokens, 0.0, heads, qkv_bias=True).to(device)
    modules = {
        "fused, SDPA": FusedAttention(width, heads),
        "torch.nn.MultiheadAttention": nn.MultiheadAttention(width, heads, batch_first=True),
        "wrapper (S6)": nn.Sequential(  # which has no output projection: with one the work is equal
            MultiHeadAttentionWrapper(width, width // heads, tokens, 0.0, heads, qkv_bias=True),
            nn.Linear(width, width),
        ),
    }
    for module in modules.values():
        module.to(device)
    calls: dict[str, Callable[[], Tensor]] = {name: partial(module, x) for name, module in modules.items()}
    calls[SPLIT] = partial(split, x)
    torchs = modules["torch.nn.MultiheadAttention"]
    # is_causal without weights is its fastest path; the mask is only checked for its shape.
    options = {"attn_mask": split.mask, "is_causal": True, "need_weights": False}
    calls["torch.nn.MultiheadAttention"] = lambda: torchs(x, x, x, **options)[0]
    gradient = torch.randn_like(x)

    def step(call: Callable[[], Tensor]) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            out = call()
        out.backward(gradient.to(out.dtype))
        for module in (split, *modules.values()):
            module.zero_grad()
        x.grad = None
        synchronize(device)

    return {name: partial(step, call) for name, call in calls.items()}
