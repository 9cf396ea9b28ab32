"""Writing a prepared folder so that an interruption at any point loses seconds of work and nothing else.

While `progress.json` stands there and `meta.json` does not, the folder is unfinished. Shards are appended to;
every few seconds they are flushed to the disk, and then `progress.json` records, atomically, how far they
count. What a killed process wrote beyond that is cut off when the next one goes on.
"""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpt.data.encode import Block, Encoded
from gpt.data.shards import FORMAT, INDEX_DTYPE, META, SPLITS, Segment, file_sha256, token_dtype
from gpt.errors import InputError
from gpt.files import write_json
from gpt.tokenizer import Tokenizer

PROGRESS = "progress.json"
_STATE = ("parts", "empty", "largest_id", "splits")
_SECONDS_BETWEEN_COMMITS = 5.0
_SHARD_TOKENS = 1 << 27
_COUNTED_AT_ONCE = 1 << 20


class ShardWriter:
    """Appends blocks to a folder, from where the last commit of the same `key` left it.

    Args:
        folder: made already, and locked by the caller.
        key: of the text, the tokenizer and the options.
        tokenizer: whose ids come.

    Raises:
        InputError: the folder holds other files, or another unfinished preparation.
    """

    def __init__(self, folder: Path, key: str, tokenizer: Tokenizer) -> None:
        self.folder, self.key, self.tokenizer = folder, key, tokenizer
        self.dtype = token_dtype(tokenizer.n_vocab)
        self.parts = 0
        self.empty = 0
        self.largest_id = 0
        self.splits = {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}
        self._open: dict[str, IO[bytes]] = {}
        self._resume()
        self._committed = time.monotonic()

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of text written so far."""
        return sum(counts["bytes"] for counts in self.splits.values())

    def add(self, block: Block) -> None:
        """Append a block, and commit if the last commit is some seconds old."""
        for split, encoded in block.splits.items():
            self._append(split, encoded)
        self.parts += block.parts
        self.empty += block.empty
        if time.monotonic() - self._committed > _SECONDS_BETWEEN_COMMITS:
            self.commit()

    def commit(self) -> None:
        """Make what was added so far survive a kill, or a power cut."""
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
        write_json(
            self.folder / PROGRESS, {"key": self.key, **{name: getattr(self, name) for name in _STATE}}
        )
        self._committed = time.monotonic()

    def close(self) -> None:
        """Close the files, whatever state they are in."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def finish(self, val_fraction: float, source: dict[str, Any]) -> None:
        """Divide the text, take the checksums, and write `meta.json`: now the folder is prepared.

        Raises:
            InputError: there was no text.
        """
        self.commit()
        self.close()
        tokens = {split: self.splits[split]["tokens"] for split in SPLITS}
        total = sum(tokens.values())
        if total == 0:
            raise InputError(
                f"the corpus {source['corpus']} is empty: {self.empty} documents, none with text"
            )
        by_document = val_fraction / 4 <= tokens["val"] / total <= val_fraction * 4
        held_out = tokens["val"] if by_document else max(1, round(total * val_fraction))
        files = sorted(path for path in self.folder.glob("*.bin"))
        with ThreadPoolExecutor() as pool:
            digests = list(pool.map(file_sha256, files))
        meta = {
            "format": FORMAT,
            "key": self.key,
            "source": source,
            "tokenizer": {
                "name": self.tokenizer.name,
                "vocab_size": self.tokenizer.n_vocab,
                "fingerprint": self.tokenizer.fingerprint,
            },
            "dtype": self.dtype.str,
            "val_fraction": val_fraction,
            "split_by": "document" if by_document else "position",
            "empty_documents": self.empty,
            "largest_id": self.largest_id,
            "splits": self._by_document() if by_document else self._by_position(total - held_out),
            "files": {
                path.name: {"bytes": path.stat().st_size, "sha256": digest}
                for path, digest in zip(files, digests, strict=True)
            },
        }
        write_json(self.folder / META, meta)
        (self.folder / PROGRESS).unlink()

    def _append(self, split: str, encoded: Encoded) -> None:
        counts = self.splits[split]
        self._file(_index_name(split)).write(
            (encoded.starts + counts["tokens"]).astype(INDEX_DTYPE).tobytes()
        )
        ids = encoded.ids
        self.largest_id = max(self.largest_id, int(ids.max(initial=0)))
        while len(ids):
            shard, within = divmod(counts["tokens"], _SHARD_TOKENS)
            fitting, ids = ids[: _SHARD_TOKENS - within], ids[_SHARD_TOKENS - within :]
            self._file(_shard_name(split, shard)).write(fitting.tobytes())
            counts["tokens"] += len(fitting)
        counts["documents"] += len(encoded.starts)
        counts["bytes"] += encoded.text_bytes

    def _file(self, name: str) -> IO[bytes]:
        if name not in self._open:
            self._open[name] = open(self.folder / name, "ab")  # noqa: SIM115 (closed by `close`)
        return self._open[name]

    def _resume(self) -> None:
        """Go back to the last commit; without one, start from nothing."""
        for left in self.folder.glob(".*.tmp"):  # of an atomic write that was killed
            left.unlink()
        present = {path.name for path in self.folder.iterdir() if not path.name.startswith(".")}
        progress = self.folder / PROGRESS
        if not progress.exists():
            if present:
                raise InputError(
                    f"{self.folder} holds other files ({sorted(present)[0]}): "
                    "choose an empty folder to prepare in"
                )
            self.commit()
            return
        state = json.loads(progress.read_text(encoding="utf-8"))
        if state["key"] == self.key:
            for name in _STATE:
                setattr(self, name, state[name])
        elif state["parts"]:  # of no parts nothing is lost
            raise InputError(
                f"{self.folder} holds an unfinished preparation of other text or with other options: "
                "delete it, or choose another folder"
            )
        kept = {name: size for split in SPLITS for name, size in self._sizes(split).items()}
        for path in self.folder.glob("*.bin"):
            if path.name not in kept:
                path.unlink()
        for name, size in kept.items():
            with open(self.folder / name, "ab") as file:
                if file.tell() < size:
                    raise InputError(f"{file.name} is shorter than {PROGRESS} says: delete {self.folder}")
                file.truncate(size)

    def _sizes(self, split: str) -> dict[str, int]:
        """The bytes of each file of a split, by name."""
        counts = self.splits[split]
        sizes = {_index_name(split): counts["documents"] * INDEX_DTYPE.itemsize}
        for segment in self._tokens_in(split, 0, counts["tokens"]):
            sizes[segment.file] = segment.stop * self.dtype.itemsize
        return sizes

    def _tokens_in(self, split: str, start: int, stop: int) -> list[Segment]:
        """Where the tokens `start` to `stop` of a split are."""
        segments = []
        while start < stop:
            shard, within = divmod(start, _SHARD_TOKENS)
            end = min(stop, (shard + 1) * _SHARD_TOKENS)
            segments.append(Segment(file=_shard_name(split, shard), start=within, stop=within + end - start))
            start = end
        return segments

    def _by_document(self) -> dict[str, Any]:
        return {
            split: {
                **counts,
                "tokens_in": [asdict(segment) for segment in self._tokens_in(split, 0, counts["tokens"])],
                "documents_in": [asdict(Segment(file=_index_name(split), start=0, stop=counts["documents"]))],
            }
            for split, counts in self.splits.items()
        }

    def _by_position(self, cut: int) -> dict[str, Any]:
        """The tokens before `cut` train, the others validate: `train`'s come first, then `val`'s."""
        total = sum(self.splits[split]["tokens"] for split in SPLITS)
        views = {"train": self._view(0, cut), "val": self._view(cut, total)}
        views["val"]["bytes"] = self._text_bytes([Segment(**part) for part in views["val"]["tokens_in"]])
        views["train"]["bytes"] = self.text_bytes - views["val"]["bytes"]
        return views

    def _text_bytes(self, segments: list[Segment]) -> int:
        """UTF-8 bytes of the text in some tokens, read a little at a time."""
        lengths, total = self.tokenizer.byte_lengths(), 0
        for segment in segments:
            for at in range(segment.start, segment.stop, _COUNTED_AT_ONCE):
                count = min(_COUNTED_AT_ONCE, segment.stop - at)
                ids = np.fromfile(
                    self.folder / segment.file, self.dtype, count, offset=at * self.dtype.itemsize
                )
                total += int(lengths[ids].sum())
        return total

    def _view(self, start: int, stop: int) -> dict[str, Any]:
        """The tokens `start` to `stop` of both splits taken as one text."""
        tokens_in: list[Segment] = []
        documents_in: list[Segment] = []
        before = 0
        for split in SPLITS:
            counts = self.splits[split]
            after = before + counts["tokens"]
            tokens_in += self._tokens_in(split, max(start, before) - before, min(stop, after) - before)
            index = Segment(file=_index_name(split), start=0, stop=counts["documents"])
            first, last = np.searchsorted(
                index.view(self.folder, INDEX_DTYPE) + before, [start, stop]
            ).tolist()
            documents_in.append(replace(index, start=first, stop=last, shift=before - start))
            before = after
        return {
            "tokens": stop - start,
            "documents": sum(segment.stop - segment.start for segment in documents_in),
            "tokens_in": [asdict(segment) for segment in tokens_in],
            "documents_in": [asdict(segment) for segment in documents_in],
        }


def _index_name(split: str) -> str:
    return f"{split}-documents.bin"


def _shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"
