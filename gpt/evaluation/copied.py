"""Find passages of a generated text that are copied verbatim from the training text."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpt.data.prepared import META, find_prepared, is_prepared
from gpt.data.stored import token_ids
from gpt.errors import InputError, check_least
from gpt.files import cache_folder
from gpt.plain import parse_yaml
from gpt.text.tokenizer import Tokenizer
from gpt.weights.runs import newest_text

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def training_text(run: Path | None, tokenizer: Tokenizer) -> NDArray[np.uint32]:
    """Return the token ids (tokens,) of a run's training text.

    Raises InputError if it is not on this machine, or has an id that the vocabulary lacks.

    The run's newest checkpoint has the text's hash. A prepared text with this hash is looked for in the cache
    and in the prepared folder that config.yaml names. The run may be untrusted, so nothing else that its
    files name is read, and nothing is downloaded.
    """
    if run is None:
        raise InputError("the training text is not known: give a run, or a checkpoint in its folder")
    folders = [file.parent for file in cache_folder().glob(f"*/{META}")]
    prepared = find_prepared(newest_text(run), [*_named_folder(run), *folders])
    if prepared is None or prepared.tokenizer != tokenizer:
        how = f"gpt validate --ckpt_path {run} --data.corpus TEXT"
        raise InputError(f"the training text of {run} is not at hand: prepare it with '{how}'")
    stream = prepared.stream("train")
    return token_ids(stream.checked(stream.tokens)).astype(np.uint32)  # includes tokens that are not scored


def _named_folder(run: Path) -> list[Path]:
    """Return the prepared folder that a run's config.yaml names, if it names one."""
    try:
        corpus = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"))["data"]["corpus"]
        return [Path(corpus)] if is_prepared(corpus) else []
    except (OSError, KeyError, TypeError, ValueError):
        return []


class Copied:
    """An index of a text, (tokens,) ids, in which passages of at least `least` (N) tokens are found.

    It keeps a sorted array of 64-bit hashes, one for each N consecutive tokens of the text, and their places
    in the text. They take 12 bytes for each token, or 16 if the text has over 4 billion. Raises InputError
    for N below 2.
    """

    def __init__(self, text: NDArray[np.uint32], tokenizer: Tokenizer, least: int = 12) -> None:
        check_least(2, copied_tokens=least)
        self.tokenizer = tokenizer
        self.least = least
        hashes = self._hashes(text)
        order = hashes.argsort()
        self.hashes = hashes[order]
        self.places = order.astype(np.min_scalar_type(len(text)))

    def runs(self, ids: Sequence[int]) -> list[list[int]]:
        """Return [start, end) of each longest passage of `ids` that stands in the text as a whole, in order.

        None contains another, but they may overlap: the text may have the first part of `ids` in one place
        and the last part in another. `copiedRuns` in gpt/share/worker.js finds the same.
        """
        hashes = self._hashes(np.asarray(ids, np.uint64))
        lows = self.hashes.searchsorted(hashes)
        highs = self.hashes.searchsorted(hashes, "right")
        runs: list[list[int]] = []
        # Where N tokens of `ids` stand in the text, and where in `ids` the passage copied from there begins.
        places = self.places[:0]
        starts = np.empty(0, np.int64)
        for place, (low, high) in enumerate(zip(lows, highs, strict=True)):
            found = np.sort(self.places[low:high])
            begun = np.full(len(found), place)
            index = found.searchsorted(places + 1)
            goes_on = np.append(found, 0)[index] == places + 1  # 0 comes after no place
            begun[index[goes_on]] = starts[goes_on]
            places, starts = found, begun
            if not len(found):
                continue
            start = int(begun.min())
            if runs and runs[-1][0] == start:
                runs[-1][1] += 1
            else:
                runs.append([start, place + self.least])
        return runs

    def mark(self, text: str) -> str:
        """Return the text with [[ ]] around copied passages, and a line that counts them."""
        ids = self.tokenizer.encode(text)
        runs = self.runs(ids)
        copied = {place for run in runs for place in range(*run)}
        changes = [place for place in range(len(ids) + 1) if (place in copied) != (place - 1 in copied)]
        cuts = [len(self.tokenizer.decode_bytes(ids[:place]).decode(errors="ignore")) for place in changes]
        parts = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        parts[1::2] = [f"[[{part}]]" for part in parts[1::2]]
        longest = max((end - start for start, end in runs), default=0)
        return f"{''.join(parts)}\n{len(copied)} of {len(ids)} tokens are copied, the longest run {longest}"

    def _hashes(self, ids: NDArray[np.uint32] | NDArray[np.uint64]) -> NDArray[np.uint64]:
        count = max(0, len(ids) - self.least + 1)
        hashes = np.zeros(count, np.uint64)
        for k in range(self.least):
            hashes *= _FACTOR
            hashes += ids[k : k + count]
        return hashes
