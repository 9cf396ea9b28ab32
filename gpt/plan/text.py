"""What a plan needs to know of a text: its size, how hard it is, and what vocabularies make of it.

How hard it is says a short training of a small model. Shapes: T context_length, N windows.
"""

import math
import timeit
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from gpt.config import GPTConfig
from gpt.data.corpus import find_corpus
from gpt.data.respelling import Respelling
from gpt.data.shards import Prepared, is_prepared
from gpt.data.split import SPLITS, Divided, sample
from gpt.data.windows import IGNORE_INDEX
from gpt.errors import InputError
from gpt.evaluation.scoring import bits_per_byte, quarters, repeated, score, target_bytes
from gpt.model import GPT
from gpt.plan.cost import train_step
from gpt.plan.law import Trial
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import Learned, find_vocabulary, learn
from gpt.threads import cores
from gpt.training.device import default_precision
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.schedule import learning_rate_factor

_SAMPLE = 1 << 18  # tokens of a prepared folder
_RESPELLED = 40_000  # characters, to time BPE-dropout with
_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_FEWEST_HELD_OUT = 100  # bytes
BPE_DROPOUT = 0.05
"""Of a text that is read often."""
_AROUND_TOKENIZING = 1.5  # reading, dividing, writing and checksums, beside tokenizing
# The trial.
_FEWEST_STEPS = 20
_EARLY = 33  # steps, at most a third of all: from there to the end its pace is seen
_WIDTH = 64  # of its one layer
_CONTEXT = 64
_BATCH = 1536  # tokens
SAME = {"blocks": 12 * _WIDTH**2, "context": _CONTEXT, "batch": _BATCH}
"""What every trial has, as arguments of `Law.usual`."""
_MOST_PASSES = 4  # over the text: more would say how well it can be learned by heart
_BYTES_FOR_ID = 300  # of text, in the trial's vocabulary
_IDS = 512, 4096  # the fewest and the most
_SCORED = 300_000  # characters
_RECIPE = OptimizerConfig(lr=0.012, rest_lr=0.018, weight_decay=0.4, embedding_weight_decay=0.2)


@dataclass(frozen=True, kw_only=True)
class Text:
    """The numbers of a text that decide a plan."""

    size: int  # bytes, those held out too
    val_fraction: float  # is held out
    trial: Trial  # what a short training on it has reached
    bytes_per_token: Mapping[int, float]  # of held-out text, by the sizes of the vocabularies to choose from
    error: float  # of bits per byte on what is held out, its standard error as a share of them
    respelling: float  # seconds of BPE-dropout for a token of a batch
    tokenizing: float = 0.0  # seconds, 0 for a text that is tokenized and divided already
    most_bytes: int | None = None  # of a longer text are read

    @property
    def train_bytes(self) -> float:
        """What is not held out."""
        return self.size * (1 - self.val_fraction)


def measure(corpus: str, steps: int = 100, **reading: Any) -> Text:
    """Read what a run would read of a corpus, of a large text a sample; InputError if it is too short.

    Args:
        corpus: as `TokenData` takes it.
        steps: of the trial.
        reading: further arguments of `_read`, as `TokenData` takes them, None for what is not given.
    """
    tokenizers, train, val, known = _prepared(corpus) if is_prepared(corpus) else _read(corpus, **reading)
    if not known["val_fraction"] or len(val.encode()) < _FEWEST_HELD_OUT:
        raise InputError(
            f"{corpus} has fewer than {_FEWEST_HELD_OUT} bytes of held-out text to predict: give more text, "
            "prepare it with a larger --val_fraction, or leave --data.val_fraction out"
        )
    val = sample(val, _SCORED)
    size = len(val.encode())
    held_out = known["size"] * known["val_fraction"]
    trial, error = try_out(train, val, known["size"] - held_out, steps)
    middle = tokenizers[len(tokenizers) // 2]
    return Text(
        trial=trial,
        error=error * math.sqrt(size / max(size, held_out)),
        bytes_per_token={one.n_vocab: size / len(one.encode_array(val)) for one in tokenizers},
        respelling=Respelling(BPE_DROPOUT, middle.tokens, 0).seconds(middle.encode_array(train[:_RESPELLED])),
        **known,
    )


_Parts = tuple[list[Tokenizer], str, str, dict[str, Any]]
"""Vocabularies to choose from, text to train on and text that is held out, and what is known of them."""


def _prepared(folder: str) -> _Parts:
    """Of a folder of `gpt prepare`."""
    prepared = Prepared(folder)
    sizes = [prepared.counts[split].bytes for split in SPLITS]
    train, val = (prepared.tokenizer.decode(prepared.spread_ids(_SAMPLE, split)) for split in SPLITS)
    return [prepared.tokenizer], train, val, {"size": sum(sizes), "val_fraction": sizes[1] / sum(sizes)}


def _read(
    corpus: str,
    vocabulary: str | None = None,
    vocab_size: int | None = None,
    val_fraction: float | None = None,
    most_bytes: int | None = None,
    **options: Any,
) -> _Parts:
    """Of another corpus; `options` are those of `find_corpus`."""
    divided = Divided(find_corpus(corpus, **options), val_fraction, most_bytes)
    pieces = list(divided.sample())
    train, val = (sample("".join(piece.text for piece in pieces if piece.split == split)) for split in SPLITS)
    wanted = find_vocabulary(vocabulary or "learn", vocab_size or _SIZES[-1])
    if isinstance(wanted, Tokenizer):
        tokenizers = [wanted]
    else:
        learned = learn(divided.to_learn_from(), wanted)
        free = vocabulary in (None, "learn") and vocab_size is None
        sizes = [n for n in _SIZES if free and n <= learned.n_vocab] or [learned.n_vocab]
        tokenizers = [Tokenizer("own", table=learned.tokens[: n - 1]) for n in sizes]
    seconds = timeit.timeit(partial(tokenizers[0].encode_array, train), number=1)  # on one thread
    known = {
        "size": divided.size,
        "val_fraction": divided.rule.share,
        "most_bytes": divided.drawn,
        "tokenizing": divided.size * seconds / len(train.encode()) / cores() * _AROUND_TOKENIZING,
    }
    return tokenizers, train, val, known


def try_out(train: str, val: str, size: float, steps: int) -> tuple[Trial, float]:
    """Train on `train`, of a text of `size` bytes, and score `val`, on the CPU.

    Also the standard error of the bits per byte, as a share of them; infinite if `val` is very short.
    """
    tokenizer = learn([train], Learned(int(np.clip(size / _BYTES_FOR_ID, *_IDS))))
    known, new = (torch.from_numpy(tokenizer.encode_array(part).astype("int64")) for part in (train, val))
    known = F.pad(known, (0, max(0, _CONTEXT + 1 - len(known))))
    steps = min(steps, max(_FEWEST_STEPS, _MOST_PASSES * len(known) // _BATCH))
    padded = F.pad(new, (0, -(len(new) - 1) % _CONTEXT), value=IGNORE_INDEX)
    inputs = padded[:-1].clamp(min=0).view(-1, _CONTEXT)  # (N, T)
    targets = padded[1:].view(-1, _CONTEXT)
    sizes = target_bytes(targets, tokenizer.byte_lengths())
    early = min(_EARLY, steps // 3)
    # (N, T) each
    scores = [score(_trained(tokenizer.n_vocab, known, made), inputs, targets) for made in (early, steps)]
    nats = np.stack([one.sum(dim=1) for one in scores])  # (2, N)
    bits, error = bits_per_byte(nats[1], sizes)
    earlier, reached = quarters(nats, sizes)
    per_token = len(val.encode()) / len(new)
    seen = _BATCH * per_token  # in a step
    trial = Trial(
        bits_per_byte=reached,
        earlier=earlier,
        earlier_seen=early * seen,
        repeated=repeated(scores[1], inputs, targets),
        numbers={
            **SAME,
            "table": tokenizer.n_vocab * _WIDTH,
            "seen": steps * seen,
            "unique": len(train.encode()),
            "per_token": per_token,
        },
    )
    return trial, error / bits


def _trained(vocab_size: int, known: Tensor, steps: int) -> GPT:
    """The model of a trial after so many steps on the ids `known`."""
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(vocab_size=vocab_size, context_length=_CONTEXT, emb_dim=_WIDTH, num_heads=2, num_layers=1)
    )
    precision = default_precision("cpu")
    optimizer = build_optimizer(model, _RECIPE, precision)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps, steps // 10, "linear"))
    places = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(known) - _CONTEXT, (_BATCH // _CONTEXT, 1), generator=places)
        windows = known[starts + torch.arange(_CONTEXT + 1)]  # (windows, T + 1)
        train_step(model, optimizer, windows[:, :-1], windows[:, 1:], precision)
        schedule.step()
    return model
