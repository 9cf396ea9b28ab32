"""Token tables: the bytes of each token by rank. How words are cut, checks, and the file format of a table.

The merge rule is tiktoken's. Within a word, the pair whose token has the lowest rank is merged first. A word
that is itself a token is taken as it is.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from gpt.errors import InputError
from gpt.plain import JsonObject, parse_json, shown
from gpt.progress import notice_once

END_OF_TEXT = "<|endoftext|>"
Ranked = tuple[int, int]
"""The rank of the token that two neighbours form, and the index of the first of them."""
_LARGEST_FILE = 64 << 20  # bytes
_MOST_MERGING = 1 << 28  # the sum of the squared token lengths in bytes; merging takes about half a minute

# A word, as a regular expression for tiktoken. Merges never cross words. It is GPT-2's expression (Radford et
# al. 2019, the released encoder.py) with possessive repetitions, which are faster.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# The end of a text that may be cut into other words when more text follows. It is the last word, or an
# apostrophe and a letter that may become "'ll", "'re" or "'ve". `$` would also match before a final newline.
LAST_WORD = r"(?:(?<![^\p{L}\p{N}\s]| )'[lrv]| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+)(?![\s\S])"
# The equivalent of `WORDS` in Hugging Face's libraries. It also spells bytes as letters.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def check_table(tokens: list[bytes]) -> None:
    """Raise InputError if a table cannot encode every text, or has two ids for the same bytes."""
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
    """Merge the bytes of a token as far as possible and return the parts that are left.

    The neighbours that form the token of the lowest rank are merged first. Another `choose` may pick another
    of the possible merges, or None to stop.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        formed = (rank_of(a + b) for a, b in pairwise(parts))
        ranked = [(rank, i) for i, rank in enumerate(formed) if rank is not None]
        chosen = choose(ranked) if ranked else None
        if chosen is None:
            return parts
        _, i = chosen
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def merges(tokens: list[bytes]) -> list[tuple[bytes, bytes] | None]:
    """Return, for each token of several bytes, the two tokens of lower rank that it is merged from.

    None for a token that merging never makes. Raises InputError if the tokens are so long that this would
    take minutes.
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


class StoredTable(NamedTuple):
    """The tokens in a file of another program."""

    tokens: list[bytes]
    """The tokens by rank, without the added ones, such as `<|endoftext|>`."""
    end_of_text: int
    """The id of `<|endoftext|>`. Without a token of this name, the id of the one that follows the table."""


def read_table(path: Path) -> StoredTable:
    """Read a `tokenizer.json` of byte-level BPE that cuts words as GPT-2 does.

    It may also be a `vocab.json`, with `merges.txt` beside it. Added tokens other than `<|endoftext|>` are
    left out, and a line names them. Raises InputError for any other file.
    """
    try:
        content = _content(path)
        _check_no_changes(content)
        tokens = _tokens_by_rank(content)
        listed = _listed_merges(content)
        if not _cuts_as_gpt2(content["pre_tokenizer"]):
            raise InputError("it cuts text into other words than GPT-2")
        check_table(tokens)
        if listed != merges(tokens):
            raise InputError("its merges do not make its tokens in the order of their ids")
        added = {int(token["id"]): str(token["content"]) for token in content["added_tokens"]}
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise InputError(f"{path} is no tokenizer.json of byte-level BPE that can be used: {error}") from None
    end_of_text = next((id_ for id_, name in added.items() if name == END_OF_TEXT), len(tokens))
    _tell_added(path, added, end_of_text)
    return StoredTable(tokens, end_of_text)


def _tell_added(path: Path, added: dict[int, str], end_of_text: int) -> None:
    """Tell the user which added tokens are left out, and if `<|endoftext|>` has another name."""
    told = []
    left_out = [name for id_, name in added.items() if id_ != end_of_text]
    if left_out:
        told.append(f"the added tokens {shown(left_out)} are left out")
    if added.get(end_of_text, END_OF_TEXT) != END_OF_TEXT:
        told.append(f"{shown(added[end_of_text])} is the end of a text")
    if told:
        notice_once(f"{path}: {'; '.join(told)}")


def _content(path: Path) -> JsonObject:
    """Return what a tokenizer.json says, or what a vocab.json and its merges.txt do."""
    if path.stat().st_size > _LARGEST_FILE:
        raise InputError(f"it has more than {_LARGEST_FILE:,} bytes")
    content = parse_json(path.read_text(encoding="utf-8"))
    if path.name != "vocab.json":
        return {"added_tokens": [], **content}
    lines = path.with_name("merges.txt").read_text(encoding="utf-8").split("\n")
    pairs = [line for line in lines if line and not line.startswith("#version")]
    return {
        "model": {"vocab": content, "merges": pairs},
        "pre_tokenizer": _BYTE_LEVEL,
        "added_tokens": [
            {"id": id_, "content": name} for name, id_ in content.items() if name == END_OF_TEXT
        ],
    }


def _check_no_changes(content: JsonObject) -> None:
    """Raise InputError if a tokenizer.json says that texts are changed before they are encoded."""
    model = content["model"]
    settings = ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    if content.get("normalizer") or any(model.get(name) for name in settings):
        raise InputError("it changes texts before encoding them: they would not come back")


def _tokens_by_rank(content: JsonObject) -> list[bytes]:
    """Return the tokens of a tokenizer.json in the order of their ids, without the special ones."""
    special = {token["content"] for token in content["added_tokens"]}
    vocabulary = {name: id_ for name, id_ in content["model"]["vocab"].items() if name not in special}
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise InputError("the ids of its tokens are not numbered from 0 on, special tokens after them")
    return [unspell(name) for name in sorted(vocabulary, key=lambda name: vocabulary[name])]


def _listed_merges(content: JsonObject) -> list[tuple[bytes, bytes]]:
    """Return the merges of a tokenizer.json, each of which is a pair or a text with a space in the middle."""
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in content["model"]["merges"]]
    return [(unspell(first), unspell(second)) for first, second in pairs]


def _cuts_as_gpt2(pre_tokenizer: JsonObject) -> bool:
    """Whether a tokenizer.json cuts words as `WORDS` does. How it trims offsets changes no token."""
    return {**_BYTE_LEVEL, **pre_tokenizer, "trim_offsets": True} == _BYTE_LEVEL


def to_json(tokens: list[bytes]) -> JsonObject:
    """Return the content of a `tokenizer.json` with which Hugging Face's libraries give the same ids."""
    end_of_text = {
        "id": len(tokens),
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    pairs = [pair for pair in merges(tokens) if pair is not None]
    return {
        "version": "1.0",
        "added_tokens": [end_of_text],
        "pre_tokenizer": _BYTE_LEVEL,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "ignore_merges": True,  # a word that is a token is not merged, as in tiktoken
            "vocab": {spell(token): rank for rank, token in enumerate(tokens)},
            "merges": [[spell(first), spell(second)] for first, second in pairs],
        },
    }


def pack(tokens: list[bytes]) -> str:
    """Return the tokens as one text: one line for each, in base64."""
    return "\n".join(b64encode(token).decode() for token in tokens)


def unpack(table: str) -> list[bytes]:
    """Read the tokens that `pack` wrote. A rank may follow the token on each line, as in tiktoken's files."""
    return [b64decode(line.partition(" ")[0], validate=True) for line in table.splitlines()]


def spell(token: bytes) -> str:
    """Write the bytes of a token as printable characters."""
    letters = byte_letters()
    return "".join([letters[byte] for byte in token])


def unspell(letters: str) -> bytes:
    """Return the bytes that `spell` wrote. Raises ValueError for other characters."""
    known = byte_letters()
    return bytes([known.index(letter) for letter in letters])


@cache
def byte_letters() -> str:
    """Return a printable character for each byte: the byte itself, or a character from U+0100 on.

    GPT-2's encoder.py uses the same characters.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))
