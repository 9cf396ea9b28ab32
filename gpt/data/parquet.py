"""Read Parquet row by row: the chosen columns of some of the file's row groups."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpt.data.row import LONGEST_VALUE, Choose, Row, check_named_once
from gpt.errors import InputError
from gpt.plain import JsonObject

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table
    from pyarrow.parquet import ColumnChunkMetaData, FileMetaData, RowGroupMetaData

_BATCH = 256  # most rows in memory at once
_BATCH_BYTES = 16 << 20  # and about the most bytes
_USUAL_DICTIONARY = 1 << 20  # bytes, the limit that programs that write Parquet use
_USUAL_RATIO = 10  # compression ratio


def group_sizes(name: str, choose: Choose) -> list[int]:
    """Return the size in bytes of the chosen columns in each row group, uncompressed."""
    from pyarrow.parquet import read_metadata

    metadata = read_metadata(name)
    columns = _chosen(metadata, choose)
    return [_size(_chunks(group, columns)) for group in _groups(metadata)]


def parquet_rows(name: str, chosen: Sequence[int] | None, choose: Choose) -> Iterator[Row]:
    """Yield the rows of the chosen row groups, or of all.

    The larger the values, the fewer rows are in memory at once.
    """
    from pyarrow.parquet import ParquetFile, read_metadata

    metadata = read_metadata(name)
    columns = _chosen(metadata, choose)
    groups = _groups(metadata)
    chunks = [_chunks(group, columns) for group in groups]
    repeated = {chunk.path_in_schema for group in chunks for chunk in group if _repeats_large_values(chunk)}
    with ParquetFile(
        name,
        metadata=metadata,
        read_dictionary=sorted(repeated),
        memory_map=True,  # without these two, a whole row group would be in memory
        pre_buffer=False,
    ) as file:
        for group in range(len(groups)) if chosen is None else chosen:
            number = sum(before.num_rows for before in groups[:group])
            most = _BATCH_BYTES * groups[group].num_rows // max(1, _size(chunks[group]))
            for batch in file.iter_batches(min(_BATCH, max(1, most)), row_groups=[group], columns=columns):
                for value in arrow_rows(batch, columns):
                    number += 1
                    yield Row(number, value)


def _chosen(metadata: "FileMetaData", choose: Choose) -> list[str]:
    """Return the columns to read. Raises InputError for a name that two of the file's columns have."""
    present = metadata.schema.to_arrow_schema().names
    chosen = list(choose(present))
    check_named_once(chosen, present)
    return chosen


def _groups(metadata: "FileMetaData") -> "list[RowGroupMetaData]":
    return [metadata.row_group(number) for number in range(metadata.num_row_groups)]


def _chunks(group: "RowGroupMetaData", columns: Sequence[str]) -> "list[ColumnChunkMetaData]":
    """Return the metadata of some columns in a row group.

    A column can have fields, whose paths begin with its name.
    """
    chunks = map(group.column, range(group.num_columns))
    inside = tuple(f"{name}." for name in columns)
    return [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(inside)]


def _size(chunks: "Sequence[ColumnChunkMetaData]") -> int:
    return sum(chunk.total_uncompressed_size for chunk in chunks)


def _repeats_large_values(chunk: "ColumnChunkMetaData") -> bool:
    """Whether a column may repeat large values. Then each value is kept in memory once for all its rows."""
    if not chunk.has_dictionary_page or chunk.physical_type != "BYTE_ARRAY":
        return False
    dictionary = chunk.data_page_offset - chunk.dictionary_page_offset
    ratio = chunk.total_uncompressed_size / max(1, chunk.total_compressed_size)
    return bool(dictionary > _USUAL_DICTIONARY or ratio > _USUAL_RATIO)


def arrow_rows(table: "Table | RecordBatch", columns: Sequence[str]) -> Iterator[JsonObject | InputError]:
    """Yield the rows of an Arrow table as Python values, one at a time; an InputError for a bad row."""
    values = [table.column(name) for name in columns]
    for number in range(table.num_rows):
        try:
            row = {name: column[number].as_py() for name, column in zip(columns, values, strict=True)}
        except (ValueError, OverflowError) as error:  # Python has no time after the year 9999, for example
            yield InputError(f"holds a value that Python cannot represent: {error}")
            continue
        texts = {name: value for name, value in row.items() if isinstance(value, str)}
        large = [name for name, text in texts.items() if len(text) > LONGEST_VALUE]
        yield InputError(f"column {large[0]!r} has more than {LONGEST_VALUE >> 20} MB") if large else row
