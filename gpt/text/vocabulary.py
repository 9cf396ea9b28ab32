"""What `--vocabulary` names, and learning a vocabulary from texts."""

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
    """The bytes, then the merges of the most frequent pairs, as far as they stand in the texts twice."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # it warns of workers forked later otherwise
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
    table = [unspell(token) for token in sorted(ids, key=ids.__getitem__)]
    return Tokenizer("own", table=table)
