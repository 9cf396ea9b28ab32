"""Token healing: a typed text may end inside a token. It is continued as if it did not.

A text is cut into tokens word by word. So text that follows a typed text can change only the tokens of its
last word. For example, "The functio" ends with " fun", "ct", "io", while "The function" is "The" and just one
more token. So the tokens of the last word are removed, and drawn again. Each is drawn from the tokens that
agree with the typed bytes that are left: they begin with these, or these begin with them. The last one may go
beyond the typed text. gpt/share/healing.js does the same in a browser.

The likeliest token at each step need not lead to the likeliest way to cut the word, also with temperature 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

from gpt.text.tokenizer import Tokenizer, last_word

_MOST_REMOVED = 64  # bytes, unless one token has more


class Prompt(NamedTuple):
    """The tokens of a prompt, at least one, and how many of the last ones are drawn again."""

    tokens: list[int]
    healed: int = 0


def typed_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """Return the prompt for a typed text. The tokens of an empty text are `<|endoftext|>`."""
    ids = tokenizer.encode(text)
    return Prompt(ids or [tokenizer.eot], _tokens_of_last_word(tokenizer, text, ids))


def _tokens_of_last_word(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> int:
    """Return how many of the ids of a text belong to its last word; 0 if it cannot be cut in another way."""
    lengths = tokenizer.byte_lengths()
    size = len(last_word(text).encode())
    place = len(ids)
    removed = 0
    while place > 0 and removed < size:
        removed += int(lengths[ids[place - 1]])
        if removed > _MOST_REMOVED and place < len(ids):
            break
        place -= 1
    word = tokenizer.decode_bytes(ids[place:])
    has_choice = any(len(agreeing_ids(tokenizer, word[start:])) > 1 for start in range(len(word)))
    return len(ids) - place if has_choice else 0


def agreeing_ids(tokenizer: Tokenizer, rest: bytes) -> list[int]:
    """Return the ids of the tokens that begin with the typed bytes `rest`, or with which `rest` begins."""
    beginnings = [rest[:length] for length in range(1, len(rest))]
    shorter = [tokenizer.ranks[beginning] for beginning in beginnings if beginning in tokenizer.ranks]
    return [*shorter, *tokenizer.ids_beginning_with(rest)]
