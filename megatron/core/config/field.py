"""How a config field says what its type cannot: another spelling of its flag, a closed set of values."""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FlagSpec:
    """How one field appears on the command line, beyond what its name, type and default say."""

    off: str | None = None
    """For a field that is on by default: the flag that switches it off (no second negation is made)."""
    aliases: tuple[str, ...] = ()
    """Other spellings of the flag."""
    spelling: str | None = None
    """The flag's spelling where it is not ``--`` and the field's name with hyphens."""
    cli: bool = True
    """False for a field that has no flag: a derived value."""
    nargs: str | None = None
    """argparse's ``nargs`` where it isn't the one the type implies."""


def flag(default: Any = dataclasses.MISSING, **spec: Any) -> Any:
    """A dataclass field whose flag needs a :class:`FlagSpec`; the keywords are that class's fields."""
    return dataclasses.field(default=default, metadata={"flag": FlagSpec(**spec)})


def flag_spec(field: "dataclasses.Field[Any]") -> FlagSpec:
    """The :class:`FlagSpec` of a field: the one it was declared with, or the plain one."""
    spec = field.metadata.get("flag", FlagSpec())
    assert isinstance(spec, FlagSpec)
    return spec
