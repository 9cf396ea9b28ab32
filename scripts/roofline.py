"""The time of a GPT-2 small training step on one GPU, computed part by part: the table in docs/benchmarks.md.

    python scripts/roofline.py

Nothing here is measured. A part takes its operations divided by the assumed rate, or its bytes divided by the
assumed bandwidth, whichever applies. Replace the assumptions with your own figures.

Shapes: N tokens of a step's micro-batch, D width, L layers, T context, V vocabulary.
"""

from dataclasses import dataclass, replace

from scale import PEAK, flops_per_token, parameters

from gpt import GPTConfig

CONFIG = GPTConfig()  # GPT-2 small
TOKENS = 1024  # one window of T tokens; every time below is for this many


@dataclass(frozen=True, kw_only=True)
class GPU:
    """Assumed rates of one GPU in bfloat16."""

    products: float  # FLOP/s of large matrix products
    attention: float  # FLOP/s of fused attention, forward and backward
    bandwidth: float  # bytes/s of elementwise kernels


GPUS = {
    "H100": GPU(products=600e12, attention=350e12, bandwidth=2.9e12),
    "H200": GPU(products=622e12, attention=350e12, bandwidth=4.15e12),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """How a training step is set up."""

    windows: int = 12  # micro-batch, in windows of T tokens
    loss_chunk: int = 1024  # rows of logits at a time
    loss_passes: int = 9  # reads and writes of the bfloat16 logits
    residual_bytes: int = 120  # per element and layer: norms, GELU, additions, with a float32 residual stream


AS_CONFIGURED = Step()
LARGER = replace(AS_CONFIGURED, windows=60, loss_chunk=8192)
FUSED = replace(LARGER, loss_passes=3)
STEPS = {
    "as configured: 12 windows, loss chunks of 1,024": AS_CONFIGURED,
    "60 windows, loss chunks of 8,192": LARGER,
    "and softmax with its gradient in one kernel": FUSED,
    "and a bfloat16 residual stream": replace(FUSED, residual_bytes=84),
}


def times(step: Step, gpu: GPU) -> dict[str, float]:
    """Milliseconds per TOKENS tokens of each part."""
    head = CONFIG.vocab_size * CONFIG.emb_dim  # weights of the head, V * D
    blocks = parameters(CONFIG) - head - CONFIG.context_length * CONFIG.emb_dim
    # Causal attention computes half of 12 L D T, and its backward pass repeats one of six products.
    attention = 12 * CONFIG.num_layers * CONFIG.emb_dim * CONFIG.context_length / 2 * 7 / 6
    elements = TOKENS * CONFIG.emb_dim * CONFIG.num_layers
    accumulation = 3 * 4 * head * TOKENS / step.loss_chunk  # read, read and write float32 gradients per chunk
    once = (
        4.4e9 / step.windows
    )  # per micro-batch: casts of weights, gradient accumulation, embedding gradient
    seconds = {
        "block products": 6 * blocks * TOKENS / gpu.products,
        "head products": 6 * head * TOKENS / gpu.products,
        "attention": attention * TOKENS / gpu.attention,
        "block elementwise": step.residual_bytes * elements / gpu.bandwidth,
        "loss elementwise": step.loss_passes * 2 * CONFIG.vocab_size * TOKENS / gpu.bandwidth,
        "head-gradient accumulation": accumulation / gpu.bandwidth,
        "casts and gradient accumulation": once / gpu.bandwidth,
    }
    return {part: 1000 * value for part, value in seconds.items()}


def utilisation(step: Step, gpu: GPU) -> float:
    """The fraction of the peak that the step reaches (MFU)."""
    return TOKENS * flops_per_token(CONFIG) / PEAK / (sum(times(step, gpu).values()) / 1000)


def tables() -> str:
    """Both tables of docs/benchmarks.md."""
    names = " | ".join(GPUS)
    lines = [f"| ms per {TOKENS:,} tokens | {names} |", "| --- " * (len(GPUS) + 1) + "|"]
    found = {name: times(AS_CONFIGURED, gpu) for name, gpu in GPUS.items()}
    for part in next(iter(found.values())):
        lines.append(f"| {part} | {' | '.join(f'{parts[part]:.2f}' for parts in found.values())} |")
    lines.append(f"| sum | {' | '.join(f'{sum(parts.values()):.2f}' for parts in found.values())} |")
    lines += ["", f"| fraction of the peak, tokens per second | {names} |", "| --- " * (len(GPUS) + 1) + "|"]
    for name, step in STEPS.items():
        cells = [
            f"{utilisation(step, gpu):.0%}, {TOKENS / sum(times(step, gpu).values()):.0f}k"
            for gpu in GPUS.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
