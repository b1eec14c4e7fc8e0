"""Text corpora as JSON lines: files, plain or gzip, read in chunks, and the texts on one line."""

import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

CHUNK_BYTES: Final = 1 << 18
"""Bytes of lines that are handed around together; a longer line is a chunk of its own."""
_GZIP_MAGIC: Final = b"\x1f\x8b"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_JSON_NAMES: Final = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
}
_SHOWN_KEYS: Final = 20


@dataclass(frozen=True)
class Chunk:
    """Some whole lines of one file."""

    path: str
    """The file."""
    first_line: int
    """Number of the first of the lines, from 1."""
    lines: list[bytes]
    """The lines."""
    num_bytes: int
    """Size of the lines together."""
    bytes_read: int
    """How far the reading of all files has come, in bytes as they lie on disk."""


def input_files(inputs: Sequence[str]) -> list[Path]:
    """The files that ``--input`` names, in order; a pattern such as ``part-*.jsonl`` gives its files sorted.

    Raises:
        ValueError: naming every input that is no file.
    """
    files: list[Path] = []
    problems = []
    for name in inputs:
        path = Path(name)
        matches = [] if path.exists() else sorted(map(Path, glob.glob(name)))
        if path.is_file() or matches:
            files += matches or [path]
        else:
            problems.append(f"{name} ({'is a folder' if path.is_dir() else 'no such file'})")
    if problems:
        raise ValueError(f"--input: {', '.join(problems)}")
    return files


def read_chunks(files: Sequence[Path], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The lines of some files, in order, about ``chunk_bytes`` at a time; gzip is known by a file's content.

    Raises:
        ValueError: for a gzip file that is damaged or cut off.
    """
    done = 0
    for path in files:
        with path.open("rb") as raw:
            lines_before = 0
            for lines in _lines_of(path, raw, chunk_bytes):
                if lines_before == 0:
                    lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
                num_bytes = sum(map(len, lines))
                yield Chunk(str(path), lines_before + 1, lines, num_bytes, done + raw.tell())
                lines_before += len(lines)
            done += path.stat().st_size


def _lines_of(path: Path, raw: BinaryIO, chunk_bytes: int) -> Iterator[list[bytes]]:
    zipped = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    raw.seek(0)
    # GzipFile alone would fetch each line through Python code.
    file = io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=raw))) if zipped else raw
    count = 0
    while True:
        try:
            lines = file.readlines(chunk_bytes)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path}: the gzip file is damaged or cut off after line {count}: {error}"
            ) from None
        if not lines:
            return
        count += len(lines)
        yield lines


def texts_on_line(line: bytes, keys: Sequence[str]) -> list[list[str]] | None:
    """For each key the texts that one line holds under it: one string, or the strings of a list.

    Args:
        line: one JSON object, in UTF-8.
        keys: the values of ``--json-keys``.

    Returns:
        One list a key; None for a line of white space.

    Raises:
        ValueError: saying why the line cannot be used; the caller knows the file and the line number.
    """
    if not line.strip():
        return None
    record = _parse(line)
    if not isinstance(record, dict):
        raise ValueError(f"holds {_describe(record)}, but one JSON object is wanted")
    missing = [key for key in keys if key not in record]
    if missing:
        shown = ", ".join(map(repr, list(record)[:_SHOWN_KEYS])) + (
            ", ..." if len(record) > _SHOWN_KEYS else ""
        )
        raise ValueError(
            f"no key {', '.join(map(repr, missing))}; the keys present are {shown or 'none'} "
            "(--json-keys says which to take)"
        )
    return [_strings(key, record[key]) for key in keys]


def _parse(line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1} of the line: {error.reason}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise ValueError("malformed JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"malformed JSON: {error}") from None


def _strings(key: str, value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            within = " in its list" if isinstance(value, list) else ""
            raise ValueError(f"key {key!r} holds {_describe(text)}{within}, but a string is wanted")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = ascii(text[error.start])
            raise ValueError(
                f"key {key!r} holds {half} at character {error.start + 1}, one half of a surrogate pair"
            ) from None
    return texts


def _describe(value: Any) -> str:
    return _JSON_NAMES.get(type(value), "an array" if isinstance(value, list) else "an object")
