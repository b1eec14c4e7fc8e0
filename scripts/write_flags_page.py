#!/usr/bin/env python3
"""Write docs/flags.md anew from the config dataclasses and the table of foreign flags.

python scripts/write_flags_page.py
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.training.arguments import flag_sections
from megatron.training.flags import Flag, flags_of
from megatron.training.foreign_flags import FAMILIES, FOREIGN_FLAGS, FOREIGN_VALUES, ForeignFlag

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"

INTRODUCTION = """\
# Flags

<!-- Written by scripts/write_flags_page.py; a test checks that it is current. -->

Every flag of `pretrain_gpt.py`. `python pretrain_gpt.py --help` says the same.

- Flags are written out in full. An abbreviated or unknown flag is refused, with the nearest valid one.
- A flag without a value is a switch, off unless you give it. `--x` also has `--no-x`, and the last one
  counts. A switch that itself begins with `--no-` or `--disable-` has no second negation.
- `@FILE` puts the flags of a file in its place. Lines may hold several flags; `#` begins a comment.
- A flag that has no effect beside the others, such as `--rotary-base` without rotary positions, costs one
  line in the log.
- Names are those of Megatron-LM. Flags of Megatron-LM and its relatives that are not ours come
  [after the tables](#flags-of-other-systems), as far as launch scripts are known to use them: each is
  accepted with one line that says why it has no meaning here, or refused with what to use instead.
"""

FOREIGN = """\
## Flags of other systems

Launch scripts written for Megatron-LM and its relatives should work, or say why not. A foreign flag is
accepted only where ignoring it can neither change the numbers of a run nor lose something that its user
counts on. One that is in no table here is refused as unknown.
"""


def _code(text: str) -> str:
    return f"`{text}`"


def _flag_cell(flag: Flag) -> str:
    """The flag with a placeholder for its value, then its other spellings."""
    value = {"int": " N", "float": " X", "str": " TEXT"}.get(flag.type, "")
    if flag.choices:
        value = " {" + ",".join(map(str, flag.choices)) + "}"
    if flag.nargs:
        value += " ..."
    return ", ".join(map(_code, [flag.spellings[0] + value, *flag.spellings[1:]]))


def _default_cell(flag: Flag) -> str:
    if flag.required:
        return "**required**"
    if flag.type in ("switch", "off switch") or flag.default is None or flag.default == ():
        return ""
    return _code(str(flag.default))


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(header)
    yield f"| {' | '.join(names)} |"
    yield f"| {' | '.join('---' for _ in names)} |"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _own_flags() -> Iterator[str]:
    for section in flag_sections():
        yield f"## {(section.__doc__ or '').splitlines()[0].rstrip('.')}"
        yield ""
        rows = ((_flag_cell(flag), _default_cell(flag), flag.help) for flag in flags_of(section))
        yield from _table(("flag", "default", "meaning"), rows)


def _by_reason(flags: Iterable[ForeignFlag]) -> Iterator[tuple[str, str]]:
    """The flags that share an answer, and the answer; in the order of the table in the code."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for foreign in flags:
        groups.setdefault((foreign.reason, foreign.harmless_values), []).append(foreign.spelling)
    for (reason, harmless), spellings in groups.items():
        values = " or ".join(map(_code, harmless))
        yield ", ".join(map(_code, spellings)), reason + (f" (accepted with {values})" if harmless else "")


def _foreign_flags() -> Iterator[str]:
    yield FOREIGN
    for accepted, title in ((True, "Accepted, without effect"), (False, "Refused")):
        yield f"### {title}"
        yield ""
        chosen = (foreign for foreign in FOREIGN_FLAGS.values() if foreign.accepted == accepted)
        yield from _table(("flags", "why" if accepted else "what to do"), _by_reason(chosen))
    yield "### Families that are refused, whatever flags they have"
    yield ""
    yield from _table(
        ("flags", "what to do"), ((_code(f"{start}…"), answer) for start, answer in FAMILIES.items())
    )
    yield "### Values of our own flags that other systems know"
    yield ""
    spelling = {flag.dest: flag.spellings[0] for section in flag_sections() for flag in flags_of(section)}
    rows = (
        (_code(f"{spelling[name]} {value}"), answer)
        for name, values in FOREIGN_VALUES.items()
        for value, answer in values.items()
    )
    yield from _table(("flag and value", "what to do"), rows)


def render() -> str:
    """The text of the page."""
    return "\n".join([INTRODUCTION, *_own_flags(), *_foreign_flags()]).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
