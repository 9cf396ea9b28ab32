"""`gpt prepare`: from a corpus to token shards, once for the same text, tokenizer and options."""

import hashlib
import json
import os
import re
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt.data.corpus import find_corpus
from gpt.data.documents import Piece
from gpt.data.shard_writer import Encoded, ShardWriter, check_ours
from gpt.data.shards import FORMAT, META, Prepared
from gpt.data.split import Divided
from gpt.errors import InputError, check_least
from gpt.files import cache_folder
from gpt.progress import notice, progress
from gpt.text.template import DEFAULT_TEMPLATE, Template
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import Learned, find_vocabulary, learn

_BLOCK_CHARACTERS = 1 << 18


def prepare(
    corpus: str,
    output: str | os.PathLike[str] | None = None,
    *,
    vocabulary: str | None = None,
    vocab_size: int = 50257,
    val_fraction: float | None = None,
    most_bytes: int | None = None,
    text_column: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    streaming: bool | None = None,
    errors: str | None = None,
    template: Template = DEFAULT_TEMPLATE,
    workers: int | None = None,
    verify: bool = True,
) -> Path:
    """Tokenize a corpus into files that training memory-maps, and return their folder.

    A second call returns at once where the first has finished.

    Args:
        corpus: a file, folder, pattern, URL or prepared folder, a recipe's name, or the hub's OWNER/NAME.
        output: the folder to write; by default one in the cache, named by text, tokenizer and options.
        vocabulary: gpt2, gpt2:SIZE (a prefix of it), learn:SIZE (learned from the training part of the text),
            learn:SIZE:marks (words contain combining marks, as in Hindi or Thai), learn (at most `vocab_size`
            ids), learn:chars, a .tiktoken or tokenizer.json file; by default GPT-2's with `vocab_size` ids.
        vocab_size: ids, where `vocabulary` gives no number of them: GPT-2's has 50257.
        val_fraction: the fraction of the text to hold out; by default a tenth of a text up to a megabyte, of
            a longer one 100 times the root of its bytes.
        most_bytes: of a longer text, tokenize parts of all of it, of about so many bytes together.
        text_column: the column of the text, PROMPT,COMPLETION or the column of messages; by default `text`,
            else `messages`, or `prompt` and `completion`. Of examples, the replies alone are scored.
        subset: the configuration of a hub data set.
        split: the split of a hub data set.
        revision: the commit or tag of a hub data set.
        streaming: read a hub data set as it downloads; false downloads all of it first.
        errors: `strict` stops at bytes that are not UTF-8, `replace` puts U+FFFD in their place.
        template: the text around the messages of examples.
        workers: threads that tokenize; by default one for each core.
        verify: check the checksums of a folder prepared before; a damaged one is prepared again.
    """
    reading: dict[str, Any] = {"text_column": text_column, "errors": errors, "subset": subset}
    reading |= {"split": split, "revision": revision, "streaming": streaming, "template": template}
    found = find_vocabulary(vocabulary, vocab_size)
    return prepare_for(
        found, corpus, output, val_fraction, most_bytes, workers, verify, vocabulary is None, **reading
    )


def prepare_for(
    vocabulary: Tokenizer | Learned,
    corpus: str,
    output: str | os.PathLike[str] | None = None,
    val_fraction: float | None = None,
    most_bytes: int | None = None,
    workers: int | None = None,
    verify: bool = True,
    by_size: bool = False,
    **options: Any,
) -> Path:
    """`prepare` for a tokenizer, or for a vocabulary to learn; `options` are those of `find_corpus`.

    With `by_size` a prepared folder may have any vocabulary of the tokenizer's size.
    """
    check_least(1, workers=workers, most_bytes=most_bytes)
    if (Path(corpus) / META).is_file():
        return _check_vocabulary(Path(corpus), vocabulary, by_size)
    source = find_corpus(corpus, **options)
    stamps = source.stamps()
    parts = [FORMAT, source.fingerprint(most_bytes), vocabulary.fingerprint, val_fraction, most_bytes]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    folder = Path(output) if output is not None else cache_folder() / f"{_short_name(corpus)}-{key[:16]}"
    if _is_done(folder, key, verify):
        return folder
    from filelock import FileLock

    check_ours(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # another process may be preparing it: wait
        if _is_done(folder, key, verify):
            return folder
        if folder.is_dir() and any(folder.iterdir()):
            notice(f"{folder} is damaged and is prepared again")
        divided = Divided(source, val_fraction, most_bytes)
        if isinstance(vocabulary, Learned):
            vocabulary = learn(divided.to_learn_from(), vocabulary)
        pieces = divided.pieces()
        first = list(islice(pieces, 1))
        examples = bool(first) and not first[0].scored
        empty: Counter[str] = Counter()
        pieces = _documents(chain(first, pieces), examples, empty)
        writer = ShardWriter(folder, vocabulary, source.template if examples else None)
        blocks = _encode(pieces, vocabulary, writer.dtype, workers or os.cpu_count() or 1)
        known = {name: value for name, value in asdict(source).items() if value and name != "template"}
        try:
            with closing(blocks), progress(f"tokenizing {corpus}", divided.size) as advance:
                for block in blocks:
                    advance(writer.add(block))
            if not any(counts["tokens"] for counts in writer.counts.values()):
                raise InputError(f"{corpus} is empty: {empty.total()} documents, none with text")
            if source.stamps() != stamps:
                raise InputError("the corpus changed while it was read: run this again when it is complete")
            given = {"val_fraction": val_fraction, "most_bytes": most_bytes, "empty_documents": empty.total()}
            writer.finish({"key": key, "source": {"corpus": corpus, **known}, **given})
        except OSError as error:  # what reading raises is an InputError
            raise InputError(f"cannot write {folder}: {error.strerror or error}") from error
        finally:
            writer.abandon()
        if examples and empty:
            notice(f"left out {empty.total():,} examples whose completion is empty")
    return folder


def _documents(pieces: Iterable[Piece], examples: bool, empty: Counter[str]) -> Iterator[Piece]:
    """The pieces without documents that have no text, which are counted; an InputError for two kinds."""
    for piece in pieces:
        if piece.first and piece.scored is examples:
            raise InputError("the corpus mixes texts with examples: give one kind")
        if piece.first and piece.last and not piece.text:
            empty[piece.split] += 1
        else:
            yield piece


def _encode(
    pieces: Iterable[Piece], tokenizer: Tokenizer, dtype: Any, threads: int
) -> Generator[list[Encoded]]:
    """Tokenize pieces on threads, as tiktoken releases Python's lock, in order; few blocks wait in memory."""

    def encoded(piece: Piece) -> Encoded:
        ids: NDArray[Any] = tokenizer.encode_array(piece.text)
        ids = ids if piece.scored else ~ids.astype(np.int64)
        ids = (np.append(ids, tokenizer.eot) if piece.last else ids).astype(dtype)
        return piece.split, piece.first, ids, len(piece.text.encode())

    with ThreadPoolExecutor(threads) as pool:
        submitted = (pool.submit(list, map(encoded, block)) for block in _blocks(pieces))
        waiting = deque(islice(submitted, 2 * threads))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(islice(submitted, 1))


def _blocks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    block: list[Piece] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece.text)
        if size >= _BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    yield block


def _is_done(folder: Path, key: str, verify: bool) -> bool:
    """Whether `folder` is prepared by this key, and undamaged; an InputError if its key is another one."""
    meta = folder / META
    if not meta.is_file():
        return False
    if not folder.name.endswith(f"-{key[:16]}") and key.encode() not in meta.read_bytes():
        raise InputError(f"{folder} holds other text or has other options: delete it, or choose another")
    try:
        prepared = Prepared(folder)
        if verify:
            prepared.verify()
    except InputError:
        return False
    return bool(prepared.meta["key"] == key)


def _check_vocabulary(folder: Path, wanted: Tokenizer | Learned, by_size: bool) -> Path:
    """A prepared folder fits the tokenizer that it was prepared with, or one of its size."""
    found, size = Prepared(folder).tokenizer, wanted.n_vocab
    if isinstance(wanted, Tokenizer):
        fits = found == wanted or (by_size and found.n_vocab == size)
    elif wanted.at_most:
        fits = found.n_vocab <= (size or 0)
    else:
        fits = (found.name, found.pattern) == ("own", wanted.pattern) and size in (None, found.n_vocab)
    if not fits:
        raise InputError(
            f"{folder} was prepared with vocab_size {found.n_vocab}, not {size}, or with another vocabulary: "
            f"set vocab_size to {found.n_vocab}, or prepare the text again"
        )
    return folder


def _short_name(corpus: str) -> str:
    name = Path(corpus.rstrip("/")).stem if "/" in corpus or "." in corpus else corpus
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40] or "corpus"
