"""Tokenize the two splits of a text into the files of a prepared folder."""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt.cores import cores
from gpt.data.documents import Piece
from gpt.data.prepared import INDEX_DTYPE, Counts, Meta, index_name
from gpt.data.split import SPLITS, Divided
from gpt.data.stored import StoredType, as_unscored, token_dtype
from gpt.errors import InputError
from gpt.plain import as_dict
from gpt.progress import progress
from gpt.text.tokenizer import Tokenizer

Encoded: TypeAlias = tuple[Piece, NDArray[np.uint32]]
"""A piece and its ids, (tokens,)."""
_GROUP_CHARACTERS = 1 << 18  # a thread tokenizes about as many at once


def write_token_files(folder: Path, divided: Divided, tokenizer: Tokenizer, key: str) -> Meta:
    """Tokenize both splits into files of the folder. Return what is to be written into its `META`.

    Raises InputError if the corpus has no text, or has both texts and examples.
    """
    pieces = iter(divided.pieces())
    first = next(pieces, None)
    if first is None:
        raise InputError(f"the corpus is empty: {divided.source.files[0]} has no text")
    examples = first.begins_example
    dtype = token_dtype(examples)
    with ExitStack() as stack:
        writers = {}
        for split in SPLITS:
            tokens = stack.enter_context(open(folder / f"{split}.bin", "wb"))
            starts = stack.enter_context(open(folder / index_name(split), "wb")) if examples else None
            writers[split] = _SplitWriter(tokens, starts, dtype, tokenizer.eot)
        advance = stack.enter_context(progress("tokenizing", divided.size))
        for group in _encode(chain([first], pieces), tokenizer):
            for piece, ids in group:
                if piece.first and piece.begins_example is not examples:
                    raise InputError("the corpus mixes texts with examples: give one kind")
                writers[piece.split].add(piece, ids)
            advance(sum(len(piece.text.encode()) for piece, _ in group))
        for writer in writers.values():
            writer.finish()
    return Meta(
        key=key,
        tokenizer=tokenizer.to_dict(),
        template=as_dict(divided.source.template) if examples else None,
        splits={split: as_dict(writer.counts) for split, writer in writers.items()},
    )


@dataclass
class _SplitWriter:
    """The open files of a split. `<|endoftext|>` follows each text, and each reply of an example."""

    tokens: IO[bytes]
    starts: IO[bytes] | None
    """The index of examples. Plain text has none."""
    dtype: StoredType
    eot: int
    counts: Counts = field(default_factory=Counts)
    sha256: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    lacks_end: bool = False  # whether the last tokens are of a text, which `<|endoftext|>` must still follow

    def add(self, piece: Piece, ids: NDArray[np.uint32]) -> None:
        """Append the ids of a piece."""
        if piece.first:
            self._end_text()
            self.counts.documents += 1
            if self.starts is not None:
                self.starts.write(np.array(self.counts.tokens, INDEX_DTYPE).tobytes())
        size = len(piece.text.encode())
        self.counts.bytes += size
        if piece.scored:
            self.counts.scored_bytes += size
        self._write(np.append(ids, np.uint32(self.eot)) if piece.ends else ids, piece.scored)
        self.lacks_end = piece.scored and not piece.ends

    def finish(self) -> None:
        """End the last text, and complete the counts with the hash of the tokens."""
        self._end_text()
        self.counts.sha256 = self.sha256.hexdigest()

    def _end_text(self) -> None:
        """Write `<|endoftext|>` if it must still follow a text, whose end only the next piece tells."""
        if self.lacks_end:
            self._write(np.array([self.eot], np.uint32), scored=True)
            self.lacks_end = False

    def _write(self, ids: NDArray[np.uint32], scored: bool) -> None:
        stored = ids if scored else as_unscored(ids)
        data = stored.astype(self.dtype).tobytes()
        self.tokens.write(data)
        self.sha256.update(data)
        self.counts.tokens += len(ids)
        if scored:
            self.counts.scored_tokens += len(ids)


def _encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[list[Encoded]]:
    """Yield groups of pieces with their ids, in order.

    Each core has a thread, because tiktoken releases the global interpreter lock.
    """
    threads = cores()

    def encode(group: list[Piece]) -> list[Encoded]:
        return [(piece, tokenizer.encode_array(piece.text)) for piece in group]

    with ThreadPoolExecutor(threads) as pool:
        submitted = (pool.submit(encode, group) for group in _groups(pieces))
        waiting = deque(islice(submitted, 2 * threads))  # limits the groups in memory
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(islice(submitted, 1))


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces in groups of about `_GROUP_CHARACTERS`; the last one may be empty."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= _GROUP_CHARACTERS:
            yield group
            group = []
            size = 0
    yield group
