"""Datasets written part by part: finished parts outlive a crash, and are put together at the end.

With one part there is nothing to put together: its documents go straight to where they belong.
"""

import contextlib
import fcntl
import glob
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

_RUN: Final = "run.json"
_LOCK: Final = "lock"
_LONGEST_VALUE: Final = 60


class PartedWriter:
    """Writes some datasets, each in the same parts, into a folder of parts and then into one pair of files.

    The folder holds for each finished part its datasets and a report, written last. What the parts were made
    from stands beside them, and parts that were made from anything else are never used.

    Args:
        outputs: by name, the prefix of each dataset.
        dtype: type of a token.
        parts: numbers of the parts, in the order in which they come in the datasets.
        folder: for the parts, where there are several.
        identity: JSON values that say what the datasets are made from.
        resume: use the finished parts of an earlier run; otherwise they are deleted.

    Attributes:
        finished: by part, the report of each that is there.
        deleted: how many finished parts of an earlier run were deleted.

    Raises:
        ValueError: if another process is at work in the folder, or a run is to be resumed that was made from
            something else.
    """

    def __init__(
        self,
        outputs: Mapping[str, str],
        dtype: npt.DTypeLike,
        parts: Sequence[int],
        folder: Path,
        identity: Mapping[str, Any],
        resume: bool,
    ) -> None:
        self._outputs, self._dtype, self._parts = dict(outputs), np.dtype(dtype), list(parts)
        self._folder, self._direct = folder, len(parts) <= 1
        self._builders: dict[int, dict[str, IndexedDatasetBuilder]] = {}
        self._lock: int | None = None
        self.finished: dict[int, dict[str, Any]] = {}
        self.deleted = 0
        made_from: dict[str, Any] = json.loads(json.dumps(dict(identity)))
        if folder.is_dir():
            self._take_over(made_from, resume)
        if not self._direct and not folder.is_dir():
            folder.mkdir(parents=True)
            self._hold()
            with _naming(folder / _RUN):
                _write_json(folder / _RUN, made_from)
        for output in self._outputs.values():
            _delete_leftovers(output)

    def _take_over(self, made_from: dict[str, Any], resume: bool) -> None:
        self._hold()
        if not resume:
            self.deleted = len(list(self._folder.glob("part-*.json")))
            self._delete()
            return
        if not (self._folder / _RUN).is_file():  # it died before it had begun
            self._delete()
            return
        change = _first_change(json.loads((self._folder / _RUN).read_bytes()), made_from)
        if change is not None:
            self._release()
            raise ValueError(
                f"--resume: the parts in {self._folder} were made from something else: {change}; leave out "
                "--resume to begin anew"
            )
        for part in self._parts:
            report = self._report_of(part)
            if report is not None:
                self.finished[part] = report
        kept = {f"part-{part:05d}" for part in self.finished} | {_RUN, _LOCK}
        for path in self._folder.iterdir():
            if path.name not in kept and path.name.partition(".")[0] not in kept:
                path.unlink()

    def _report_of(self, part: int) -> dict[str, Any] | None:
        try:
            content = json.loads(self._file(part).read_bytes())
            for name in self._outputs:
                dataset = IndexedDataset(self._prefix(part, name))
                dataset.verify()
                found = [dataset.num_documents, dataset.num_sequences, dataset.num_tokens]
                if found != content["sizes"][name]:
                    return None
            report: dict[str, Any] = content["report"]
        except (OSError, ValueError, KeyError):
            return None
        return report

    def _file(self, part: int) -> Path:
        return self._folder / f"part-{part:05d}.json"

    def _prefix(self, part: int, name: str) -> str:
        if self._direct:
            return self._outputs[name]
        return str(self._folder / f"part-{part:05d}.{list(self._outputs).index(name)}")

    def add(
        self,
        part: int,
        name: str,
        tokens: npt.NDArray[Any],
        sequence_lengths: npt.NDArray[np.int64],
        sequences_per_document: npt.NDArray[np.int64],
    ) -> None:
        """Add documents to a part of one dataset.

        Args:
            part: its number.
            name: of the dataset.
            tokens: [t] tokens of all the documents.
            sequence_lengths: [n] tokens in each sequence.
            sequences_per_document: [m] sequences in each document.
        """
        with _naming(self._prefix(part, name)):
            self._begun(part)[name].add_many(tokens, sequence_lengths, sequences_per_document)

    def _begun(self, part: int) -> dict[str, IndexedDatasetBuilder]:
        if part not in self._builders:
            self._builders[part] = {
                name: IndexedDatasetBuilder(self._prefix(part, name), self._dtype) for name in self._outputs
            }
        return self._builders[part]

    def finish(self, part: int, report: Mapping[str, Any]) -> None:
        """End a part: nothing more is added to it.

        Args:
            part: its number.
            report: JSON values to keep with it.
        """
        if not self._direct:
            builders = self._begun(part)
            sizes = {}
            for name, builder in builders.items():
                with _naming(self._prefix(part, name)):
                    builder.finalize()
                dataset = IndexedDataset(self._prefix(part, name))
                sizes[name] = [dataset.num_documents, dataset.num_sequences, dataset.num_tokens]
            with _naming(self._file(part)):
                _write_json(self._file(part), {"sizes": sizes, "report": dict(report)})
            del self._builders[part]
        self.finished[part] = dict(report)

    def complete(self) -> None:
        """Give the datasets their names, once every part is finished; the parts are then deleted."""
        assert len(self.finished) == len(self._parts), "a part is missing"
        if self._direct:
            for name, builder in self._builders.pop(self._parts[0], {}).items():
                with _naming(self._outputs[name]):
                    builder.finalize()
            return
        for output, builder in zip(self._outputs.values(), self._merged(), strict=True):
            with _naming(output):
                builder.finalize()
        self._delete()

    def _merged(self) -> list[IndexedDatasetBuilder]:
        builders: list[IndexedDatasetBuilder] = []
        try:
            for name, output in self._outputs.items():
                builder = IndexedDatasetBuilder(output, self._dtype)
                builders.append(builder)
                for part in self._parts:
                    with _naming(output):
                        builder.add_dataset(IndexedDataset(self._prefix(part, name)))
        except BaseException:
            for builder in builders:
                builder.discard()
            raise
        return builders

    def close(self) -> Collection[int]:
        """Give up what is not finished, unless everything is complete; the parts that are kept."""
        for builders in self._builders.values():
            for builder in builders.values():
                builder.discard()
        self._builders.clear()
        if self._folder.is_dir() and not self._direct and not self.finished:
            self._delete()
        self._release()
        return self.finished if self._folder.is_dir() and not self._direct else ()

    def _hold(self) -> None:
        descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(f"{self._folder}: another run is at work here; wait for it, or end it") from None
        except OSError:
            pass  # a file system without locks
        self._lock = descriptor

    def _release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                # Closing is not enough: worker processes hold the same open file.
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def _delete(self) -> None:
        (self._folder / _RUN).unlink(missing_ok=True)  # first: without it nothing here is ever used
        self._release()
        shutil.rmtree(self._folder)


@contextlib.contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    """Let an error of the system say where it came up: one of a full disk does not say it by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def _delete_leftovers(output: str) -> None:
    """Delete what processes that were killed have left of a dataset beside its place."""
    for suffix in (".bin", ".idx"):
        beginning = f"{output}{suffix}.partial-"
        for name in glob.glob(f"{glob.escape(beginning)}*"):
            process = name.removeprefix(beginning)
            if process.isdecimal() and not _is_alive(int(process)):
                Path(name).unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # someone else's; no number of a process
    return True


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _first_change(before: Any, now: Any, where: str = "") -> str | None:
    """In words the first difference of two JSON values."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        before, now = dict(enumerate(before)), dict(enumerate(now))
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            change = _first_change(before.get(key), now.get(key), f"{where} {key}".lstrip())
            if change is not None:
                return change
        return None
    if before == now:
        return None
    shown = [
        text if len(text := str(value)) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."
        for value in (before, now)
    ]
    return f"{where} was {shown[0]} and is {shown[1]}"
