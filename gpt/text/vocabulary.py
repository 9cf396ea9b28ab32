"""Find the vocabulary that `--vocabulary` names, or learn one from texts."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gpt.errors import InputError
from gpt.text.table import byte_letters, unspell
from gpt.text.tokenizer import FULL_SIZE, Tokenizer, check_size, split_at_words

_LONGEST_TOKEN = 128  # bytes, as in GPT-2's table
_LONGEST_WORD = 256  # bytes; the time to learn grows with the square of a word's length
_PART = 1 << 14  # characters; the time to cut text into words grows with the square of its length


@dataclass(frozen=True)
class VocabularyToLearn:
    """A vocabulary that is still to be learned from the corpus.

    Raises InputError for fewer than 257 tokens, or for too many.
    """

    n_vocab: int  # the most tokens; a short text gives fewer, as a pair must occur twice to be merged

    def __post_init__(self) -> None:
        check_size(self.n_vocab)


Vocabulary: TypeAlias = Tokenizer | VocabularyToLearn


def find_vocabulary(name: str | None, vocab_size: int) -> Vocabulary:
    """Find the vocabulary that `name` means. Without a name, it is GPT-2's, cut to `vocab_size` tokens.

    Raises InputError if the name is unknown or the vocabulary cannot be used.
    """
    if name is None:
        return Tokenizer("gpt2", vocab_size)
    if name == "learn":
        return VocabularyToLearn(vocab_size)
    if name == "gpt2":
        return Tokenizer()
    if match := re.fullmatch(r"(gpt2|learn):(\d{1,9})", name):
        size = int(match[2])
        return Tokenizer("gpt2", size) if match[1] == "gpt2" else VocabularyToLearn(size)
    if not os.path.isfile(name):
        raise InputError(
            f"unknown vocabulary {name!r}: expected gpt2, gpt2:SIZE, learn, learn:SIZE "
            "or a tokenizer.json file"
        )
    return Tokenizer.from_file(Path(name))


def find_of_size(name: str | None, typed_size: int | None) -> Vocabulary:
    """Find the vocabulary that `name` means, with the size that is typed beside it; by default GPT-2's.

    Raises InputError as `find_vocabulary` does, and if the vocabulary itself has another size.
    """
    found = find_vocabulary(name, FULL_SIZE if typed_size is None else typed_size)
    if typed_size is not None and found.n_vocab != typed_size:
        what = f"the vocabulary {name} has {found.n_vocab} tokens"
        raise InputError(f"{what}: leave the vocab_size {typed_size} out")
    return found


def check_size_used(name: str | None, typed_size: int | None) -> None:
    """Raise InputError if a size is typed beside a vocabulary that has another one itself."""
    if typed_size is not None and name not in (None, "learn"):
        find_of_size(name, typed_size)


def learn(texts: list[str], wanted: VocabularyToLearn) -> Tokenizer:
    """Learn a tokenizer: the 256 bytes, then merges of the most frequent pairs that occur at least twice."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # without it, the library warns about later forks
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    library = Library(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = pre_tokenizers.Split(Regex(f".{{1,{_LONGEST_WORD}}}"), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([words, parts])
    trainer = trainers.BpeTrainer(
        vocab_size=wanted.n_vocab - 1,  # and `<|endoftext|>`
        min_frequency=2,
        initial_alphabet=list(byte_letters()),
        max_token_length=_LONGEST_TOKEN,
        show_progress=False,
    )
    library.train_from_iterator((part for text in texts for part in split_at_words(text, _PART)), trainer)
    ids = library.get_vocab()
    table = [unspell(token) for token in sorted(ids, key=lambda token: ids[token])]
    return Tokenizer("own", table=table)
