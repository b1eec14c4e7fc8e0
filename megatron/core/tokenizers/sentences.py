"""Text cut into sentences, by rules that need no data files."""

import re
from typing import Final

_BOUNDARY: Final = re.compile(
    r"""
      (?<![.!?…]) (?P<mark>[.!?…]+) ["'”’»)\]]* (?P<space>\s+)  # a full stop, what it closes, white space
    | [。！？]+ [」』”’）]* \s*             # of scripts that put no space between sentences
    | \n[^\S\n]*\n\s*                       # a blank line
    """,
    re.VERBOSE,
)
_OPENING: Final = "\"'“‘«([—–-"
_LONGEST_WORD: Final = 16
_LAST_WORD: Final = re.compile(r"[^\s\"'“‘«(\[—–]*\Z")
_INITIALS: Final = re.compile(r"(?!i\Z)[a-z](\.[a-z])*")
_BEFORE_A_NAME: Final = re.compile(
    "mr|mrs|ms|mme|dr|prof|st|sr|jr|messrs|capt|col|gen|lt|maj|sgt|rev|hon|gov|sen|rep|pres|mt|ft|vs|cf|viz|approx|ca|dept"
)
_BEFORE_A_NUMBER: Final = re.compile(
    "nos?|vols?|figs?|p|pp|ch|chap|sec|art|eqs?|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec"
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, in order, without the white space between them.

    A sentence ends at ``.``, ``!``, ``?`` or ``…`` (with the quotes and brackets that it closes) before white
    space, unless the next word starts in lower case or the mark is the point of an initial or a common
    English abbreviation; at ``。``, ``！`` or ``？``; and at a blank line.
    """
    sentences, start = [], 0
    for found in _BOUNDARY.finditer(text):
        if found["mark"] is None or _ends_sentence(text, start, found):
            sentences.append(text[start : found.end()].strip())
            start = found.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends_sentence(text: str, start: int, found: re.Match[str]) -> bool:
    if found["space"].count("\n") > 1:
        return True
    following = text[found.end() : found.end() + _LONGEST_WORD].lstrip(_OPENING)[:1]
    if following.islower():
        return False
    if found["mark"] != ".":
        return True
    stop = found.start()
    before = _LAST_WORD.search(text, max(start, stop - _LONGEST_WORD), stop)
    assert before is not None
    word = before.group().lower()
    if _INITIALS.fullmatch(word) or _BEFORE_A_NAME.fullmatch(word):
        return False
    return not (following.isdigit() and _BEFORE_A_NUMBER.fullmatch(word))
