"""A prepared folder: token shards, an index of document starts, and `meta.json`.

Shards are little-endian uint16 or uint32, one document after another, each followed by `<|endoftext|>`; those
of examples are int32, with -1 - id for a token that is not scored. Documents lie in the shards of `train`
and of `val`, see `gpt.data.split`.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt.data.split import SPLITS
from gpt.errors import InputError
from gpt.files import file_hashes
from gpt.progress import notice
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer

META = "meta.json"
FORMAT = 2
INDEX_DTYPE = np.dtype("<i8")
_SHOWN = {"corpus": str, "key": str, "empty_documents": int}
_STRETCHES = 64
_CHECKED_TOKENS = 1 << 22  # of each split, when a folder is opened; `verify` covers all


def token_dtype(vocab_size: int, examples: bool = False) -> np.dtype[Any]:
    """The narrowest integer type that holds every id; for `examples` it has a sign."""
    return np.dtype("<i4" if examples else "<u2" if vocab_size <= 1 << 16 else "<u4")


def token_ids(stored: NDArray[Any]) -> NDArray[np.int64]:
    """The ids of stored tokens, whether they are scored or not."""
    ids = stored.astype(np.int64)
    return ids if stored.dtype.kind == "u" else np.maximum(ids, ~ids)


class Stream:
    """The tokens of shards, memory-mapped; `eot`, `<|endoftext|>`, precedes the first."""

    def __init__(self, shards: Iterable[Path], dtype: np.dtype[Any], eot: int = 0) -> None:
        self.dtype, self.eot = dtype, eot
        self._shards = list(shards)
        self.bounds = [0, *accumulate(path.stat().st_size // dtype.itemsize for path in self._shards)]

    def __len__(self) -> int:
        return self.bounds[-1]

    def __getstate__(self) -> dict[str, Any]:  # not the mapped arrays, which would be copied
        return {name: value for name, value in vars(self).items() if name != "parts"}

    @cached_property
    def parts(self) -> list[NDArray[Any]]:
        """The tokens of each shard, mapped on first use."""
        return [np.asarray(np.memmap(shard, self.dtype, mode="r")) for shard in self._shards]

    def scored(self) -> NDArray[np.bool_]:
        """Which tokens are scored, (tokens,)."""
        return np.concatenate([np.empty(0, bool), *(part >= 0 for part in self.parts)])

    def rows(self, starts: NDArray[np.int64], length: int) -> NDArray[Any]:
        """`length` stored tokens from each start on, and the one before them: (len(starts), length + 1).

        The token before the first is `<|endoftext|>`; past the last, rows are filled with zeros.
        """
        rows = np.zeros((len(starts), length + 1), self.dtype)
        rows[starts == 0, 0] = self.eot
        parts, bounds, width = self.parts, self.bounds, length + 1
        for row, start in zip(rows, (starts - 1).tolist(), strict=True):
            shard = bisect_right(bounds, start) - 1
            if 0 <= shard < len(parts) and start + width <= bounds[shard + 1]:  # nearly always
                row[:] = parts[shard][start - bounds[shard] : start + width - bounds[shard]]
                continue
            for part, begin in zip(parts, bounds, strict=False):
                first, last = max(start, begin), min(start + len(row), begin + len(part))
                if first < last:
                    row[first - start : last - start] = part[first - begin : last - begin]
        return rows


class Prepared:
    """A prepared folder, memory-mapped, after the checks that take milliseconds: InputErrors."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self.meta: dict[str, Any] = json.loads((self.folder / META).read_text(encoding="utf-8"))
            self._check()
        except FileNotFoundError as error:
            raise InputError(f"{folder} is not prepared data: it has no {META}; run gpt prepare") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            found = f"{META} is not as gpt prepare writes it ({type(error).__name__}: {error})"
            found = str(error) if isinstance(error, InputError) else found
            raise InputError(f"{folder}: {found}; prepare it again") from error

    def _check(self) -> None:
        if (found := self.meta.get("format")) != FORMAT:
            raise InputError(f"{META} has format {found}, expected {FORMAT}")
        self.tokenizer = Tokenizer.from_dict(self.meta["tokenizer"])
        if self.meta["tokenizer"]["fingerprint"] != self.tokenizer.fingerprint:
            raise InputError(f"it was made with another tokenizer than this {self.tokenizer}")
        self.template = Template.from_dict(self.meta["template"]) if "template" in self.meta else None
        self.dtype = token_dtype(self.tokenizer.n_vocab, self.template is not None)
        if (found := self.meta["dtype"]) != self.dtype.str:
            raise InputError(f"{META} has dtype {found}, expected {self.dtype.str}")
        for name, kind in _SHOWN.items():
            if not isinstance(found := {**self.meta["source"], **self.meta}[name], kind):
                raise TypeError(f"{name} is {found!r:.80}")
        for name, recorded in self.meta["files"].items():
            if Path(name).name != name or not name.endswith(".bin"):
                raise InputError(f"{META} names {name!r}, expected a .bin file of the folder")
            file = self.folder / name
            size = file.stat().st_size if file.exists() else 0
            expected, _ = recorded["bytes"], recorded["sha256"]  # which `verify` compares
            if size != expected:
                raise InputError(f"{name} has {size} bytes, expected {expected}")
        for split in SPLITS:
            if (claimed := self.count(split, "tokens")) != len(self.stream(split)):
                raise InputError(f"{META} claims {claimed} tokens of {split}")
            if not 0 <= (size := self.count(split, "bytes")) < 1 << 60:
                raise InputError(f"{META} claims {size} bytes of {split}")
            largest = self.first_ids(_CHECKED_TOKENS, split).max(initial=0)
            if largest >= (ids := self.tokenizer.n_vocab):
                raise InputError(f"the {split} split has id {largest}, outside the vocabulary of {ids}")
            claimed, held = (
                self.count(split, "documents"),
                self.meta["files"][f"{split}-documents.bin"]["bytes"],
            )
            if claimed != held // INDEX_DTYPE.itemsize:
                raise InputError(f"{META} claims {claimed} documents of {split}")

    def stream(self, split: str) -> Stream:
        """The tokens of `train` or `val`."""
        shards = [name for name in sorted(self.meta["files"]) if name.startswith(split)]
        paths = [self.folder / name for name in shards if name != f"{split}-documents.bin"]
        return Stream(paths, self.dtype, self.tokenizer.eot)

    def first_ids(self, most: int, split: str = "train") -> NDArray[np.int64]:
        """The ids that a split begins with."""
        parts = self.stream(split).parts
        return token_ids(parts[0][:most]) if parts else np.empty(0, np.int64)

    def spread_ids(self, most: int, split: str) -> NDArray[np.int64]:
        """About so many ids of a split, in stretches from all of it."""
        stream = self.stream(split)
        stretch = max(1, min(most, len(stream)) // _STRETCHES)
        starts = np.linspace(0, max(0, len(stream) - stretch), _STRETCHES).astype(np.int64)
        return token_ids(stream.rows(starts, stretch)[:, 1:]).ravel()

    def document_starts(self, split: str) -> NDArray[np.int64]:
        """The position in `stream(split)` of each document's first token."""
        starts = np.fromfile(self.folder / f"{split}-documents.bin", INDEX_DTYPE)
        if np.any(np.diff(starts, prepend=-1, append=self.count(split, "tokens")) <= 0):
            raise InputError(f"the documents of {self.folder} are not in order; prepare it again")
        return starts

    def count(self, split: str, what: str) -> int:
        """How many `documents`, `bytes` (of UTF-8 text) or `tokens` a split has."""
        count: int = self.meta["splits"][split][what]
        if type(count) is not int:
            raise TypeError(f"{what} of {split} is {count!r}")
        return count

    @property
    def held_out(self) -> float:
        """The share of the text in `val`, of its bytes."""
        train, val = (self.count(split, "bytes") for split in SPLITS)
        return val / max(1, train + val)

    def document_lengths(self, split: str) -> NDArray[np.int64]:
        """Tokens in each document of a split, `<|endoftext|>` counted."""
        return np.diff(self.document_starts(split), append=self.count(split, "tokens"))

    def scored(self, split: str) -> tuple[int, int]:
        """How many tokens of a split are scored, and the bytes of UTF-8 text that they stand for."""
        if self.template is None:
            return self.count(split, "tokens"), self.count(split, "bytes")
        lengths, found = self.tokenizer.byte_lengths(), [part[part >= 0] for part in self.stream(split).parts]
        return sum(map(len, found)), sum(int(lengths[ids].sum()) for ids in found)

    def check_examples(self, context_length: int, isolate: bool) -> None:
        """Warn of examples that no window holds; an InputError if `isolate` would cut others."""
        if self.template is None:
            return
        lengths = np.concatenate([self.document_lengths(split) for split in SPLITS])
        replies = sum(int((part == self.tokenizer.eot).sum()) for part in self.stream("train").parts)
        if isolate and replies > self.count("train", "documents"):
            raise InputError("isolate would separate the turns of a conversation: leave it out")
        if long := int((lengths > context_length).sum()):
            notice(
                f"{long:,} of {len(lengths):,} examples are longer than the context_length of "
                f"{context_length}: they are cut, so a completion may lack its prompt; "
                f"the longest has {lengths.max():,} tokens"
            )

    def verify(self) -> None:
        """Compare each file's checksum with the recorded one: an InputError names a file that was altered."""
        for path, found in file_hashes(self.folder / name for name in self.meta["files"]).items():
            if found != self.meta["files"][path.name]["sha256"]:
                raise InputError(f"{path} was altered: its checksum differs; prepare it again")
