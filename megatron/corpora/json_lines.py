"""One document a line: its text, and the same line with another text in it."""

import json

import orjson

from megatron.core.tokenizers.corpus import texts_on_line


def text_on_line(line: bytes, key: str) -> str | None:
    """The text under a key of one line.

    Args:
        line: one JSON object, in UTF-8.
        key: the value of ``--json-key``.

    Returns:
        The text; None for a line of white space.

    Raises:
        ValueError: saying why the line cannot be used; the caller knows the file and the line number.
    """
    try:
        text = orjson.loads(line)[key]
        if isinstance(text, str):
            return text
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        pass  # what is wrong, if anything is, the slower reader says
    texts = texts_on_line(line, (key,))
    if texts is None:
        return None
    if len(texts[0]) != 1 or not _is_string(line, key):
        raise ValueError(f"key {key!r} holds an array, but one string a document is wanted")
    return texts[0][0]


def _is_string(line: bytes, key: str) -> bool:
    return isinstance(json.loads(line)[key], str)


def with_text(line: bytes, key: str, text: str) -> bytes:
    """A line with another text under ``key`` and every other byte as it is.

    Args:
        line: a line that :func:`text_on_line` takes.
        key: where the text is; of a key that occurs twice the last counts, as for every reader of JSON.
        text: what to put there. A line that spells all characters in ASCII stays such a line.
    """
    source = line.decode()
    decoder = json.JSONDecoder()
    found = (-1, -1)
    place = _skip_space(source, source.index("{") + 1)
    while source[place] != "}":
        name, place = decoder.raw_decode(source, place)
        start = _skip_space(source, _skip_space(source, place) + 1)  # past the colon
        _, end = decoder.raw_decode(source, start)
        if name == key:
            found = (start, end)
        place = _skip_space(source, end)
        if source[place] == ",":
            place = _skip_space(source, place + 1)
    literal = json.dumps(text, ensure_ascii=source.isascii())
    return (source[: found[0]] + literal + source[found[1] :]).encode()


def _skip_space(source: str, place: int) -> int:
    while source[place] in " \t\n\r":
        place += 1
    return place
