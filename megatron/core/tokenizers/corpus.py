"""Text corpora as JSON lines: files of any kind, read in chunks, and the texts on one line."""

import glob
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from megatron.core.tokenizers.compression import DAMAGE, kind_of, plain_pieces

CHUNK_BYTES: Final = 1 << 18
"""Bytes of lines that are handed around together; a longer line is a chunk of its own."""
LONGEST_LINE: Final = 256 << 20
"""Bytes that a line may have, so that a file without line ends does not fill the memory."""
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
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
        matches = [] if path.exists() else sorted(map(Path, glob.glob(name, recursive=True)))
        if path.is_file() or matches:
            files += matches or [path]
        else:
            problems.append(f"{name} ({'is a folder' if path.is_dir() else 'no such file'})")
    if problems:
        raise ValueError(f"--input: {', '.join(problems)}")
    return files


def read_chunks(
    files: Sequence[Path], chunk_bytes: int = CHUNK_BYTES, columns: Sequence[str] | None = None
) -> Iterator[Chunk]:
    """The lines of some files, in order, about ``chunk_bytes`` at a time.

    What a file is (plain, gzip, zstd, bzip2, parquet) is known by its content. The rows of a parquet file
    come as JSON lines.

    Args:
        files: the files.
        chunk_bytes: what a chunk has at least, unless the file ends; and one line more at most.
        columns: those to read of a parquet file; all if None.

    Raises:
        ValueError: for a compressed file that is damaged or cut off.
    """
    done = 0
    for path in files:
        first_line = 1
        for text, disk_bytes in whole_lines(path, chunk_bytes, columns):
            done += disk_bytes
            if text:
                lines = io.BytesIO(text).readlines()
                yield Chunk(str(path), first_line, lines, len(text), done)
                first_line += len(lines)


def whole_lines(
    path: Path, size: int, columns: Sequence[str] | None = None, longest: int = LONGEST_LINE
) -> Iterator[tuple[bytes, int]]:
    """The text of a file in blocks of whole lines, without a byte-order mark.

    Args:
        path: a file of any kind that is read.
        size: bytes that a block has at least, unless the file ends; and one line more at most.
        columns: those to read of a parquet file; all if None.
        longest: bytes that a line may have; a longer one is cut off after one byte more.

    Yields:
        Whole lines, and the bytes on disk that have been read for them.

    Raises:
        ValueError: for a compressed file that is damaged or cut off.
    """
    kind = kind_of(path)
    if kind == "parquet":
        # pyarrow takes a quarter of a second to load, which other inputs need not pay.
        from megatron.core.tokenizers.parquet import parquet_pieces

        yield from parquet_pieces(path, columns, size)
        return
    lines, held = 0, _Held(size, longest)
    with path.open("rb") as raw:
        read = 0
        try:
            for piece in plain_pieces(raw, kind):
                for block in held.blocks(piece):
                    block = block if lines else block.removeprefix(BYTE_ORDER_MARK)
                    lines += block.count(b"\n")
                    yield block, raw.tell() - read
                    read = raw.tell()
        except DAMAGE as error:
            lines += held.take().count(b"\n")
            raise ValueError(
                f"{path}: the {kind} file is damaged or cut off after line {lines}, before "
                f"byte {raw.tell() + 1}: {error}"
            ) from None
        rest = held.take()
        yield rest if lines else rest.removeprefix(BYTE_ORDER_MARK), raw.tell() - read


class _Held:
    """Pieces of text that do not make a block of whole lines yet."""

    def __init__(self, size: int, longest: int) -> None:
        self._size, self._longest = size, longest
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._line = 0  # bytes since the last line end

    def blocks(self, piece: bytes) -> Iterator[bytes]:
        """The blocks that come full with another piece."""
        while piece:
            cut = piece.find(b"\n", max(0, self._size - self._bytes - 1)) + 1
            self._hold(piece[:cut] if cut else piece)
            if not cut:
                return
            yield self.take()
            piece = piece[cut:]

    def take(self) -> bytes:
        """All that is held."""
        block = b"".join(self._pieces)
        self._pieces, self._bytes, self._line = [], 0, 0
        return block

    def _hold(self, piece: bytes) -> None:
        end = piece.find(b"\n")
        of_line = len(piece) if end < 0 else end
        if self._line + of_line > self._longest + 1:
            piece = piece[: max(0, self._longest + 1 - self._line)] + piece[of_line:]
        self._pieces.append(piece)
        self._bytes += len(piece)
        last = piece.rfind(b"\n")
        self._line = self._line + len(piece) if last < 0 else len(piece) - last - 1


def texts_on_line(line: bytes, keys: Sequence[str], flag: str = "--json-keys") -> list[list[str]] | None:
    """For each key the texts that one line holds under it: one string, or the strings of a list.

    Args:
        line: one JSON object, in UTF-8.
        keys: the values of ``flag``.
        flag: what says which keys to take, for messages.

    Returns:
        One list a key; None for a line of white space.

    Raises:
        ValueError: saying why the line cannot be used; the caller knows the file and the line number.
    """
    if not line.strip():
        return None
    if len(line) > LONGEST_LINE:
        raise ValueError(f"longer than {LONGEST_LINE >> 20} MiB")
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
            f"({flag} says which to take)"
        )
    return [_strings(key, record[key]) for key in keys]


def _parse(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass  # the standard library takes NaN, and tells better what is wrong
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
