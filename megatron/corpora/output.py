"""Files of JSON lines that are complete or absent, compressed as their names say."""

import contextlib
import gzip
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, cast

import zstandard

from megatron.core.checkpoint.files import sync_folder

_ZSTD_LEVEL: Final = 3
_GZIP_LEVEL: Final = 6
_READ_ONLY: Final = (".bz2", ".parquet")


@contextlib.contextmanager
def complete_or_absent(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets its name only when all is written and on disk.

    Until then it lies beside, with a random name that ends in ``.part``; it is removed if anything goes
    wrong. A name that ends in ``.gz`` or ``.zst`` gives a compressed file, the same bytes for the same
    content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        with beside.open("xb") as raw:
            with _compressor(path, raw) as file:
                yield file
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def _compressor(path: Path, raw: BinaryIO) -> Iterator[BinaryIO]:
    if path.suffix == ".gz":
        with gzip.GzipFile("", "wb", _GZIP_LEVEL, raw, mtime=0) as zipped:
            yield cast(BinaryIO, zipped)
    elif path.suffix == ".zst":
        packer = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
        with packer.stream_writer(raw, closefd=False) as packed:
            yield cast(BinaryIO, packed)
    else:
        yield raw


def output_names(files: Sequence[Path], folder: Path) -> list[Path]:
    """One output for each input, in ``folder``, named like it.

    Files keep their names, and so their compression; ``a.jsonl.bz2`` and ``a.parquet``, which are not
    written, become ``a.jsonl.zst``.

    Raises:
        ValueError: if two inputs would have the same output, or an input its own.
    """
    outputs = [folder / _output_name(path) for path in files]
    first: dict[Path, Path] = {}
    for path, output in zip(files, outputs, strict=True):
        if output.resolve() == path.resolve():
            raise ValueError(f"--output-folder {folder}: {path} would be written over; give another folder")
        other = first.setdefault(output, path)
        if other is not path:
            raise ValueError(
                f"--output-folder {folder}: {other} and {path} would both become {output}; rename one, or "
                "run them with folders of their own"
            )
    return outputs


def _output_name(path: Path) -> str:
    if path.suffix not in _READ_ONLY:
        return path.name
    stem = path.name.removesuffix(path.suffix)
    return (stem if stem.endswith((".jsonl", ".json")) else f"{stem}.jsonl") + ".zst"
