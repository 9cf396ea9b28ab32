"""`gpt prepare`: documents become token shards, once for the same text, tokenizer and options.

The calling thread reads documents and writes shards; the others tokenize (tiktoken works outside Python's
lock), and their results are written in the order of the text: the bytes do not depend on their number.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gpt.data.corpus import Corpus, find_corpus
from gpt.data.encode import encode
from gpt.data.shard_writer import ShardWriter
from gpt.data.shards import FORMAT, META, Prepared
from gpt.errors import InputError
from gpt.progress import progress
from gpt.tokenizer import Tokenizer


def prepare(
    corpus: str,
    output: str | os.PathLike[str] | None = None,
    *,
    vocab_size: int = 50257,
    val_fraction: float = 0.05,
    text_column: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    streaming: bool | None = None,
    errors: str | None = None,
    workers: int | None = None,
) -> Path:
    """Tokenize a corpus into files that training maps into memory.

    Interrupted, it goes on where it stopped when it is called again. Called again for the same text and
    options, it finds the files and does nothing.

    Args:
        corpus: a file, a folder, a pattern, a URL, hub:OWNER/NAME, a recipe's name or a prepared folder.
        output: the folder to write; by default one in the cache, named by text, tokenizer and options.
        vocab_size: ids of the tokenizer: 50257 is GPT-2's own vocabulary, fewer are a prefix of it.
        val_fraction: the part of the text held out for validation: whole documents chosen by their hash, or
            the end of the text where that gives no such part, as with a single document.
        text_column: the column that holds the text, in JSON, CSV, Parquet and hub data sets.
        subset: the configuration of a hub data set.
        split: the split of a hub data set.
        revision: the commit or tag of a hub data set.
        streaming: read a hub data set as it comes, rather than download it first.
        errors: `replace` puts U+FFFD where text is not UTF-8, rather than stop.
        workers: threads that tokenize; by default one for each core.

    Returns:
        The folder.

    Raises:
        InputError: no such corpus, text that cannot be read, or a folder that holds something else.
    """
    tokenizer = Tokenizer("gpt2", vocab_size)
    if not 0.0 <= val_fraction < 1.0:
        raise InputError(f"val_fraction must be in [0, 1), got {val_fraction}")
    if (Path(corpus) / META).is_file():
        return _check_vocabulary(Path(corpus), tokenizer)
    source = find_corpus(
        corpus,
        text_column=text_column,
        subset=subset,
        split=split,
        revision=revision,
        streaming=streaming,
        errors=errors,
    )
    key = _key(source, tokenizer, val_fraction)
    folder = Path(output) if output is not None else cache_folder() / f"{_short_name(corpus)}-{key[:16]}"
    if _is_done(folder, key):
        return folder
    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # another process may be at it: then wait, and find its work
        if not _is_done(folder, key):
            _run(source, tokenizer, val_fraction, folder, key, workers or os.cpu_count() or 1, corpus)
    return folder


def cache_folder() -> Path:
    """Where prepared data goes unless told: `$GPT_CACHE`, or `minimal-gpt` in the user's cache folder."""
    if chosen := os.environ.get("GPT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minimal-gpt"


def _run(
    source: Corpus,
    tokenizer: Tokenizer,
    val_fraction: float,
    folder: Path,
    key: str,
    workers: int,
    label: str,
) -> None:
    with closing(ShardWriter(folder, key, tokenizer)) as writer:
        blocks = encode(source.pieces(), writer.parts, tokenizer, val_fraction, workers)
        done = writer.text_bytes
        with closing(blocks), progress(f"tokenizing {label}", source.size(), done=done) as advance:
            for block in blocks:
                with _full_disk(folder):
                    writer.add(block)
                advance(writer.text_bytes - done)
                done = writer.text_bytes
        with _full_disk(folder):
            writer.finish(val_fraction, {"corpus": label, **source.summary()})


def _key(source: Corpus, tokenizer: Tokenizer, val_fraction: float) -> str:
    parts = [FORMAT, source.fingerprint(), tokenizer.fingerprint, val_fraction]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _is_done(folder: Path, key: str) -> bool:
    """Whether `folder` holds what was asked for, whole.

    Raises:
        InputError: it is whole, and something else.
    """
    if not (folder / META).is_file():
        return False
    if Prepared(folder).meta["key"] != key:
        raise InputError(
            f"{folder} holds other text, or was prepared with other options: "
            "delete it, or choose another folder"
        )
    return True


def _check_vocabulary(folder: Path, tokenizer: Tokenizer) -> Path:
    found = Prepared(folder).tokenizer
    if found != tokenizer:
        raise InputError(
            f"{folder} was prepared with vocab_size {found.n_vocab}, not {tokenizer.n_vocab}: "
            f"set vocab_size to {found.n_vocab}, or prepare the text again"
        )
    return folder


@contextmanager
def _full_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {folder}: {error.strerror or error}; what is written is kept, "
            "and the same command goes on from there"
        ) from error


def _short_name(corpus: str) -> str:
    """What a person recognises the folder by."""
    name = Path(corpus.rstrip("/")).stem if "/" in corpus or "." in corpus else corpus
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40] or "corpus"
