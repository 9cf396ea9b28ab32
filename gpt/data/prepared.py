"""A prepared folder. It holds the tokens of each split, an index of the starts of examples, and `META`.

The documents follow one another, each followed by `<|endoftext|>`. `gpt.data.stored` says how a token is
stored.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpt.data.split import SPLITS
from gpt.data.stored import Stored, StoredType, largest_id, token_dtype, token_ids
from gpt.errors import InputError, check_least
from gpt.plain import JsonObject, build, parse_json
from gpt.progress import notice
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer

META = "meta-4.json"  # the number changes with the format
_META_OF_ANY_VERSION = "meta-*.json"
INDEX_DTYPE = np.dtype("<i8")
_NEIGHBOURS = 1 << 12  # tokens


@dataclass(frozen=True, eq=False)
class Stream:
    """The tokens of a split as they are stored."""

    path: Path
    dtype: StoredType
    eot: int
    """The id of `<|endoftext|>`."""
    example_starts: NDArray[np.int64] | None = None
    """The position of each example's first token, (examples,). None for plain text."""

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def tokens(self) -> Stored:
        """All tokens, (tokens,), memory-mapped on first use."""
        if not self.path.stat().st_size:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        return np.asarray(np.memmap(self.path, self.dtype, mode="r"))

    def rows(self, starts: NDArray[np.int64], length: int) -> Stored:
        """Return the token before each start and `length` tokens from it on: (len(starts), length + 1).

        The token before the first one of the split is `<|endoftext|>`. Past the last one, rows are zero.
        Raises InputError for an id that the vocabulary does not have.
        """
        tokens = self.tokens
        slices = [tokens[max(start - 1, 0) : start + length] for start in starts.tolist()]
        if all(len(part) == length + 1 for part in slices):
            return self.checked(np.concatenate(slices).reshape(-1, length + 1))
        rows = np.zeros((len(starts), length + 1), self.dtype)
        for row, part, start in zip(rows, slices, starts, strict=True):
            if start == 0:
                row[0] = self.eot
                row = row[1:]
            row[: len(part)] = part
        return self.checked(rows)

    def checked(self, stored: Stored) -> Stored:
        """Return some of the stored tokens; InputError for an id that the vocabulary does not have.

        This is checked where tokens are used: when a folder is opened, it may have 10 GB of them.
        """
        if (largest := largest_id(stored)) > self.eot:
            raise InputError(f"{self.path} has the token {largest}, its vocabulary only {self.eot + 1}")
        return stored


@dataclass(kw_only=True)
class Counts:
    """The counts of a split. Bytes are those of its text in UTF-8."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    scored_tokens: int = 0
    scored_bytes: int = 0
    sha256: str = ""  # the hash of its file of tokens


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The content of the file `META`."""

    key: str
    """A hash of all that determines the content of the folder: text, tokenizer and options."""
    tokenizer: JsonObject
    template: dict[str, str] | None
    """The text around the messages, if the documents are examples."""
    splits: dict[str, JsonObject]
    """The `Counts` of each split."""


def index_name(split: str) -> str:
    """Return the name of the file with the position of each example's first token."""
    return f"{split}-documents.bin"


def positions_for(lengths: NDArray[np.int64]) -> int:
    """Return the smallest power of two that, as a context length, cuts no example of these lengths."""
    return 1 << (int(lengths.max(initial=1)) - 1).bit_length()


def is_prepared(corpus: str) -> bool:
    """Whether the corpus is a folder that `gpt prepare` wrote, in this or another version."""
    return (Path(corpus) / META).is_file() or _is_of_another_version(Path(corpus))


def _is_of_another_version(folder: Path) -> bool:
    is_of_any = (folder / "train.bin").is_file() and any(folder.glob(_META_OF_ANY_VERSION))
    return is_of_any and not (folder / META).is_file()


def find_prepared(sha256: str, folders: Iterable[Path]) -> "Prepared | None":
    """Return the first of these prepared folders whose training tokens have this hash, or None."""
    if not sha256:
        return None
    for folder in folders:
        try:
            if sha256 not in (folder / META).read_text(encoding="utf-8"):  # this is faster than to open it
                continue
            prepared = Prepared(folder)
            if prepared.counts["train"].sha256 == sha256:
                return prepared
        except (OSError, ValueError):  # the folder is damaged, or was deleted meanwhile
            continue
    return None


def _check_counts(split: str, counts: Counts) -> None:
    """Raise InputError for counts of a split that no text has."""
    check_least(0, **{name: count for name, count in vars(counts).items() if name != "sha256"})
    is_divided = counts.documents <= counts.tokens and (counts.documents > 0) == (counts.tokens > 0)
    has_scored = counts.scored_tokens <= counts.tokens and counts.scored_bytes <= counts.bytes
    if not is_divided or not has_scored or (counts.scored_bytes and not counts.scored_tokens):
        raise InputError(f"the counts of {split} contradict one another")


def _check_starts(split: str, counts: Counts, starts: NDArray[np.int64]) -> None:
    """Raise InputError unless the first document of a split begins at 0, and each has tokens."""
    lengths = np.diff(starts, append=counts.tokens)
    if starts[:1].any() or (starts < 0).any() or (lengths < 1).any():
        raise InputError(f"the index of the documents of {split} does not fit its {counts.tokens} tokens")


class Prepared:
    """A prepared folder, memory-mapped.

    Raises InputError if `META`, the size of a file, or the index of the examples is wrong, and for a folder
    of another version.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if _is_of_another_version(self.folder):
            raise InputError(f"{folder} was prepared by another version of this program: prepare it again")
        try:
            self.meta = build(Meta, parse_json((self.folder / META).read_text(encoding="utf-8")))
            self.counts = {split: build(Counts, self.meta.splits.get(split)) for split in SPLITS}
            self.tokenizer = Tokenizer.from_dict(self.meta.tokenizer)
            self.template = self.meta.template
            if self.template is not None:
                build(Template, self.template)  # it checks the texts
            self.dtype = token_dtype(self.template is not None)
            self._streams = {split: self._opened(split, counts) for split, counts in self.counts.items()}
        except (OSError, ValueError) as error:
            raise InputError(f"{folder} is not what gpt prepare writes: {error}; prepare it again") from error

    def _opened(self, split: str, counts: Counts) -> Stream:
        """Return the tokens of a split. Raises InputError if its counts or its files are wrong."""
        _check_counts(split, counts)
        self._check_size(f"{split}.bin", counts.tokens * self.dtype.itemsize)
        starts = None
        if self.template is not None:  # folders of plain text may have an index from earlier versions
            self._check_size(index_name(split), counts.documents * INDEX_DTYPE.itemsize)
            starts = np.fromfile(self.folder / index_name(split), INDEX_DTYPE)
            _check_starts(split, counts, starts)
        return Stream(self.folder / f"{split}.bin", self.dtype, self.tokenizer.eot, starts)

    def _check_size(self, name: str, expected: int) -> None:
        size = (self.folder / name).stat().st_size
        if size != expected:
            raise InputError(f"{name} has {size} bytes, expected {expected}")

    def stream(self, split: str) -> Stream:
        """Return the tokens of `train` or `val`."""
        return self._streams[split]

    def spread_ids(self, most: int, split: str) -> NDArray[np.int64]:
        """Return about `most` ids of a split, in rows of neighbours that are spread evenly over it."""
        stream = self.stream(split)
        starts = range(0, max(1, len(stream)), max(_NEIGHBOURS, _NEIGHBOURS * len(stream) // most))
        spread = np.concatenate([stream.tokens[start : start + _NEIGHBOURS] for start in starts])
        return token_ids(stream.checked(spread))

    def example_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each training example, (examples,). Empty for plain text."""
        starts = self.stream("train").example_starts
        if starts is None:
            return np.empty(0, np.int64)
        return np.diff(starts, append=self.counts["train"].tokens)

    def check_examples(self, context_length: int) -> None:
        """Warn if examples are longer than a window."""
        lengths = self.example_lengths()
        if cut := int((lengths > context_length).sum()):
            notice(
                f"examples longer than the context_length of {context_length} are cut, {cut:,} of "
                f"{len(lengths):,}, so their completions lack some of the prompt: give "
                f"--model.config.context_length {positions_for(lengths)}, or shorter examples"
            )
