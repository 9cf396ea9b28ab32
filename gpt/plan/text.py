"""What a plan needs to know of a text: its size, how hard it is, and what vocabularies make of it.

How hard it is says a short training of a small model. Shapes: B windows, T context_length.
"""

import hashlib
import lzma
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from gpt.config import GPTConfig
from gpt.data.corpus import choose_split, find_corpus
from gpt.data.shard_writer import cut_at, is_by_document
from gpt.data.shards import META, SPLITS, Prepared
from gpt.data.vocabularies import Learned, find_vocabulary, learn_table
from gpt.data.windows import IGNORE_INDEX
from gpt.errors import InputError
from gpt.evaluation.scoring import score
from gpt.model import GPT
from gpt.plan.cost import train_step
from gpt.plan.law import Trial
from gpt.text.tokenizer import Tokenizer
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.schedule import learning_rate_factor

_READ = 32 << 20  # characters: of a longer text, the beginning stands for the rest
_SAMPLE = 1_000_000  # characters, in parts from all of what is read
_PART = 100_000  # characters
_HELD_OUT = 100_000  # bytes: enough to measure, at most a tenth of the text
_SIZES = (512, 1024, 2048, 4096, 8192)
_SHORTEST = 2_000  # bytes
_MOST_STEPS, _FEWEST_STEPS = 100, 20  # of the trial: about a second on two cores
_MOST_PASSES = 4  # over the text: more would say how well it can be learned by heart
_RECIPE = OptimizerConfig(lr=0.012, rest_lr=0.018, weight_decay=0.4, embedding_weight_decay=0.2)
_KNOWN, _NEW = 1_000_000, 100_000  # bytes that are compressed, of the text and of what is held out


@dataclass(frozen=True, kw_only=True)
class Text:
    """The numbers of a text that decide a plan."""

    size: int  # bytes, those held out too
    val_fraction: float  # is held out
    trial: Trial  # what a short training on it has reached
    bytes_per_token: Mapping[int, float]  # of held-out text, by the ids of the vocabularies to choose from
    prepared: bool = False  # it is tokenized and divided already

    @property
    def train_bytes(self) -> float:
        """What is not held out."""
        return self.size * (1 - self.val_fraction)


def measure(
    corpus: str,
    vocabulary: str | None = None,
    vocab_size: int | None = None,
    val_fraction: float | None = None,
    **reading: str | None,
) -> Text:
    """Read a corpus, of a long one the beginning; InputError if there is none or it is too short to plan for.

    Args:
        corpus, vocabulary, vocab_size, val_fraction: as `TokenData` takes them, None for what is not given.
        reading: its `text_column` and `errors`.
    """
    if (Path(corpus) / META).is_file():
        prepared = Prepared(Path(corpus))
        train_bytes, val_bytes = (prepared.count(split, "bytes") for split in SPLITS)
        if not val_bytes:
            raise InputError(f"a plan needs held-out text to predict: prepare {corpus} with a --val_fraction")
        train, val = (prepared.tokenizer.decode(prepared.first_ids(_SAMPLE // 4, split)) for split in SPLITS)
        size = train_bytes + val_bytes
        known = {"size": size, "val_fraction": val_bytes / size, "prepared": True}
        return _describe([prepared.tokenizer], train, val, **known)
    source, documents, read = find_corpus(corpus, **reading), list[list[str]](), 0
    for piece in source.pieces():
        documents += [[]] if piece.first else []
        documents[-1].append(piece.text)
        read += len(piece.text)
        if read > _READ:
            break
    size = source.size() or sum(len(_utf8(part)) for parts in documents for part in parts)
    if read > _READ and not source.size():
        raise InputError(f"{corpus} is of unknown size: plan for the folder that 'gpt prepare' makes of it")
    if size < _SHORTEST:
        raise InputError(f"{corpus} has {size} bytes, a plan needs at least {_SHORTEST:,}: give more text")
    fraction = min(0.1, _HELD_OUT / size) if val_fraction is None else val_fraction
    # Divided as `ShardWriter` does. In the order of their hashes no neighbours are alike.
    splits: dict[str, list[str]] = {split: [] for split in SPLITS}
    for parts in sorted(documents, key=lambda parts: hashlib.sha256(_utf8(parts[0])).digest()):
        splits[choose_split(_utf8(parts[0]), fraction)] += parts
    train, val = map("".join, splits.values())
    text, cut = train + val, len(train)
    if not is_by_document(len(val) / read, fraction):
        cut = cut_at(read, fraction)
    train, val = sample(text[:cut]), sample(text[cut:])
    if not val:
        raise InputError(f"a plan needs held-out text to predict: leave --data.val_fraction {fraction:g} out")
    wanted = find_vocabulary(vocabulary or "learn", vocab_size or _SIZES[-1])
    if isinstance(wanted, Tokenizer):
        return _describe([wanted], train, val, size=size, val_fraction=fraction)
    learned_from = text if wanted.n_vocab is None else train  # characters are those of all of the text
    table = learn_table([learned_from], wanted.n_vocab, wanted.pattern, at_most=True)
    free = vocabulary in (None, "learn") and vocab_size is None
    sizes = [n for n in _SIZES if free and n <= len(table) + 1] or [len(table) + 1]
    learned = [Tokenizer("own", table=table[: n - 1], pattern=wanted.pattern) for n in sizes]
    return _describe(learned, train, val, size=size, val_fraction=fraction)


def _describe(tokenizers: list[Tokenizer], train: str, val: str, **known: Any) -> Text:
    """The numbers of a text with what is `known`, and those of vocabularies to choose from."""
    per_token = {one.n_vocab: len(_utf8(val)) / len(one.encode_array(val)) for one in tokenizers}
    return Text(trial=try_out(train, val), bytes_per_token=per_token, **known)


def sample(text: str) -> str:
    """Parts from all of a text, a million characters of a long one."""
    step = -(-len(text) // _SAMPLE) * _PART
    return "".join(text[i : i + _PART] for i in range(0, len(text), max(step, _PART)))


def try_out(train: str, val: str) -> Trial:
    """Train on `train` and score `val`, in float32 on the CPU whatever a run will use."""
    tokenizer = Tokenizer("own", table=learn_table([train], 1024, Learned.pattern, at_most=True))
    known, new = (torch.from_numpy(tokenizer.encode_array(part).astype("int64")) for part in (train, val))
    if len(new) < 2:
        raise InputError("a plan needs held-out text to predict, a token of it is too little: hold out more")
    T, B = Trial.context, Trial.batch // Trial.context
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
    nats = sum(float(score(model, x, y)[0].sum()) for x, y in batches)
    per_token = len(_utf8(val)) / len(new)
    return Trial(
        bits_per_byte=nats / (len(new) - 1) / math.log(2) / per_token,
        table=tokenizer.n_vocab * config.emb_dim,
        seen=steps * Trial.batch * per_token,
        unique=len(_utf8(train)),
        per_token=per_token,
        repeats=repeats(train, val),
    )


def repeats(train: str, val: str) -> float:
    """Bits that LZMA takes for each byte of `val` after `train`: few where it repeats what was there."""
    known, new = _utf8(train)[-_KNOWN:], _utf8(val)[:_NEW]
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    alone, both = (len(lzma.compress(it, lzma.FORMAT_RAW, filters=filters)) for it in (known, known + new))
    return 8 * (both - alone) / len(new)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")
