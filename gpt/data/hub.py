"""Read a data set of the hub row by row, as it downloads."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from gpt.data.parquet import arrow_rows
from gpt.data.read_errors import network_errors_named
from gpt.data.row import Choose, Row

if TYPE_CHECKING:
    from datasets import IterableDataset
    from pyarrow import Table

_BATCH = 256  # rows in memory at once


@dataclass(frozen=True)
class HubDataSet:
    """The training split of a data set of the hub. Nothing is loaded before it is asked for."""

    name: str
    """OWNER/NAME."""
    subset: str | None = None
    revision: str | None = None

    @cached_property
    def _stream(self) -> "IterableDataset":
        from datasets import load_dataset

        return load_dataset(self.name, self.subset, split="train", revision=self.revision, streaming=True)

    def rows(self, choose: Choose) -> Iterator[Row]:
        """Yield the rows in order, with the columns that `choose` takes of those in the first row."""
        first = next(self._tables(1), None)
        if first is None:
            return
        columns = list(choose(first.column_names))
        number = 0
        for table in self._tables(_BATCH, columns):
            for value in arrow_rows(table, columns):
                number += 1
                yield Row(number, value)

    def _tables(self, rows: int, columns: list[str] | None = None) -> "Iterator[Table]":
        """Yield the rows in tables of so many, with all columns or only these."""
        with network_errors_named(f"hub:{self.name}"):
            stream = self._stream if columns is None else self._stream.select_columns(columns)
            yield from stream.with_format("arrow").iter(batch_size=rows)

    def estimated_bytes(self, bytes_per_row: float) -> int:
        """Estimate the bytes of text: by the number of rows, or else as many as the files have."""
        with network_errors_named(f"hub:{self.name}"):
            splits = self._stream.info.splits
            rows = splits["train"].num_examples if splits and "train" in splits else None
            return round(rows * bytes_per_row) if rows else self._stored_bytes()

    def _stored_bytes(self) -> int:
        """Return the size in bytes of the files, which are compressed."""
        from datasets import load_dataset_builder
        from fsspec.core import url_to_fs

        builder = load_dataset_builder(self.name, self.subset, revision=self.revision)
        files = builder.config.data_files or {}
        size = 0
        for url in files.get("train", []):
            system, path = url_to_fs(url)
            size += system.size(path) or 0
        return size
