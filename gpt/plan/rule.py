"""Which model to train on a text in a time: a rule of a few constants, which docs/plan.md has measured.

The compute that the time allows decides width, depth, window and batch; the bytes of the text decide the
vocabulary; how often the text is read decides what keeps the model from learning it by heart. The rule knows
nothing else of the text, and promises no loss. It guesses how many updates fit into the time, which the clock
corrects while the run trains, and how long to read a short text, which the result decides (`gpt.run.limits`).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpt.errors import InputError
from gpt.training.sampled import LATE, LATE_RATE, sampled_share
from gpt.training.schedule import learning_rates

# The rule. Compute is counted in operations of a training, see `Shape.operations`.
USUAL_COMPUTE = 3.3e13
"""Two minutes of a core with AVX-512: for so much the constants below hold."""
USUAL_WEIGHTS = 4e5
"""Weights of the blocks' matrices then; more compute buys more of them ..."""
WEIGHTS_POWER = 0.6
"""... by this power."""
LADDER = (
    *((32, 1), (64, 1), (96, 1), (96, 2), (128, 2), (160, 2), (192, 3), (256, 4), (320, 5)),
    *((384, 6), (512, 8), (640, 10), (768, 12), (1024, 16)),
)
"""Widths and layers to choose from."""
BYTES_FOR_ID = 225
"""Of text, for each id of a vocabulary: with so many, 4,096 ids were 2 % better than 2,048."""
VOCABULARIES = ((0.0, 8192), (1e15, 16_384), (1e17, 32_768))
"""The largest vocabulary from so much compute on."""
WINDOWS = ((0.0, 64), (1e14, 128), (3e15, 256), (1e17, 512), (3e18, 1024))
"""Tokens of a window from so much compute on ..."""
LONG_TEXT = 2.5e6
"""... at least 128 for a text of so many bytes, little of which is read often, and for one of records."""
USUAL_BATCH = 24
"""Windows of a batch: twice as many for each ten times the compute ..."""
MOST_BATCH = 65_536
"""... up to so many tokens: larger batches were not measured."""
RESPELLED_FROM = 5
"""Epochs from which words are spelled anew each time (BPE-dropout)."""
BPE_DROPOUT = 0.05
DROPOUT_FROM = ((15, 0.1), (60, 0.2))
"""Epochs from which there is dropout besides."""
REGULAR = 0.2
"""Of its size: a text that zlib packs to less is one of records, as logs are. It is learned fast and hardly
by heart, so it is not regularised, and a window of 128 tokens sees the record before.
"""
MOST_EPOCHS = 60
"""Of a short text at first: the run goes on from there while held-out text gains."""
MOST_WEIGHTS_PER_BYTE = 5
"""Of the text that is trained on, those of the token embedding too."""

SHARES = ("model.config.dropout", "data.val_fraction")
GIVEN = (
    *("model.config.emb_dim", "model.config.num_layers", "model.config.num_heads"),
    *("model.config.context_length", "model.config.vocab_size", "data.batch_size", *SHARES),
)
"""Options that a plan keeps where they are given by hand."""

END_SECONDS = 1.2
"""After the last validation: a checkpoint, the loss curve, the end of the process."""
_FEWEST_STEPS = 20
_FEWEST_WINDOWS = 6  # of a batch: fewer look at too few places of the text
_FEWEST_IDS = 512
_BATCHES_OF_A_TEXT = 16  # at least
_VALIDATIONS = 5  # at most
_VALIDATING = 0.04  # of the time, where two take no longer
_BESIDE = 16_384  # tokens scored in the time of a validation's temperature, sample and checkpoint
_SAMPLED_SOFTMAX = 8  # on a CPU; on a GPU this was not measured
_DROPPING = 1.3  # times as long takes a step with dropout
_RESPELLING = 1.5e-6  # seconds of BPE-dropout for a token
_COMPILING_FROM = 600.0  # seconds of training on a GPU
# Beyond the widths that were measured rates are those of configs/gpt2-small.yaml at most.
_WIDE = 768
_WIDE_RATES = (2e-3, 6e-4)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run may count on."""

    speed: float
    """Operations a second, of all processes."""
    memory: float
    """Bytes, of each."""
    is_gpu: bool
    processes: int = 1

    @property
    def sampled_softmax(self) -> int:
        """Of the planned runs."""
        return 1 if self.is_gpu else _SAMPLED_SOFTMAX


@dataclass(frozen=True, kw_only=True)
class Text:
    """What the rule has to know of a text."""

    size: int
    """Bytes that are read, those held out too."""
    val_fraction: float
    """Of them is held out."""
    most_bytes: int | None = None
    """If it is a part of a longer text."""
    vocab_size: int | None = None
    """Of a vocabulary that is not the plan's to choose."""
    tokens: int | None = None
    """Of a text that is prepared already."""
    packed: float = 1.0
    """The share of its size to which zlib packs a sample."""

    @property
    def train_bytes(self) -> float:
        """What is not held out."""
        return self.size * (1 - self.val_fraction)

    @property
    def is_regular(self) -> bool:
        """Whether it consists of records."""
        return self.packed < REGULAR

    def bytes_per_token(self, vocab_size: int) -> float:
        """Counted in a prepared text; else about those of prose: 1.9 with 512 ids, 3.6 with 8,192."""
        if self.tokens:
            return self.size / self.tokens
        return max(1.0, 1.9 + 0.425 * math.log2(vocab_size / 512))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its batch, which decide the time and the memory of a step."""

    vocab_size: int
    context_length: int
    emb_dim: int
    num_layers: int
    batch_size: int

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self.batch_size * self.context_length

    @property
    def blocks(self) -> int:
        """Weights of the blocks' matrices."""
        return 12 * self.num_layers * self.emb_dim**2

    @property
    def table(self) -> int:
        """Weights of the token embedding, which is also the head."""
        return self.vocab_size * self.emb_dim

    def operations(self, sampled_softmax: int = 1) -> float:
        """Of a training step, six for each weight and token. The factors of what is no product of weights,
        such as a softmax or the start of a kernel, are those of the time that it took on a core.
        """
        scored = self.vocab_size * sampled_share(self.vocab_size, self.tokens, sampled_softmax)
        attention = 11 * self.num_layers * self.context_length * self.emb_dim
        of_token = self.blocks + 1.4 * scored * (self.emb_dim + 64) + attention
        of_update = self.num_layers * (2e8 + 90 * self.emb_dim**3)  # with Muon's products
        return float(6 * (self.tokens * of_token + of_update))

    def memory(self) -> int:
        """About the bytes of a step: weights, gradients and moments, activations, a chunk's logits."""
        activations = self.tokens * self.emb_dim * (36 * self.num_layers + 8)
        logits = min(self.tokens, 8192) * self.vocab_size  # in a GPU's chunk, a CPU's is smaller
        return 16 * (self.blocks + self.table) + 2 * activations + 8 * logits


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run for a time."""

    text: Text
    shape: Shape
    num_heads: int
    dropout: float
    bpe_dropout: float
    machine: Machine
    compile: bool
    seconds: float
    """Of training and validation that the time leaves."""
    steps: int
    """About so many fit into them, or into the first part of them."""
    is_whole: bool
    """Not only a part, after which held-out text decides whether more gains."""
    slower: float
    """So many times as long takes a step of the last fifth, whose samples of the vocabulary are larger."""
    validations: int
    validation: float
    """Seconds of one."""

    @property
    def parameters(self) -> int:
        """Of the matrices, which are nearly all."""
        return self.shape.blocks + self.shape.table + self.shape.context_length * self.shape.emb_dim

    @property
    def tokens(self) -> int:
        """Trained on, over all epochs."""
        return self.steps * self.shape.tokens

    @property
    def epochs(self) -> float:
        """Over the text that is not held out."""
        return self.tokens * self.text.bytes_per_token(self.shape.vocab_size) / self.text.train_bytes

    def __str__(self) -> str:
        shape = self.shape
        part = f"; of the text it reads {self.text.most_bytes / 1e6:,.0f} MB" if self.text.most_bytes else ""
        longer = "" if self.is_whole else ", and longer while held-out text gains"
        drops = f"dropout {self.dropout:g}, " if self.dropout else ""
        return (
            f"the plan is {shape.emb_dim} x {shape.num_layers} (width x layers), "
            f"a {shape.vocab_size}-token vocabulary, {drops}"
            f"about {self.steps} steps of {shape.batch_size} x {shape.context_length} tokens, "
            f"{self.epochs:.3g} epochs{longer}{part}"
        )

    def options(self) -> dict[str, Any]:
        """The run as options of `gpt fit`."""
        shape = asdict(self.shape)
        batch_size = shape.pop("batch_size")
        rate, rest_rate = self._rates()
        return {
            "run": "planned",
            "temperature_scaling": True,
            "model": {
                "compile": self.compile,
                "config": {
                    **shape,
                    "num_heads": self.num_heads,
                    "dropout": self.dropout,
                    "exact_gelu": True,  # it takes less time than its approximation, or as much
                },
                "sampled_softmax": self.machine.sampled_softmax,
                "optimizer": {
                    "lr": rate,
                    "rest_lr": rest_rate,
                    "warmup_steps": min(50, self.steps // 10),
                    "weight_decay": 0.4,
                    "embedding_weight_decay": 0.2,
                    "betas": (0.8, 0.99),  # few tokens of a small batch have a rare id
                },
            },
            "data": {
                "vocabulary": "learn",
                "batch_size": max(1, round(batch_size / self.machine.processes)),
                "shift": True,
                "bpe_dropout": self.bpe_dropout,
                "most_bytes": self.text.most_bytes,
            },
            "trainer": {
                "max_steps": self.steps,
                "val_check_interval": math.ceil(self.steps / self.validations),
            },
        }

    def _rates(self) -> tuple[float, float]:
        """Of the blocks' matrices and of the other weights."""
        width = self.shape.emb_dim
        rates = learning_rates(self.steps, width, min(self.shape.tokens, MOST_BATCH))
        if width < _WIDE:
            return rates
        return min(rates[0], _WIDE_RATES[0]), min(rates[1], _WIDE_RATES[1])


def choose(text: Text, machine: Machine, seconds: float, given: Mapping[str, Any]) -> Plan:
    """The plan for so many seconds of training and validation.

    `given` are options by their names in `GIVEN`, which are kept. An InputError where no model fits.
    """
    shape = _shape(text, machine, machine.speed * seconds, given)
    heads = given.get("model.config.num_heads") or _heads(shape.emb_dim)
    if shape.emb_dim % heads:
        raise InputError(f"--model.config.num_heads {heads} does not divide the width {shape.emb_dim}")
    validations, validation = _validations(text, machine, seconds, shape)
    early = shape.operations(machine.sampled_softmax) / machine.speed
    late = shape.operations(min(LATE_RATE, machine.sampled_softmax)) / machine.speed
    in_time = max(seconds - validations * validation, 0.0) / ((1 - LATE) * early + LATE * late)
    bytes_per_step = shape.tokens * text.bytes_per_token(shape.vocab_size)
    in_part = MOST_EPOCHS * text.train_bytes / bytes_per_step
    epochs = min(in_time, in_part) * bytes_per_step / text.train_bytes
    dropout = given.get("model.config.dropout")
    if dropout is None:
        dropout = 0.0 if text.is_regular else _last_from(((0, 0.0), *DROPOUT_FROM), epochs)
    is_respelled = epochs >= RESPELLED_FROM and not (text.is_regular or machine.is_gpu)  # on one thread
    bpe_dropout = BPE_DROPOUT if is_respelled else 0.0
    slower_by = (_DROPPING if dropout else 1) + (shape.tokens * _RESPELLING / early if bpe_dropout else 0)
    in_time /= slower_by
    if in_time < _FEWEST_STEPS:
        raise InputError(
            f"{_FEWEST_STEPS} steps of {shape.emb_dim} x {shape.num_layers} and {validations} validations of "
            f"{text.val_fraction * text.size:,.0f} bytes take longer than the {seconds:.0f} s that are left "
            "for them: give more --minutes"
        )
    is_whole = in_time <= in_part or not text.val_fraction
    return Plan(
        text=text,
        shape=shape,
        num_heads=heads,
        dropout=dropout,
        bpe_dropout=bpe_dropout,
        machine=machine,
        compile=machine.is_gpu and seconds >= _COMPILING_FROM,
        seconds=seconds,
        steps=int(in_time if is_whole else max(in_part, _FEWEST_STEPS)),
        is_whole=is_whole,
        slower=late / early,
        validations=validations,
        validation=validation,
    )


def trained_on(machine: Machine, seconds: float, shape: Shape | None = None) -> float:
    """Tokens that a model is trained on in so many seconds, by default the rule's for an endless text."""
    endless = Text(size=1 << 40, val_fraction=0.0)
    shape = shape or _shape(endless, machine, machine.speed * seconds, {})
    return machine.speed * seconds / shape.operations(machine.sampled_softmax) * shape.tokens


def _shape(text: Text, machine: Machine, compute: float, given: Mapping[str, Any]) -> Shape:
    """The largest that the compute is worth, and text and memory have room for."""
    ids = text.vocab_size or given.get("model.config.vocab_size") or _vocabulary_size(text, compute)
    context, windows = _batch(text, compute, ids, given)
    wanted = USUAL_WEIGHTS * (compute / USUAL_COMPUTE) ** WEIGHTS_POWER
    shapes: list[Shape] = []
    while not shapes:
        shapes = [
            Shape(
                vocab_size=ids, context_length=context, emb_dim=width, num_layers=layers, batch_size=windows
            )
            for width, layers in _ladder(given)
        ]
        shapes = [shape for shape in shapes if shape.memory() < machine.memory]
        if not shapes and (windows <= _FEWEST_WINDOWS or "data.batch_size" in given):
            raise InputError(
                f"no model fits into {machine.memory / 1e9:.1f} GB of memory: give a smaller vocabulary, "
                "width, context or batch"
            )
        windows = max(_FEWEST_WINDOWS, windows // 2)
    most = MOST_WEIGHTS_PER_BYTE * text.train_bytes
    free = {"model.config.emb_dim", "model.config.num_layers"}.isdisjoint(given)
    small = [shape for shape in shapes if shape.blocks + shape.table <= most] if free else shapes
    return min(small or shapes[:1], key=lambda shape: abs(math.log(shape.blocks / wanted)))


def _ladder(given: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The widths and layers of the ladder, around what is given."""
    width = given.get("model.config.emb_dim")
    layers = given.get("model.config.num_layers")
    heads = given.get("model.config.num_heads", 1)
    if width and layers:
        return [(width, layers)]
    if width:
        nearest = min(LADDER, key=lambda rung: abs(math.log(rung[0] / width)))
        return [(width, nearest[1])]
    rungs = [(rung[0], layers or rung[1]) for rung in LADDER]
    return [rung for rung in rungs if not rung[0] % heads] or rungs


def _vocabulary_size(text: Text, compute: float) -> int:
    """A power of two, with `BYTES_FOR_ID` bytes of text for each id."""
    supported = 1 << int(math.log2(max(text.train_bytes / BYTES_FOR_ID, 1)))
    return min(max(supported, _FEWEST_IDS), _last_from(VOCABULARIES, compute))


def _batch(text: Text, compute: float, ids: int, given: Mapping[str, Any]) -> tuple[int, int]:
    """The tokens of a window, and the windows of a batch: a short text has several of both."""
    tokens_of_text = text.train_bytes / text.bytes_per_token(ids)
    context = given.get("model.config.context_length")
    if context is None:
        context = _last_from(WINDOWS, compute)
        if text.is_regular or text.train_bytes >= LONG_TEXT:
            context = max(context, 128)
        while context > 16 and 4 * context > tokens_of_text:
            context //= 2
    elif 4 * context > tokens_of_text:
        raise InputError(
            f"--model.config.context_length {context}: the text has {text.size:,} bytes, and four windows "
            "have to fit into it"
        )
    windows = USUAL_BATCH * 2.0 ** int(math.log10(compute / USUAL_COMPUTE))
    tokens = min(windows * context, MOST_BATCH, tokens_of_text / _BATCHES_OF_A_TEXT)
    return context, given.get("data.batch_size") or max(_FEWEST_WINDOWS, round(tokens / context))


def _validations(text: Text, machine: Machine, seconds: float, shape: Shape) -> tuple[int, float]:
    """How many validations a run has, and the seconds of one: it scores all ids, and is a third of a step."""
    held_out = text.val_fraction * text.size / text.bytes_per_token(shape.vocab_size)
    each = shape.operations() / 3 / shape.tokens * (held_out + _BESIDE) / machine.speed
    return int(min(max(_VALIDATING * seconds / each, 2), _VALIDATIONS)), each


def _heads(width: int) -> int:
    """The most heads, at least 32 wide and in wide models 64, that divide a width."""
    most = width // (64 if width >= 384 else 32) or 1
    return next(heads for heads in range(most, 0, -1) if not width % heads)


def _last_from(table: tuple[tuple[float, Any], ...], value: float) -> Any:
    """What stands in a table of thresholds for a value that is not below the first."""
    return [found for threshold, found in table if value >= threshold][-1]
