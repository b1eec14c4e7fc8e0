"""How a parser learns of foreign flags, and what becomes of those on a command line."""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from megatron.training.foreign_flags.accepted import ACCEPTED
from megatron.training.foreign_flags.entries import ForeignFlag
from megatron.training.foreign_flags.refused import FAMILIES, REFUSED

_GIVEN: Final = "foreign_flags_given"

FOREIGN_FLAGS: Final[Mapping[str, ForeignFlag]] = {
    foreign.spelling: foreign for foreign in (*ACCEPTED, *REFUSED)
}
"""Every flag that is known to belong to training elsewhere and is not ours, by its spelling."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of the foreign flags on a command line."""

    notes: tuple[str, ...]
    """A line for each that has no effect."""
    refusals: tuple[str, ...]
    """The refused ones, those with the same answer together, and the answer."""


class _Note(argparse.Action):
    """Remember that a foreign flag was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, _GIVEN, [])
        listed = values if isinstance(values, list) else [values]
        setattr(namespace, _GIVEN, [*given, (option_string, listed)])


def add_foreign_flags(
    parser: argparse.ArgumentParser, table: Mapping[str, ForeignFlag] = FOREIGN_FLAGS
) -> None:
    """Let a parser recognise the foreign flags of a table and their values; ``--help`` leaves them out."""
    for foreign in table.values():
        parser.add_argument(
            foreign.spelling,
            dest=_GIVEN,
            nargs=foreign.nargs,
            action=_Note,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def judge_foreign_flags(
    namespace: argparse.Namespace,
    unknown: Iterable[str] = (),
    table: Mapping[str, ForeignFlag] = FOREIGN_FLAGS,
) -> Verdict:
    """What becomes of the foreign flags that a parser with :func:`add_foreign_flags` has met.

    Args:
        namespace: what it parsed.
        unknown: flags of refused families, which it has left over.
        table: the foreign flags that it knows.
    """
    refused: dict[str, list[str]] = {}
    notes: dict[str, str] = {}
    for spelling, values in getattr(namespace, _GIVEN, []):
        foreign = table[spelling]
        if foreign.accepts(values):
            notes[spelling] = foreign.note(values)
        elif spelling not in refused.setdefault(foreign.reason, []):
            refused[foreign.reason].append(spelling)
    for word in unknown:
        name, reason = word.partition("=")[0], family_refusal(word)
        assert reason is not None
        if name not in refused.setdefault(reason, []):
            refused[reason].append(name)
    refusals = (f"{', '.join(flags)}: {reason}" for reason, flags in refused.items())
    return Verdict(tuple(notes.values()), tuple(refusals))


def family_refusal(word: str) -> str | None:
    """What to use instead of a flag that no table lists, but that belongs to a refused family."""
    return next((reason for prefix, reason in FAMILIES.items() if word.startswith(prefix)), None)
