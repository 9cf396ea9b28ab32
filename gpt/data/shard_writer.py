"""Writes a prepared folder. An interruption at any point loses seconds of work and nothing else.

A folder with `progress.json` and no `meta.json` is unfinished. Shards are appended to; every few seconds they
are flushed to disk, and then `progress.json` records, atomically, how much of them counts. What a killed
process wrote after that is cut off when the next one resumes.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gpt.data.documents import Piece
from gpt.data.shards import FORMAT, INDEX_DTYPE, META, SPLITS, Segment, Stream, token_dtype, token_ids
from gpt.errors import InputError
from gpt.files import file_sha256, write_json
from gpt.template import Template
from gpt.tokenizer import Tokenizer

PROGRESS = "progress.json"
_STATE = ("parts", "empty", "splits")
_SHARDS = r"(train|val)-(documents|\d{5})\.bin"
_OURS = re.compile(rf"{_SHARDS}|(lengths|scored)\.png|\.({META}|{PROGRESS})\..*\.tmp|{META}|{PROGRESS}")
_SECONDS_BETWEEN_COMMITS = 5.0
_SHARD_TOKENS = 1 << 27
_COUNTED_AT_ONCE = 1 << 20


class ShardWriter:
    """Appends blocks to a folder that the caller has locked, resuming at the last commit of the same `key`.

    The key is a hash of text, tokenizer and options; `unchanged` tells before each commit whether the text is
    still that of the key. Examples have a `template`. Other files in the folder, or another unfinished
    preparation, are an InputError.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        tokenizer: Tokenizer,
        unchanged: Callable[[], bool],
        template: Template | None = None,
    ) -> None:
        self.folder, self.key, self.tokenizer, self.unchanged = folder, key, tokenizer, unchanged
        self.template, self.dtype = template, token_dtype(tokenizer.n_vocab, template is not None)
        self.parts = self.empty = 0  # pieces of text written; documents without any
        self.splits = {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}
        self._open: dict[str, IO[bytes]] = {}
        self._resume()
        self._committed = time.monotonic()

    def count(self, what: str) -> int:
        """The `tokens`, `documents` or `bytes` of UTF-8 text written so far."""
        return sum(counts[what] for counts in self.splits.values())

    def add(self, pieces: Iterable[tuple[Piece, NDArray[Any]]]) -> int:
        """Append pieces with their tokens, as they are stored; commit if the last commit is some seconds old.

        Documents without text are left out. Texts among examples, or the reverse, are an InputError. Returns
        the bytes of text.
        """
        before = self.count("bytes")
        for (text, first, last, scored, split), tokens in pieces:
            counts = self.splits[split]
            self.parts += 1
            if first and scored is (self.template is not None):
                raise InputError("the corpus mixes texts with examples: give one kind")
            if first and last and not text:
                self.empty += 1
                continue
            if first:
                self._file(f"{split}-documents.bin").write(np.array(counts["tokens"], INDEX_DTYPE).tobytes())
                counts["documents"] += 1
            counts["bytes"] += len(text.encode("utf-8", "replace"))
            self._append(split, tokens)
        if time.monotonic() - self._committed > _SECONDS_BETWEEN_COMMITS:
            self.commit()
        return self.count("bytes") - before

    def commit(self) -> None:
        """Make what was added survive a power cut; if the text changed, delete it with an InputError."""
        if not self.unchanged():
            self.close()
            clear(self.folder)
            raise InputError("the corpus changed while it was read: run this again when it is complete")
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
        state = {name: getattr(self, name) for name in _STATE} | {"tokenizer": self.tokenizer.fingerprint}
        write_json(self.folder / PROGRESS, {"key": self.key, **state})
        self._committed = time.monotonic()

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()

    def finish(self, val_fraction: float, source: dict[str, Any]) -> None:
        """Divide the text into splits, take checksums, and write `meta.json`, which completes the folder.

        No text at all is an InputError.
        """
        for split in SPLITS:
            self._file(f"{split}-documents.bin")
        self.commit()
        self.close()
        if not self.count("tokens"):
            raise InputError(f"{source['corpus']} is empty: {self.empty} documents, none with text")
        files = sorted(path for path in self.folder.iterdir() if re.fullmatch(_SHARDS, path.name))
        with ThreadPoolExecutor() as pool:
            digests = list(pool.map(file_sha256, files))
        meta = {
            "format": FORMAT,
            "key": self.key,
            "source": source,
            "tokenizer": {**self.tokenizer.to_dict(), "fingerprint": self.tokenizer.fingerprint},
            "dtype": self.dtype.str,
            "val_fraction": val_fraction,
            **self._divided(val_fraction),
            **({"template": asdict(self.template)} if self.template else {}),
            "files": {
                path.name: {"bytes": path.stat().st_size, "sha256": digest}
                for path, digest in zip(files, digests, strict=True)
            },
        }
        write_json(self.folder / META, meta)
        (self.folder / PROGRESS).unlink()

    def _divided(self, val_fraction: float) -> dict[str, Any]:
        """What `meta.json` says of the splits.

        The documents chosen by their hash are held out, or the end of the text if they are far more or far
        fewer than `val_fraction`: of the tokens, or of the bytes where the vocabulary may have been learned
        from the text. It was then learned from what comes before `cut_at`, see `gpt.data.vocabularies.learn`.
        """
        train, val = self.splits["train"], self.splits["val"]
        tokens, size, own = self.count("tokens"), self.count("bytes"), self.tokenizer.name == "own"
        found = val["bytes"] / size if own else val["tokens"] / tokens
        # Both splits as one text, and where its documents begin.
        shards = [Segment(file=shard, start=0, stop=length) for shard, length in self._shards()]
        text = Stream(self.folder, shards, self.dtype)
        of_train = Segment(file="train-documents.bin", start=0, stop=train["documents"])
        of_val = Segment(file="val-documents.bin", start=0, stop=val["documents"], shift=train["tokens"])
        index = Stream(self.folder, [of_train, of_val], INDEX_DTYPE)

        def documents_before(token: int) -> int:
            return sum(int(np.searchsorted(starts, token)) for starts in index.parts)

        cut, val_bytes = train["tokens"], val["bytes"]
        if not (by_document := is_by_document(found, val_fraction)):
            cut = tokens - max(1, round(tokens * val_fraction))
            if own:
                cut = self._token_at(text, cut_at(size, val_fraction))
            if self.template:
                first = min(documents_before(cut), self.count("documents") - 1)
                cut = int(index.cut(first, first + 1).parts[0][0])
            val_bytes = sum(int(lengths.sum()) for lengths in self._byte_lengths(text.cut(cut, tokens)))
        splits = {}
        for split, start, stop, n in (("train", 0, cut, size - val_bytes), ("val", cut, tokens, val_bytes)):
            first, last = documents_before(start), documents_before(stop)
            documents = [replace(part, shift=part.shift - start) for part in index.cut(first, last).segments]
            splits[split] = {
                "tokens": stop - start,
                "documents": last - first,
                "tokens_in": [asdict(part) for part in text.cut(start, stop).segments],
                "documents_in": [asdict(part) for part in documents],
                "bytes": n,
            }
        return {
            "split_by": "document" if by_document else "position",
            "empty_documents": self.empty,
            "largest_id": self.tokenizer.eot,  # the last of every document
            "splits": splits,
        }

    def _append(self, split: str, tokens: NDArray[Any]) -> None:
        while len(tokens):
            shard, within = divmod(self.splits[split]["tokens"], _SHARD_TOKENS)
            fitting, tokens = tokens[: _SHARD_TOKENS - within], tokens[_SHARD_TOKENS - within :]
            self._file(f"{split}-{shard:05d}.bin").write(fitting.tobytes())
            self.splits[split]["tokens"] += len(fitting)

    def _file(self, name: str) -> IO[bytes]:
        if name not in self._open:
            self._open[name] = open(self.folder / name, "ab")  # noqa: SIM115 (closed by `close`)
        return self._open[name]

    def _resume(self) -> None:
        """Go back to the last commit, or begin."""
        state = check_ours(self.folder)
        if state is None:
            self.commit()
            return
        same = state.get("tokenizer", self.tokenizer.fingerprint) == self.tokenizer.fingerprint
        if state["key"] == self.key and same:
            for name in _STATE:
                setattr(self, name, state[name])
        elif state["parts"]:  # with no parts, nothing is lost
            raise InputError(
                f"{self.folder} holds an unfinished preparation of other text or with other options: "
                "delete it, or choose another folder"
            )
        kept = {shard: tokens * self.dtype.itemsize for shard, tokens in self._shards()}
        for split, counts in self.splits.items():
            kept[f"{split}-documents.bin"] = counts["documents"] * INDEX_DTYPE.itemsize
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in (*kept, PROGRESS):
                path.unlink()
        for name, size in kept.items():
            with open(self.folder / name, "ab") as file:
                if file.tell() < size:
                    raise InputError(f"{file.name} is shorter than {PROGRESS} says: delete {self.folder}")
                file.truncate(size)

    def _shards(self) -> Iterator[tuple[str, int]]:
        """The files of tokens, and how many each has."""
        for split in SPLITS:
            tokens = self.splits[split]["tokens"]
            for number, start in enumerate(range(0, tokens, _SHARD_TOKENS)):
                yield f"{split}-{number:05d}.bin", min(_SHARD_TOKENS, tokens - start)

    def _token_at(self, text: Stream, position: int) -> int:
        """The first token that begins at a byte of the text or after it; at least one follows it."""
        before = tokens = 0
        for lengths in self._byte_lengths(text):
            ends = before + np.cumsum(lengths)
            if ends[-1] >= position:
                tokens += int(np.searchsorted(ends, position)) + 1
                break
            before, tokens = int(ends[-1]), tokens + len(ends)
        return min(tokens, len(text) - 1)

    def _byte_lengths(self, text: Stream) -> Iterator[NDArray[np.int64]]:
        """UTF-8 bytes of each token, in blocks."""
        lengths = self.tokenizer.byte_lengths()
        for start in range(0, len(text), _COUNTED_AT_ONCE):
            for ids in text.cut(start, start + _COUNTED_AT_ONCE).parts:
                yield lengths[token_ids(ids)]


def is_by_document(held_out: float, val_fraction: float) -> bool:
    """Whether documents chosen by their hash give about the fraction to hold out."""
    return val_fraction / 4 <= held_out <= val_fraction * 4


def cut_at(text_bytes: int, val_fraction: float) -> int:
    """The byte where held-out text begins, if the vocabulary may be learned and the split is by position."""
    return int(text_bytes * (1 - val_fraction))


def check_ours(folder: Path) -> dict[str, Any] | None:
    """The state of the unfinished preparation in `folder`, None if it is empty; an InputError otherwise."""
    present = sorted(path.name for path in folder.glob("*") if not path.name.startswith("."))
    if PROGRESS in present:
        size = sum(path.stat().st_size for path in folder.glob("*.bin"))
        try:
            state: dict[str, Any] = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
            counts = [state["splits"][split][what] for split in SPLITS for what in ("tokens", "documents")]
            if {"key", *_STATE} <= state.keys() and min(counts) >= 0 and max(counts) <= size:
                return state
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
    if present:
        raise InputError(f"{folder} holds other files ({present[0]}): choose an empty folder to prepare in")
    return None


def clear(folder: Path) -> None:
    """Delete what a `ShardWriter` wrote, `meta.json` and `progress.json` last, so that it can be repeated."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name in (META, PROGRESS)):
        if _OURS.fullmatch(path.name):
            path.unlink()
