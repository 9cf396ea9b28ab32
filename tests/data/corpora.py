"""Corpora in files of every format, and what is read of them."""

import csv
import gzip
import io
import json
import tracemalloc
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gpt.data.find import find_corpus
from gpt.data.module import TokenData
from gpt.data.options import Reading


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, and the folders in which it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def comma_separated(rows: list[dict], separator: str = ",") -> str:
    """Rows as CSV, which holds a list as its JSON."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, rows[0], delimiter=separator)
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
        )
    return file.getvalue()


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write rows in the format that the name says, compressed if it ends in .gz."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=20)
        return path
    if ".csv" in name or ".tsv" in name:
        content = comma_separated(rows, "\t" if ".tsv" in name else ",")
    elif name.endswith(".json"):
        content = json.dumps(rows)
    else:
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return write(path, gzip.compress(content.encode()) if name.endswith(".gz") else content)


def write_texts(path: Path, texts: list[str]) -> Path:
    """Write documents as rows."""
    return write_rows(path, [{"id": number, "text": text} for number, text in enumerate(texts)])


def documents(corpus: Path | str, **options) -> list[str]:
    """The documents of a corpus, in order."""
    texts: list[str] = []
    for piece in find_corpus(str(corpus), Reading(**options)).pieces():
        if piece.first:
            texts.append("")
        texts[-1] += piece.text
    return texts


def joined(data: TokenData, rank: int = 0, processes: int = 1, batches: int = 1, device: str = "cpu"):
    """The data module in one of so many processes, whose Trainer accumulates so many batches."""
    data.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=processes,
        accumulate_grad_batches=batches,
        strategy=SimpleNamespace(root_device=torch.device(device)),
    )
    return data


@contextmanager
def memory_limit(most: int):
    """Check that Python takes fewer than `most` bytes of memory during the block."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
