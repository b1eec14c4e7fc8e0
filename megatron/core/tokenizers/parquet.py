"""Parquet files as JSON lines: one row is one line, a column is a key."""

import datetime
import decimal
import functools
import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow
import pyarrow.parquet
from pyarrow import types


def parquet_pieces(
    path: Path, columns: Sequence[str] | None, piece_bytes: int
) -> Iterator[tuple[bytes, int]]:
    """The rows of a file as JSON lines, a few at a time.

    Bytes of any kind, also within lists and structures, are text in UTF-8; a row with bytes that are not is a
    line that no reader of JSON takes. Dates and times come as in ISO 8601, decimal numbers as strings, and
    numbers that are infinite or none (NaN) as null.

    Args:
        path: the file.
        columns: those to read, of strings, bytes or lists of either; all columns of any type if None.
        piece_bytes: size of a piece, about.

    Yields:
        Whole lines, and the bytes of the file, as they lie on disk, that they stand for.

    Raises:
        ValueError: if the file is damaged, lacks a column, or has one of those asked for with no text in it.
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
            lines = _lines(batch)
            done += len(lines)
            share = size * (group + done / max(1, rows)) / metadata.num_row_groups
            yield b"".join(line + b"\n" for line in lines), int(share) - given
            given = int(share)
    yield b"", size - given


def _lines(batch: pyarrow.RecordBatch) -> list[bytes]:
    try:
        return [orjson.dumps(row, default=_plain) for row in batch.to_pylist()]
    except (TypeError, ValueError, OverflowError):  # orjson's error, which hides that of _plain, is the first
        names, columns = batch.schema.names, map(_values, batch.columns)
        return [_line(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def _line(row: dict[str, Any]) -> bytes:
    """The row; one whose bytes are no text keeps them, and is then refused as a line that is not UTF-8."""
    try:
        return orjson.dumps(row, default=_plain)
    except TypeError as error:
        if not isinstance(error.__cause__, UnicodeDecodeError):
            raise ValueError(str(error.__cause__ or error)) from None
    text = json.dumps(row, ensure_ascii=False, default=functools.partial(_plain, errors="surrogateescape"))
    return text.encode(errors="surrogateescape")


def _values(column: pyarrow.Array) -> list[Any]:
    """The values of a column in which some have no equal in Python."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return list(column.cast(_in_bytes(column.type)).to_pylist())
    except (ValueError, OverflowError):  # times that Python's types do not reach
        return list(column.cast(pyarrow.string()).to_pylist())


def _plain(value: Any, errors: str = "strict") -> Any:
    """What JSON has for a value that it does not have; some writers do not say that their bytes are text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode(errors=errors)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta | uuid.UUID):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    raise TypeError(f"a value of the type {type(value).__name__} cannot be written as JSON")


def _in_bytes(kind: pyarrow.DataType) -> pyarrow.DataType:
    """The type with bytes for strings."""
    if types.is_dictionary(kind):
        return _in_bytes(kind.value_type)
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        return pyarrow.list_(_in_bytes(kind.value_type))
    if types.is_large_list(kind):
        return pyarrow.large_list(_in_bytes(kind.value_type))
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_in_bytes(field.type)) for field in kind])
    strings = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return pyarrow.large_binary() if strings else kind


_TEXT: Final = (
    types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary,
    types.is_binary_view, types.is_fixed_size_binary, types.is_null,
)  # fmt: skip
_LISTS: Final = (
    types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view
)  # fmt: skip


def _holds_text(kind: pyarrow.DataType, in_list: bool = False) -> bool:
    if not in_list and any(is_kind(kind) for is_kind in _LISTS):
        return _holds_text(kind.value_type, in_list=True)
    if types.is_dictionary(kind):
        return _holds_text(kind.value_type, in_list)
    return any(is_kind(kind) for is_kind in _TEXT)


def _check_columns(path: Path, schema: Any, columns: Sequence[str] | None) -> None:
    missing = [name for name in columns or () if name not in schema.names]
    if missing:
        raise ValueError(
            f"{path}: no column {', '.join(map(repr, missing))}; the columns present are "
            f"{', '.join(map(repr, schema.names)) or 'none'} (--json-keys says which to take)"
        )
    for name in columns or ():
        kind = schema.field(name).type
        if not _holds_text(kind):
            raise ValueError(
                f"{path}: the column {name!r} is of the type {kind}, but one of strings, of bytes in UTF-8, "
                "or of lists of either is wanted"
            )
