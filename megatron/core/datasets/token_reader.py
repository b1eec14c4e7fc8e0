"""Two ways to read the tokens of a ``.bin`` file: mapped into memory, or by a read for each request."""

import logging
import os
import time
import weakref
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = (10.0, 20.0, 40.0)
"""Waits before a read that failed is tried again; storage on a network fails for moments."""


class TokenReader(Protocol):
    """The tokens of one file by their place."""

    count: int
    """Tokens in the file."""

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens ``start`` to ``stop``: [stop - start], not to be written to."""


class MappedTokens:
    """Tokens of a file that is mapped into memory: what is read is a view, and the system keeps pages."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.count = path.stat().st_size // dtype.itemsize
        self._tokens: npt.NDArray[Any] = (
            np.memmap(path, dtype=dtype, mode="r", shape=(self.count,)).view(np.ndarray)
            if self.count
            else np.empty(0, dtype)  # an empty file can't be mapped
        )

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens ``start`` to ``stop``: a view of the file [stop - start]."""
        return self._tokens[start:stop]


class FileTokens:
    """Tokens of a file that is read anew for each request, for storage on which mapped files are slow.

    A read that fails, or ends early, is tried again after a while, with the file opened anew. The place in
    the file is part of each read, so processes that were forked may share the open file.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path = path
        self._dtype = dtype
        self._open()
        self.count = os.fstat(self._descriptor).st_size // dtype.itemsize

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens ``start`` to ``stop``: [stop - start].

        Raises:
            OSError: if the file could still not be read at the last try.
        """
        tries = len(RETRY_SECONDS) + 1
        for number, pause in enumerate(RETRY_SECONDS, start=1):
            try:
                if number > 1:
                    self._reopen()
                return self._read(start, stop)
            except OSError as error:
                logger.warning(
                    "%s: try %d of %d to read failed (%s); the next in %g s",
                    self._path,
                    number,
                    tries,
                    error,
                    pause,
                )
                time.sleep(pause)
        self._reopen()
        return self._read(start, stop)

    def _reopen(self) -> None:
        self._close()
        self._open()

    def _read(self, start: int, stop: int) -> npt.NDArray[Any]:
        tokens = np.empty(stop - start, self._dtype)
        wanted = tokens.view(np.uint8)
        offset, done = start * self._dtype.itemsize, 0
        while done < len(wanted):
            got = os.preadv(self._descriptor, [wanted[done:].data], offset + done)
            if got == 0:
                raise OSError(
                    f"ends at byte {offset + done}, but bytes up to {offset + len(wanted)} were there when "
                    "it was opened"
                )
            done += got
        return tokens
