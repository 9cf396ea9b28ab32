"""Writes a prepared folder: shards while the text is read, `meta.json` last."""

import os
import re
from collections.abc import Iterable, Iterator
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

_UNFINISHED = ".unfinished"  # marks a folder until it is complete
_OURS = re.compile(rf"(train|val)-(documents|\d{{5}})\.bin|(lengths|scored)\.png|{META}|\.{META}\..*\.tmp")
_SHARD_TOKENS = 1 << 27
_COUNTED_AT_ONCE = 1 << 20


class ShardWriter:
    """Writes documents to a folder after `clear`. Examples have a `template`."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, template: Template | None = None) -> None:
        self.folder, self.tokenizer, self.template = folder, tokenizer, template
        self.dtype = token_dtype(tokenizer.n_vocab, template is not None)
        self.empty = 0  # documents without text
        self.splits = {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}
        self._files: dict[str, IO[bytes]] = {}

    def add(self, pieces: Iterable[tuple[Piece, NDArray[Any]]]) -> int:
        """Append pieces with their tokens, as they are stored, and return their bytes of UTF-8 text.

        Documents without text are left out. Texts among examples, or the reverse, are an InputError.
        """
        added = 0
        for (text, first, last, scored, split), tokens in pieces:
            counts = self.splits[split]
            if first and scored is (self.template is not None):
                raise InputError("the corpus mixes texts with examples: give one kind")
            if first and last and not text:
                self.empty += 1
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
        return added

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def finish(self, key: str, val_fraction: float, source: dict[str, Any]) -> None:
        """Divide the text into splits and write `meta.json`; no text at all is an InputError."""
        for split in SPLITS:
            self._file(f"{split}-documents.bin")
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        if not any(counts["tokens"] for counts in self.splits.values()):
            raise InputError(f"{source['corpus']} is empty: {self.empty} documents, none with text")
        files = [self.folder / name for name in sorted(self._files)]
        with ThreadPoolExecutor() as pool:
            digests = pool.map(file_sha256, files)
        meta = {
            "format": FORMAT,
            "key": key,
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
        (self.folder / _UNFINISHED).unlink()

    def _divided(self, val_fraction: float) -> dict[str, Any]:
        """What `meta.json` says of the splits.

        The documents chosen by their hash are held out, or the end of the text if they are far from
        `val_fraction`: of the tokens, or of the bytes if the vocabulary may have been learned from the text
        before `cut_at`, see `gpt.data.vocabularies.learn`.
        """
        train, val = self.splits["train"], self.splits["val"]
        tokens, size = train["tokens"] + val["tokens"], train["bytes"] + val["bytes"]
        own = self.tokenizer.name == "own"
        # Both splits as one text, and where its documents begin.
        text = Stream(self.folder, self._shards(), self.dtype)
        of_train = Segment(file="train-documents.bin", start=0, stop=train["documents"])
        of_val = Segment(file="val-documents.bin", start=0, stop=val["documents"], shift=train["tokens"])
        index = Stream(self.folder, [of_train, of_val], INDEX_DTYPE)
        starts = np.concatenate(index.parts)
        cut, val_bytes = train["tokens"], val["bytes"]
        held_out = val_bytes / size if own else val["tokens"] / tokens
        if not (by_document := is_by_document(held_out, val_fraction)):
            cut = tokens - max(1, round(tokens * val_fraction))
            if own:
                cut = self._token_at(text, cut_at(size, val_fraction))
            if self.template:
                cut = int(starts[min(int(np.searchsorted(starts, cut)), len(starts) - 1)])
            val_bytes = sum(int(lengths.sum()) for lengths in self._byte_lengths(text.cut(cut, tokens)))
        splits = {}
        for split, start, stop, n in (("train", 0, cut, size - val_bytes), ("val", cut, tokens, val_bytes)):
            first, last = np.searchsorted(starts, (start, stop)).tolist()
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

    def _file(self, name: str) -> IO[bytes]:
        if name not in self._files:
            self._files[name] = open(self.folder / name, "wb")  # noqa: SIM115 (closed by `close`)
        return self._files[name]

    def _shards(self) -> Iterator[Segment]:
        for split, counts in self.splits.items():
            for number, start in enumerate(range(0, counts["tokens"], _SHARD_TOKENS)):
                stop = min(_SHARD_TOKENS, counts["tokens"] - start)
                yield Segment(file=f"{split}-{number:05d}.bin", start=0, stop=stop)

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


def check_ours(folder: Path) -> None:
    """Raise an InputError where a folder holds files that no preparation wrote."""
    present = sorted(path.name for path in folder.glob("[!.]*"))
    if present and not {META, _UNFINISHED} & {path.name for path in folder.iterdir()}:
        raise InputError(
            f"{folder} holds other files ({present[0]}): delete them, or choose an empty folder to prepare in"
        )


def clear(folder: Path) -> None:
    """Mark a folder of `check_ours` as unfinished, and delete what an earlier preparation wrote."""
    (folder / _UNFINISHED).touch()
    for path in sorted(folder.iterdir(), key=lambda path: path.name == META):
        if _OURS.fullmatch(path.name):
            path.unlink()
