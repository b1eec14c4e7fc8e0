"""Index arrays on disk: built once by whichever process comes first, complete or absent, read by all.

No rank waits for another in a collective, so it does not matter which ranks ask, or how long building takes.
Those that find an index being built wait for its file lock, which the system releases even if the builder
dies. On a file system without locks several may build the same index; the first to finish gives its folder
the final name.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.gpt_indices import Allocate, allocate_in_memory

logger = logging.getLogger(__name__)

REPORT_SECONDS: Final = 60.0
"""How often a process that waits for an index says so."""
LONGEST_PAUSE: Final = 0.5
STALE_SECONDS: Final = 24 * 3600.0
"""Age from which what an unfinished build left behind is deleted."""

Build = Callable[[Allocate], Mapping[str, npt.NDArray[Any]]]


class IndexArrays(dict[str, npt.NDArray[Any]]):
    """Arrays by name. Those that are mapped from a folder are pickled as its path, and mapped anew."""

    folder: Path | None = None

    @classmethod
    def load(cls, folder: Path) -> "IndexArrays":
        """Map all arrays of a folder, for reading."""
        files = sorted(folder.glob("*.npy"))
        arrays = cls({file.stem: np.load(file, mmap_mode="r").view(np.ndarray) for file in files})
        arrays.folder = folder
        return arrays

    def __reduce__(self) -> tuple[Any, ...]:
        return (IndexArrays, (dict(self),)) if self.folder is None else (IndexArrays.load, (self.folder,))


class IndexCache:
    """A folder of index arrays.

    Args:
        folder: where the arrays lie, one folder inside it for each set; None keeps them in memory.
        required: a folder that can't be written to is an error; else each process builds its own in memory.
    """

    def __init__(self, folder: Path | None, *, required: bool) -> None:
        self.folder = folder
        self.required = required

    def get(self, name: str, key: Mapping[str, Any], build: Build) -> IndexArrays:
        """The arrays of ``key``, built if they are not there yet.

        Args:
            name: for the reader of the folder, say ``GPTDataset-train``.
            key: everything that the arrays depend on, the state of the data files included; fit for JSON.
            build: makes the arrays; may let them be allocated in their files.

        Raises:
            ValueError: if the folder is required and can't be written to.
        """
        description = json.dumps(key, indent=4)
        digest = hashlib.blake2b(description.encode(), digest_size=16).hexdigest()
        if self.folder is None:
            return IndexArrays(build(allocate_in_memory))
        final = self.folder / f"{digest}-{name}"
        if final.is_dir():
            return IndexArrays.load(final)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(self.folder, os.W_OK | os.X_OK)
        except OSError:
            writable = False
        if not writable:
            if self.required:
                raise ValueError(
                    f"--data-cache-path {self.folder}: this user can't make or write that folder"
                )
            logger.warning(
                "%s can't be written to: each process builds its index in memory; --data-cache-path names "
                "another folder",
                self.folder,
            )
            return IndexArrays(build(allocate_in_memory))
        with _locked(self.folder / f"{final.name}.lock"):
            if not final.is_dir():
                _build_folder(final, description, build)
        return IndexArrays.load(final)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock. Two may hold it at times (no locks, or the file is new); that only wastes work."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDONLY, 0o666)
    started, reported, pause = time.monotonic(), 0.0, 0.01
    try:
        while not _try_lock(descriptor):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            waited = time.monotonic() - started
            if waited - reported >= REPORT_SECONDS:
                reported = waited
                logger.warning("waited %d s for another process that builds %s", waited, path.stem)
        yield
        path.unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):
            # Closing is not enough where a process forked in the meantime: it holds the same open file.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _build_folder(final: Path, description: str, build: Build) -> None:
    for stale in final.parent.glob(f"{final.name}.*.partial"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - stale.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(stale, ignore_errors=True)
    partial = final.with_name(f"{final.name}.{socket.gethostname()}-{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()

    def allocate(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.lib.format.open_memmap(
            partial / f"{name}.npy", mode="w+", dtype=np.dtype(dtype), shape=shape
        )

    try:
        for name, array in build(allocate).items():
            if isinstance(array, np.memmap):
                array.flush()
            else:
                np.save(partial / f"{name}.npy", array)
        (partial / "description.txt").write_text(description, encoding="utf-8")
        for file in partial.iterdir():
            _flush(file)
        with contextlib.suppress(FileExistsError):
            _rename(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _rename(partial: Path, final: Path) -> None:
    """Give a folder its final name; a FileExistsError says that another process was first."""
    try:
        partial.rename(final)
    except OSError as error:
        if final.is_dir():
            raise FileExistsError(final) from error
        raise
