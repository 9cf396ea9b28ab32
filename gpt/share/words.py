"""The words that merges do not cross, as a regular expression of JavaScript with its flag `v`."""

import sys

import numpy as np
import tiktoken

from gpt.text.table import PATTERNS

_KINDS = (r"\p{L}", r"\p{M}", r"\p{N}", r"\s")


def javascript(pattern: str) -> str:
    """One of `PATTERNS` with the characters of each kind written out: browsers differ in their Unicode, and
    JavaScript in its blanks. It has no possessive repetitions; here others match the same.
    """
    text = PATTERNS[pattern].replace("++", "+").replace(r"\S", r"[^\s]")
    for kind in _KINDS:
        if kind in text:
            text = text.replace(kind, _characters(kind))
    return text


def _characters(kind: str) -> str:
    """The characters that tiktoken's regular expressions count to a kind, as a class of their ranges."""
    every = "".join(map(chr, (*range(0xD800), *range(0xE000, sys.maxunicode + 1))))
    single = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("kind", pat_str=kind, mergeable_ranks=single, special_tokens={})
    codes = np.array([ord(one) for one in bytes(encoding.encode_ordinary(every)).decode()])  # that match
    last = np.flatnonzero(np.diff(codes, append=0) != 1)
    ranges = zip(codes[np.roll(last, 1) + 1 - len(codes)], codes[last], strict=True)
    return "[" + "".join(rf"\u{{{low:x}}}-\u{{{high:x}}}" for low, high in ranges) + "]"
