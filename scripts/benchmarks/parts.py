"""`benchmark.py parts`: where the time of a training step of small models goes, on a CPU.

The models are those of plans from one minute to an hour. Their step is the one of `gpt fit`: bfloat16 where
the processor has it, a sampled softmax, Muon and AdamW. The ids are random, with the frequencies of words
(Zipf 1949), as the size of a sample depends on them.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from benchmarks.common import Report, say
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gpt import GPT
from gpt.training.device import default_precision, keep_freed_memory
from gpt.training.optimizers.recipe import OptimizerConfig, build_optimizer
from gpt.training.sampled import sampled_cross_entropy
from gpt.training.speed import Shape

SHAPES = (
    Shape(vocab_size=4096, context_length=64, emb_dim=128, num_layers=2, batch_size=24),
    Shape(vocab_size=8192, context_length=128, emb_dim=192, num_layers=3, batch_size=24),
    Shape(vocab_size=8192, context_length=128, emb_dim=320, num_layers=5, batch_size=48),
)
SAMPLED = 8
# Parts of an operation's name in torch's profiler, and its kind.
KINDS = {
    "attention of torch": ("scaled_dot_product", "flash_attention"),
    "matrix products": ("mm", "linear", "einsum"),
    "softmax": ("softmax", "logsumexp"),
    "layer norms": ("layer_norm",),
    "GELU": ("gelu",),
    "tables and samples": ("embedding", "index", "nonzero", "gather", "scatter", "cumsum", "where"),
    "copies and casts": ("copy", "clone", "contiguous", "cat", "stack"),
}
OTHER = "other operations"
SUM = "sum, ms"


def run(quick: bool) -> Report:
    """Measure all shapes; `quick` takes the first one and few steps."""
    keep_freed_memory()  # as `gpt fit` does
    precision = default_precision("cpu")
    columns = {}
    for shape in SHAPES[: 1 if quick else None]:
        name = f"{shape.emb_dim} x {shape.num_layers}, {shape.batch_size} x {shape.context_length}"
        say(name)
        columns[name] = _parts(shape, precision, rounds=2 if quick else 30)
    kinds = [*KINDS, OTHER, "clipping", "optimizer", SUM]
    rows = [
        {"part": kind, "model": name, "share": _share(parts, kind)}
        for kind in kinds
        for name, parts in columns.items()
    ]
    return Report(
        title="Parts of a training step of small models",
        rows=rows,
        ratios={},
        notes=[f"Shares of a step in per cent, in {precision}. The last row is the whole step."],
        across=("model", "share"),
    )


def _share(parts: dict[str, float], kind: str) -> float:
    """A part in per cent of the step; for the sum, its milliseconds."""
    whole = sum(parts.values())
    return 1e3 * whole if kind == SUM else 100 * parts.get(kind, 0.0) / whole


def _parts(shape: Shape, precision: str, rounds: int) -> dict[str, float]:
    """The seconds of each part of a step: medians of several steps."""
    model = GPT(shape.config)
    optimizer = build_optimizer(model, OptimizerConfig(), precision)
    ids = _zipf(shape)

    def gradients() -> None:
        model.zero_grad()  # as in a step: adding to earlier gradients is more work
        with torch.autocast("cpu", torch.bfloat16, enabled=precision.startswith("bf16")):
            rows = model.features(ids[:, :-1]).flatten(0, 1)
            loss = sampled_cross_entropy(rows, model.head.weight, ids[:, 1:].flatten(), SAMPLED)
        torch.autograd.backward(loss)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    steps: dict[str, Callable[[], None]] = {"gradients": gradients, "clipping": clip, "optimizer": update}
    seconds = defaultdict(list)
    for _ in range(rounds):
        for name, part in steps.items():
            began = time.perf_counter()
            part()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    computing = medians.pop("gradients")
    return {kind: computing * share for kind, share in _kinds(gradients).items()} | medians


def _kinds(gradients: Callable[[], None]) -> dict[str, float]:
    """The share of each kind of operation in the forward and backward passes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            gradients()
    taken: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        taken[_kind(event.key)] += event.self_cpu_time_total
    whole = sum(taken.values())
    return {kind: time / whole for kind, time in taken.items()}


def _kind(operation: str) -> str:
    """The kind of an operation; the first one that its name fits."""
    return next((kind for kind, names in KINDS.items() if any(name in operation for name in names)), OTHER)


def _zipf(shape: Shape) -> Tensor:
    """Random ids, (B, T + 1): the id of rank r has a probability in proportion to 1 / r."""
    weights = 1 / torch.arange(1, shape.vocab_size + 1)
    count = shape.batch_size * (shape.context_length + 1)
    return torch.multinomial(weights, count, replacement=True).view(shape.batch_size, -1)
