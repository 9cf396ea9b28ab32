"""What a plan needs to know of a text: its size, how hard it is, and what vocabularies make of it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpt.data.corpus import choose_split, find_corpus
from gpt.data.shard_writer import cut_at, is_by_document
from gpt.data.shards import META, SPLITS, Prepared
from gpt.data.vocabularies import Learned, find_vocabulary, learn_table
from gpt.errors import InputError
from gpt.tokenizer import Tokenizer
from gpt.training.plan.law import Trial
from gpt.training.plan.trial import try_out

_READ = 32 << 20  # characters: of a longer text, the beginning stands for the rest
_SAMPLE = 1_000_000  # characters, in parts from all of what is read
_PART = 100_000  # characters
_HELD_OUT = 100_000  # bytes: enough to measure, at most a tenth of the text
_SIZES = (512, 1024, 2048, 4096, 8192)
_SHORTEST = 2_000  # bytes


@dataclass(frozen=True, kw_only=True)
class Text:
    """The numbers of a text that decide a plan."""

    size: int
    """Bytes, those held out too."""
    trial: Trial
    """What a short training on it has reached."""
    bytes_per_token: Mapping[int, float]
    """Of held-out text, by the number of ids of the vocabularies to choose from."""
    held_out: float | None = None
    """The fraction held out, if the text is prepared already."""


def held_out(size: int, given: float | None = None) -> float:
    """The fraction of a text of so many bytes to hold out."""
    return min(0.1, _HELD_OUT / size) if given is None else given


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
        size = train_bytes + val_bytes
        parts = (prepared.first_ids(_SAMPLE // 4, split) for split in SPLITS)
        train, val = map(prepared.tokenizer.decode, parts)
        return replace(describe(train, val, size, prepared.tokenizer), held_out=val_bytes / size)
    source, documents, read = find_corpus(corpus, **reading), list[list[str]](), 0
    for piece in source.pieces():
        documents += [[]] if piece.first else []
        documents[-1].append(piece.text)
        read += len(piece.text)
        if read > _READ:
            break
    size = source.size() or sum(len(part.encode("utf-8", "replace")) for parts in documents for part in parts)
    if read > _READ and not source.size():
        raise InputError(
            f"the size of {corpus} is not known: plan for the folder that 'gpt prepare' makes of it"
        )
    if size < _SHORTEST:
        raise InputError(f"{corpus} has {size} bytes, a plan needs at least {_SHORTEST:,}: give more text")
    fraction = held_out(size, val_fraction)
    # Divided as `ShardWriter` does. By the hash those held out come first, and no neighbours are alike.
    documents.sort(key=lambda parts: hashlib.sha256(parts[0].encode("utf-8", "replace")).digest())
    whole = ["".join(parts) for parts in documents]
    splits = [choose_split(parts[0].encode("utf-8", "replace"), fraction) for parts in documents]
    cut = sum(len(text) for text, split in zip(whole, splits, strict=True) if split == "val")
    text = "".join(whole)
    if is_by_document(cut / read, fraction):
        train, val = text[cut:], text[:cut]
    else:
        cut = cut_at(len(text), fraction)
        train, val = text[:cut], text[cut:]
    if not val:
        raise InputError(f"a plan needs held-out text to predict: leave --data.val_fraction {fraction:g} out")
    wanted = find_vocabulary(vocabulary or "learn", vocab_size or _SIZES[-1])
    if isinstance(wanted, Learned) and wanted.n_vocab is None:
        table = learn_table([text], None, wanted.pattern)
        wanted = Tokenizer("own", table=table, pattern=wanted.pattern)
    free = vocabulary in (None, "learn") and vocab_size is None
    return describe(sample(train), sample(val), size, wanted, free)


def describe(train: str, val: str, size: int, vocabulary: Tokenizer | Learned, free: bool = False) -> Text:
    """The numbers of a text and a vocabulary or, where it is `free`, several learned from `train`."""
    if isinstance(vocabulary, Tokenizer):
        tokenizers = [vocabulary]
    else:
        table = learn_table([train], vocabulary.n_vocab, vocabulary.pattern, at_most=True)
        sizes = [size for size in _SIZES if size <= len(table) + 1] if free else []
        tokenizers = [Tokenizer("own", table=table[: n - 1], pattern=vocabulary.pattern) for n in sizes]
        tokenizers = tokenizers or [Tokenizer("own", table=table, pattern=vocabulary.pattern)]
    counts = {one.n_vocab: len(one.encode_array(val)) for one in tokenizers}
    scored = len(val.encode("utf-8", "replace"))
    return Text(
        size=size,
        trial=try_out(train, val),
        bytes_per_token={n: scored / tokens for n, tokens in counts.items()},
    )


def sample(text: str) -> str:
    """Parts from all of a text, a million characters of a long one."""
    step = -(-len(text) // _SAMPLE) * _PART
    return "".join(text[i : i + _PART] for i in range(0, len(text), max(step, _PART)))
