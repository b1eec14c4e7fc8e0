"""Repair of text whose bytes were once read in the wrong encoding, by ftfy."""

import re
from typing import Final, Literal

from ftfy import TextFixerConfig, fix_text
from ftfy.badness import is_bad
from ftfy.chardata import CONTROL_CHARS

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
_REMOVED: Final = "".join(re.escape(chr(code)) for code in CONTROL_CHARS)
_ODD: Final = re.compile(rf"[{_REMOVED}\x80-\x9f\ud800-\udfff]|(?:\A|\n)[ÃÂ] ")
"""What ftfy changes beyond mojibake: control characters, half surrogates; and the one kind of mojibake that
it knows by its place at the beginning of a line."""
_NOT_ASCII: Final = re.compile(r"[^\x00-\x7f]+")
_AROUND: Final = 8
"""Characters beside those that are not ASCII which may be part of mojibake: ftfy's patterns are shorter."""


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
    return text if looks_sound(text) else fix_text(text, _ENCODING_ONLY)


def looks_sound(text: str) -> bool:
    """Whether ftfy would leave a text as it is, seen from what is around its characters beyond ASCII.

    ftfy asks the same of every character, which is what takes its time. True is sure, False is not.
    """
    if _ODD.search(text):
        return False
    places = (match.span() for match in _NOT_ASCII.finditer(text))
    windows = (text[max(start - _AROUND, 0) : end + _AROUND] for start, end in places)
    return not is_bad("\n".join(windows))
