"""Choose a model to train on a text in a given time.

The compute that fits into the time decides width, depth, window and batch. The bytes of the text decide the
vocabulary. The number of epochs decides the regularisation, which keeps the model from memorising the text.
The rule also asks whether the text consists of records, and nothing else about it. It predicts no loss. It
estimates how many updates fit into the time, which the clock corrects during training. It also estimates how
long to train on a short text, which the held-out loss corrects (`gpt.run.limits`).

The measurements behind the constants are in docs/log/plans.md, and those of the regularisation in
docs/log/overfitting.md. Compute is counted in training operations, see `Shape.operations`.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from gpt.cores import cores
from gpt.errors import InputError
from gpt.plain import JsonObject
from gpt.training.sampled import LATE, LATE_ONE_IN
from gpt.training.speed import Machine, Shape

T = TypeVar("T", int, float)

USUAL_COMPUTE = 3.3e13
"""Two minutes on one core with AVX-512: the compute for which the constants below hold."""
USUAL_SPEED = USUAL_COMPUTE / 120
"""Training operations per second of such a core."""

# Width and layers.
LADDER = (
    *((32, 1), (64, 1), (96, 1), (96, 2), (128, 2), (160, 2), (192, 3), (256, 4), (320, 5)),
    *((384, 6), (512, 8), (640, 10), (768, 12), (1024, 16)),
)
"""The (width, layers) to choose from."""
USUAL_WEIGHTS = 4e5
"""Weights in the blocks' matrices at `USUAL_COMPUTE`, for a text that is read several times."""
WEIGHTS_POWER = 0.6
"""The number of weights grows with compute to this power."""
WEIGHTS_BY_EPOCHS = ((0, 0.6), (2, 1.0), (18, 1.5))
"""(epochs, factor of the weights). On a text that is read once, a smaller model reads more of it. On one that
is read often, dropout takes a part of the model's capacity. A text of records has the factor 1."""
MOST_WEIGHTS_PER_BYTE = 5
"""The most weights, token embedding included, per byte of training text."""

# Vocabulary, window and batch.
BYTES_PER_ENTRY = 225
"""Bytes of text per entry of the vocabulary, at least."""
VOCABULARIES = ((0.0, 8192), (2e13, 16_384), (1e17, 32_768))
"""(compute, size): from this compute on, the largest vocabulary."""
WINDOWS = ((0.0, 64), (1e14, 128), (3e15, 256), (1e17, 512), (3e18, 1024))
"""(compute, tokens): from this compute on, the window."""
LONG_TEXT = 2.5e6
"""Bytes from which a window has at least 128 tokens, as has one of records."""
USUAL_BATCH = 24
"""Windows of 128 tokens or more in a batch at `USUAL_COMPUTE`, or twice as many of 64; twice as many for each
tenfold compute."""
REREAD = 4
"""Epochs from which a batch has half as many windows, unless the text consists of records."""
MOST_BATCH = 65_536
"""The most tokens in a batch: larger batches were not measured."""

# Learning rates.
USUAL_RATE = 0.009
"""Peak rate of the blocks' matrices for 1,000 steps, a width of 128 and up to 4,096 tokens in a batch."""
REST_RATE = 1.5
"""The peak rate of the other weights is so many times that of the blocks' matrices."""

# Regularisation, by dropout and by BPE-dropout, which splits words into tokens at random each time.
REGULARISED_FROM = 6
"""Epochs times weights per byte of text from which a run is regularised."""
FEW_TOKENS = 1.5e6
"""With fewer tokens over fewer than `MANY_EPOCHS`, a run memorises little yet, and is not regularised."""
MANY_EPOCHS = 30
BPE_DROPOUT = 0.05
DROPOUT_BY_EPOCHS = ((0, 0.05), (MANY_EPOCHS, 0.1), (60, 0.2))
"""(epochs, dropout) of a run that is regularised: the dropout of features in a whole window, see
`WindowDropout`."""
REGULAR = 0.2
"""A text that zlib compresses to less than this share of its size consists of records, as a log does. It is
learned fast and hardly memorised, so it is not regularised."""
MOST_EPOCHS = 60
"""Epochs planned for a short text at first; the run goes on while the held-out loss falls."""

BYTES_PER_TOKEN = 4
"""Bytes of text per token, an estimate where tokens are not counted."""
END_SECONDS = 1.2
"""Seconds after the last validation: for a checkpoint, the loss curve, the end of the process."""
_LEAST_READ = 1 << 22  # bytes: a short text is read whole even on a busy machine
_LARGEST_TIMED = (256, 4)  # (width, layers): larger models make about as many operations per second
_TIMED_TOKENS = 3072  # in a batch that is timed
_READ = 8e6  # bytes per minute and core: tokenizing more would take longer than training on it
_FEWEST_STEPS = 20
_FEWEST_WINDOWS = 6  # in a batch: fewer would see too few places of the text
_SMALLEST_VOCABULARY = 512
_BATCHES_OF_A_TEXT = 16  # batches in an epoch, at least
_VALIDATIONS = 10  # validations in a run, at most
_VALIDATING = 0.04  # share of the time for validation, unless two validations take longer
_BESIDE = 16_384  # a validation's temperature, sample and checkpoint take as long as this many tokens
_RESPELLING = 1.5e-6  # seconds per token for BPE-dropout
_COMPILING_FROM = 600.0  # seconds of training on a GPU from which compiling pays off
# For widths beyond the measured ones, learning rates are at most those of configs/gpt2-small.yaml.
_WIDE = 768
_WIDE_RATES = (2e-3, 6e-4)


@dataclass(frozen=True, kw_only=True)
class Given:
    """The options that were given, which a plan keeps; None for those that it chooses."""

    emb_dim: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    context_length: int | None = None
    vocab_size: int | None = None
    batch_size: int | None = None
    dropout: float | None = None


@dataclass(frozen=True, kw_only=True)
class Text:
    """The facts about a text that the rule uses."""

    size: int
    """Bytes that are read, including held-out ones."""
    val_fraction: float
    """Share of the bytes that is held out."""
    most_bytes: int | None = None
    """The bytes to read of a longer text; None if all of it is read."""
    vocab_size: int | None = None
    """Size of a given vocabulary; None if the plan chooses it."""
    tokens: int | None = None
    """Tokens of a prepared text; None for another."""
    zlib_ratio: float = 1.0
    """A sample's size compressed by zlib, over its own size."""

    @property
    def train_bytes(self) -> float:
        """Bytes of training text."""
        return self.size * (1 - self.val_fraction)

    @property
    def has_records(self) -> bool:
        """Whether it consists of records."""
        return self.zlib_ratio < REGULAR

    def bytes_per_token(self, vocab_size: int) -> float:
        """Return bytes per token: counted if prepared, else as in prose.

        In prose they are 1.9 with a vocabulary of 512 tokens and 3.6 with 8,192.
        """
        if self.tokens:
            return self.size / self.tokens
        return max(1.0, 1.9 + 0.425 * math.log2(vocab_size / 512))

    def train_tokens(self, vocab_size: int) -> float:
        """Return the tokens of the training text."""
        return self.train_bytes / self.bytes_per_token(vocab_size)

    def epochs(self, tokens: float, vocab_size: int) -> float:
        """Return how often so many tokens read the training text."""
        return tokens * self.bytes_per_token(vocab_size) / self.train_bytes


_ENDLESS = Text(size=1 << 40, val_fraction=0.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A planned run with a time limit."""

    text: Text
    shape: Shape
    num_heads: int
    dropout: float
    bpe_dropout: float
    machine: Machine
    compile: bool
    seconds: float
    """Seconds left for training and validation."""
    steps: int
    """Estimated updates in these seconds, or in the first part of them."""
    is_whole: bool
    """Whether `steps` fill all the time; if not, the held-out loss decides after them whether to go on."""
    slower: float
    """A step in the last fifth takes this many times as long, as its samples of the vocabulary are larger."""
    validations: int
    validation: float
    """Seconds of one validation."""

    @property
    def parameters(self) -> int:
        """Weights in the matrices, which are nearly all weights."""
        return self.shape.blocks + self.shape.table + self.shape.context_length * self.shape.emb_dim

    @property
    def tokens(self) -> int:
        """Tokens to train on, over all epochs."""
        return self.steps * self.shape.tokens

    @property
    def epochs(self) -> float:
        """Epochs over the training text."""
        return self.text.epochs(self.tokens, self.shape.vocab_size)

    def __str__(self) -> str:
        shape = self.shape
        part = f"; of the text it reads {self.text.most_bytes / 1e6:,.0f} MB" if self.text.most_bytes else ""
        longer = "" if self.is_whole else ", and longer while the held-out loss falls"
        drops = f"dropout {self.dropout:g}, " if self.dropout else ""
        return (
            f"the plan is {shape.emb_dim} x {shape.num_layers} (width x layers), "
            f"{shape.vocab_size:,} tokens in the vocabulary, {drops}"
            f"about {self.steps:,} steps of {shape.batch_size} x {shape.context_length} tokens, "
            f"{self.epochs:.3g} epochs{longer}{part}"
        )

    def options(self) -> JsonObject:
        """Return the run as options of `gpt fit`."""
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
                    "window_dropout": self.dropout > 0,
                    "exact_gelu": True,  # at least as fast as the approximation
                },
                "sampled_softmax": self.machine.sampled_softmax,
                "optimizer": {
                    "lr": rate,
                    "rest_lr": rest_rate,
                    "warmup_steps": min(50, self.steps // 10),
                    "weight_decay": 0.4,
                    "embedding_weight_decay": 0.2,
                    "betas": (0.8, 0.99),  # a rare token occurs in few batches
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
        """Return the learning rates of the blocks' matrices and of the other weights."""
        width = self.shape.emb_dim
        batch = min(self.shape.tokens, MOST_BATCH)
        rate = USUAL_RATE * (self.steps / 1000) ** -0.25 * (128 / width * max(1, batch / 4096)) ** 0.5
        rest_rate = REST_RATE * rate
        most, most_of_rest = _WIDE_RATES if width >= _WIDE else (math.inf, math.inf)
        return min(round(rate, 6), most), min(round(rest_rate, 6), most_of_rest)


def choose(text: Text, machine: Machine, seconds: float, given: Given) -> Plan:
    """Choose the plan for this many seconds of training and validation. InputError if no model fits."""
    shape = _shape(text, machine, machine.speed * seconds, given)
    heads = given.num_heads or _heads(shape.emb_dim)
    if shape.emb_dim % heads:
        raise InputError(f"--model.config.num_heads {heads} does not divide the width {shape.emb_dim}")
    validations, seconds_of_one = _validations(text, machine, seconds, shape)
    # Seconds of a step, with the samples of the vocabulary as they are early and late in the run.
    early = shape.operations(machine.sampled_softmax) / machine.speed
    late = shape.operations(min(LATE_ONE_IN, machine.sampled_softmax)) / machine.speed
    steps_in_time = max(seconds - validations * seconds_of_one, 0.0) / ((1 - LATE) * early + LATE * late)
    steps_in_part = MOST_EPOCHS * text.train_tokens(shape.vocab_size) / shape.tokens
    bpe_dropout, dropout = _regularisation(text, machine, shape, steps_in_time, given)
    if bpe_dropout:  # steps are slower, so that fewer are made in the time
        steps_in_time /= 1 + shape.tokens * _RESPELLING / early
    if steps_in_time < _FEWEST_STEPS:
        raise InputError(
            f"{_FEWEST_STEPS} steps of {shape.emb_dim} x {shape.num_layers} and {validations} validations of "
            f"{text.val_fraction * text.size:,.0f} bytes take longer than the {seconds:.0f} s that are left "
            "for them: give more --minutes"
        )
    is_whole = steps_in_time <= steps_in_part
    return Plan(
        text=text,
        shape=shape,
        num_heads=heads,
        dropout=dropout,
        bpe_dropout=bpe_dropout,
        machine=machine,
        compile=machine.device == "cuda" and seconds >= _COMPILING_FROM,
        seconds=seconds,
        steps=int(steps_in_time if is_whole else max(steps_in_part, _FEWEST_STEPS)),
        is_whole=is_whole,
        slower=late / early,
        validations=validations,
        validation=seconds_of_one,
    )


def timed_shape(seconds: float) -> Shape:
    """Return the shape to time for plans of so many seconds: what usual cores would train on an endless text.

    A fixed shape would not do: on a core with matrix instructions a large model makes 1.6 times as many
    operations per second as a small one.
    """
    usual = Machine(speed=USUAL_SPEED * cores(), memory=math.inf)
    shape = _shape(_ENDLESS, usual, usual.speed * seconds, Given())
    width, layers = min((shape.emb_dim, shape.num_layers), _LARGEST_TIMED)
    batch_size = _TIMED_TOKENS // shape.context_length
    return replace(shape, emb_dim=width, num_layers=layers, batch_size=batch_size)


def bytes_to_read(
    machine: Machine, minutes: float, least: int = _LEAST_READ, shape: Shape | None = None
) -> int:
    """Return how many bytes to read of a long text: as many as a model can train on once in the time.

    `shape` is the model's, by default the one that the rule chooses. The result is a power of two, so that
    runs with slightly different speeds read the same text.
    """
    compute = machine.speed * 60 * minutes
    shape = shape or _shape(_ENDLESS, machine, compute, Given())
    bytes_in_time = _tokens_in(compute, machine, shape) * BYTES_PER_TOKEN
    return 1 << round(math.log2(max(least, min(bytes_in_time, minutes * cores() * _READ))))


def _tokens_in(compute: float, machine: Machine, shape: Shape) -> float:
    """Return the tokens that a model of this shape trains on with this many operations."""
    return compute / shape.operations(machine.sampled_softmax) * shape.tokens


def _shape(text: Text, machine: Machine, compute: float, given: Given) -> Shape:
    """Choose the shape whose size suits the compute and which text and memory allow."""
    vocab_size = text.vocab_size or given.vocab_size or _vocabulary_size(text, compute)
    context = _context(text, compute, vocab_size, given)
    batch_size = given.batch_size or _batch_size(text, compute, vocab_size, context)
    fitting = _shapes_in_memory(machine, vocab_size, context, batch_size, given)
    by_hand = given.emb_dim or given.num_layers
    most = math.inf if by_hand else MOST_WEIGHTS_PER_BYTE * text.train_bytes
    suitable = [shape for shape in fitting if shape.blocks + shape.table <= most] or fitting[:1]
    usual_weights = USUAL_WEIGHTS * (compute / USUAL_COMPUTE) ** WEIGHTS_POWER
    usual_shape = _nearest(suitable, usual_weights)
    if text.has_records:
        return usual_shape
    epochs = text.epochs(_tokens_in(compute, machine, usual_shape), vocab_size)
    shape = _nearest(suitable, _last_from(WEIGHTS_BY_EPOCHS, epochs) * usual_weights)
    if epochs < REREAD:
        return shape
    halved = given.batch_size or _batch_size(text, compute, vocab_size, context, share=0.5)
    return replace(shape, batch_size=min(halved, shape.batch_size))


def _nearest(shapes: list[Shape], weights: float) -> Shape:
    """Return the shape whose blocks have about so many weights."""
    return min(shapes, key=lambda shape: abs(math.log(shape.blocks / weights)))


def _shapes_in_memory(
    machine: Machine, vocab_size: int, context: int, batch_size: int, given: Given
) -> list[Shape]:
    """Return the shapes that fit into memory, with a smaller batch if it has to be. InputError if none do."""
    while True:
        shapes = [
            Shape(
                vocab_size=vocab_size,
                context_length=context,
                emb_dim=width,
                num_layers=layers,
                batch_size=batch_size,
            )
            for width, layers in _ladder(given)
        ]
        if fitting := [shape for shape in shapes if shape.memory() < machine.memory]:
            return fitting
        if batch_size <= _FEWEST_WINDOWS or given.batch_size:
            raise InputError(
                f"no model fits into {machine.memory / 1e9:.1f} GB of memory: give a smaller vocabulary, "
                "width, context or batch"
            )
        batch_size = max(_FEWEST_WINDOWS, batch_size // 2)


def _ladder(given: Given) -> list[tuple[int, int]]:
    """Return the (width, layers) to choose from that agree with the given options."""
    width = given.emb_dim
    layers = given.num_layers
    heads = given.num_heads or 1
    if width and layers:
        return [(width, layers)]
    if width:
        nearest = min(LADDER, key=lambda rung: abs(math.log(rung[0] / width)))
        return [(width, nearest[1])]
    rungs = [(rung[0], layers or rung[1]) for rung in LADDER]
    return [rung for rung in rungs if not rung[0] % heads] or rungs


def _vocabulary_size(text: Text, compute: float) -> int:
    """Return a power of two with at least `BYTES_PER_ENTRY` bytes of text per entry, within limits."""
    supported = 1 << int(math.log2(max(text.train_bytes / BYTES_PER_ENTRY, 1)))
    return min(max(supported, _SMALLEST_VOCABULARY), _last_from(VOCABULARIES, compute))


def _context(text: Text, compute: float, vocab_size: int, given: Given) -> int:
    """Choose the tokens in a window, of which four fit into the text. InputError if those given do not."""
    tokens_of_text = text.train_tokens(vocab_size)
    context = given.context_length
    if context is None:
        context = _last_from(WINDOWS, compute)
        if text.has_records or text.train_bytes >= LONG_TEXT:
            context = max(context, 128)
        while context > 16 and 4 * context > tokens_of_text:
            context //= 2
    elif 4 * context > tokens_of_text:
        raise InputError(
            f"--model.config.context_length {context}: the text has {text.size:,} bytes, and four windows "
            "have to fit into it"
        )
    return context


def _batch_size(text: Text, compute: float, vocab_size: int, context: int, share: float = 1.0) -> int:
    """Choose the windows of a batch, or a share of the usual ones, few enough for a short text."""
    windows = USUAL_BATCH * 2.0 ** int(math.log10(compute / USUAL_COMPUTE))
    usual_tokens = windows * max(128, context)
    tokens_of_text = text.train_tokens(vocab_size)
    tokens = min(share * usual_tokens, MOST_BATCH, tokens_of_text / _BATCHES_OF_A_TEXT)
    return max(_FEWEST_WINDOWS, round(tokens / context))


def _regularisation(
    text: Text, machine: Machine, shape: Shape, steps: float, given: Given
) -> tuple[float, float]:
    """Return BPE-dropout and dropout for a run of so many updates; none for one that memorises little."""
    tokens = steps * shape.tokens
    epochs = text.epochs(tokens, shape.vocab_size)
    memorised = epochs * (shape.blocks + shape.table) / text.train_bytes
    is_early = tokens < FEW_TOKENS and epochs < MANY_EPOCHS
    if text.has_records or is_early or memorised < REGULARISED_FROM:
        return 0.0, given.dropout or 0.0
    dropout = _last_from(DROPOUT_BY_EPOCHS, epochs) if given.dropout is None else given.dropout
    # On a GPU BPE-dropout would wait for the one thread that splits the words.
    return 0.0 if machine.is_gpu else BPE_DROPOUT, dropout


def _validations(text: Text, machine: Machine, seconds: float, shape: Shape) -> tuple[int, float]:
    """Return the number of validations and the seconds of one.

    A validation scores all of the vocabulary. It takes a third of a step's time, having no backward pass.
    """
    held_out = text.val_fraction * text.size / text.bytes_per_token(shape.vocab_size)
    seconds_of_one = shape.operations() / 3 / shape.tokens * (held_out + _BESIDE) / machine.speed
    return int(min(max(_VALIDATING * seconds / seconds_of_one, 2), _VALIDATIONS)), seconds_of_one


def _heads(width: int) -> int:
    """Return the most heads that divide a width, each at least 32 wide, or 64 in wide models."""
    most = width // (64 if width >= 384 else 32) or 1
    return next(heads for heads in range(most, 0, -1) if not width % heads)


def _last_from(table: tuple[tuple[float, T], ...], value: float) -> T:
    """Return the entry of the last threshold that a value reaches; it reaches at least the first one."""
    _, chosen = table[0]
    for threshold, entry in table:
        if value >= threshold:
            chosen = entry
    return chosen
