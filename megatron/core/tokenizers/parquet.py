"""Parquet files as JSON lines: one row is one line, a column is a key."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet


def parquet_pieces(
    path: Path, columns: Sequence[str] | None, piece_bytes: int
) -> Iterator[tuple[bytes, int]]:
    """The rows of a file as JSON lines, a few at a time.

    Args:
        path: the file.
        columns: those to read, strings or lists of strings; all if None.
        piece_bytes: size of a piece, about.

    Yields:
        Whole lines, and the bytes of the file, as they lie on disk, that they stand for.

    Raises:
        ValueError: if the file is damaged or lacks a column.
    """
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            _check_columns(path, file.schema_arrow, columns)
            yield from _rows(file, columns, piece_bytes, path.stat().st_size)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"{path}: the parquet file is damaged or cut off: {first_line}") from None


def _rows(
    file: pyarrow.parquet.ParquetFile, columns: Sequence[str] | None, piece_bytes: int, size: int
) -> Iterator[tuple[bytes, int]]:
    metadata, given = file.metadata, 0
    for group in range(metadata.num_row_groups):
        rows, row_bytes = metadata.row_group(group).num_rows, metadata.row_group(group).total_byte_size
        at_once = max(1, min(rows, piece_bytes * rows // max(1, row_bytes)))
        done = 0
        wanted = None if columns is None else list(columns)
        for batch in file.iter_batches(at_once, row_groups=[group], columns=wanted, use_threads=False):
            if columns is not None:
                batch = _with_text(batch)
            lines = [orjson.dumps(row, default=str) for row in batch.to_pylist()]
            done += len(lines)
            share = size * (group + done / max(1, rows)) / metadata.num_row_groups
            yield b"".join(line + b"\n" for line in lines), int(share) - given
            given = int(share)
    yield b"", size - given


def _with_text(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """The same with strings for bytes: some writers do not say that their bytes are text."""
    for place, field in enumerate(batch.schema):
        if pyarrow.types.is_binary(field.type) or pyarrow.types.is_large_binary(field.type):
            text = batch.column(place).cast(pyarrow.large_string())
            batch = batch.set_column(place, field.name, text)
    return batch


def _check_columns(path: Path, schema: Any, columns: Sequence[str] | None) -> None:
    missing = [name for name in columns or () if name not in schema.names]
    if missing:
        raise ValueError(
            f"{path}: no column {', '.join(map(repr, missing))}; the columns present are "
            f"{', '.join(map(repr, schema.names)) or 'none'} (--json-keys says which to take)"
        )
