"""What `--vocabulary` names, and learning a vocabulary from texts."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from gpt.errors import InputError
from gpt.text.table import byte_letters, unspell
from gpt.text.tokenizer import Tokenizer, check_size, split_at_words

_LONGEST_TOKEN = 128  # bytes, as in GPT-2's table
_LONGEST_WORD = 256  # bytes: the time to learn grows with the square of a word,
_PART = 1 << 14  # and that to cut a word with the square of the text it is in
_USUAL_SIZE = 1 << 15  # tokens: so many take a tenth longer to learn than 4,096
_learned: dict[tuple[str, int], list[bytes]] = {}  # by the text: a run has the vocabulary of its plan


@dataclass(frozen=True)
class Learned:
    """A vocabulary to learn from the corpus; an InputError for fewer than 257 tokens, or too many."""

    n_vocab: int  # at most: a text has those that stand in it twice

    def __post_init__(self) -> None:
        check_size(self.n_vocab)


def find_vocabulary(name: str | None, vocab_size: int) -> Tokenizer | Learned:
    """What `name` stands for, without one a prefix of GPT-2's; an InputError if unknown or unusable."""
    if name is None:
        return Tokenizer("gpt2", vocab_size)
    if name == "learn":
        return Learned(vocab_size)
    if name == "gpt2":
        return Tokenizer()
    if found := re.fullmatch(r"(gpt2|learn):(\d{1,9})", name):
        size = int(found[2])
        return Tokenizer("gpt2", size) if found[1] == "gpt2" else Learned(size)
    if not os.path.isfile(name):
        raise InputError(
            f"unknown vocabulary {name!r}: expected gpt2, gpt2:SIZE, learn, learn:SIZE "
            "or a tokenizer.json file"
        )
    return Tokenizer.from_file(Path(name))


def learn(texts: list[str], wanted: Learned) -> Tokenizer:
    """The vocabulary of the most frequent pairs, as far as they stand in the texts twice."""
    size = max(wanted.n_vocab, _USUAL_SIZE)
    key = hashlib.sha256("".join(texts).encode()).hexdigest(), size
    if key not in _learned:
        _learned[key] = _train(texts, size)
    # Of any size the beginning is the same.
    return Tokenizer("own", table=_learned[key][: wanted.n_vocab - 1])


def _train(texts: list[str], size: int) -> list[bytes]:
    """The bytes, then the merges of the most frequent pairs by rank."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # it warns of workers forked later otherwise
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    library = Library(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = pre_tokenizers.Split(Regex(f".{{1,{_LONGEST_WORD}}}"), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([words, parts])
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
