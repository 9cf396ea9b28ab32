"""`gpt inspect`: what a prepared folder holds, whether its files are unaltered; vocabularies side by side."""

from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from gpt.data.prepare import prepare
from gpt.data.shards import META, Prepared, token_ids
from gpt.data.split import SPLITS
from gpt.errors import check_least
from gpt.files import check_free
from gpt.pictures.figures import save, token_labels
from gpt.pictures.probabilities import COLUMNS, boxes
from gpt.text.tokenizer import Tokenizer

_COUNTED_TOKENS, _LINE_FROM_TOKENS = 1 << 22, 2000
_ORANGE, _BLUE = "#FDB366", "#A6D5FA"


def inspect(
    data: str,
    *,
    vocabulary: str | None = None,
    vocab_size: int = 50257,
    windows: int = 3,
    context_length: int = 64,
    picture: str | None = None,
    overwrite: bool = False,
) -> None:
    """Print what prepared data holds, check every file against its checksum, and draw document lengths.

    With several vocabularies it compares them instead: what their tokens are like, and how they cut a line.

    Args:
        data: a prepared folder, or a corpus, which is prepared first.
        vocabulary: as in `gpt prepare`, if `data` is a corpus; several with commas between them.
        vocab_size: ids of GPT-2's tokenizer, if `data` is a corpus.
        windows: how many parts of the training text to print.
        context_length: tokens in each part.
        picture: the file for the histogram of document lengths, by default lengths.png in the folder, or for
            the cut lines, by default vocabularies.png.
        overwrite: replace existing pictures outside the folder.
    """
    check_least(0, windows=windows)
    several = vocabulary.split(",") if vocabulary and "," in vocabulary else []
    picture = picture or ("vocabularies.png" if several else "")
    if picture:
        check_free(Path(picture), overwrite)
    if several:
        return _compare(data, several, Path(picture))
    folder = Path(data)
    if not (folder / META).is_file():
        folder = prepare(data, vocabulary=vocabulary, vocab_size=vocab_size)
    prepared = Prepared(folder)
    print(*_describe(prepared), sep="\n")
    prepared.verify()
    print(f"checksums   all {len(prepared.meta.sha256)} files are as they were written")
    lengths = Path(picture) if picture else folder / "lengths.png"
    _draw_lengths({split: prepared.document_lengths(split) for split in SPLITS}, lengths)
    print(f"histogram   {lengths}")
    stream = prepared.stream("train")
    length = min(context_length, len(stream))
    starts = np.random.default_rng(0).integers(0, len(stream) - length + 1, windows)
    for row in stream.rows(starts, length)[:, 1:]:
        print(f"\n--- {length} tokens of the training text\n{prepared.tokenizer.decode(token_ids(row))}")


def _describe(prepared: Prepared) -> Iterator[str]:
    meta, tokenizer = prepared.meta, prepared.tokenizer
    yield f"folder      {prepared.folder}"
    yield f"corpus      {meta.corpus}, {meta.empty_documents:,} empty documents left out"
    yield f"tokenizer   {tokenizer.name}, {tokenizer.n_vocab:,} ids in {prepared.dtype}"
    yield f"held out    {prepared.held_out:.2%} of the bytes"
    for split in SPLITS:
        documents, size, tokens = (prepared.count(split, what) for what in ("documents", "bytes", "tokens"))
        line = f"{split:<12}{documents:,} documents, {size:,} bytes, {tokens:,} tokens"
        if tokens:
            line += f", {size / tokens:.2f} bytes a token"
        if prepared.template:
            line += ", {:,} of them scored, of {:,} bytes".format(*prepared.scored(split))
        yield line
    ids = prepared.first_ids(_COUNTED_TOKENS)
    yield from _kinds_of_tokens(tokenizer, ids)
    yield f"beginning   {_show(tokenizer, ids[:16])}"


def _kinds_of_tokens(tokenizer: Tokenizer, ids: NDArray[Any]) -> list[str]:
    """How many ids of the vocabulary occur in `ids`, the most frequent and the longest of them."""
    counts, lengths = np.bincount(ids, minlength=tokenizer.n_vocab), tokenizer.byte_lengths()
    used = np.flatnonzero(counts)
    return [
        f"used        {len(used):,} of {tokenizer.n_vocab:,} ids in the first {len(ids):,} tokens",
        f"frequent    {_show(tokenizer, used[np.argsort(-counts[used], kind='stable')][:12])}",
        f"longest     {_show(tokenizer, used[np.argsort(-lengths[used], kind='stable')][:6])}",
    ]


def _show(tokenizer: Tokenizer, ids: NDArray[Any]) -> str:
    return " ".join(repr(tokenizer.decode([i])) for i in ids.tolist())


def _compare(corpus: str, vocabularies: list[str], picture: Path) -> None:
    """Print what the tokens of each vocabulary are like, and print and draw how each cuts the same line."""
    line, labels, colours = "", [], []
    for name in vocabularies:
        prepared = Prepared(prepare(corpus, vocabulary=name))
        tokenizer, ids = prepared.tokenizer, prepared.first_ids(_COUNTED_TOKENS)
        if not line:  # the longest that fits a row of the picture; the first characters where none does
            text = tokenizer.decode(ids[:_LINE_FROM_TOKENS])
            fitting = (one for one in text.splitlines() if len(one) <= COLUMNS)
            line = max(fitting, key=len, default="") or text[:COLUMNS]
        cut = token_labels(tokenizer, tokenizer.encode(line))
        a_token = prepared.count("train", "bytes") / max(1, prepared.count("train", "tokens"))
        heading = f"{name}: {a_token:.2f} bytes a token"
        print(heading, *_kinds_of_tokens(tokenizer, ids), f"cut         {'|'.join(cut)}", "", sep="\n")
        labels += [heading.ljust(COLUMNS), *cut, " " * COLUMNS]
        colours += ["white", *islice(cycle((_ORANGE, _BLUE)), len(cut)), "white"]
    save(boxes(labels, colours), picture)
    print(f"picture     {picture}")


def _draw_lengths(lengths: dict[str, NDArray[np.int64]], picture: Path) -> None:
    """Draw a histogram of document lengths over a logarithmic axis."""
    every = np.concatenate(list(lengths.values()))
    bins = np.geomspace(every.min(), every.max() + 1, 40).tolist()
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for (split, values), colour in zip(lengths.items(), ("#56B4E9", "#D55E00"), strict=True):
        if len(values):
            axes.hist(values, bins, color=colour, label=f"{split}: median {int(np.median(values)):,}")
    axes.set(xscale="log", title="Length of documents", xlabel="tokens in a document", ylabel="documents")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(figure, picture)
