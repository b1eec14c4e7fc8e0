"""What the stages of deduplication leave for each other: a folder, its settings, and numbered files in it.

Document *d* of the corpus is a line: the lines of the files before its own, and those before it in its file.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatron.core.checkpoint.files import replace_durably
from megatron.corpora.output import complete_or_absent

_SETTINGS: Final = "settings.json"


@dataclass(frozen=True)
class WorkFolder:
    """The files of one deduplication. Numbered files belong to the input file of that number."""

    path: Path
    """The folder."""
    inputs: tuple[Path, ...]
    """The input files, in order."""
    settings: dict[str, Any]
    """JSON values that the content of the folder depends on."""

    def open(self) -> None:
        """Make the folder, or see that what is in it was made from the same files with the same settings.

        Raises:
            ValueError: if it was not, naming what differs: files that were written since count as others.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps(self._identity()))
        file = self.path / _SETTINGS
        if not file.exists():
            # Several shards may come here at once; they write the same.
            with complete_or_absent(file) as opened:
                opened.write(json.dumps(wanted, indent=1).encode())
            return
        found = json.loads(file.read_bytes())
        for name, value in wanted.items():
            if found.get(name) != value:
                raise ValueError(
                    f"--work-folder {self.path}: made with another {name}: "
                    f"{_difference(found.get(name), value)}; give the same again, or another folder, or "
                    "delete this one to begin anew"
                )

    def _identity(self) -> dict[str, Any]:
        return {"input": [file_state(path) for path in self.inputs], **self.settings}

    def file(self, kind: str, number: int, suffix: str) -> Path:
        """Path of a numbered file; its folder is there afterwards."""
        folder = self.path / kind
        folder.mkdir(exist_ok=True)
        return folder / f"{number:06d}{suffix}"

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each input file, by its path."""
        return {str(path): number for number, path in enumerate(self.inputs)}

    def require(self, kind: str, suffix: str, stage: str) -> None:
        """See that a stage is done for every input.

        Raises:
            ValueError: naming what is missing.
        """
        missing = [
            path for number, path in enumerate(self.inputs) if not self.file(kind, number, suffix).exists()
        ]
        if missing:
            raise ValueError(
                f"--work-folder {self.path}: --stage {stage} is not done for {len(missing)} of "
                f"{len(self.inputs)} files, such as {missing[0]}"
            )


def file_state(path: Path) -> dict[str, Any]:
    """JSON values that differ once a file is written again, at the same size too: the time is in ns."""
    stat = path.stat()
    return {"file": str(path), "size": stat.st_size, "changed": stat.st_mtime_ns}


def _difference(old: Any, new: Any) -> str:
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return f"{len(old)} files then, {len(new)} now"
        old, new = next((a, b) for a, b in zip(old, new, strict=True) if a != b)
    if isinstance(old, dict) and isinstance(new, dict):
        if old.get("file") == new.get("file"):
            sizes = f"{old.get('size')} bytes then, {new.get('size')} now"
            return f"{new['file']} has been written since ({sizes})"
        old, new = old.get("file"), new.get("file")
    return f"{json.dumps(old)} then, {json.dumps(new)} now"


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array as .npy, complete or absent."""
    with complete_or_absent(path) as file:
        np.save(file, array, allow_pickle=False)


def read_array(path: Path) -> npt.NDArray[Any]:
    """An array that :func:`write_array` has written, mapped and not read."""
    array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value, complete or absent."""
    replace_durably(path, json.dumps(value).encode())


def read_json(path: Path) -> Any:
    """A JSON value that :func:`write_json` has written."""
    return json.loads(path.read_bytes())
