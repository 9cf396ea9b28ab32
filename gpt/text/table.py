"""Tables of tokens, the bytes of each by rank: their words, checks, and the file that holds one.

tiktoken's rule: within a word, the pair whose token has the lowest rank is merged first; a word that is a
token is not merged.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpt.errors import InputError
from gpt.plain import parse_json

END_OF_TEXT = "<|endoftext|>"
Ranked = tuple[int, int]
"""The rank of the token that two neighbours form, and the place of the first."""
_LARGEST_FILE = 64 << 20  # bytes
_MOST_MERGING = 1 << 28  # bytes of tokens squared: about half a minute

# The words that merges do not cross, as tiktoken's regular expression: GPT-2's (Radford et al. 2019, the
# released encoder.py) in the possessive form, which is faster.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# The end of a text whose words may change with what follows: its last word, or an apostrophe and a letter of
# which "'ll", "'re" or "'ve" can come. `$` would also match before a newline at the end.
LAST_WORD = r"(?:(?<![^\p{L}\p{N}\s]| )'[lrv]| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+)(?![\s\S])"
# `WORDS` of Hugging Face's libraries, which also spells bytes as letters.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def check_table(tokens: list[bytes]) -> None:
    """An InputError where a table cannot encode every text, or has two ids for the same bytes."""
    known = set(tokens)
    if missing := [byte for byte in range(256) if bytes([byte]) not in known]:
        raise InputError(f"the vocabulary lacks the byte {missing[0]}: it could not encode every text")
    if len(known) < len(tokens):
        raise InputError("the vocabulary has a token twice")


def merge(
    token: bytes,
    rank_of: Callable[[bytes], int | None],
    choose: Callable[[list[Ranked]], Ranked | None] = min,
) -> list[bytes]:
    """The parts of a token whose bytes are merged, neighbours of the lowest rank first, as far as it goes.

    `choose` takes another of the merges that are possible, or None to end.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        formed = (rank_of(a + b) for a, b in pairwise(parts))
        ranked = [(rank, i) for i, rank in enumerate(formed) if rank is not None]
        if not ranked or (chosen := choose(ranked)) is None:
            return parts
        _, i = chosen
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def merges(tokens: list[bytes]) -> list[tuple[bytes, bytes] | None]:
    """The two tokens that each token of several bytes is merged from: what tokens of lower rank leave of it.

    None for one that merging never makes. An InputError for tokens so long that it would take minutes.
    """
    if sum(len(token) ** 2 for token in tokens) > _MOST_MERGING:
        raise InputError("the vocabulary has too many long tokens to find their merges")
    lower: dict[bytes, int] = {}  # the ranks of the tokens so far
    pairs: list[tuple[bytes, bytes] | None] = []
    for rank, token in enumerate(tokens):
        if len(token) != 1:
            parts = merge(token, lower.get)
            pairs.append((parts[0], parts[1]) if len(parts) == 2 else None)
        lower[token] = rank
    return pairs


def read_table(path: Path) -> list[bytes]:
    """The tokens by rank of a `tokenizer.json` of byte-level BPE with GPT-2's words."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise InputError(f"it has more than {_LARGEST_FILE:,} bytes")
        found = parse_json(path.read_text(encoding="utf-8"))
        model = found["model"]
        changes = "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"
        if found.get("normalizer") or any(map(model.get, changes)):
            raise InputError("it changes texts before encoding them: they would not come back")
        special = {token["content"] for token in found.get("added_tokens", [])}
        vocabulary = {name: i for name, i in model["vocab"].items() if name not in special}
        if sorted(vocabulary.values()) != [*range(len(vocabulary))]:
            raise InputError("the ids of its tokens are not numbered from 0 on, special tokens after them")
        tokens = [unspell(name) for name in sorted(vocabulary, key=vocabulary.__getitem__)]
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        listed = [(unspell(first), unspell(second)) for first, second in pairs]
        if _BYTE_LEVEL | found["pre_tokenizer"] | {"trim_offsets": True} != _BYTE_LEVEL:
            raise InputError("it cuts text into other words than GPT-2")
        check_table(tokens)
        if listed != merges(tokens):
            raise InputError("its merges do not make its tokens in the order of their ids")
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise InputError(f"{path} is no tokenizer.json of byte-level BPE that can be used: {error}") from None
    return tokens


def to_json(tokens: list[bytes]) -> dict[str, Any]:
    """The `tokenizer.json` from which Hugging Face's libraries give the same ids."""
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": len(tokens), "content": END_OF_TEXT, **special, "special": True}],
        "pre_tokenizer": _BYTE_LEVEL,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "ignore_merges": True,  # a word that is a token is taken at once, as tiktoken does
            "vocab": {spell(token): rank for rank, token in enumerate(tokens)},
            "merges": [[spell(first), spell(second)] for first, second in filter(None, merges(tokens))],
        },
    }


def pack(tokens: list[bytes]) -> str:
    """The tokens as one text, each in base64 on a line."""
    return "\n".join(b64encode(token).decode() for token in tokens)


def unpack(table: str) -> list[bytes]:
    """The inverse of `pack`; a rank may follow on each line, as in tiktoken's files."""
    return [b64decode(line.partition(" ")[0], validate=True) for line in table.splitlines()]


def spell(token: bytes) -> str:
    """The bytes of a token as printable characters."""
    return "".join(map(byte_letters().__getitem__, token))


def unspell(letters: str) -> bytes:
    """The inverse of `spell`; a ValueError for other characters."""
    return bytes(map(byte_letters().index, letters))


@cache
def byte_letters() -> str:
    """A printable character for each byte, itself or one from U+0100 on (GPT-2's encoder.py)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))
