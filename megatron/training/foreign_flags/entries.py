"""What the tables of foreign flags are made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
"""What saves memory for activations here."""


@dataclass(frozen=True)
class ForeignFlag:
    """One flag that is not ours."""

    spelling: str
    """The flag as people type it."""
    nargs: str | int | None
    """argparse's ``nargs``; 0 for a switch."""
    accepted: bool
    """Whether a run starts with it."""
    reason: str
    """Why it has no meaning here, or what to use instead."""
    harmless_values: tuple[str, ...] = ()
    """Values with which a refused flag asks for nothing, so that it is accepted after all."""

    def accepts(self, values: Sequence[str]) -> bool:
        """Whether a run starts with the flag given these values."""
        return self.accepted or (bool(values) and all(value in self.harmless_values for value in values))

    def note(self, values: Sequence[str]) -> str:
        """The line that a run says when it starts with the flag given these values."""
        if self.accepted:
            return f"{self.spelling} has no meaning here: {self.reason}"
        return f"{self.spelling} {' '.join(values)} has no meaning here: it asks for what is always so"


def _group(
    accepted: bool, reason: str, *, switches: str = "", valued: str = "", listed: str = "", harmless: str = ""
) -> Iterator[ForeignFlag]:
    """Flags that share a reason: those without, with one and with several values, separated by spaces."""
    kinds: tuple[tuple[str, str | int | None], ...] = ((switches, 0), (valued, None), (listed, "*"))
    for spellings, nargs in kinds:
        for spelling in spellings.split():
            yield ForeignFlag(spelling, nargs, accepted, reason, tuple(harmless.split()))


def accepted(reason: str, *, switches: str = "", valued: str = "", listed: str = "") -> Iterator[ForeignFlag]:
    """Flags that are without effect, because ``reason``."""
    return _group(True, reason, switches=switches, valued=valued, listed=listed)


def refused(
    reason: str, *, switches: str = "", valued: str = "", listed: str = "", harmless: str = ""
) -> Iterator[ForeignFlag]:
    """Flags that a run does not start with, unless all their values are ``harmless``; what to use instead."""
    return _group(False, reason, switches=switches, valued=valued, listed=listed, harmless=harmless)
