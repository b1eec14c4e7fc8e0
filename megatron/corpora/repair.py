"""Repair of text whose bytes were once read in the wrong encoding, by ftfy."""

import re
from typing import Final, Literal

from ftfy import TextFixerConfig, fix_text

Repair = Literal["encoding", "full", "none"]

_ENCODING_ONLY: Final = TextFixerConfig(
    unescape_html=False,
    fix_latin_ligatures=False,
    fix_character_width=False,
    uncurl_quotes=False,
    fix_line_breaks=False,
    normalization=None,
    explain=False,
)
_FULL: Final = TextFixerConfig(explain=False)
_ODD_ASCII: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def repair(text: str, kind: Repair) -> str:
    """A text with its encoding repaired.

    Args:
        text: any text.
        kind: ``encoding`` undoes wrong decodings (``schÃ¶n`` becomes ``schön``) and takes out control
            characters and terminal escapes; ``full`` is all that ftfy does by default, which also makes curly
            quotes straight, resolves HTML entities and ligatures, and normalizes to NFC; ``none`` changes
            nothing.
    """
    if kind == "none":
        return text
    if kind == "full":
        return fix_text(text, _FULL)
    if text.isascii():
        return fix_text(text, _ENCODING_ONLY) if _ODD_ASCII.search(text) else text
    # ftfy goes line by line itself; a line of plain ASCII has nothing to repair, and most lines are such.
    return "".join(
        line if line.isascii() and not _ODD_ASCII.search(line) else fix_text(line, _ENCODING_ONLY)
        for line in _lines(text)
    )


def _lines(text: str) -> list[str]:
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + parts[-1:]
