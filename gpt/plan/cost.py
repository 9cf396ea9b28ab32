"""What a training step costs on this machine: a few shapes are timed, the rest is arithmetic."""

import time
import timeit
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.progress import report
from gpt.training.device import free_memory
from gpt.training.loss import linear_cross_entropy
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.sampled import sampled_share

_TIMED = 2.0  # seconds, or as long as two steps of each shape take, of which the first does not count
_BUSY = 0.8  # of its cores' time that a process gets: on an idle machine all of it
_TRAINER = 1.15  # a step of a run, with callbacks and samples of the ids, over a bare one that scores all
_SAMPLED = 8  # on a CPU, a random one in so many ids that are no target; on a GPU this was not measured
_SOFTMAX = 64  # more columns of the head take as long as the softmax of a token's logits


@dataclass(frozen=True)
class Shape:
    """A model and its batch, which decide the time of a step: numbers, or arrays of candidates."""

    vocab_size: Any
    context_length: Any
    emb_dim: Any
    num_layers: Any
    batch_size: Any

    @property
    def tokens(self) -> Any:
        """Tokens of a step."""
        return self.batch_size * self.context_length

    @property
    def blocks(self) -> Any:
        """Weights of the blocks' matrices."""
        return 12 * self.num_layers * self.emb_dim**2

    @property
    def table(self) -> Any:
        """Weights of the token embedding, which is also the head."""
        return self.vocab_size * self.emb_dim

    def work(self, sampled_softmax: int = 1) -> NDArray[Any]:
        """How much of each kind of work a step has, (kinds, ...)."""
        n = self.tokens
        d = self.emb_dim
        layers = self.num_layers
        scored = self.vocab_size * sampled_share(self.vocab_size, n, sampled_softmax)
        kinds = (
            n * self.blocks,
            n * scored * (d + _SOFTMAX),
            n * layers * self.context_length * d,
            n * layers * d,
            np.ones_like(d),  # calls
            layers,
            layers * d**3,  # Muon
        )
        return np.stack(kinds)

    def memory(self) -> Any:
        """About the bytes of a step: weights, gradients and moments, activations, a chunk's logits."""
        activations = self.tokens * self.emb_dim * (36 * self.num_layers + 8)
        logits = np.minimum(self.tokens, 8192) * self.vocab_size  # in a GPU's chunk, a CPU's is smaller
        return 16 * (self.blocks + self.table) + 2 * activations + 8 * logits


# Narrow and wide, shallow and deep, with few and many ids, short and long windows and batches.
_PROBES = [
    Shape(512, 64, 32, 1, 12),
    Shape(512, 64, 64, 6, 24),
    Shape(2048, 128, 128, 4, 12),
    Shape(8192, 64, 96, 1, 24),
    Shape(1024, 512, 128, 2, 3),
    Shape(2048, 64, 256, 4, 24),
    Shape(4096, 64, 128, 2, 72),
]
# On a GPU those only show how long it takes to start the work of a step; these fill it.
_LARGE = [
    Shape(16384, 512, 384, 4, 96),
    Shape(8192, 64, 512, 6, 768),
    Shape(512, 128, 1024, 12, 64),
]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds for a unit of each kind of work, and the bytes of memory that a run may take."""

    seconds: tuple[float, ...]
    memory: float
    sampled_softmax: int = 1  # of the runs that are planned

    def step(self, shape: Shape, sampled_softmax: int = 1) -> Any:
        """Seconds of a training step."""
        return np.tensordot(self.seconds, shape.work(sampled_softmax), 1)


def probe(device: torch.device, precision: str) -> Cost:
    """Time a few steps of each of a handful of shapes: some seconds on two cores.

    The shapes take turns: what slows the machine for a while then slows all of them.
    """
    memory = free_memory(device)
    # Their weights are there at once, beside the activations of one.
    shapes = _PROBES + [shape for shape in _LARGE if device.type == "cuda" and shape.memory() < memory / 2]
    began = time.perf_counter()
    computed = time.process_time()
    steps = [_step(shape, device, precision) for shape in shapes]
    rounds: list[list[float]] = []
    while len(rounds) < 2 or time.perf_counter() - began < _TIMED:
        rounds.append([timeit.timeit(step, number=1) for step in steps])
    seconds = _TRAINER * np.median(rounds[1:], axis=0)
    # Threads compute, or wait for each other without rest: less than all of the time went to other programs.
    got = (time.process_time() - computed) / (time.perf_counter() - began) / torch.get_num_threads()
    if device.type == "cpu" and got < _BUSY:
        report(
            f"other programs took {1 - got:.0%} of the cores while steps were timed: the plan is for what"
            " they left, and becomes longer when they end",
            prefix="",
        )
    return fit_cost(zip(shapes, seconds, strict=True), memory, _SAMPLED if device.type == "cpu" else 1)


def fit_cost(timed: Iterable[tuple[Shape, float]], memory: float, sampled_softmax: int = 1) -> Cost:
    """The cost with the least relative errors over the timed shapes; no work takes negative time."""
    work = np.stack([shape.work() / seconds for shape, seconds in timed])
    target = work.sum(axis=0)
    squares = work.T @ work + np.diag(1e-7 * target**2)
    found = np.zeros(len(target))
    for _ in range(3000):  # coordinate descent: each in turn takes its best value that is not negative
        for i in range(len(found)):
            found[i] = max(0.0, found[i] + (target[i] - squares[i] @ found) / squares[i, i])
    return Cost(seconds=tuple(found), memory=memory, sampled_softmax=sampled_softmax)


def _step(shape: Shape, device: torch.device, precision: str) -> Callable[[], None]:
    """A training step, without the Trainer."""
    sizes = asdict(shape)
    del sizes["batch_size"]
    with device:  # drawing weights elsewhere takes longer than the steps
        model = GPT(GPTConfig(**sizes, num_heads=shape.emb_dim // 32, exact_gelu=True))
    optimizer = build_optimizer(model, OptimizerConfig(), precision)
    x = torch.randint(shape.vocab_size, (shape.batch_size, shape.context_length), device=device)

    def step() -> None:
        train_step(model, optimizer, x, x, precision)
        torch.get_device_module(device).synchronize()

    return step


def train_step(model: GPT, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, precision: str) -> None:
    """An update with a batch, (B, T) both."""
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
        loss = linear_cross_entropy(model.features(x).flatten(0, 1), model.head.weight, y.flatten())
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
