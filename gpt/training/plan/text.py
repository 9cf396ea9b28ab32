"""What a plan needs to know of a text: its size, how well it compresses, and what vocabularies make of it."""

import bz2
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpt.data.corpus import find_corpus
from gpt.data.shards import META, Prepared
from gpt.data.vocabularies import Learned, find_vocabulary, learn_table
from gpt.errors import InputError
from gpt.tokenizer import Tokenizer

_READ = 32 << 20  # characters: of a longer text, the beginning stands for the rest
_SAMPLE = 1_000_000  # characters, in pieces from all of what is read
_PART = 100_000  # bytes that are compressed at a time
_SMALLER = 0.13  # a text of less than a part compresses worse, by this power of its size
_SIZES = (512, 1024, 2048, 4096, 8192, 16384)
_SHORTEST = 2_000  # bytes


@dataclass(frozen=True, kw_only=True)
class Text:
    """The numbers of a text that decide a plan."""

    size: int
    """Bytes, those held out too."""
    compressed: float
    """Bits that bz2 takes for each of 100,000 bytes."""
    bytes_per_token: Mapping[int, float]
    """By the number of ids of the vocabularies to choose from."""


def measure(corpus: str, vocabulary: str | None = None, vocab_size: int | None = None) -> Text:
    """Read a corpus, of a long one the beginning; InputError if there is none or it is too short to plan for.

    Args:
        corpus, vocabulary, vocab_size: as `TokenData` takes them, None for what is left to choose.
    """
    if (Path(corpus) / META).is_file():
        prepared = Prepared(Path(corpus))
        text = prepared.tokenizer.decode(prepared.first_ids(_SAMPLE // 4))
        return describe(
            text, sum(prepared.count(split, "bytes") for split in ("train", "val")), prepared.tokenizer
        )
    source, parts, read = find_corpus(corpus), list[str](), 0
    for piece in source.pieces():
        parts.append(piece.text)
        read += len(piece.text)
        if read > _READ:
            break
    text = "".join(parts)
    size = source.size() or len(text.encode("utf-8", "replace"))
    if read > _READ and not source.size():
        raise InputError(
            f"the size of {corpus} is not known: plan for the folder that 'gpt prepare' makes of it"
        )
    if size < _SHORTEST:
        raise InputError(f"{corpus} has {size} bytes, a plan needs at least {_SHORTEST:,}: give more text")
    wanted = find_vocabulary(vocabulary or "learn", vocab_size or _SIZES[-1])
    if isinstance(wanted, Learned) and wanted.n_vocab is None:
        wanted = Tokenizer("own", table=learn_table([text], None, wanted.pattern), pattern=wanted.pattern)
    step = max(1, len(text) // _SAMPLE)
    text = "".join(text[i : i + _PART] for i in range(0, len(text), step * _PART))
    return describe(text, size, wanted, free=vocabulary in (None, "learn") and vocab_size is None)


def describe(text: str, size: int, vocabulary: Tokenizer | Learned, free: bool = False) -> Text:
    """The numbers of a sample, of a vocabulary or, where it is `free`, of several learned ones."""
    scored = text[len(text) // 2 :]
    if isinstance(vocabulary, Tokenizer):
        tokenizers = [vocabulary]
    else:  # learned from one half and tried on the other, as common merges are common in both
        table = learn_table([text[: len(text) // 2]], vocabulary.n_vocab, vocabulary.pattern, at_most=True)
        sizes = [size for size in _SIZES if size <= len(table)] if free else []
        tokenizers = [Tokenizer("own", table=table[: n - 1], pattern=vocabulary.pattern) for n in sizes]
        tokenizers = tokenizers or [Tokenizer("own", table=table, pattern=vocabulary.pattern)]
    counts = {one.n_vocab: len(one.encode_array(scored)) for one in tokenizers}
    bytes_scored = len(scored.encode("utf-8", "replace"))
    return Text(
        size=size,
        compressed=compressed(text.encode("utf-8", "replace")),
        bytes_per_token={n: bytes_scored / tokens for n, tokens in counts.items()},
    )


def compressed(sample: bytes) -> float:
    """Bits that bz2 takes for each byte of parts of 100,000 bytes, or would if the sample were as long."""
    parts = [sample[i : i + _PART] for i in range(0, max(1, len(sample) - _PART + 1), _PART)]
    bits = sum(8 * len(bz2.compress(part)) / len(part) for part in parts) / len(parts)
    return bits * (min(len(sample), _PART) / _PART) ** _SMALLER
