"""What `--vocabulary` names, and learning a vocabulary from texts."""

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpt.errors import InputError
from gpt.text.table import LIBRARY_PATTERNS, PATTERNS, byte_letters, unspell
from gpt.text.tokenizer import SMALLEST_SIZE, Tokenizer, split_at_words

_LONGEST_TOKEN = 128  # bytes, as in GPT-2's table
_LONGEST_WORD = 256  # characters: the time to learn grows with the square of a word,
_PART = 1 << 14  # and that to cut a word with the square of the text it is in
_learned: dict[str, tuple[int, list[bytes]]] = {}  # the last two: a run has the vocabulary of its plan


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A vocabulary to learn; an InputError for an unknown pattern or fewer than 257 tokens."""

    n_vocab: int | None  # None for as many as there are characters
    pattern: str = "gpt2"
    at_most: bool = False  # a text that supports fewer ids gets those

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise InputError(f"unknown pattern of words {self.pattern!r}, expected {', '.join(PATTERNS)}")
        if self.n_vocab is not None and self.n_vocab < SMALLEST_SIZE:
            raise InputError(f"a vocabulary has at least {SMALLEST_SIZE} tokens, got learn:{self.n_vocab}")

    @property
    def fingerprint(self) -> str:
        """Of all that decides the table, but for the text."""
        size = f"at most {self.n_vocab}" if self.at_most else self.n_vocab
        return f"learn {size} {PATTERNS[self.pattern]} {_LONGEST_WORD} {_LONGEST_TOKEN}"


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


def learn(texts: Iterable[str], wanted: Learned) -> Tokenizer:
    """The vocabulary of the most frequent pairs; an InputError if too few stand twice, unless `at_most`."""
    if wanted.n_vocab is None:
        characters = sorted(set().union(*texts) - {chr(byte) for byte in range(128)})
        table = [*(bytes([byte]) for byte in range(256)), *(c.encode() for c in characters)]
        return Tokenizer("own", table=table, pattern=wanted.pattern)
    table = _merged(list(texts), wanted.n_vocab - 1, wanted.pattern)
    if len(table) < wanted.n_vocab - 1 and not wanted.at_most:
        raise InputError(f"the text supports at most {len(table) + 1} tokens, got learn:{wanted.n_vocab}")
    return Tokenizer("own", table=table, pattern=wanted.pattern)


def _merged(texts: list[str], size: int, pattern: str) -> list[bytes]:
    """The bytes, then the merges of the most frequent pairs by rank: the first of them in any size."""
    digest = hashlib.sha256(pattern.encode())
    for text in texts:
        digest.update(text.encode())
    key = digest.hexdigest()
    asked, table = _learned.get(key, (0, []))
    if asked < size:
        table = _train(texts, size, pattern)
        _learned[key] = size, table
        if len(_learned) > 2:
            del _learned[next(iter(_learned))]
    return table[:size]


def _train(texts: list[str], size: int, pattern: str) -> list[bytes]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # it warns of workers forked later otherwise
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    library = Library(models.BPE())
    words = pre_tokenizers.Split(Regex(LIBRARY_PATTERNS[pattern]), "isolated")
    parts = pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{_LONGEST_WORD}}}"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([words, parts, as_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        initial_alphabet=list(byte_letters()),
        max_token_length=_LONGEST_TOKEN,
        show_progress=False,
    )
    library.train_from_iterator((part for text in texts for part in split_at_words(text, _PART)), trainer)
    ids = library.get_vocab()
    return [unspell(token) for token in sorted(ids, key=ids.__getitem__)]
