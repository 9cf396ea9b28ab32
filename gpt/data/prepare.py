"""`gpt prepare`: tokenize a corpus into files, once for the same text, tokenizer and options.

The result is a prepared folder. `gpt.data.token_files` tokenizes.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from gpt.data.corpus import Corpus
from gpt.data.find import find_corpus
from gpt.data.options import DEFAULT_READING, Reading
from gpt.data.prepared import META, Prepared, is_prepared
from gpt.data.split import Divided, divide_corpus
from gpt.data.token_files import write_token_files
from gpt.errors import InputError
from gpt.files import StrPath, cache_folder, locked, write_json
from gpt.plain import as_dict
from gpt.progress import notice, notice_once
from gpt.text.template import DEFAULT_TEMPLATE, Template
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import Vocabulary, VocabularyToLearn, find_of_size, learn


def prepare(
    corpus: str,
    output: str | os.PathLike[str] | None = None,
    *,
    vocabulary: str | None = None,
    vocab_size: int | None = None,
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
        vocab_size: the number of tokens where `vocabulary` gives none, by default GPT-2's 50257.
        val_fraction: the fraction of the text to hold out. By default a tenth of a text of up to one
            megabyte; of a longer text, 100 times the square root of its bytes.
        most_bytes: tokenize only about this many bytes of a longer text: parts from all of it, or its
            beginning where a file can only be read in order.
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
    check_reading(corpus, reading)
    if is_prepared(corpus) and (output is not None or template != DEFAULT_TEMPLATE):
        raise InputError(f"{corpus} is prepared already: to have it in another way, give the text itself")
    return prepare_named(corpus, find_of_size(vocabulary, vocab_size), reading, output).folder


def prepare_named(
    corpus: str, vocabulary: Vocabulary, reading: Reading = DEFAULT_READING, output: StrPath | None = None
) -> Prepared:
    """Do as `prepare` does, for a tokenizer or a vocabulary to learn, and open the folder.

    A prepared folder is opened by `open_prepared`.
    """
    if is_prepared(corpus):
        return prepare_text(open_prepared(corpus, reading), vocabulary)
    source = find_corpus(corpus, reading)
    key = _key(source, source.stamps(), vocabulary, reading.val_fraction, reading.most_bytes)
    divide = partial(divide_corpus, source, reading.val_fraction, reading.most_bytes)
    return _open_or_make(key, divide, vocabulary, output)


def prepare_text(text: Divided | Prepared, vocabulary: Vocabulary) -> Prepared:
    """Return the prepared folder of a text that was divided before, or prepared.

    Raises InputError if it was prepared with another vocabulary.
    """
    if isinstance(text, Divided):
        key = _key(text.source, text.stamps, vocabulary, text.val_fraction, text.most_bytes)
        return _open_or_make(key, lambda: text, vocabulary)
    own = text.tokenizer
    if isinstance(vocabulary, Tokenizer) and own != vocabulary:
        raise InputError(
            f"{text.folder} was prepared with vocab_size {own.n_vocab}, not {vocabulary.n_vocab}, or with "
            "another vocabulary: take the vocabulary learn, which takes it as it is, or prepare the text "
            "again"
        )
    return text


def check_reading(corpus: str, typed: Reading) -> None:
    """Raise InputError if a user gives options of reading for a prepared folder, which they cannot change.

    The template is not among them: `gpt evaluate` compares it with the folder's, and runs keep their own.
    """
    names = typed.changed
    if names and is_prepared(corpus):
        what = f"{corpus} is prepared already: to have it with another {' or '.join(names)}"
        raise InputError(f"{what}, give the text itself")


def open_prepared(corpus: str, reading: Reading) -> Prepared:
    """Open a prepared folder, and tell the user which options of reading change nothing in it.

    Such options come from a recipe or a resumed run. Those that a user types are errors: `check_reading`.
    """
    if names := reading.changed:
        told = " and ".join(f"{name} {getattr(reading, name)}" for name in names)
        notice_once(f"{corpus} is prepared already, so {told} of a config or a run changes nothing")
    return Prepared(corpus)


def _key(
    source: Corpus,
    stamps: list[object],
    vocabulary: Vocabulary,
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


def _open_or_make(
    key: str, divide: Callable[[], Divided], vocabulary: Vocabulary, output: StrPath | None = None
) -> Prepared:
    """Open the folder with this key: `output`, or else one in the cache. Where there is none, make it.

    One process makes it while the others wait, if the file system has locks. A damaged folder in the cache is
    made again.
    """
    folder = cache_folder() / key if output is None else Path(output)
    _check_output(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(_hidden_neighbour(folder, "lock"), wait=True) as has_locks:
        if not has_locks:
            where = folder.parent
            notice(f"the file system of {where} has no locks: prepare this text in one process at a time")
        with suppress(InputError):  # it is not prepared, or damaged
            prepared = Prepared(folder)
            if prepared.meta.key == key:
                return prepared
        if output is None:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.is_dir() and any(folder.iterdir()):
            raise InputError(
                f"{folder} holds other files, or other text or options: delete it, or choose another"
            )
        _make_folder(folder, key, divide(), vocabulary)
    return Prepared(folder)


def _check_output(folder: Path) -> None:
    """Raise InputError if a folder cannot be made at this path: before the text is read, not after."""
    is_file = os.path.lexists(folder) and not folder.is_dir()
    is_empty_link = folder.is_symlink() and folder.is_dir() and not any(folder.iterdir())
    if not folder.name or is_file or is_empty_link:
        raise InputError(f"cannot write {folder}: expected the name of a new or an empty folder")


def _make_folder(folder: Path, key: str, divided: Divided, vocabulary: Vocabulary) -> None:
    """Learn the vocabulary, if it has to be, and write the folder. It is renamed when it is complete."""
    tokenizer = vocabulary
    if isinstance(tokenizer, VocabularyToLearn):
        tokenizer = learn(divided.to_learn_from(), tokenizer)
    unfinished = _hidden_neighbour(folder, "unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # a process that was killed may have left it
    try:
        unfinished.mkdir()
        meta = write_token_files(unfinished, divided, tokenizer, key)
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
