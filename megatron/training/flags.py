"""Turn typed, frozen dataclasses into command-line flags, and flags back into dataclasses.

A flag, its default, its help, its choices and its validation live in one place: the dataclass field. What the
field's type cannot say (another spelling, a switch that turns something off) is its
:class:`~megatron.core.config.field.FlagSpec`.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import os
import shlex
import sys
import textwrap
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union

from megatron.core.config.field import FlagSpec, flag_spec

T = TypeVar("T")

USAGE_ERROR = 2
"""Exit code of a command line that cannot be run."""

_LAUNCHED_RANK = ("RANK", "SLURM_PROCID")
_SECONDS_FOR_RANK_ZERO = 5.0

_LEAST_LIKENESS = 0.8
"""Share of letters that a misspelt flag has in common with the one meant; other words have less."""


class UsageError(ValueError):
    """A command line that cannot be run: the program ends with exit code :data:`USAGE_ERROR`."""


class FlagParser(argparse.ArgumentParser):
    """A parser that takes whole flags only, reads ``@file``, and says in one line what is wrong.

    A file given as ``@file`` holds one or more flags a line, quoted as in a shell; ``#`` starts a comment.
    Of a flag that is given twice, the last counts. In a job of several ranks only rank 0 says what is wrong.
    """

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        usage = "%(prog)s [--flag [value ...]] ... [@file] ..."
        super().__init__(prog=prog, usage=usage, description=description, allow_abbrev=False)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, after putting each ``@file``'s flags in its place."""
        words = sys.argv[1:] if args is None else args
        try:
            return super().parse_known_args(expand_files(words), namespace)
        except ValueError as error:
            self.error(str(error))

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse; what is no flag of this parser ends the program with the nearest valid spelling."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error("; ".join(map(self.describe_unknown, flags_among(unknown))))
        return found

    def error(self, message: str) -> NoReturn:
        """End the program with one line on standard error and exit code 2."""
        stop_with_error(f"{self.prog}: error: {message}")

    def describe_unknown(self, word: str) -> str:
        """What to say of a word that is no flag of this parser, with the nearest valid spelling."""
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"{word!r} follows no flag that takes it"
        near = self._nearest(name)
        return f"unknown flag {name}" + (f"; did you mean {' or '.join(near)}?" if near else "")

    def _nearest(self, name: str) -> list[str]:
        shown = [
            option
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for option in action.option_strings
            if option.startswith("--")
        ]
        wanted = "--" + name.lstrip("-").replace("_", "-").lower()
        same = [option for option in shown if option.replace("_", "-") == wanted]
        abbreviated = [option for option in shown if option.startswith(wanted)]
        if same or abbreviated:
            return same or abbreviated[:3]
        stems = [option[2:] for option in shown if _word_by_word_alike(wanted[2:], option[2:])]
        stems = difflib.get_close_matches(wanted[2:], stems, n=2, cutoff=_LEAST_LIKENESS)
        return [f"--{stem}" for stem in stems]


def _word_by_word_alike(stem: str, other: str) -> bool:
    """Whether each word of a flag is one of another's, misspelt at most: eval-batch-size is none of ours."""
    words = other.split("-")
    return all(difflib.get_close_matches(word, words, n=1) for word in stem.split("-"))


def flags_among(words: Sequence[str]) -> list[str]:
    """Of the words that a parser has left over, the flags; all of them where there is no flag."""
    return [word for word in words if word.startswith("-")] or list(words)


def launched_rank() -> int:
    """This process's rank as its launcher says, before anything is checked; 0 where that is not known."""
    for name in _LAUNCHED_RANK:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 0


def stop_with_error(message: str) -> NoReturn:
    """End the program with one line on standard error and exit code 2; of several ranks only rank 0 says it.

    The other ranks meet the same error and say nothing. They leave a little later, since a launcher that sees
    a rank gone ends the rest, rank 0 and its message with them.
    """
    if launched_rank() == 0:
        sys.stderr.write(message + "\n")
        sys.stderr.flush()
    else:
        time.sleep(_SECONDS_FOR_RANK_ZERO)
    raise SystemExit(USAGE_ERROR)


def expand_files(words: Iterable[str], _open_files: tuple[Path, ...] = ()) -> list[str]:
    """Replace each ``@file`` by the flags in that file.

    Raises:
        ValueError: for a file that cannot be read, has an open quote, or includes itself.
    """
    expanded: list[str] = []
    for word in words:
        if len(word) < 2 or not word.startswith("@"):
            expanded.append(word)
            continue
        path = Path(word[1:])
        if path.resolve() in _open_files:
            raise ValueError(f"{word}: the file includes itself")
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{word}: cannot read flags from {path}: {error}") from None
        for number, line in enumerate(lines, start=1):
            try:
                inner = shlex.split(line, comments=True)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error} in {line.strip()!r}") from None
            expanded += expand_files(inner, (*_open_files, path.resolve()))
    return expanded


def field_help(cls: type) -> dict[str, str]:
    """Map each field of ``cls`` to the string written under it, base classes first."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        class_def = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(class_def, ast.ClassDef)
        for pair in itertools.pairwise(class_def.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag, worked out from its dataclass field."""

    dest: str
    """Name of the field."""
    spellings: tuple[str, ...]
    """The flag and its aliases."""
    type: str
    """``switch``, ``off switch``, ``int``, ``float`` or ``str``."""
    default: Any
    """The field's default; :data:`dataclasses.MISSING` where the flag is required."""
    choices: tuple[Any, ...] | None
    """The closed set of values, if there is one."""
    nargs: str | None
    """argparse's ``nargs`` for a flag of several values."""
    help: str
    """One or two sentences."""

    @property
    def required(self) -> bool:
        """Whether the run cannot start without it."""
        return self.default is dataclasses.MISSING


@functools.cache
def flags_of(cls: type) -> tuple[Flag, ...]:
    """Every flag of a dataclass, in order of its fields.

    Raises:
        TypeError: for a field that has no help, or whose type no flag can carry.
    """
    hints, help_text = typing.get_type_hints(cls), field_help(cls)
    found = []
    for field in dataclasses.fields(cls):
        spec = flag_spec(field)
        if not spec.cli:
            continue
        if field.name not in help_text:
            raise TypeError(f"{cls.__name__}.{field.name} has no string under it, so its flag has no help")
        kind, choices, nargs = _value_form(hints[field.name])
        if spec.off is not None:
            assert kind == "switch", f"{field.name}: only a switch can be switched off"
            assert field.default is True, f"{field.name}: a switch with `off` is on by default"
            kind = "off switch"
        found.append(
            Flag(
                dest=field.name,
                spellings=_spellings(field.name, spec),
                type=kind,
                default=field.default,
                choices=choices,
                nargs=spec.nargs or nargs,
                help=help_text[field.name],
            )
        )
    return tuple(found)


def add_flags(
    parser: argparse.ArgumentParser, cls: type, advice: Mapping[str, Mapping[str, str]] | None = None
) -> None:
    """Add one argument group with a flag for every field of the dataclass ``cls``.

    Args:
        parser: what gets the group.
        cls: the dataclass.
        advice: for a field, what to say of a value that is none of its choices but that people try.
    """
    group = parser.add_argument_group(cls.__name__, (cls.__doc__ or "").split("\n")[0])
    for flag in flags_of(cls):
        options: dict[str, Any] = {"dest": flag.dest, "help": _shown_help(flag)}
        options["default"] = argparse.SUPPRESS if flag.required else flag.default
        if flag.type == "off switch":
            options["action"] = "store_false"
        elif flag.type == "switch":
            options["action"] = argparse.BooleanOptionalAction
        else:
            convert = _converter(flag, (advice or {}).get(flag.dest, {}))
            options |= {"type": convert, "choices": flag.choices, "nargs": flag.nargs}
            options["metavar"] = None if flag.choices else flag.type.upper()
        group.add_argument(*flag.spellings, **options)


def build(cls: type[T], namespace: argparse.Namespace) -> T:
    """Build one dataclass from parsed flags; its own ``__post_init__`` validates it.

    Raises:
        ValueError: if a required flag is missing, or the dataclass refuses a value.
    """
    section: type = cls
    missing = missing_flags(section, namespace)
    if missing:
        raise ValueError(
            f"{', '.join(missing)} missing: give {'it' if len(missing) == 1 else 'them'} a value"
        )
    values = {flag.dest: getattr(namespace, flag.dest) for flag in flags_of(section)}
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def missing_flags(cls: type, namespace: argparse.Namespace) -> list[str]:
    """The spellings of the required flags of ``cls`` that were not given."""
    return [
        flag.spellings[0] for flag in flags_of(cls) if flag.required and not hasattr(namespace, flag.dest)
    ]


def flag_text(cls: type, name: str, value: Any) -> str:
    """How a field's value is said on a command line, such as ``--num-layers 4`` or ``no --swiglu``."""
    (found,) = [one for one in flags_of(cls) if one.dest == name]
    spelling = found.spellings[0]
    if found.type in ("switch", "off switch"):
        return spelling if value == (found.type == "switch") else f"no {spelling}"
    words = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return f"no {spelling}" if words is None else f"{spelling} {words}"


def flag_table(sections: Iterable[type]) -> list[dict[str, Any]]:
    """All flags of some dataclasses as plain values, for documentation and for noticing every change."""
    return [
        {
            "section": cls.__name__,
            "flag": flag.spellings[0],
            "aliases": list(flag.spellings[1:]),
            "type": flag.type,
            "nargs": flag.nargs,
            "default": "required" if flag.required else flag.default,
            "choices": list(flag.choices) if flag.choices else None,
            "help": flag.help,
        }
        for cls in sections
        for flag in flags_of(cls)
    ]


def _spellings(name: str, spec: FlagSpec) -> tuple[str, ...]:
    first = spec.off or spec.spelling or "--" + name.replace("_", "-")
    return (first, *spec.aliases)


def _value_form(hint: Any) -> tuple[str, tuple[Any, ...] | None, str | None]:
    """What one value of a type annotation looks like: (type, choices, nargs)."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        (hint,) = [one for one in inner if one is not type(None)]  # Optional[X] is the only legal union
        return _value_form(hint)
    if origin is Literal:
        return type(inner[0]).__name__, inner, None
    if origin is tuple:
        kind, choices, _ = _value_form(inner[0])
        return kind, choices, "+"
    if hint is bool:
        return "switch", None, None
    if hint in (int, float, str):
        return str(hint.__name__), None, None
    raise TypeError(f"no command-line form for {hint!r}; declare the field with flag(..., cli=False)")


def _shown_help(flag: Flag) -> str:
    text = flag.help.replace("%", "%%")
    if flag.required:
        return f"{text} (required)"
    if flag.default is None or isinstance(flag.default, bool):
        return text
    return f"{text} (default {flag.default})"


def _converter(flag: Flag, advice: Mapping[str, str]) -> Callable[[str], Any]:
    """The function that reads one value of a flag, and says what would be valid if it can't."""

    def convert(text: str) -> Any:
        try:
            value = _TYPES[flag.type](text)
        except ValueError:
            value = None
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            article = "a whole number" if flag.type == "int" else "a finite number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {article}")
        if flag.choices is not None and value not in flag.choices:
            if text in advice:
                raise argparse.ArgumentTypeError(f"{text}: {advice[text]}")
            choices = ", ".join(map(str, flag.choices))
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {choices}")
        return value

    return convert


_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
