"""The tokens of a text, with labels for pictures."""

from functools import cache

from gpt.errors import InputError
from gpt.tokenizer import Tokenizer

_VISIBLE = {" ": "·", "\n": "\u21b5", "\t": "\u2192", "\r": "\u240d"}


def labelled_tokens(tokenizer: Tokenizer, text: str, context_length: int) -> tuple[list[int], list[str]]:
    """The ids of a text, and a readable label for each.

    Raises:
        InputError: the text is empty, or has more tokens than the context length.
    """
    ids = tokenizer.encode(text)
    if not ids:
        raise InputError("there is no text to read: give one with --text")
    if len(ids) > context_length:
        raise InputError(f"the text has {len(ids)} tokens, more than the context_length {context_length}")
    return ids, [token_label(tokenizer.decode_bytes([i])) for i in ids]


def token_label(token: bytes) -> str:
    """A token's bytes in readable form: spaces and line ends visible, incomplete characters in hex.

    Characters that the pictures' font lacks are written as code points.
    """
    try:
        text = token.decode("utf-8")
    except UnicodeDecodeError:
        return token.hex(" ")
    visible = [_VISIBLE.get(character, character) for character in text]
    return "".join(c if c.isprintable() and ord(c) in _font() else f"U+{ord(c):04X}" for c in visible)


@cache
def _font() -> frozenset[int]:
    """The code points in matplotlib's own font."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
