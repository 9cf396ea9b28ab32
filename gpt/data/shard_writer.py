"""Writes a prepared folder. An interruption at any point loses seconds of work and nothing else.

Shards are appended to. Every few seconds they are flushed to disk, and then `progress.json` records how much
of them counts; what a killed process wrote after that is cut off. `meta.json` comes last.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gpt.data.documents import Piece
from gpt.data.shards import FORMAT, INDEX_DTYPE, META, SPLITS, Stream, all_starts, token_dtype, token_ids
from gpt.errors import InputError
from gpt.files import file_hashes, write_json
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer

PROGRESS = "progress.json"
_SHARDS = r"(train|val)-(documents|\d{5})\.bin"
_OURS = re.compile(rf"{_SHARDS}|(lengths|scored)\.png|\.({META}|{PROGRESS})\..*\.tmp|{META}|{PROGRESS}")
_SECONDS_BETWEEN_COMMITS = 5.0
_SHARD_TOKENS = 1 << 27
_COUNTED_AT_ONCE = 1 << 20


@dataclass
class ShardWriter:
    """Appends documents to a folder that the caller has locked, from the last commit of the same `key` on.

    The key is a hash of text, tokenizer and options; `unchanged` tells before each commit whether the text is
    still that of the key. Examples have a `template`.
    """

    folder: Path
    key: str
    tokenizer: Tokenizer
    unchanged: Callable[[], bool]
    template: Template | None = None

    def __post_init__(self) -> None:
        self.dtype = token_dtype(self.tokenizer.n_vocab, self.template is not None)
        made_of = {"key": self.key, "tokenizer": self.tokenizer.fingerprint}
        splits = {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}
        # `parts` are pieces of text written, `empty` documents without text.
        self.state: dict[str, Any] = {**made_of, "parts": 0, "empty": 0, "splits": splits}
        if (found := check_ours(self.folder)).items() >= made_of.items():
            self.state = found
        elif found.get("parts"):
            raise InputError(
                f"{self.folder} holds an unfinished preparation of other text or with other options: "
                "delete it, or choose another folder"
            )
        self._files: dict[str, IO[bytes]] = {}
        self.commit()
        self._cut_off()

    def add(self, pieces: Iterable[tuple[Piece, NDArray[Any]]]) -> int:
        """Append pieces with their tokens, as they are stored, and return their bytes of UTF-8 text.

        Documents without text are left out. Texts among examples, or the reverse, are an InputError.
        """
        added = 0
        for (text, first, last, scored, split), tokens in pieces:
            counts = self.state["splits"][split]
            self.state["parts"] += 1
            if first and scored is (self.template is not None):
                raise InputError("the corpus mixes texts with examples: give one kind")
            if first and last and not text:
                self.state["empty"] += 1
                continue
            if first:
                self._file(f"{split}-documents.bin").write(np.array(counts["tokens"], INDEX_DTYPE).tobytes())
                counts["documents"] += 1
            while len(tokens):
                shard, within = divmod(counts["tokens"], _SHARD_TOKENS)
                fitting, tokens = tokens[: _SHARD_TOKENS - within], tokens[_SHARD_TOKENS - within :]
                self._file(f"{split}-{shard:05d}.bin").write(fitting.tobytes())
                counts["tokens"] += len(fitting)
            size = len(text.encode("utf-8", "replace"))
            counts["bytes"] += size
            added += size
        if time.monotonic() - self._committed > _SECONDS_BETWEEN_COMMITS:
            self.commit()
        return added

    def commit(self) -> None:
        """Make what was added survive a power cut; if the text changed, delete it with an InputError."""
        if not self.unchanged():
            self.close()
            clear(self.folder)
            raise InputError("the corpus changed while it was read: run this again when it is complete")
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        write_json(self.folder / PROGRESS, self.state)
        self._committed = time.monotonic()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            with suppress(OSError):  # of a full disk, which `add` has reported
                file.close()

    def finish(self, val_fraction: float, source: dict[str, Any]) -> None:
        """Divide the text into splits and write `meta.json`; no text at all is an InputError."""
        self.commit()
        if not any(counts["tokens"] for counts in self.state["splits"].values()):
            raise InputError(f"{source['corpus']} is empty: {self.state['empty']} documents, none with text")
        files = sorted(path for path in self.folder.iterdir() if re.fullmatch(_SHARDS, path.name))
        meta = {
            "format": FORMAT,
            "key": self.state["key"],
            "source": source,
            "tokenizer": {**self.tokenizer.to_dict(), "fingerprint": self.tokenizer.fingerprint},
            "dtype": self.dtype.str,
            "val_fraction": val_fraction,
            **self._divided(val_fraction, [path for path in files if "documents" not in path.name]),
            **({"template": asdict(self.template)} if self.template else {}),
            "files": {
                path.name: {"bytes": path.stat().st_size, "sha256": digest}
                for path, digest in file_hashes(files).items()
            },
        }
        write_json(self.folder / META, meta)
        (self.folder / PROGRESS).unlink()

    def _divided(self, val_fraction: float, shards: list[Path]) -> dict[str, Any]:
        """What `meta.json` says of the splits.

        The documents chosen by their hash are held out, or the end of the text if they are far from
        `val_fraction`: by bytes if the vocabulary may have been learned, from the text before `cut_at`.
        """
        train, val = (self.state["splits"][split] for split in SPLITS)
        tokens, size = train["tokens"] + val["tokens"], train["bytes"] + val["bytes"]
        own = self.tokenizer.name == "own"
        starts = all_starts(self.folder, train["tokens"])
        cut, val_bytes = train["tokens"], val["bytes"]
        held_out = val_bytes / size if own else val["tokens"] / tokens
        if not (by_document := is_by_document(held_out, val_fraction)):
            cut = tokens - max(2, round(tokens * val_fraction))  # the last token is `<|endoftext|>`
            if own:
                cut = self._token_at(shards, cut_at(size, val_fraction), tokens - 2)
            if self.template:
                cut = int(starts[min(int(np.searchsorted(starts, cut)), len(starts) - 1)])
            val_bytes = sum(int(lengths.sum()) for lengths in self._byte_lengths(shards, cut))
        documents = int(np.searchsorted(starts, cut))
        return {
            "split_by": "document" if by_document else "position",
            "empty_documents": self.state["empty"],
            "splits": {
                "train": {"tokens": cut, "documents": documents, "bytes": size - val_bytes},
                "val": {"tokens": tokens - cut, "documents": len(starts) - documents, "bytes": val_bytes},
            },
        }

    def _file(self, name: str) -> IO[bytes]:
        if name not in self._files:
            self._files[name] = open(self.folder / name, "ab")  # noqa: SIM115 (closed by `close`)
        return self._files[name]

    def _cut_off(self) -> None:
        """Remove what was written after the last commit."""
        sizes = {}
        for split, counts in self.state["splits"].items():
            sizes[f"{split}-documents.bin"] = counts["documents"] * INDEX_DTYPE.itemsize
            for number, start in enumerate(range(0, counts["tokens"], _SHARD_TOKENS)):
                tokens = min(_SHARD_TOKENS, counts["tokens"] - start)
                sizes[f"{split}-{number:05d}.bin"] = tokens * self.dtype.itemsize
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in (*sizes, PROGRESS):
                path.unlink()
        for name, size in sizes.items():
            with open(self.folder / name, "ab") as file:
                if file.tell() < size:
                    raise InputError(f"{file.name} is shorter than {PROGRESS} says: delete {self.folder}")
                file.truncate(size)

    def _token_at(self, shards: list[Path], position: int, last: int) -> int:
        """The first token that begins at a byte of the text or after it, at most the `last`."""
        size = ended = 0  # bytes of the text so far, and tokens that end before `position`
        for lengths in self._byte_lengths(shards):
            ended += int(np.count_nonzero(size + np.cumsum(lengths) < position))
            size += int(lengths.sum())
        return min(ended + 1, last)

    def _byte_lengths(self, shards: list[Path], start: int = 0) -> Iterator[NDArray[np.int64]]:
        """UTF-8 bytes of each token from `start` on, in blocks."""
        lengths = self.tokenizer.byte_lengths()
        for part in Stream(shards, self.dtype, start=start).parts:
            for first in range(0, len(part), _COUNTED_AT_ONCE):
                yield lengths[token_ids(part[first : first + _COUNTED_AT_ONCE])]


def is_by_document(held_out: float, val_fraction: float) -> bool:
    """Whether documents chosen by their hash give about the fraction to hold out, and leave the rest."""
    return val_fraction / 4 <= held_out <= min(val_fraction * 4, 1 - (1 - val_fraction) / 4)


def cut_at(text_bytes: int, val_fraction: float) -> int:
    """The byte where held-out text begins, if the vocabulary may be learned and the split is by position."""
    return int(text_bytes * (1 - val_fraction))


def check_ours(folder: Path) -> dict[str, Any]:
    """The state of the unfinished preparation in `folder`, {} if it is empty; an InputError otherwise."""
    present = sorted(folder.glob("[!.]*"))
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        state: dict[str, Any] = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        counts = [state["splits"][split][what] for split in SPLITS for what in ("tokens", "documents")]
        size = sum(path.stat().st_size for path in folder.glob("*.bin"))
        if {"key", "tokenizer", "parts", "empty"} <= state.keys() and 0 <= min(counts) <= max(counts) <= size:
            return state
    if present and not (folder / META).is_file():  # another process may have finished it just now
        raise InputError(
            f"{folder} holds other files ({present[0].name}): choose an empty folder to prepare in"
        )
    return {}


def clear(folder: Path) -> None:
    """Delete what a `ShardWriter` wrote, `meta.json` and `progress.json` last, so that it can be repeated."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name in (META, PROGRESS)):
        if _OURS.fullmatch(path.name):
            path.unlink()
