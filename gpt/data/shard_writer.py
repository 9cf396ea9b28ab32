"""Writes a prepared folder. An interruption at any point loses seconds of work and nothing else.

A folder with `progress.json` and no `meta.json` is unfinished. Shards are appended to; every few seconds they
are flushed to disk, and then `progress.json` records, atomically, how much of them counts. What a killed
process wrote after that is cut off when the next one resumes.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gpt.data.encode import Block
from gpt.data.shards import FORMAT, INDEX_DTYPE, META, SPLITS, Segment, token_dtype, token_ids
from gpt.errors import InputError
from gpt.files import file_sha256, write_json
from gpt.template import Template
from gpt.tokenizer import Tokenizer

PROGRESS = "progress.json"
_STATE = ("parts", "empty", "largest_id", "splits")
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
        self.parts = self.empty = self.largest_id = 0  # parts: the pieces of text written
        self.splits = {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}
        self._open: dict[str, IO[bytes]] = {}
        self._resume()
        self._committed = time.monotonic()

    def count(self, what: str) -> int:
        """The `tokens`, `documents` or `bytes` of UTF-8 text written so far."""
        return sum(counts[what] for counts in self.splits.values())

    def add(self, block: Block) -> None:
        """Append a block; commit if the last commit is some seconds old."""
        for split in SPLITS:
            self._append(split, block.ids[split], block.starts[split], block.text_bytes[split])
        self.parts += block.pieces
        self.empty += block.empty
        if time.monotonic() - self._committed > _SECONDS_BETWEEN_COMMITS:
            self.commit()

    def commit(self) -> None:
        """Make what was added survive a power cut; if the text changed, delete it with an InputError."""
        if not self.unchanged():
            self.close()
            clear(self.folder)
            raise InputError(
                "the corpus changed while it was read: run the command again when it is complete"
            )
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
        state = {name: getattr(self, name) for name in _STATE}
        state["tokenizer"] = self.tokenizer.fingerprint
        write_json(self.folder / PROGRESS, {"key": self.key, **state})
        self._committed = time.monotonic()

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()

    def finish(self, val_fraction: float, source: dict[str, Any]) -> None:
        """Divide the text into splits, take checksums, and write `meta.json`, which completes the folder.

        The documents chosen by their hash are held out, or the end of the text if they are far more or far
        fewer than `val_fraction`: of the tokens, or of the bytes where the vocabulary may have been learned
        from the text. It was then learned from what comes before `cut_at`, see `gpt.data.vocabularies.learn`.
        No text at all is an InputError.
        """
        self.commit()
        self.close()
        tokens, held_out = self.count("tokens"), self.splits["val"]["tokens"]
        if tokens == 0:
            raise InputError(
                f"the corpus {source['corpus']} is empty: {self.empty} documents, none with text"
            )
        own = self.tokenizer.name == "own"
        found = self.splits["val"]["bytes"] / self.count("bytes") if own else held_out / tokens
        by_document = is_by_document(found, val_fraction)
        if not by_document and own:
            held_out = tokens - self._token_at(cut_at(self.count("bytes"), val_fraction))
        elif not by_document:
            held_out = max(1, round(tokens * val_fraction))
        if self.template and not by_document:
            held_out = tokens - self._document_at(tokens - held_out)
        train, val = self._view(0, tokens - held_out), self._view(tokens - held_out, tokens)
        val["bytes"] = self.splits["val"]["bytes"]
        if not by_document:
            val["bytes"] = sum(int(lengths.sum()) for lengths in self._byte_lengths(tokens - held_out))
        train["bytes"] = self.count("bytes") - val["bytes"]
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
            "split_by": "document" if by_document else "position",
            "empty_documents": self.empty,
            "largest_id": self.largest_id,
            "splits": {"train": train, "val": val},
            **({"template": asdict(self.template)} if self.template else {}),
            "files": {
                path.name: {"bytes": path.stat().st_size, "sha256": digest}
                for path, digest in zip(files, digests, strict=True)
            },
        }
        write_json(self.folder / META, meta)
        (self.folder / PROGRESS).unlink()

    def _append(self, split: str, ids: NDArray[Any], starts: NDArray[np.int64], text_bytes: int) -> None:
        counts = self.splits[split]
        self._file(f"{split}-documents.bin").write((starts + counts["tokens"]).astype(INDEX_DTYPE).tobytes())
        self.largest_id = max(self.largest_id, int(token_ids(ids).max(initial=0)))
        while len(ids):
            shard, within = divmod(counts["tokens"], _SHARD_TOKENS)
            fitting, ids = ids[: _SHARD_TOKENS - within], ids[_SHARD_TOKENS - within :]
            self._file(f"{split}-{shard:05d}.bin").write(fitting.tobytes())
            counts["tokens"] += len(fitting)
        counts["documents"] += len(starts)
        counts["bytes"] += text_bytes

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

    def _tokens_in(self, start: int, stop: int) -> list[Segment]:
        """Where the tokens `start` to `stop` of both splits taken as one text lie."""
        segments, before = [], 0
        for shard, tokens in self._shards():
            first, last = max(start - before, 0), min(stop - before, tokens)
            if first < last:
                segments.append(Segment(file=shard, start=first, stop=last))
            before += tokens
        return segments

    def _view(self, start: int, stop: int) -> dict[str, Any]:
        """The tokens `start` to `stop` of both splits taken as one text, as `meta.json` records them."""
        documents_in, before = [], 0
        for split in SPLITS:
            index = Segment(file=f"{split}-documents.bin", start=0, stop=self.splits[split]["documents"])
            places = index.view(self.folder, INDEX_DTYPE)
            first, last = np.searchsorted(places, [start - before, stop - before]).tolist()
            if first < last:
                documents_in.append(replace(index, start=first, stop=last, shift=before - start))
            before += self.splits[split]["tokens"]
        return {
            "tokens": stop - start,
            "documents": sum(segment.stop - segment.start for segment in documents_in),
            "tokens_in": [asdict(segment) for segment in self._tokens_in(start, stop)],
            "documents_in": [asdict(segment) for segment in documents_in],
        }

    def _document_at(self, position: int) -> int:
        """The first document that begins at a token of both splits or after it; else the last one."""
        starts, before = list[NDArray[np.int64]](), 0
        for split, counts in self.splits.items():
            name, documents = f"{split}-documents.bin", counts["documents"]
            segment = Segment(file=name, start=0, stop=documents, shift=before)
            starts.append(segment.view(self.folder, INDEX_DTYPE))
            before += counts["tokens"]
        places = np.concatenate(starts)
        return int(places[min(int(np.searchsorted(places, position)), len(places) - 1)])

    def _token_at(self, position: int) -> int:
        """The first token that begins at a byte of the text or after it; at least one follows it."""
        total, before, tokens = self.count("tokens"), 0, 0
        for lengths in self._byte_lengths(0):
            ends = before + np.cumsum(lengths)
            if ends[-1] >= position:
                return min(tokens + int(np.searchsorted(ends, position)) + 1, total - 1)
            before, tokens = int(ends[-1]), tokens + len(ends)
        return total - 1

    def _byte_lengths(self, start: int) -> Iterator[NDArray[np.int64]]:
        """UTF-8 bytes of each token from `start` on, of both splits taken as one text, in blocks."""
        lengths = self.tokenizer.byte_lengths()
        for segment in self._tokens_in(start, self.count("tokens")):
            ids = segment.view(self.folder, self.dtype)
            for at in range(0, len(ids), _COUNTED_AT_ONCE):
                yield lengths[token_ids(ids[at : at + _COUNTED_AT_ONCE])]


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
