"""From pieces of documents to blocks of tokens by split, on several threads, in the order of the text."""

import hashlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt.data.documents import Piece
from gpt.data.shards import SPLITS, token_dtype
from gpt.errors import InputError
from gpt.tokenizer import Tokenizer

_BLOCK_CHARACTERS = 1 << 18


class Block:
    """The tokens of some pieces of text, by split. Documents without text are left out.

    `ids` has `<|endoftext|>` after each document, and -1 - id for a token that is not scored; `starts` is
    where in `ids` documents begin. Texts among `examples`, or examples among texts, are an InputError.
    """

    def __init__(self, pieces: list[tuple[Piece, str]], tokenizer: Tokenizer, examples: bool = False) -> None:
        self.pieces, self.empty, self.text_bytes = len(pieces), 0, dict.fromkeys(SPLITS, 0)
        ids: dict[str, list[NDArray[Any]]] = {split: [np.empty(0, np.uint32)] for split in SPLITS}
        starts: dict[str, list[int]] = {split: [] for split in SPLITS}
        tokens = dict.fromkeys(SPLITS, 0)
        eot = np.array([tokenizer.eot], np.uint32)
        for (text, first, last, scored), split in pieces:
            if first and scored is examples:
                raise InputError("the corpus mixes texts with examples: give one kind")
            if first and last and not text:
                self.empty += 1
                continue
            if first:
                starts[split].append(tokens[split])
            encoded: NDArray[Any] = tokenizer.encode_array(text)
            if not scored:
                encoded = ~encoded.astype(np.int64)
            ids[split] += [encoded, eot] if last else [encoded]
            tokens[split] += len(encoded) + last
            self.text_bytes[split] += len(text.encode("utf-8", "replace"))
        dtype = token_dtype(tokenizer.n_vocab, examples)
        self.ids = {split: np.concatenate(ids[split]).astype(dtype) for split in SPLITS}
        self.starts = {split: np.array(starts[split], np.int64) for split in SPLITS}


def encode(
    pieces: Iterable[Piece],
    skip: int,
    tokenizer: Tokenizer,
    val_fraction: float,
    workers: int,
    examples: bool = False,
) -> Generator[Block]:
    """Tokenize all but the first `skip` pieces on threads, as tiktoken releases Python's lock, in order.

    At most 2 * workers blocks wait, so memory does not grow with the corpus.
    """
    pool = ThreadPoolExecutor(workers)
    pending: deque[Future[Block]] = deque()
    try:
        for batch in _batches(islice(with_splits(pieces, val_fraction), skip, None)):
            pending.append(pool.submit(Block, batch, tokenizer, examples))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def with_splits(pieces: Iterable[Piece], val_fraction: float) -> Iterator[tuple[Piece, str]]:
    """Each piece with the split of its document, which the document's first piece decides."""
    split = ""
    for piece in pieces:
        if piece.first:
            split = choose_split(piece.text.encode("utf-8", "replace"), val_fraction)
        yield piece, split


def choose_split(text: bytes, val_fraction: float) -> str:
    """`train` or `val`, by a hash of the text: equal documents are always in the same split."""
    draw = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
    return "val" if draw < val_fraction * 2**64 else "train"


def _batches(pieces: Iterable[tuple[Piece, str]]) -> Iterator[list[tuple[Piece, str]]]:
    """Lists of pieces of about `_BLOCK_CHARACTERS` in all."""
    batch: list[tuple[Piece, str]] = []
    size = 0
    for piece, split in pieces:
        batch.append((piece, split))
        size += len(piece.text)
        if size >= _BLOCK_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
