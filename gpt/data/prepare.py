"""`gpt prepare`: tokenize a corpus into files, once for the same text, tokenizer and options."""

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from gpt.cores import cores
from gpt.data.corpus import Corpus
from gpt.data.documents import Piece
from gpt.data.find import find_corpus
from gpt.data.prepared import INDEX_DTYPE, META, Counts, Meta, Prepared, index_name, is_prepared
from gpt.data.reading import DEFAULT_READING, Reading
from gpt.data.split import SPLITS, Divided, divide_corpus
from gpt.data.stored import StoredType, as_unscored, token_dtype
from gpt.errors import InputError
from gpt.files import cache_folder, locked, write_json
from gpt.plain import as_dict
from gpt.progress import notice, progress
from gpt.text.template import DEFAULT_TEMPLATE, Template
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import VocabularyToLearn, find_vocabulary, learn

_GROUP_CHARACTERS = 1 << 18


def prepare(
    corpus: str,
    output: str | os.PathLike[str] | None = None,
    *,
    vocabulary: str | None = None,
    vocab_size: int = 50257,
    val_fraction: float | None = None,
    most_bytes: int | None = None,
    text_column: str | None = None,
    skip_bad_rows: int | None = None,
    template: Template = DEFAULT_TEMPLATE,
) -> Path:
    """Tokenize a corpus into files for training. The result is their folder.

    If the files exist already, they are not written again.

    Args:
        corpus: a text file, a folder, a pattern, a URL, a corpus file (.yaml), a prepared folder, a name of
            `data/`, or OWNER/NAME on the hub.
        output: the folder to write; by default one in the cache, named by text, tokenizer and options.
        vocabulary: gpt2, gpt2:SIZE (GPT-2's first SIZE tokens), learn:SIZE (learn at most SIZE tokens from
            the training text), learn (at most `vocab_size` tokens) or a tokenizer.json file; by default
            GPT-2's first `vocab_size` tokens.
        vocab_size: the number of tokens where `vocabulary` gives none. GPT-2's full vocabulary has 50257.
        val_fraction: the fraction of the text to hold out. By default a tenth of a text of up to one
            megabyte; of a longer text, 100 times the square root of its bytes.
        most_bytes: tokenize only about this many bytes of a longer text, in parts spread over all of it.
        text_column: the column of the text, PROMPT,COMPLETION, PROMPT,INPUT,COMPLETION or the column of
            messages. By default `text`, or else the columns of examples in docs/tune.md. In examples, only
            the replies are scored.
        skip_bad_rows: the most rows that cannot be used and may be left out; by default none.
        template: the text around the messages of examples.
    """
    reading = Reading(
        val_fraction=val_fraction,
        most_bytes=most_bytes,
        text_column=text_column,
        skip_bad_rows=skip_bad_rows,
        template=template,
    )
    if is_prepared(corpus) and (output is not None or reading != DEFAULT_READING):
        raise InputError(f"{corpus} is prepared already: to have it in another way, give the text itself")
    return prepare_named(corpus, find_vocabulary(vocabulary, vocab_size), reading, output).folder


def prepare_named(
    corpus: str,
    vocabulary: Tokenizer | VocabularyToLearn,
    reading: Reading = DEFAULT_READING,
    output: str | os.PathLike[str] | None = None,
) -> Prepared:
    """Do as `prepare` does, for a tokenizer or a vocabulary to learn, and open the folder."""
    if is_prepared(corpus):
        return prepare_text(Prepared(corpus), vocabulary)
    source = find_corpus(corpus, reading)
    stamps = source.stamps()
    return _prepare_once(
        _key(source, stamps, vocabulary, reading.val_fraction, reading.most_bytes),
        vocabulary,
        lambda: divide_corpus(source, reading.val_fraction, reading.most_bytes),
        output,
    )


def prepare_text(text: Divided | Prepared, vocabulary: Tokenizer | VocabularyToLearn) -> Prepared:
    """Return the prepared folder of a text that was divided before, or prepared.

    Raises InputError if it was prepared with another vocabulary.
    """
    if isinstance(text, Prepared):
        _check_vocabulary(text, vocabulary)
        return text
    key = _key(text.source, text.stamps, vocabulary, text.val_fraction, text.most_bytes)
    return _prepare_once(key, vocabulary, lambda: text)


def _key(
    source: Corpus,
    stamps: list[object],
    vocabulary: Tokenizer | VocabularyToLearn,
    val_fraction: float | None,
    most_bytes: int | None,
) -> str:
    """Return a hash of all that determines the content of a prepared folder."""
    if isinstance(vocabulary, Tokenizer):
        tokens = {"name": vocabulary.name, "tokens": vocabulary.tokens, "n_vocab": vocabulary.n_vocab}
    else:
        tokens = as_dict(vocabulary)
    facts = META, source, stamps, tokens, val_fraction, most_bytes
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _prepare_once(
    key: str,
    vocabulary: Tokenizer | VocabularyToLearn,
    divide: Callable[[], Divided],
    output: str | os.PathLike[str] | None = None,
) -> Prepared:
    """Open the folder with this key, or divide and tokenize the text if there is none.

    It is `output`, or else one in the cache.
    """
    folder = cache_folder() / key if output is None else Path(output)
    _check_output(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(_hidden_neighbour(folder, "lock")):
        prepared = _open_done(folder, key)
        if prepared is not None:
            return prepared
        if output is None:  # a damaged folder in the cache is made again
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.is_dir() and any(folder.iterdir()):
            raise InputError(
                f"{folder} holds other files, or other text or options: delete it, or choose another"
            )
        _make_folder(folder, divide(), vocabulary, key)
    return Prepared(folder)


def _check_output(folder: Path) -> None:
    """Raise InputError if a folder cannot be made at this path: before the text is read, not after."""
    is_file = os.path.lexists(folder) and not folder.is_dir()
    is_empty_link = folder.is_symlink() and folder.is_dir() and not any(folder.iterdir())
    if not folder.name or is_file or is_empty_link:
        raise InputError(f"cannot write {folder}: expected the name of a new or an empty folder")


def _make_folder(folder: Path, divided: Divided, vocabulary: Tokenizer | VocabularyToLearn, key: str) -> None:
    """Learn the vocabulary, if it has to be, and write the folder. It is renamed when it is complete."""
    if isinstance(vocabulary, VocabularyToLearn):
        vocabulary = learn(divided.to_learn_from(), vocabulary)
    unfinished = _hidden_neighbour(folder, "unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # a process that was killed may have left it
    try:
        unfinished.mkdir()
        meta = _write(unfinished, divided, vocabulary, key)
        write_json(unfinished / META, as_dict(meta))
        with suppress(FileNotFoundError):
            folder.rmdir()
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _hidden_neighbour(folder: Path, ending: str) -> Path:
    """Return a hidden path beside the folder. A name that would be too long is replaced by its hash."""
    name = folder.name
    if len(os.fsencode(name)) > 200:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return folder.with_name(f".{name}.{ending}")


@contextmanager
def _alone(lock_file: Path) -> Iterator[None]:
    """Hold the lock during the block, after waiting until no other process holds it.

    The lock ends with the process. Where the file system has no locks, a notice asks the user to prepare
    a text in one process at a time.
    """
    with locked(lock_file, wait=True) as has_locks:
        if not has_locks:
            where = lock_file.parent
            notice(f"the file system of {where} has no locks: prepare this text in one process at a time")
        yield


def _write(folder: Path, divided: Divided, tokenizer: Tokenizer, key: str) -> Meta:
    """Tokenize both splits into files of the folder.

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
            writer.end()
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
    open: bool = False  # whether the last tokens are of a text, which `<|endoftext|>` must still follow

    def add(self, piece: Piece, ids: NDArray[np.uint32]) -> None:
        """Append the ids of a piece."""
        if piece.first:
            self.end()
            self.counts.documents += 1
            if self.starts is not None:
                self.starts.write(np.array(self.counts.tokens, INDEX_DTYPE).tobytes())
        size = len(piece.text.encode())
        self.counts.bytes += size
        if piece.scored:
            self.counts.scored_bytes += size
        self._write(ids, piece.scored)
        if piece.ends:
            self._write(self._end_of_text, piece.scored)
        self.open = piece.scored and not piece.ends

    def end(self) -> None:
        """Write `<|endoftext|>` if it must still follow a text. Update the hash."""
        if self.open:
            self._write(self._end_of_text, scored=True)
            self.open = False
        self.counts.sha256 = self.sha256.hexdigest()

    @property
    def _end_of_text(self) -> NDArray[np.uint32]:
        return np.array([self.eot], np.uint32)

    def _write(self, ids: NDArray[np.uint32], scored: bool) -> None:
        stored = ids if scored else as_unscored(ids)
        data = stored.astype(self.dtype).tobytes()
        self.tokens.write(data)
        self.sha256.update(data)
        self.counts.tokens += len(ids)
        if scored:
            self.counts.scored_tokens += len(ids)


def _encode(
    pieces: Iterable[Piece], tokenizer: Tokenizer
) -> Iterator[list[tuple[Piece, NDArray[np.uint32]]]]:
    """Yield groups of pieces with their ids, in order.

    Each core has a thread, because tiktoken releases the global interpreter lock.
    """
    threads = cores()

    def encode(group: list[Piece]) -> list[tuple[Piece, NDArray[np.uint32]]]:
        return [(piece, tokenizer.encode_array(piece.text)) for piece in group]

    with ThreadPoolExecutor(threads) as pool:
        submitted = (pool.submit(encode, group) for group in _groups(pieces))
        waiting = deque(islice(submitted, 2 * threads))  # limits the groups in memory
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(islice(submitted, 1))


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
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


def _open_done(folder: Path, key: str) -> Prepared | None:
    """Open a folder; None if it is not prepared with this key, or is damaged."""
    with suppress(InputError):
        prepared = Prepared(folder)
        if prepared.meta.key == key:
            return prepared
    return None


def _check_vocabulary(prepared: Prepared, wanted: Tokenizer | VocabularyToLearn) -> None:
    """Raise InputError if the tokenizer of a prepared folder is not the one that is wanted."""
    own = prepared.tokenizer
    if not isinstance(wanted, VocabularyToLearn) and own != wanted:
        raise InputError(
            f"{prepared.folder} was prepared with vocab_size {own.n_vocab}, not {wanted.n_vocab}, or with "
            "another vocabulary: take the vocabulary learn, which takes it as it is, or prepare the text "
            "again"
        )
