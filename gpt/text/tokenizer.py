"""Text to ids and back: GPT-2's tokenizer, or one with a table of its own.

Byte-pair encoding of bytes (Radford et al. 2019, section 2.2), by tiktoken. Any prefix of GPT-2's ranks that
has the 256 single bytes encodes every text without loss, since a token is merged from tokens of lower rank.
"""

import lzma
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

from gpt.errors import InputError
from gpt.files import shipped
from gpt.text.table import END_OF_TEXT, LAST_WORD, WORDS, check_table, merge, pack, read_table, unpack

_FULL_SIZE = 50257
SMALLEST_SIZE = 257  # of a vocabulary: the 256 bytes and `<|endoftext|>`
LARGEST_SIZE = (1 << 16) - (1 << 11)  # ids are stored in 16 bits, in a page as letters without surrogates

# These always begin a word: text cut there gives the same tokens.
_LINE_END = re.compile(r"(?<=\S)\n")
_BLANK = re.compile(r"(?<=\S) ")

_LAST_WORD = regex.compile(LAST_WORD)
_LONGEST_WORD = 65  # characters of a text's end in which its last word is looked for

_LONGEST_CALL = 1 << 16  # characters: tiktoken's regular expression can panic on millions without a blank


class Tokenizer:
    """Text to ids and back. Tokenizers with the same table are equal; InputError for one that cannot be used.

    Args:
        name: `gpt2`, or `own` for a table of its own.
        vocab_size: tokens of `gpt2` in all, 257 .. 50257: the first ranks of the table, then `<|endoftext|>`.
        table: the tokens by rank, if the name is `own`, `LARGEST_SIZE` - 1 at most; it decides the size.
    """

    def __init__(
        self,
        name: str = "gpt2",
        vocab_size: int = _FULL_SIZE,
        table: Sequence[bytes] | None = None,
    ) -> None:
        if name != ("gpt2" if table is None else "own"):
            raise InputError(f"unknown tokenizer {name!r}, expected gpt2")
        if table is not None:
            check_size(len(table) + 1)
        elif not SMALLEST_SIZE <= vocab_size <= _FULL_SIZE:
            raise InputError(f"vocab_size must be {SMALLEST_SIZE} to {_FULL_SIZE}, got {vocab_size}")
        self.name = name
        self.tokens = list(_table()[: vocab_size - 1] if table is None else table)
        """The bytes of each by id, without `<|endoftext|>`."""
        check_table(self.tokens)
        self.n_vocab = len(self.tokens) + 1

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Tokenizer":
        """The inverse of `to_dict`; an InputError for anything else."""
        try:
            table = unpack(saved["table"]) if "table" in saved else None
            tokenizer = cls(saved["name"], saved["vocab_size"], table)
            if tokenizer.n_vocab != saved["vocab_size"]:
                raise InputError(f"it has {tokenizer.n_vocab} tokens, expected {saved['vocab_size']}")
            return tokenizer
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"not a saved tokenizer: {type(error).__name__} {error}") from None

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """The tokenizer in a file of `read_table`: GPT-2's if the table is a prefix of its ranks."""
        table = read_table(path)
        if table == _table()[: len(table)]:
            return cls("gpt2", len(table) + 1)
        return cls("own", table=table)

    def to_dict(self) -> dict[str, Any]:
        """Strings and numbers, for JSON and for checkpoints."""
        saved: dict[str, Any] = {"name": self.name, "vocab_size": self.n_vocab}
        return saved if self.name == "gpt2" else saved | {"table": pack(self.tokens)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.name, self.n_vocab))

    @property
    def eot(self) -> int:
        """The id of `<|endoftext|>`."""
        return self.n_vocab - 1

    @property
    @lru_cache(maxsize=8)  # noqa: B019 (shared by equal tokenizers)
    def encoding(self) -> Any:
        """The `tiktoken.Encoding`."""
        import tiktoken

        return tiktoken.Encoding(
            name=f"{self.name}-{self.n_vocab}",
            pat_str=WORDS,
            mergeable_ranks=self.ranks,
            special_tokens={END_OF_TEXT: self.eot},
        )

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """The ids of `text`. `<|endoftext|>` in it is plain text unless `allow_special`."""
        first, *others = text.split(END_OF_TEXT) if allow_special else [text]
        ids: list[int] = self.encode_array(first).tolist()
        for part in others:
            ids += [self.eot, *self.encode(part)]
        return ids

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        """The ids of plain text, (tokens,)."""
        encode = self.encoding.encode_to_numpy
        text = whole_characters(text)
        parts = split_at_words(text, _LONGEST_CALL)
        return np.concatenate([encode(part, disallowed_special=()) for part in parts])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`; an InputError for one outside the vocabulary."""
        ids = [int(i) for i in ids]
        if outside := [i for i in ids if not 0 <= i < self.n_vocab]:
            raise InputError(f"token id {outside[0]} is outside the {self.n_vocab}-token vocabulary")
        return self.encoding.decode_bytes(ids)

    @lru_cache(maxsize=8)  # noqa: B019 (shared by equal tokenizers)
    def byte_lengths(self) -> NDArray[np.int64]:
        """UTF-8 bytes of text that each id stands for, (n_vocab,); 0 for `<|endoftext|>`."""
        return np.array([*map(len, self.tokens), 0], dtype=np.int64)

    @property
    @lru_cache(maxsize=8)  # noqa: B019 (shared by equal tokenizers)
    def ranks(self) -> dict[bytes, int]:
        """The id of each token by its bytes, without `<|endoftext|>`."""
        return {token: rank for rank, token in enumerate(self.tokens)}

    def encode_word(self, word: bytes) -> list[int]:
        """The ids of the bytes of one word of `WORDS`, or of its beginning."""
        if word in self.ranks:
            return [self.ranks[word]]
        return [self.ranks[part] for part in merge(word, self.ranks.get)]

    @lru_cache(maxsize=256)  # noqa: B019 (shared by equal tokenizers)
    def ids_beginning_with(self, beginning: bytes) -> tuple[int, ...]:
        """The ids of the tokens whose bytes begin with these, in order."""
        tokens = self._sorted
        following = tokens[bisect_left(tokens, beginning) :]
        return tuple(
            sorted(self.ranks[token] for token in takewhile(lambda one: one.startswith(beginning), following))
        )

    @property
    @lru_cache(maxsize=8)  # noqa: B019 (shared by equal tokenizers)
    def _sorted(self) -> list[bytes]:
        return sorted(self.tokens)


def last_word(text: str) -> str:
    """The end of a text whose tokens may change with what follows it; of a longer word 65 characters."""
    found = _LAST_WORD.search(whole_characters(text)[-_LONGEST_WORD:])
    return found[0] if found else ""


def check_size(tokens: int) -> None:
    """An InputError for a vocabulary of its own that has too few tokens, or more than can be stored."""
    if not SMALLEST_SIZE <= tokens <= LARGEST_SIZE:
        raise InputError(f"vocab_size must be {SMALLEST_SIZE} to {LARGEST_SIZE}, got {tokens}")


def whole_characters(text: str) -> str:
    """`text` with U+FFFD in the place of half a surrogate pair, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def split_at_words(text: str, longest: int) -> Iterator[str]:
    """Cut `text` into parts of at most `longest` characters, two at least.

    It is cut at the first line end in the second half of each part, else at the first blank: encoded one by
    one the parts give the ids of `text`. Where there is neither, they give ids that decode to it.
    """
    start = 0
    while len(text) - start > longest:
        half = start + longest // 2, start + longest
        word = _LINE_END.search(text, *half) or _BLANK.search(text, *half)
        stop = word.start() if word else half[1]
        yield text[start:stop]
        start = stop
    yield text[start:]


@cache
def _table() -> list[bytes]:
    """GPT-2's tokens by rank."""
    packed = (shipped("assets") / "r50k_base.tiktoken.xz").read_bytes()
    return unpack(lzma.decompress(packed).decode())
