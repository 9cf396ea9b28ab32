"""The cost of training GPT-2's sizes on one to 64 GPUs: the formulas and tables of docs/cluster.md.

    python scripts/scale.py

Everything here is computed. Replace the assumptions below with your own figures.
"""

from functools import cache

import torch

from gpt import GPT, GPTConfig

TOKENS = 10_000_000_000
BATCH_TOKENS = 2**19  # an update, all GPUs together
PEAK = 989e12  # FLOP/s of an H100 SXM in dense bfloat16, data sheet
UTILISATION = 0.40  # fraction of the peak that one GPU reaches
PRICE = 2.50  # dollars a GPU and hour
GPUS_A_NODE = 8
NODE, NETWORK = 450e9, 50e9  # bytes a second: NVLink, one way; one 400 Gbit/s card for each node
GPUS = (1, 8, 16, 32, 64)


@cache
def parameters(config: GPTConfig) -> int:
    """N, counted on the meta device."""
    with torch.device("meta"):
        return GPT(config).num_parameters()


def flops_per_token(config: GPTConfig, context: int | None = None) -> float:
    """6 N + 12 L D T: the products with the weights and attention's own, forward and backward.

    Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022, appendix B.
    """
    tokens = context or config.context_length
    return 6 * parameters(config) + 12 * config.num_layers * config.emb_dim * tokens


def hours(config: GPTConfig, gpus: int) -> float:
    """Return the hours of training on TOKENS tokens, if no traffic of gradients overlaps with computing.

    Most of it can overlap.
    """
    compute = BATCH_TOKENS * flops_per_token(config) / (gpus * PEAK * UTILISATION)  # seconds an update
    speed = NODE if gpus <= GPUS_A_NODE else NETWORK
    traffic = 2 * (gpus - 1) / gpus * 4 * parameters(config) / speed  # a ring's all-reduce of float32
    return TOKENS / BATCH_TOKENS * (compute + traffic) / 3600


def activations(config: GPTConfig) -> float:
    """Bytes that a window keeps: 34 D a token and layer in 16 bits with attention in one kernel.

    Korthikanti et al. 2022, section 4.1. The logits come in chunks and hardly count.
    """
    return 34 * config.emb_dim * config.num_layers * config.context_length


def tables() -> str:
    """The tables of docs/cluster.md."""
    sizes = {name: GPTConfig.from_name(name) for name in GPTConfig.names()}
    lines = [
        "| | parameters | GFLOP a token | states, GB | a window's activations, GB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, config in sizes.items():
        states, kept = 16 * parameters(config) / 1e9, activations(config) / 1e9
        operations = flops_per_token(config) / 1e9
        lines.append(f"| {name} | {parameters(config):,} | {operations:.2f} | {states:.1f} | {kept:.2f} |")
    header = " | ".join(f"{count} GPU{'s' if count > 1 else ''}" for count in GPUS)
    lines += ["", f"| hours, dollars | {header} |", "| --- " * (len(GPUS) + 1) + "|"]
    for name, config in sizes.items():
        cells = []
        for count in GPUS:
            needed = hours(config, count)
            cells.append(f"{needed:,.1f} h, ${needed * count * PRICE:,.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
