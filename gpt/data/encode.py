"""Pieces of text become tokens of one split or the other, in blocks that threads work on side by side."""

import hashlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt.data.documents import Piece
from gpt.data.shards import SPLITS, token_dtype
from gpt.tokenizer import Tokenizer

_BLOCK_CHARACTERS = 1 << 18


class Part(NamedTuple):
    """A piece, and what it is a piece of."""

    text: str
    first: bool
    last: bool
    split: str | None
    """Of the long document that it is a part of; None for a whole document, whose text decides."""


class Encoded(NamedTuple):
    """What a block adds to one split."""

    ids: NDArray[Any]
    """The tokens, one end of text after each document."""
    starts: NDArray[np.int64]
    """Where in `ids` documents begin."""
    text_bytes: int
    """UTF-8 bytes of the text."""


class Block(NamedTuple):
    """What came of some parts."""

    parts: int
    empty: int
    """Documents without text: they are left out."""
    splits: dict[str, Encoded]


def encode(
    pieces: Iterable[Piece], skip: int, tokenizer: Tokenizer, val_fraction: float, workers: int
) -> Generator[Block]:
    """Tokenize all but the first `skip` pieces on `workers` threads, and yield the results in order.

    tiktoken works outside Python's lock, so threads are enough; few blocks are under way at once, so memory
    does not grow with the corpus.
    """
    pool = ThreadPoolExecutor(workers)
    under_way: deque[Future[Block]] = deque()
    try:
        for block in _blocks(pieces, skip, val_fraction):
            under_way.append(pool.submit(_encode_block, block, tokenizer, val_fraction))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def choose_split(text: bytes, val_fraction: float) -> str:
    """`train` or `val`, by a hash of the text: equal documents never stand on both sides."""
    draw = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
    return "val" if draw < val_fraction * 2**64 else "train"


def _blocks(pieces: Iterable[Piece], skip: int, val_fraction: float) -> Iterator[list[Part]]:
    """The parts from number `skip` on, in lists of about `_BLOCK_CHARACTERS`."""
    block: list[Part] = []
    size, first, split = 0, True, None
    for number, (text, last) in enumerate(pieces):
        if first and not last:  # a long document goes where its first piece says
            split = choose_split(text.encode("utf-8", "replace"), val_fraction)
        if number >= skip:
            block.append(Part(text, first, last, split))
            size += len(text)
        first, split = last, None if last else split
        if size >= _BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def _encode_block(parts: list[Part], tokenizer: Tokenizer, val_fraction: float) -> Block:
    ids: dict[str, list[NDArray[Any]]] = {split: [] for split in SPLITS}
    starts: dict[str, list[int]] = {split: [] for split in SPLITS}
    tokens, text_bytes, empty = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0), 0
    eot = np.array([tokenizer.eot], np.uint32)
    for text, first, last, split in parts:
        data = text.encode("utf-8", "replace")
        if first and last and not data:
            empty += 1
            continue
        split = split or choose_split(data, val_fraction)
        if first:
            starts[split].append(tokens[split])
        encoded = tokenizer.encode_array(text)
        ids[split] += [encoded, eot] if last else [encoded]
        tokens[split] += len(encoded) + last
        text_bytes[split] += len(data)
    dtype = token_dtype(tokenizer.n_vocab)
    return Block(
        len(parts),
        empty,
        {
            split: Encoded(
                np.concatenate([np.empty(0, np.uint32), *ids[split]]).astype(dtype),
                np.array(starts[split], np.int64),
                text_bytes[split],
            )
            for split in SPLITS
        },
    )
