"""Writes a prepared folder: in another folder beside it, which takes its place when it is complete."""

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gpt.data.shards import FORMAT, INDEX_DTYPE, META, token_dtype
from gpt.data.split import SPLITS
from gpt.errors import InputError
from gpt.files import file_hashes, write_json
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer

Encoded = tuple[
    str, bool, NDArray[Any], int
]  # split, whether a document begins, tokens as stored, bytes of text
_OURS = re.compile(rf"(train|val)-(documents|\d{{5}})\.bin|(lengths|scored)\.png|{META}")
_SHARD_TOKENS = 1 << 27


@dataclass
class ShardWriter:
    """Writes documents to a folder that the caller has locked. Examples have a `template`."""

    folder: Path
    tokenizer: Tokenizer
    template: Template | None = None
    counts: dict[str, dict[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = token_dtype(self.tokenizer.n_vocab, self.template is not None)
        self.counts = {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}
        self._files: dict[str, IO[bytes]] = {}
        self._unfinished = self.folder.with_name(f".{self.folder.name}.unfinished")
        shutil.rmtree(self._unfinished, ignore_errors=True)  # of a process that was killed
        self._unfinished.mkdir(parents=True)
        for split in SPLITS:
            self._file(f"{split}-documents.bin")

    def add(self, pieces: Iterable[Encoded]) -> int:
        """Append the tokens of pieces, and return their bytes of text."""
        added = 0
        for split, first, tokens, size in pieces:
            counts = self.counts[split]
            if first:
                start = np.array(counts["tokens"], INDEX_DTYPE)
                self._file(f"{split}-documents.bin").write(start.tobytes())
                counts["documents"] += 1
            while len(tokens):
                shard, within = divmod(counts["tokens"], _SHARD_TOKENS)
                fitting, tokens = tokens[: _SHARD_TOKENS - within], tokens[_SHARD_TOKENS - within :]
                self._file(f"{split}-{shard:05d}.bin").write(fitting.tobytes())
                counts["tokens"] += len(fitting)
            counts["bytes"] += size
            added += size
        return added

    def finish(self, known: dict[str, Any]) -> None:
        """Write `meta.json` with what is `known` besides, and let the folder take its place."""
        self._close()
        files = sorted(self._unfinished.iterdir())
        meta = {
            "format": FORMAT,
            **known,
            "tokenizer": {**self.tokenizer.to_dict(), "fingerprint": self.tokenizer.fingerprint},
            "dtype": self.dtype.str,
            "splits": self.counts,
            **({"template": asdict(self.template)} if self.template else {}),
            "files": {
                path.name: {"bytes": path.stat().st_size, "sha256": digest}
                for path, digest in file_hashes(files).items()
            },
        }
        write_json(self._unfinished / META, meta)
        if self.folder.is_dir():
            clear(self.folder)
            self.folder.rmdir()
        os.rename(self._unfinished, self.folder)

    def abandon(self) -> None:
        """Delete what was written, if the folder has not taken its place."""
        with suppress(OSError):  # of a full disk, which `add` has reported
            self._close()
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def _file(self, name: str) -> IO[bytes]:
        if name not in self._files:
            self._files[name] = open(self._unfinished / name, "wb")  # noqa: SIM115 (closed by `_close`)
        return self._files[name]

    def _close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def check_ours(folder: Path) -> None:
    """An InputError for a folder with files that are not those of prepared text."""
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if others := [name for name in found if META not in found or not _OURS.fullmatch(name)]:
        raise InputError(f"{folder} holds other files ({others[0]}): choose an empty folder to prepare in")


def clear(folder: Path) -> None:
    """Delete what was prepared in a folder, `meta.json` last."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == META):
        if _OURS.fullmatch(path.name):
            path.unlink()
