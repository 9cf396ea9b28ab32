"""The cost of training GPT-2's sizes on one to 64 GPUs: the formulas and tables of docs/hardware.md.

    python scripts/scale.py

Everything here is computed. Replace the assumptions below with your own figures.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import yaml

from gpt import GPT, GPTConfig

TOKENS = 10_000_000_000
BATCH_TOKENS = 2**19  # an update, all GPUs together
PEAK = 989e12  # FLOP/s of an H100 SXM in dense bfloat16, data sheet
UTILISATION = 0.40  # fraction of the peak that one GPU reaches
PRICE = 2.50  # dollars a GPU and hour
GPUS_A_NODE = 8
BYTES_A_SECOND = {"node": 450e9, "network": 50e9}  # NVLink, one way; one 400 Gbit/s card for each node
GPUS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a run on a number of GPUs."""

    hours: float
    dollars: float
    efficiency: float
    """Relative to the same number of independent GPUs."""


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


def cost(config: GPTConfig, gpus: int) -> Cost:
    """Cost of TOKENS tokens if none of the gradients' traffic overlaps with computing; most of it can."""
    compute = BATCH_TOKENS * flops_per_token(config) / (gpus * PEAK * UTILISATION)  # seconds an update
    speed = BYTES_A_SECOND["node" if gpus <= GPUS_A_NODE else "network"]
    traffic = 2 * (gpus - 1) / gpus * 4 * parameters(config) / speed  # a ring's all-reduce of float32
    hours = TOKENS / BATCH_TOKENS * (compute + traffic) / 3600
    return Cost(hours=hours, dollars=hours * gpus * PRICE, efficiency=compute / (compute + traffic))


def memory(config: GPTConfig, windows: int) -> float:
    """Bytes on each GPU: float32 weights, gradients and AdamW's two moments, and the activations kept.

    Activations: 34 D bytes a token and layer in 16 bits with attention in one kernel (Korthikanti et al.
    2022, section 4.1); the logits come in chunks and hardly count.
    """
    activations = 34 * config.emb_dim * config.num_layers * config.context_length * windows
    return 16 * parameters(config) + activations


def recipes() -> str:
    """The table of configs/gpt2-*.yaml: the cost on one GPU and on a node of eight."""
    lines = [
        "| configs/ | tokens an update | updates | tokens | GB on a GPU | one GPU | eight GPUs |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in GPTConfig.names():
        text = Path(__file__).parents[1].joinpath("configs", f"{name}.yaml").read_text(encoding="utf-8")
        options, config = yaml.safe_load(text), GPTConfig.from_name(name)
        windows, updates = options["data"]["batch_size"], options["trainer"]["max_steps"]
        an_update = options["data"]["tokens_per_update"]
        tokens = an_update * updates
        hours = [cost(config, count).hours * tokens / TOKENS for count in (1, 8)]
        lines.append(
            f"| {name}.yaml | {an_update:,} | {updates:,} | {tokens / 1e9:.1f} billion | "
            f"{memory(config, windows) / 1e9:.0f} | {hours[0]:.0f} h | {hours[1]:.1f} h |"
        )
    return "\n".join(lines)


def tables() -> str:
    """The tables of docs/hardware.md."""
    sizes = {name: GPTConfig.from_name(name) for name in GPTConfig.names()}
    lines = [
        "| | parameters | GFLOP a token | states, GB | a window's activations, GB | GPU-hours |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, config in sizes.items():
        states, both = memory(config, 0) / 1e9, memory(config, 1) / 1e9
        figures = f"{flops_per_token(config) / 1e9:.2f} | {states:.1f} | {both - states:.2f}"
        lines.append(f"| {name} | {parameters(config):,} | {figures} | {cost(config, 1).hours:,.1f} |")
    header = " | ".join(f"{count} GPU{'s' if count > 1 else ''}" for count in GPUS)
    lines += ["", f"| hours, dollars | {header} |", "| --- " * (len(GPUS) + 1) + "|"]
    for name, config in sizes.items():
        costs = [cost(config, count) for count in GPUS]
        cells = " | ".join(f"{one.hours:,.1f} h, ${one.dollars:,.0f}" for one in costs)
        lines.append(f"| {name} | {cells} |")
    lines += ["", f"| efficiency | {header} |", "| --- " * (len(GPUS) + 1) + "|"]
    for name, config in sizes.items():
        cells = " | ".join(f"{cost(config, count).efficiency:.0%}" for count in GPUS)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables(), recipes(), sep="\n\n")
