"""`gpt prepare`: from a corpus to token shards, once for the same text, tokenizer and options."""

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gpt.data.corpus import find_corpus
from gpt.data.documents import Piece
from gpt.data.shards import FILES, FORMAT, META, Meta, Prepared, token_dtype
from gpt.data.split import SPLITS, Divided
from gpt.data.writer import SplitWriter, check_ours, replacing
from gpt.errors import InputError, check_least
from gpt.files import cache_folder, file_hashes, write_json
from gpt.plain import as_dict
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
    errors: str | None = None,
    template: Template = DEFAULT_TEMPLATE,
) -> Path:
    """Tokenize a corpus into files that training memory-maps, and return their folder.

    A second call compares checksums and returns where the first has finished.

    Args:
        corpus: a file, folder, pattern, URL or prepared folder, a recipe's name, or the hub's OWNER/NAME.
        output: the folder to write; by default one in the cache, named by text, tokenizer and options.
        vocabulary: gpt2, gpt2:SIZE (a prefix of it), learn:SIZE (learned from the training part of the text),
            learn:SIZE:marks (words contain combining marks, as in Hindi or Thai), learn (at most `vocab_size`
            tokens), learn:chars, a .tiktoken or tokenizer.json file; by default GPT-2's first `vocab_size`.
        vocab_size: tokens of a vocabulary of which `vocabulary` gives no number: GPT-2's has 50257.
        val_fraction: the fraction of the text to hold out; by default a tenth of a text up to a megabyte, of
            a longer one 100 times the root of its bytes.
        most_bytes: of a longer text, tokenize parts of all of it, of about so many bytes together.
        text_column: the column of the text, PROMPT,COMPLETION or the column of messages; by default `text`,
            else `messages`, or `prompt` and `completion`. Of examples, the replies alone are scored.
        errors: `strict` stops at bytes that are not UTF-8, `replace` puts U+FFFD in their place.
        template: the text around the messages of examples.
    """
    return prepare_for(
        find_vocabulary(vocabulary, vocab_size),
        corpus,
        output,
        val_fraction,
        most_bytes,
        by_size=vocabulary is None,
        text_column=text_column,
        errors=errors,
        template=template,
    )


def prepare_for(
    vocabulary: Tokenizer | Learned,
    corpus: str,
    output: str | os.PathLike[str] | None = None,
    val_fraction: float | None = None,
    most_bytes: int | None = None,
    verify: bool = True,
    by_size: bool = False,
    **reading: Any,
) -> Path:
    """`prepare` for a tokenizer, or for a vocabulary to learn; `reading` are options of `find_corpus`.

    With `by_size` a prepared folder may have any vocabulary of the tokenizer's size. Without `verify`, the
    checksums of a folder prepared before are not compared; with it, a damaged one is prepared again.
    """
    check_least(1, most_bytes=most_bytes)
    if (Path(corpus) / META).is_file():
        return _check_vocabulary(Path(corpus), vocabulary, by_size)
    source = find_corpus(corpus, **reading)
    stamps = source.stamps()
    parts = [FORMAT, source.fingerprint(most_bytes), vocabulary.fingerprint, val_fraction, most_bytes]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    name = re.sub(r"[^A-Za-z0-9_]+", "-", Path(corpus).stem)[:40]
    folder = Path(output) if output is not None else cache_folder() / f"{name}-{key}"
    if _is_done(folder, key, verify):
        return folder
    from filelock import FileLock

    check_ours(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # another process may be preparing it: wait
        if _is_done(folder, key, verify):
            return folder
        if (folder / META).is_file():
            notice(f"{folder} is damaged and is prepared again")
        divided = Divided(source, val_fraction, most_bytes)
        if isinstance(vocabulary, Learned):
            vocabulary = learn(divided.to_learn_from(), vocabulary)
        with replacing(folder) as unfinished:
            meta = _write(unfinished, divided, vocabulary, corpus, key)
            if source.stamps() != stamps:
                raise InputError("the corpus changed while it was read: run this again when it is complete")
            write_json(unfinished / META, as_dict(meta))
        if meta.template and meta.empty_documents:
            notice(f"left out {meta.empty_documents:,} examples whose completion is empty")
    return folder


def _write(folder: Path, divided: Divided, tokenizer: Tokenizer, corpus: str, key: str) -> Meta:
    """Tokenize both splits into files of the folder; an InputError for a corpus that has no text."""
    pieces = divided.pieces()
    begin = list(islice(pieces, 1))
    examples = not all(piece.scored for piece in begin)
    dtype = token_dtype(tokenizer.n_vocab, examples)
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in FILES}
        writers = {
            split: SplitWriter(files[f"{split}.bin"], files[f"{split}-documents.bin"], dtype, tokenizer.eot)
            for split in SPLITS
        }
        advance = stack.enter_context(progress(f"tokenizing {corpus}", divided.size))
        for block in _encode(chain(begin, pieces), tokenizer):
            for piece, ids in block:
                if piece.first and piece.scored is examples:
                    raise InputError("the corpus mixes texts with examples: give one kind")
                writers[piece.split].add(piece, ids)
            advance(sum(len(piece.text.encode()) for piece, _ in block))
        for writer in writers.values():
            writer.end()
    empty = sum(writer.empty for writer in writers.values())
    if not any(writer.counts.tokens for writer in writers.values()):
        raise InputError(f"{corpus} is empty: {empty} documents, none with text")
    return Meta(
        format=FORMAT,
        key=key,
        corpus=corpus,
        empty_documents=empty,
        tokenizer=tokenizer.to_dict(),
        template=as_dict(divided.source.template) if examples else None,
        splits={split: as_dict(writer.counts) for split, writer in writers.items()},
        sha256={path.name: digest for path, digest in file_hashes(folder.iterdir()).items()},
    )


def _encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[list[tuple[Piece, NDArray[Any]]]]:
    """Pieces and their ids, from a thread for each core, as tiktoken releases Python's lock; in order."""
    threads = os.cpu_count() or 1

    def encode(block: list[Piece]) -> list[tuple[Piece, NDArray[Any]]]:
        return [(piece, tokenizer.encode_array(piece.text)) for piece in block]

    with ThreadPoolExecutor(threads) as pool:
        submitted = (pool.submit(encode, block) for block in _blocks(pieces))
        waiting = deque(islice(submitted, 2 * threads))  # few blocks wait in memory
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
    if key not in folder.name and key.encode() not in meta.read_bytes():
        raise InputError(f"{folder} holds other text or has other options: delete it, or choose another")
    try:
        prepared = Prepared(folder)
        if verify:
            prepared.verify()
    except InputError:
        return False
    return prepared.meta.key == key


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
