"""What of a generated text stands word for word in the training text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt.data.prepare import prepare_for
from gpt.data.shards import Prepared
from gpt.errors import InputError, check_least
from gpt.plain import parse_yaml
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer

_MOST_PLACES = 256  # of a gram that are compared: a passage that stands in more is found in these
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_READING = ("val_fraction", "most_bytes", "text_column")
Run = tuple[int, int]  # from the first of some ids up to the one after the last


def training_text(run: Path | None, tokenizer: Tokenizer) -> NDArray[Any]:
    """The ids (tokens,) of a run's training text; an InputError where it is not at hand."""
    if run is None:
        raise InputError("the training text is not known: give a run, or a checkpoint in its folder")
    try:
        data = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"))["data"]
        options = {name: data[name] for name in _READING}
        options["template"] = Template.from_dict(data["template"])
        prepared = Prepared(prepare_for(tokenizer, data["corpus"], **options))
        ids = prepared.stream("train").tokens
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the training text of {run} is not at hand: {error}") from None
    return ids if prepared.template is None else np.maximum(ids, ~ids)  # also what is not scored


class Copied:
    """Finds the runs of at least `least` ids that stand in a text, (tokens,); InputError for less than 2.

    The index has the hash of each gram of half of `least` ids that begins at every few places of the text,
    so that each such run contains one. What has an equal hash is compared.
    """

    def __init__(self, text: NDArray[Any], tokenizer: Tokenizer, least: int) -> None:
        check_least(2, copied_tokens=least)
        self.text, self.tokenizer, self.least, self._gram = text, tokenizer, least, (least + 1) // 2
        self._stride = least - self._gram + 1
        hashes = self._hashes(text, self._stride)
        self._order = hashes.argsort().astype(np.uint32)
        self._sorted = hashes[self._order]

    def runs(self, ids: Sequence[int]) -> list[Run]:
        """The longest runs of the ids, in their order; none is within another."""
        given, ends = np.asarray(ids, np.int64), dict[int, int]()
        hashes = self._hashes(given, 1)
        bounds = (self._sorted.searchsorted(hashes, side) for side in ("left", "right"))
        for at, (first, last) in enumerate(zip(*bounds, strict=True)):
            for place in self._order[first : min(last, first + _MOST_PLACES)] * np.int64(self._stride):
                start = at - _common(given[:at][::-1], self.text[:place][::-1])
                ends[start] = max(ends.get(start, 0), at + _common(given[at:], self.text[place:]))
        found: list[Run] = []
        for start, end in sorted(ends.items()):
            if end - start >= self.least and (not found or end > found[-1][1]):
                found.append((start, end))
        return found

    def mark(self, text: str) -> str:
        """The text with [[ ]] around its runs, and a line that counts them."""
        ids = self.tokenizer.encode(text)
        runs = self.runs(ids)
        copied = {place for run in runs for place in range(*run)}
        for place, opens in sorted(((run[end], not end) for run in runs for end in (0, 1)), reverse=True):
            before = len(self.tokenizer.decode_bytes(ids[:place]).decode(errors="ignore"))
            text = text[:before] + ("[[" if opens else "]]") + text[before:]
        longest = max((end - start for start, end in runs), default=0)
        return f"{text}\n{len(copied)} of {len(ids)} tokens are copied, the longest run {longest}"

    def _hashes(self, ids: NDArray[Any], stride: int) -> NDArray[np.uint64]:
        """Of the grams that begin at every `stride`-th place."""
        last = max(0, len(ids) - self._gram + 1)
        hashes = np.zeros(-(-last // stride), np.uint64)
        for k in range(self._gram):
            hashes = hashes * _FACTOR + ids[k : last + k : stride].astype(np.uint64)
        return hashes


def _common(one: NDArray[Any], other: NDArray[Any]) -> int:
    """How many of their first values are equal."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
