"""Tell, for a data prefix that does not work, what was looked for and what was probably meant."""

import difflib
from pathlib import Path


def check_prefix(prefix: str) -> None:
    """Check that ``prefix.bin`` and ``prefix.idx`` are there and can be read.

    Raises:
        ValueError: one message with both files that were looked for and, where there is one, a hint.
    """
    files = (Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
    problems = {file: problem for file in files if (problem := _problem(file)) is not None}
    if not problems:
        return
    looked_for = ", ".join(f"{file} ({problems.get(file, 'found')})" for file in files)
    hint = _hint(prefix, set(problems.values()))
    raise ValueError(f"no dataset at the data path {prefix!r}: looked for {looked_for}. {hint}")


def _problem(file: Path) -> str | None:
    try:
        with file.open("rb"):
            return None
    except FileNotFoundError:
        return "not there"
    except NotADirectoryError:
        return "not there"
    except PermissionError:
        return "may not be read"
    except OSError as error:
        return str(error.strerror)


def _hint(prefix: str, problems: set[str]) -> str:
    path = Path(prefix)
    if "may not be read" in problems:
        return "The user that runs this may not read the file: check its permissions and those of its folder."
    if path.suffix in (".bin", ".idx") and not _dataset_there(path) and _dataset_there(path.with_suffix("")):
        return f"Give the prefix without the suffix: {path.with_suffix('')}"
    if path.is_dir():
        return _folder_hint(path)
    if path.is_file():
        return f"{path} is itself a file: give the prefix that tools/preprocess_data.py made from it."
    if Path(f"{prefix}.idx").exists() or Path(f"{prefix}.bin").exists():
        return "Half of the pair is missing: preprocessing did not finish, or it was not copied along."
    if _is_number(prefix):
        return (
            "If that is meant as a weight: weights and prefixes must alternate, a weight before each prefix."
        )
    if not path.parent.is_dir():
        return f"There is no folder {path.parent}."
    return _similar_hint(path)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _dataset_there(path: Path) -> bool:
    return Path(f"{path}.idx").is_file() and Path(f"{path}.bin").is_file()


def _prefixes_in(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.idx") if file.with_suffix(".bin").is_file())


def _folder_hint(folder: Path) -> str:
    inside = _prefixes_in(folder)
    if not inside:
        return "That is a folder without a dataset; give a prefix: folder and file name without .bin or .idx."
    return "That is a folder; give one of the prefixes in it: " + ", ".join(
        str(folder / p) for p in inside[:5]
    )


def _similar_hint(path: Path) -> str:
    there = _prefixes_in(path.parent)
    near = [name for name in there if name.startswith(path.name)]
    near += [name for name in difflib.get_close_matches(path.name, there) if name not in near]
    if near:
        return "Did you mean " + " or ".join(str(path.parent / name) for name in near[:3]) + "?"
    return "A data path is a prefix as written by tools/preprocess_data.py, without .bin or .idx."
