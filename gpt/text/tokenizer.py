"""Convert text to token ids and back, with GPT-2's tokenizer or with one that has its own table.

tiktoken does the byte-pair encoding of bytes (Radford et al. 2019, section 2.2). A token is merged only from
tokens of lower rank. So any prefix of GPT-2's table that has the 256 single bytes encodes every text without
loss.
"""

import lzma
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import regex
from numpy.typing import NDArray

from gpt.errors import InputError
from gpt.files import shipped
from gpt.plain import JsonObject
from gpt.text.table import END_OF_TEXT, LAST_WORD, WORDS, check_table, pack, read_table, unpack

if TYPE_CHECKING:
    import tiktoken

FULL_SIZE = 50257  # of GPT-2's table
SMALLEST_SIZE = 257  # tokens: the 256 bytes and `<|endoftext|>`
# Files store an id in 16 bits. A page stores it as a letter of 16 bits, and 2048 of these are surrogates.
LARGEST_SIZE = (1 << 16) - (1 << 11)

# A line end or space after a non-blank always begins a word. Text that is cut there gives the same tokens.
_LINE_END = re.compile(r"(?<=\S)\n")
_BLANK = re.compile(r"(?<=\S) ")

_LAST_WORD = regex.compile(LAST_WORD)
_LONGEST_WORD = 65  # characters at a text's end that are searched for its last word

_LONGEST_CALL = 1 << 16  # characters: tiktoken's regular expression can panic on millions without a blank


# What is computed from a table is kept for all tokenizers that have it: a run has several equal ones.
_cached = lru_cache(maxsize=8)
_cached_by_bytes = lru_cache(maxsize=256)


class Tokenizer:
    """A converter of text to token ids and back. Tokenizers with the same table are equal.

    Args:
        name: `gpt2`, or `own` for a tokenizer with its own table.
        vocab_size: the number of tokens of `gpt2`, 257 .. 50257. They are the first tokens of the table and
            `<|endoftext|>`.
        table: the tokens by rank, at most `LARGEST_SIZE` - 1, if the name is `own`. It determines the size.

    Raises:
        InputError: the name is unknown, the size is out of range, or the table cannot encode every text.
    """

    def __init__(
        self,
        name: str = "gpt2",
        vocab_size: int = FULL_SIZE,
        table: Sequence[bytes] | None = None,
    ) -> None:
        if name != ("gpt2" if table is None else "own"):
            raise InputError(f"unknown tokenizer {name!r}, expected gpt2")
        if table is not None:
            check_size(len(table) + 1)
        elif not SMALLEST_SIZE <= vocab_size <= FULL_SIZE:
            raise InputError(f"vocab_size must be {SMALLEST_SIZE} to {FULL_SIZE}, got {vocab_size}")
        self.name = name
        self.tokens = list(_table()[: vocab_size - 1] if table is None else table)
        """The bytes of each token by id, without `<|endoftext|>`."""
        check_table(self.tokens)
        self.n_vocab = len(self.tokens) + 1

    @classmethod
    def from_dict(cls, saved: JsonObject) -> "Tokenizer":
        """Build the tokenizer that `to_dict` returned. Raises InputError for any other value."""
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
        """Read the tokenizer from a `tokenizer.json`. It is `gpt2` if its table is a prefix of GPT-2's.

        Raises InputError as `read_table` does.
        """
        return cls.from_tokens(read_table(path).tokens)

    @classmethod
    def from_tokens(cls, tokens: list[bytes]) -> "Tokenizer":
        """Build the tokenizer of a table: `gpt2` if it is a prefix of GPT-2's.

        Args:
            tokens: the bytes of each token by rank, without `<|endoftext|>`.

        Raises:
            InputError: there are too many, or they cannot encode every text.
        """
        if tokens == _table()[: len(tokens)]:
            return cls("gpt2", len(tokens) + 1)
        return cls("own", table=tokens)

    def to_dict(self) -> JsonObject:
        """Return the tokenizer as strings and numbers, for JSON and for checkpoints."""
        saved: JsonObject = {"name": self.name, "vocab_size": self.n_vocab}
        return saved if self.name == "gpt2" else saved | {"table": pack(self.tokens)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.tokens == other.tokens

    def __hash__(self) -> int:
        return hash(self.n_vocab)

    @property
    def eot(self) -> int:
        """The id of `<|endoftext|>`."""
        return self.n_vocab - 1

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Return the ids of `text`. `<|endoftext|>` in it is plain text unless `allow_special`."""
        first, *others = text.split(END_OF_TEXT) if allow_special else [text]
        ids: list[int] = self.encode_array(first).tolist()
        for part in others:
            ids += [self.eot, *self.encode(part)]
        return ids

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        """Return the ids of plain text, (tokens,)."""
        encode = self.encoding.encode_to_numpy
        text = whole_characters(text)
        parts = split_at_words(text, _LONGEST_CALL)
        return np.concatenate([encode(part, disallowed_special=()) for part in parts])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of `ids`. Raises InputError if an id is outside the vocabulary."""
        ids = [int(i) for i in ids]
        if outside := [i for i in ids if not 0 <= i < self.n_vocab]:
            raise InputError(f"token id {outside[0]} is outside the {self.n_vocab}-token vocabulary")
        return self.encoding.decode_bytes(ids)

    @property
    @_cached
    def encoding(self) -> "tiktoken.Encoding":
        """The `tiktoken.Encoding` of this tokenizer."""
        import tiktoken

        return tiktoken.Encoding(
            name=f"{self.name}-{self.n_vocab}",
            pat_str=WORDS,
            mergeable_ranks=self.ranks,
            special_tokens={END_OF_TEXT: self.eot},
        )

    @property
    @_cached
    def ranks(self) -> dict[bytes, int]:
        """The id of each token by its bytes, without `<|endoftext|>`."""
        return {token: rank for rank, token in enumerate(self.tokens)}

    @_cached
    def byte_lengths(self) -> NDArray[np.int64]:
        """Return the number of bytes of each token, (n_vocab,). 0 for `<|endoftext|>`."""
        return np.array([*map(len, self.tokens), 0], dtype=np.int64)

    @property
    @_cached
    def _sorted_tokens(self) -> list[bytes]:
        return sorted(self.tokens)

    @_cached_by_bytes
    def ids_beginning_with(self, beginning: bytes) -> tuple[int, ...]:
        """Return the ids of the tokens whose bytes begin with `beginning`, in order."""
        tokens = self._sorted_tokens
        following = tokens[bisect_left(tokens, beginning) :]
        found = takewhile(lambda token: token.startswith(beginning), following)
        return tuple(sorted(self.ranks[token] for token in found))


def last_word(text: str) -> str:
    """Return the end of a text whose tokens may change when more text follows.

    It has at most 65 characters.
    """
    word = _LAST_WORD.search(whole_characters(text)[-_LONGEST_WORD:])
    return word[0] if word else ""


def check_size(tokens: int) -> None:
    """Raise InputError if an own vocabulary has too few tokens, or more than can be stored."""
    if not SMALLEST_SIZE <= tokens <= LARGEST_SIZE:
        raise InputError(f"vocab_size must be {SMALLEST_SIZE} to {LARGEST_SIZE}, got {tokens}")


def whole_characters(text: str) -> str:
    """Replace each half of a surrogate pair in `text`, which UTF-8 cannot hold, with U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def split_at_words(text: str, longest: int) -> Iterator[str]:
    """Cut `text` into parts of at most `longest` characters; `longest` is at least 2.

    A part ends at the first line end in its second half, or else at the first space there. Such parts give
    the same ids as `text` when they are encoded one by one. If there is neither, the part ends after
    `longest` characters. The ids may then differ, but they still decode to `text`.
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
    """Read GPT-2's tokens by rank."""
    packed = (shipped("assets") / "r50k_base.tiktoken.xz").read_bytes()
    return unpack(lzma.decompress(packed).decode())
