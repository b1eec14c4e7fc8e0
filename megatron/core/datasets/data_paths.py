"""Which datasets the data flags name, for each split: on the command line, or in a file."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from megatron.core.config import DataConfig
from megatron.core.datasets.blend import Blend, parse_blend
from megatron.core.datasets.mock_dataset import MockIndexedDataset
from megatron.core.datasets.split import SPLIT_NAMES

_LIST: Final = "--data-args-path"
_TABLE: Final = "--per-split-data-args-path"


def read_path_files(config: DataConfig) -> DataConfig:
    """The data flags with what a file of paths holds in place of its name; others as they are.

    Raises:
        ValueError: if the file can't be read or holds no list of data paths, naming flag, file and reason.
    """
    if config.data_args_path is not None:
        words = _read_list(config.data_args_path)
        return replace(config, data_args_path=None, data_path=words)
    if config.per_split_data_args_path is not None:
        table = _read_table(config.per_split_data_args_path)
        paths = {f"{name}_data_path": table.get(name) for name in SPLIT_NAMES}
        return replace(config, per_split_data_args_path=None, **paths)  # type: ignore[arg-type]
    return config


def split_blends(config: DataConfig, *, validation_sets: bool = False) -> dict[str, Blend | None]:
    """What each split draws on, by its name; None if on nothing.

    Args:
        config: the data flags, files of paths already read.
        validation_sets: whether validation datasets are to be kept apart.

    Raises:
        ValueError: if the flags name no data, or don't go together.
    """
    paths = {name: getattr(config, f"{name}_data_path") for name in SPLIT_NAMES}
    if validation_sets and not paths["valid"]:
        raise ValueError(
            "--multiple-validation-sets evaluates each dataset of --valid-data-path (or of "
            f'"valid" in {_TABLE}), and there is none'
        )
    if config.mock_data:
        return dict.fromkeys(SPLIT_NAMES, Blend((MockIndexedDataset.prefix,), None))
    if config.data_path:
        return dict.fromkeys(SPLIT_NAMES, parse_blend(config.data_path, "--data-path"))
    if not any(paths.values()):
        raise ValueError("no data: give --data-path, --train-data-path and its like, or --mock-data")
    if config.split is not None:
        raise ValueError(
            f"--split {config.split} divides --data-path; with --train-data-path and its like, leave it out"
        )
    return {
        name: parse_blend(words, f"--{name}-data-path") if words else None for name, words in paths.items()
    }


def _read_list(file: str) -> tuple[str, ...]:
    """The words of a file that holds what would follow --data-path."""
    where = f"{_LIST} {file}"
    return _checked(_divided(_read_text(file, where), where), where)


def _read_table(file: str) -> dict[str, tuple[str, ...] | None]:
    """The words for each split of a JSON file."""
    where = f"{_TABLE} {file}"
    form = 'it must hold {"train": [...], "valid": [...], "test": [...]}'
    text = _read_text(file, where)
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: no JSON at line {error.lineno}, column {error.colno}; {form}") from None
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{where}: {form}")
    strange = [repr(name) for name in table if name not in SPLIT_NAMES]
    if strange:
        raise ValueError(f"{where}: there is no split {', '.join(strange)}; {form}")
    return {name: _words(value, f'{where}, "{name}"') for name, value in table.items()}


def _words(value: Any, where: str) -> tuple[str, ...] | None:
    """What would follow one of the flags for a split; None if nothing."""
    if value is None or value in ("", []):
        return None
    if isinstance(value, str):
        return _checked(_divided(value, where), where)
    if not isinstance(value, list):
        raise ValueError(f"{where}: {json.dumps(value)} is no list of data paths")
    for word in value:
        if isinstance(word, bool) or not isinstance(word, str | int | float):
            raise ValueError(f"{where}: {json.dumps(word)} is neither a data path nor a weight")
    return _checked(tuple(map(str, value)), where)


def _divided(text: str, where: str) -> tuple[str, ...]:
    """The words of a text, quoted as in a shell."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _checked(words: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The words, if they can be data paths."""
    flags = [word for word in words if word.startswith("--")]
    if flags:
        raise ValueError(
            f"{where}: holds the flag {flags[0]}, where only data paths and weights belong; a file of flags "
            "is given as @FILE"
        )
    if not words:
        raise ValueError(f"{where}: names no data")
    parse_blend(words, where)
    return words


def _read_text(file: str, where: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{where}: is no text in UTF-8") from None
