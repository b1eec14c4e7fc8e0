"""Text cut into sentences: by rules that need no data files, or by NLTK where that is asked for."""

import functools
import re
from collections.abc import Callable
from typing import Final, Literal

from megatron.core.tokenizers.punkt import punkt_splitter

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


def split_sentences(text: str, keep_white_space: bool = False) -> list[str]:
    """The sentences of a text, in order.

    A sentence ends at ``.``, ``!``, ``?`` or ``…`` (with the quotes and brackets that it closes) before white
    space, unless the next word starts in lower case or the mark is the point of an initial or a common
    English abbreviation; at ``。``, ``！`` or ``？``; and at a blank line.

    Args:
        text: any text.
        keep_white_space: leave the white space after a sentence (and before the first) in it, so that the
            sentences put together are the text. Without it there is none around any sentence.
    """
    pieces, start = [], 0
    for found in _BOUNDARY.finditer(text):
        if found["mark"] is None or _ends_sentence(text, start, found):
            pieces.append(text[start : found.end()])
            start = found.end()
    pieces.append(text[start:])
    if not keep_white_space:
        pieces = [piece.strip() for piece in pieces]
    return [piece for piece in pieces if piece]


def sentence_splitter(
    kind: Literal["builtin", "nltk", "auto"], language: str, keep_white_space: bool
) -> tuple[Callable[[str], list[str]], str]:
    """What splits texts into sentences; nothing is ever downloaded.

    Args:
        kind: ``builtin`` is :func:`split_sentences`, ``nltk`` the Punkt model of the NLTK package, which must
            be installed with its data, and ``auto`` NLTK's where it is there and otherwise the built-in one.
        language: for NLTK the name of one of its models; the built-in rules know English.
        keep_white_space: leave white space between sentences at the end of the first.

    Returns:
        The splitter, and a line that says which it is.

    Raises:
        ValueError: if what is asked for is not there, saying what is missing.
    """
    if kind != "builtin":
        try:
            return punkt_splitter(
                language, keep_white_space
            ), f"splitting sentences with NLTK's {language} model"
        except ValueError as error:
            if kind == "nltk":
                raise
            missing = f" ({error})"
    else:
        missing = ""
    if language != "english":
        raise ValueError(
            f"--lang {language}: the built-in splitter knows the abbreviations of English only; other "
            f"languages need --sentence-splitter nltk{missing}"
        )
    split = functools.partial(split_sentences, keep_white_space=keep_white_space)
    return split, f"splitting sentences with the built-in rules{missing}"


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
