"""What `--vocabulary` names, and learning a vocabulary from the part of a corpus that is trained on."""

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpt.data.corpus import Corpus
from gpt.data.shard_writer import cut_at, is_by_document
from gpt.data.shards import SPLITS
from gpt.errors import InputError
from gpt.text.table import LIBRARY_PATTERNS, PATTERNS, byte_letters, unspell
from gpt.text.tokenizer import SMALLEST_SIZE, Tokenizer, split_at_words

_SCANNED_BYTES = 1 << 30  # of text that is read to learn from: of a larger corpus, the beginning
_SAMPLE_BYTES = 32 << 20  # of text that is learned from, in memory: of more, parts are chosen by their hash
_PART_CHARACTERS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A vocabulary to learn from the corpus; an InputError for an unknown pattern or fewer than 257 ids."""

    n_vocab: int | None  # None for as many as there are characters
    pattern: str = "gpt2"
    at_most: bool = False  # a text that supports fewer ids gets those

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise InputError(f"unknown pattern of words {self.pattern!r}, expected {', '.join(PATTERNS)}")
        if self.n_vocab is not None and self.n_vocab < SMALLEST_SIZE:
            raise InputError(f"a vocabulary has at least {SMALLEST_SIZE} ids, got learn:{self.n_vocab}")

    @property
    def fingerprint(self) -> str:
        """Of all that decides the table, but for the text."""
        size = f"at most {self.n_vocab}" if self.at_most else self.n_vocab
        return f"learn {size} {PATTERNS[self.pattern]} {_SCANNED_BYTES} {_SAMPLE_BYTES}"


def find_vocabulary(name: str | None, vocab_size: int) -> Tokenizer | Learned:
    """What `name` stands for, without one a prefix of GPT-2's; an InputError if unknown or unusable."""
    if name is None:
        return Tokenizer("gpt2", vocab_size)
    if name == "learn":
        return Learned(n_vocab=vocab_size, at_most=True)
    if name == "learn:chars":
        return Learned(n_vocab=None, pattern="chars")
    if found := re.fullmatch(r"gpt2(?::(\d{1,9}))?", name):
        return Tokenizer("gpt2", int(found[1] or 50257))
    if found := re.fullmatch(r"learn:(\d{1,9})(?::(.*))?", name):
        return Learned(n_vocab=int(found[1]), pattern=found[2] or "gpt2")
    if name.partition(":")[0] in ("gpt2", "learn") or not Path(name).is_file():
        raise InputError(
            f"unknown vocabulary {name!r}: expected gpt2, gpt2:SIZE, learn, learn:SIZE, learn:SIZE:PATTERN, "
            "learn:chars or a .tiktoken or tokenizer.json file"
        )
    return Tokenizer.from_file(Path(name))


def learn(source: Corpus, wanted: Learned, val_fraction: float) -> Tokenizer:
    """Learn a vocabulary from the text that is trained on; what `ShardWriter` holds out leaves no trace."""
    sample: list[tuple[int, str, int, bytes]] = []  # hash, split, first byte in it, UTF-8 text
    sizes, kept, limit = dict.fromkeys(SPLITS, 0), 0, 1 << 64
    begins: dict[str, int] = {}  # where the last example of a split begins
    for text, first, _, scored, split in source.pieces(val_fraction):
        if first and text and not scored:
            begins[split] = sizes[split]
        for part in split_at_words(text, _PART_CHARACTERS):
            data = part.encode("utf-8", "replace")
            draw = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
            if draw < limit:
                sample.append((draw, split, sizes[split], data))
                kept += len(data)
            sizes[split] += len(data)
        while kept > _SAMPLE_BYTES:
            limit //= 2
            sample = [drawn for drawn in sample if drawn[0] < limit]
            kept = sum(len(data) for *_, data in sample)
        if sum(sizes.values()) > _SCANNED_BYTES:
            break
    total = sum(sizes.values())
    # Of a text that was not read to its end, take only what is trained on however it is divided.
    read_all = total <= _SCANNED_BYTES
    by_document = is_by_document(sizes["val"] / max(total, 1), val_fraction)
    last = sizes["train"] + begins["val"] if "val" in begins else begins.get("train", total)  # never cut
    cut = total if by_document and read_all else min(cut_at(total, val_fraction), last)
    ends = {"train": cut, "val": 0 if by_document or not read_all else cut - sizes["train"]}
    texts = [data[: max(0, ends[split] - at)].decode("utf-8", "ignore") for _, split, at, data in sample]
    table = learn_table(texts, wanted.n_vocab, wanted.pattern, wanted.at_most)
    return Tokenizer("own", table=table, pattern=wanted.pattern)


def learn_table(
    texts: Iterable[str], vocab_size: int | None, pattern: str, at_most: bool = False
) -> list[bytes]:
    """The bytes, then the merges of the most frequent pairs by rank; without a size all characters.

    An InputError if too few pairs stand twice, unless `at_most`.
    """
    if vocab_size is None:
        characters = sorted({character for text in texts for character in text if ord(character) > 127})
        return [*(bytes([byte]) for byte in range(256)), *(c.encode() for c in characters)]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # it warns of workers forked later otherwise
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    library = Library(models.BPE())
    split = pre_tokenizers.Split(Regex(LIBRARY_PATTERNS[pattern]), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=2, initial_alphabet=byte_letters(), show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    ids = library.get_vocab()
    if len(ids) < vocab_size - 1 and not at_most:
        raise InputError(f"the text supports at most {len(ids) + 1} ids, got learn:{vocab_size}")
    return [unspell(token) for token in sorted(ids, key=ids.__getitem__)]
