"""The input of a run cut into blocks of lines that can be worked on anywhere, in parts read in order.

How the input is cut into blocks depends on the files alone, so nothing that comes of a block depends on how
many parts or processes there are.
"""

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron.core.tokenizers.compression import kind_of
from megatron.core.tokenizers.corpus import BYTE_ORDER_MARK, LONGEST_LINE, whole_lines

BLOCK_BYTES: Final = 1 << 19
"""Bytes of lines in a block; a longer line is a block of its own."""
_READ_AHEAD: Final = 2
"""Blocks that a reader may have ready."""
_SECONDS_BETWEEN_LOOKS: Final = 0.2
_COUNTED_AT_ONCE: Final = 1 << 24


@dataclass(frozen=True)
class Stretch:
    """Some or all of a file."""

    path: Path
    """The file."""
    start: int
    """First byte, on disk."""
    stop: int
    """One past the last byte."""
    cut: bool
    """Whether blocks of it can be read by themselves: the file is plain."""


@dataclass(frozen=True)
class Block:
    """Some whole lines of one file, or where to find them."""

    part: int
    """The part of the input that it belongs to."""
    path: str = ""
    """The file."""
    start: int = 0
    """Plain file: the lines are those that begin from this byte on. Others: lines of the file before it."""
    stop: int = 0
    """Plain file: and before this byte."""
    data: bytes | None = b""
    """The lines; None if they are to be read from the file."""
    disk_bytes: int = 0
    """Bytes on disk that it stands for."""
    ends_part: bool = False
    """Whether it comes after the last lines of its part, and has none."""

    @property
    def weight(self) -> int:
        """Bytes of memory that its lines take, about."""
        return len(self.data) if self.data is not None else self.stop - self.start


def plan_parts(files: Sequence[Path], count: int) -> list[list[Stretch]]:
    """Divide files, laid end to end, into parts of about equal size on disk.

    A plain file is cut at a block's border. Any other belongs to the part that its first byte falls into.

    Args:
        files: in order.
        count: parts; some may come out empty.

    Raises:
        ValueError: for a file that cannot be read as text.
    """
    sizes = [path.stat().st_size for path in files]
    total = max(1, sum(sizes))
    parts: list[list[Stretch]] = [[] for _ in range(count)]
    before = 0
    for path, size in zip(files, sizes, strict=True):
        cut = kind_of(path) == "plain"
        stretch, start = BLOCK_BYTES if cut else max(1, size), 0
        for part in range(before * count // total, count):
            end_of_part = total * (part + 1) // count - before
            stop = size if part == count - 1 else min(size, -(-end_of_part // stretch) * stretch)
            if stop > start:
                parts[part].append(Stretch(path, start, stop, cut))
                start = stop
            if start >= size:
                break
        before += size
    return parts


def read_parts(
    parts: Mapping[int, Sequence[Stretch]], columns: Sequence[str], readers: int
) -> Iterator[Block]:
    """The blocks of some parts: each part's in order, and a block at its end that says so.

    Files that are not plain are read (and decompressed) by threads, several parts at a time, so blocks of
    different parts may come mixed.

    Args:
        parts: what to read, by number of the part.
        columns: of parquet files, those to read.
        readers: threads.

    Raises:
        ValueError: for a file that is damaged or cut off.
    """
    if all(stretch.cut for stretches in parts.values() for stretch in stretches):
        for part, stretches in parts.items():
            yield from _blocks_of(part, stretches, columns)
        return
    yield from _read_ahead(iter(list(parts.items())), columns, min(readers, len(parts)))


def _read_ahead(
    parts: Iterator[tuple[int, Sequence[Stretch]]], columns: Sequence[str], readers: int
) -> Iterator[Block]:
    found: queue.Queue[Block | Exception | None] = queue.Queue(_READ_AHEAD * readers)
    enough, lock = threading.Event(), threading.Lock()

    def read() -> None:
        try:
            while not enough.is_set():
                with lock:
                    part, stretches = next(parts, (-1, ()))
                if part < 0:
                    break
                for block in _blocks_of(part, stretches, columns):
                    _put(found, block, enough)
                    if enough.is_set():
                        return
            _put(found, None, enough)
        except Exception as error:  # noqa: BLE001 - it is raised again where the blocks are wanted
            _put(found, error, enough)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(readers)]
    for thread in threads:
        thread.start()
    try:
        while readers:
            item = found.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                readers -= 1
            else:
                yield item
    finally:
        enough.set()
        for thread in threads:
            thread.join()


def _put(
    found: "queue.Queue[Block | Exception | None]", item: Block | Exception | None, enough: threading.Event
) -> None:
    while not enough.is_set():
        with contextlib.suppress(queue.Full):
            found.put(item, timeout=_SECONDS_BETWEEN_LOOKS)
            return


def _blocks_of(part: int, stretches: Sequence[Stretch], columns: Sequence[str]) -> Iterator[Block]:
    for stretch in stretches:
        path = str(stretch.path)
        if stretch.cut:
            for start in range(stretch.start, stretch.stop, BLOCK_BYTES):
                stop = min(start + BLOCK_BYTES, stretch.stop)
                yield Block(part, path, start, stop, None, stop - start)
        else:
            lines = 0
            for data, disk_bytes in whole_lines(stretch.path, BLOCK_BYTES, columns):
                yield Block(part, path, lines, 0, data, disk_bytes)
                lines += data.count(b"\n")
    yield Block(part, ends_part=True)


def sample_blocks(stretch: Stretch, columns: Sequence[str], count: int) -> Iterator[Block]:
    """Some blocks of a stretch, evenly spread; of a file that can't be cut, the first alone."""
    if not stretch.cut:
        yield from itertools.islice(_blocks_of(0, [stretch], columns), 1)
        return
    blocks = -(-(stretch.stop - stretch.start) // BLOCK_BYTES)
    for place in range(min(count, blocks)):
        start = stretch.start + BLOCK_BYTES * (place * blocks // min(count, blocks))
        yield Block(0, str(stretch.path), start, min(start + BLOCK_BYTES, stretch.stop), None)


def lines_of(block: Block, longest: int = LONGEST_LINE) -> list[bytes]:
    """The lines of a block, without the line ends.

    Args:
        block: read from its file unless it holds its lines.
        longest: bytes that a line may have; a longer one comes cut off after one byte more.

    Raises:
        OSError: if the file cannot be read.
    """
    data = block.data
    if data is None:
        data = _read_lines(block, longest)
        if block.start == 0:
            data = data.removeprefix(BYTE_ORDER_MARK)
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _read_lines(block: Block, longest: int) -> bytes:
    """The bytes of all lines that begin in the block, the last one from beyond it where need be."""
    with open(block.path, "rb", buffering=0) as file:
        begin = max(0, block.start - 1)
        data = _read(file.fileno(), block.stop - begin, begin)
        if block.start > 0:
            data = data[data.find(b"\n") + 1 :] if b"\n" in data else b""
        if not data or data.endswith(b"\n"):
            return data
        pieces, place = [data], block.stop
        missing = longest + 1 - (len(data) - data.rfind(b"\n") - 1)
        while missing > 0 and (more := _read(file.fileno(), min(BLOCK_BYTES, missing), place)):
            end = more.find(b"\n") + 1
            pieces.append(more[:end] if end else more)
            if end:
                break
            place += len(more)
            missing -= len(more)
        return b"".join(pieces)


def _read(descriptor: int, size: int, offset: int) -> bytes:
    pieces = []
    while size > 0 and (piece := os.pread(descriptor, size, offset)):
        pieces.append(piece)
        size -= len(piece)
        offset += len(piece)
    return b"".join(pieces)


def lines_before(path: str, start: int) -> int:
    """Number of lines of a plain file that begin before byte ``start`` of it."""
    if start == 0:
        return 0
    count, left = 1, start - 1  # a line begins at byte 0, and after each line end before the last byte
    with open(path, "rb") as file:
        while left > 0 and (piece := file.read(min(left, _COUNTED_AT_ONCE))):
            count += piece.count(b"\n")
            left -= len(piece)
    return count
