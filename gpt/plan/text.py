"""What a plan needs to know of a text: its size, how hard it is, and what vocabularies make of it.

How hard it is says a short training of a small model. Shapes: B windows, T context_length.
"""

import lzma
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from gpt.config import GPTConfig
from gpt.data.corpus import find_corpus
from gpt.data.shards import META, Prepared
from gpt.data.split import SPLITS, Divided
from gpt.data.windows import IGNORE_INDEX
from gpt.errors import InputError
from gpt.evaluation.scoring import bits_per_byte, score, target_bytes
from gpt.model import GPT
from gpt.plan.cost import train_step
from gpt.plan.law import Trial
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import Learned, find_vocabulary, learn
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.schedule import learning_rate_factor

_SAMPLE = 1_000_000  # characters, in parts from all of the text
_PART = 100_000  # characters
_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_SHORTEST = 2_000  # bytes
_AROUND_TOKENIZING = 1.5  # reading, dividing, writing and checksums, beside tokenizing
_MOST_STEPS = 100  # of the trial: about a second on two cores
_FEWEST_STEPS = 20  # of the trial
_MOST_PASSES = 4  # over the text: more would say how well it can be learned by heart
_RECIPE = OptimizerConfig(lr=0.012, rest_lr=0.018, weight_decay=0.4, embedding_weight_decay=0.2)
_KNOWN = 1_000_000  # bytes of the text that are compressed
_NEW = 100_000  # and of what is held out


@dataclass(frozen=True, kw_only=True)
class Text:
    """The numbers of a text that decide a plan."""

    size: int  # bytes, those held out too
    val_fraction: float  # is held out
    trial: Trial  # what a short training on it has reached
    bytes_per_token: Mapping[int, float]  # of held-out text, by the sizes of the vocabularies to choose from
    error: float = 0.0  # of bits per byte on what is held out, its standard error as a share of them
    tokenizing: float = 0.0  # seconds, 0 for a text that is tokenized and divided already
    most_bytes: int | None = None  # of a longer text are read
    in_order: bool = False  # and these are its first, as of a compressed file

    @property
    def train_bytes(self) -> float:
        """What is not held out."""
        return self.size * (1 - self.val_fraction)


def measure(
    corpus: str,
    vocabulary: str | None = None,
    vocab_size: int | None = None,
    val_fraction: float | None = None,
    most_bytes: int | None = None,
    **reading: str | None,
) -> Text:
    """Read what a run would read of a corpus, of a large text a sample; InputError if it is too short.

    Args:
        corpus, vocabulary, vocab_size, val_fraction, most_bytes: as `TokenData` takes them, None for what is
            not given.
        reading: its `text_column`.
    """
    if (Path(corpus) / META).is_file():
        prepared = Prepared(Path(corpus))
        sizes = [prepared.counts[split].bytes for split in SPLITS]
        if not sizes[1]:
            raise InputError(f"a plan needs held-out text to predict: prepare {corpus} with a --val_fraction")
        train, val = (prepared.tokenizer.decode(prepared.spread_ids(_SAMPLE // 4, split)) for split in SPLITS)
        held_out = sizes[1] / sum(sizes)
        return _describe([prepared.tokenizer], train, val, size=sum(sizes), val_fraction=held_out)
    source = find_corpus(corpus, **reading)
    divided = Divided(source, val_fraction, most_bytes)
    if divided.size < _SHORTEST:
        raise InputError(
            f"{corpus} has {divided.size} bytes, a plan needs at least {_SHORTEST:,}: give more text"
        )
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for piece in divided.sample():
        texts[piece.split].append(piece.text)
    train, val = (sample("".join(texts[split])) for split in SPLITS)
    if not val or not divided.rule.below:
        raise InputError("a plan needs held-out text to predict: leave --data.val_fraction out")
    wanted = find_vocabulary(vocabulary or "learn", vocab_size or _SIZES[-1])
    known: dict[str, Any] = {
        "size": divided.size,
        "val_fraction": divided.rule.share,
        "most_bytes": divided.drawn,
        "in_order": source.size() is None,
    }
    if isinstance(wanted, Tokenizer):
        tokenizers = [wanted]
    else:
        learned = learn(divided.to_learn_from(), wanted)
        free = vocabulary in (None, "learn") and vocab_size is None
        sizes = [n for n in _SIZES if free and n <= learned.n_vocab] or [learned.n_vocab]
        tokenizers = [Tokenizer("own", table=learned.tokens[: n - 1]) for n in sizes]
    began = time.perf_counter()
    tokenizers[0].encode_array(train)
    seconds = (time.perf_counter() - began) / len(train.encode())  # for a byte, on one thread
    known["tokenizing"] = divided.size * seconds / (os.cpu_count() or 1) * _AROUND_TOKENIZING
    return _describe(tokenizers, train, val, **known)


def _describe(tokenizers: list[Tokenizer], train: str, val: str, **known: Any) -> Text:
    """The numbers of a text with what is `known`, and those of vocabularies to choose from."""
    size = len(val.encode())
    per_token = {one.n_vocab: size / len(one.encode_array(val)) for one in tokenizers}
    trial, error = try_out(train, val)
    scored_later = known["size"] * known["val_fraction"]
    error *= math.sqrt(size / max(size, scored_later))
    return Text(trial=trial, error=error, bytes_per_token=per_token, **known)


def sample(text: str) -> str:
    """Parts from all of a text, a million characters of a long one."""
    step = -(-len(text) // _SAMPLE) * _PART
    return "".join(text[i : i + _PART] for i in range(0, len(text), max(step, _PART)))


def try_out(train: str, val: str) -> tuple[Trial, float]:
    """Train on `train` and score `val`, in float32 on the CPU whatever a run will use.

    Also the standard error of the bits per byte, as a share of them; infinite if `val` is very short.
    """
    tokenizer = learn([train], Learned(1024))
    known, new = (torch.from_numpy(tokenizer.encode_array(part).astype("int64")) for part in (train, val))
    if len(new) < 2:
        raise InputError("a plan needs held-out text to predict, a token of it is too little: hold out more")
    T = Trial.context
    B = Trial.batch // T
    known = F.pad(known, (0, max(0, T + 1 - len(known))))
    config = GPTConfig(vocab_size=tokenizer.n_vocab, context_length=T, emb_dim=64, num_heads=2, num_layers=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(config)
    steps = min(_MOST_STEPS, max(_FEWEST_STEPS, _MOST_PASSES * len(known) // Trial.batch))
    optimizer = build_optimizer(model, _RECIPE)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps, steps // 10, "linear"))
    places = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(known) - T, (B, 1), generator=places)
        windows = known[starts + torch.arange(T + 1)]  # (B, T + 1)
        train_step(model, optimizer, windows[:, :-1], windows[:, 1:])
        schedule.step()
    rest = -(len(new) - 1) % T
    inputs = F.pad(new[:-1], (0, rest)).view(-1, T)
    targets = F.pad(new[1:], (0, rest), value=IGNORE_INDEX).view(-1, T)
    batches = zip(torch.split(inputs, 4 * B), torch.split(targets, 4 * B), strict=True)
    nats = torch.cat([score(model, x, y).sum(dim=1) for x, y in batches]).numpy()  # (windows,)
    bits, error = bits_per_byte(nats, target_bytes(targets, tokenizer.byte_lengths()))
    per_token = len(val.encode()) / len(new)
    trial = Trial(
        bits_per_byte=bits,
        table=tokenizer.n_vocab * config.emb_dim,
        seen=steps * Trial.batch * per_token,
        unique=len(train.encode()),
        per_token=per_token,
        repeats=repeats(train, val),
    )
    return trial, error / bits


def repeats(train: str, val: str) -> float:
    """Bits that LZMA takes for each byte of `val` after `train`: few where it repeats what was there."""
    known = train.encode()[-_KNOWN:]
    new = val.encode()[:_NEW]
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    alone, both = (len(lzma.compress(it, lzma.FORMAT_RAW, filters=filters)) for it in (known, known + new))
    return 8 * (both - alone) / len(new)
