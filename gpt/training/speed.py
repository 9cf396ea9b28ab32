"""The time and memory of a training step: operations of a shape, and operations per second of a machine."""

import time
import timeit
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from gpt.config import GPTConfig
from gpt.cores import cores
from gpt.files import cache_folder, write_json
from gpt.model import GPT
from gpt.plain import parse_json
from gpt.training.device import Precision, choose_precision, device_name, free_memory, keep_freed_memory
from gpt.training.loss import linear_cross_entropy
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.processes import of_first_process, process_count
from gpt.training.sampled import sampled_cross_entropy, sampled_share
from gpt.weights.load import Accelerator, choose_device

SPEEDS = "speed.json"
"""File in the cache with measured training speeds, in operations per second, by `speed_key`."""

_LEAST_SECONDS = 1.0  # of the measurement
_STEP_OF_RUN = 1.1  # time of a step of a run, with callbacks and data loading, over a bare step
_IDLE_FROM = 0.8  # the machine counts as idle if the process gets this share of its cores' time
_SAMPLED_SOFTMAX = 8  # on a CPU; on a GPU this was not measured


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a model and its batch, which decides the time and memory of a step."""

    vocab_size: int
    context_length: int
    emb_dim: int
    num_layers: int
    batch_size: int

    @property
    def tokens(self) -> int:
        """Tokens in a batch."""
        return self.batch_size * self.context_length

    @property
    def blocks(self) -> int:
        """Weights in the blocks' matrices."""
        return 12 * self.num_layers * self.emb_dim**2

    @property
    def table(self) -> int:
        """Weights in the token embedding, which is also the head."""
        return self.vocab_size * self.emb_dim

    @property
    def config(self) -> GPTConfig:
        """The model to time; its heads are 32 wide."""
        return GPTConfig(
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            emb_dim=self.emb_dim,
            num_heads=self.emb_dim // 32,
            num_layers=self.num_layers,
            exact_gelu=True,
        )

    def operations(self, sampled_softmax: int = 1) -> float:
        """Count the operations of a training step: six for each weight and token.

        A softmax or the launch of a kernel is no matrix product. It counts as the number of operations that a
        core would make in the same time.
        """
        scored = self.vocab_size * sampled_share(self.vocab_size, self.tokens, sampled_softmax)
        attention = 11 * self.num_layers * self.context_length * self.emb_dim
        of_token = self.blocks + 1.4 * scored * (self.emb_dim + 64) + attention
        of_update = self.num_layers * (2e8 + 90 * self.emb_dim**3)  # including Muon's matrix products
        return float(6 * (self.tokens * of_token + of_update))

    def memory(self) -> int:
        """Estimate the bytes of a step: weights, gradients, moments, activations and a chunk's logits."""
        activations = self.tokens * self.emb_dim * (36 * self.num_layers + 8)
        logits = min(self.tokens, 8192) * self.vocab_size  # of a GPU's chunk; a CPU's is smaller
        return 16 * (self.blocks + self.table) + 2 * activations + 8 * logits


USUAL_SHAPE = Shape(vocab_size=8192, context_length=128, emb_dim=128, num_layers=2, batch_size=24)
"""The shape that is timed on a CPU if no other is named."""
_SHAPE_ON_GPU = Shape(vocab_size=16_384, context_length=256, emb_dim=512, num_layers=8, batch_size=64)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine's speed and memory for a run."""

    speed: float
    """Training operations per second, of all processes together."""
    memory: float
    """Bytes for each process."""
    device: str = "cpu"
    """The type of PyTorch's device: `cpu`, `cuda` or `mps`."""
    processes: int = 1

    @property
    def is_gpu(self) -> bool:
        """Whether its device is not a CPU. Such a device scores the whole vocabulary."""
        return self.device != "cpu"

    @property
    def sampled_softmax(self) -> int:
        """The planned runs' option `sampled_softmax`."""
        return sampled_softmax_on(self.device)


def sampled_softmax_on(device: str) -> int:
    """Return the planned runs' option `sampled_softmax` on a type of device: only a CPU samples."""
    return _SAMPLED_SOFTMAX if device == "cpu" else 1


def time_machine(
    accelerator: Accelerator | None = None, precision: Precision | None = None, shape: Shape = USUAL_SHAPE
) -> Machine:
    """Measure the machine for a run with these options; of several processes, the first one measures.

    A CPU is timed on `shape`, as another makes up to 1.6 times as many operations per second. The speed comes
    from the cache, if one is stored for this shape, machine, version and number of threads.
    """
    keep_freed_memory()
    accelerator = accelerator or "auto"
    device = choose_device(accelerator)
    kind = choose_precision(accelerator, precision)
    processes = process_count()
    timed = _SHAPE_ON_GPU if device.type == "cuda" else shape
    return Machine(
        speed=processes * of_first_process("speed", lambda: _speed(device, kind, timed)),
        memory=of_first_process("memory", lambda: free_memory(device, processes)),
        device=device.type,
        processes=processes,
    )


def speed_key(device: torch.device, precision: str, shape: Shape = USUAL_SHAPE) -> str:
    """Return the key of a speed in the cache: machine, cores, threads, precision, versions and shape."""
    threads = f"{cores()} cores, {torch.get_num_threads()} threads"
    versions = f"gpt {version('minimal-gpt')}, torch {torch.__version__}"
    model = f"{shape.emb_dim} x {shape.num_layers}, {shape.vocab_size} tokens"
    batch = f"{shape.batch_size} x {shape.context_length}"
    return f"{device_name(device)}, {threads}, {precision}, {versions}, {model}, {batch}"


def _speed(device: torch.device, precision: str, shape: Shape) -> float:
    """Return the training speed in operations per second, from the cache or measured in about a second."""
    path = cache_folder() / SPEEDS
    key = speed_key(device, precision, shape)
    known = _read_speeds(path)
    if key not in known:
        speed, is_idle = _timed(device, precision, shape)
        if not is_idle:  # do not store it; the clock corrects the run when other programs end
            return speed
        known[key] = speed
        with suppress(OSError):  # the cache may be read-only
            write_json(path, known)
    return known[key]


def _read_speeds(path: Path) -> dict[str, float]:
    """Read the speeds in the cache; none if the file is missing or damaged."""
    with suppress(OSError, ValueError, TypeError):
        speeds = parse_json(path.read_text(encoding="utf-8"))  # whose numbers are finite
        if isinstance(speeds, dict):
            return {key: float(speed) for key, speed in speeds.items() if speed > 0}
    return {}


def _timed(device: torch.device, precision: str, shape: Shape) -> tuple[float, bool]:
    """Measure training operations per second on a shape, and whether the machine was idle."""
    sampled_softmax = sampled_softmax_on(device.type)
    step = _step(shape, sampled_softmax, device, precision)
    step()  # the first step is slow
    began = time.perf_counter()
    computed = time.process_time()
    seconds = [timeit.timeit(step, number=1)]
    while len(seconds) < 2 or time.perf_counter() - began < _LEAST_SECONDS:
        seconds.append(timeit.timeit(step, number=1))
    # Threads compute or spin, so they use all CPU time of their cores, except what other programs take.
    got = (time.process_time() - computed) / (time.perf_counter() - began) / torch.get_num_threads()
    # The shortest step: other programs, and other guests of a virtual machine's host, disturb it least.
    speed = shape.operations(sampled_softmax) / (_STEP_OF_RUN * min(seconds))
    return speed, device.type != "cpu" or got >= _IDLE_FROM


def _step(shape: Shape, sampled_softmax: int, device: torch.device, precision: str) -> Callable[[], None]:
    """Return a function that makes a training step, without the Trainer."""
    with device:
        model = GPT(shape.config)
    optimizer = build_optimizer(model, OptimizerConfig(), precision)
    x = torch.randint(shape.vocab_size, (shape.batch_size, shape.context_length), device=device)
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            rows = model.features(x).flatten(0, 1), model.head.weight, x.flatten()
            if sampled_softmax > 1:
                loss = sampled_cross_entropy(*rows, sampled_softmax)
            else:
                loss = linear_cross_entropy(*rows)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.get_device_module(device).synchronize()

    return step
