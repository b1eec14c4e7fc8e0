"""The text of ``--pipeline-model-parallel-layout``: what each part of the model holds.

The syntax is Megatron-LM's. ``E`` are the embeddings, ``t`` is a layer, ``L`` are the output layer and the
loss, and ``|`` ends a part. ``x*n`` repeats a letter, ``(...)*n`` a group; commas and blanks mean nothing.
Parts are in the order of the model: for interleaved chunks, the first chunk of each stage, then the second
of each, and so on.
"""

import re

FLAG = "--pipeline-model-parallel-layout"

_REPEATED = re.compile(r"(?:\(([^()]*)\)|([EtmL|]))\*(\d{1,7})(?![\d*])")
_GROUP = re.compile(r"\(([^()]*)\)(?!\*)")
_MOST_LETTERS = 1_000_000
"""A longer layout is a slip of the pen; it would fill the memory."""


def layout_parts(layout: str) -> int:
    """How many parts a layout has.

    Raises:
        ValueError: if the layout can't be read.
    """
    return _expand(layout).count("|") + 1


def read_layout(layout: str, num_layers: int, parts: int) -> list[int]:
    """The number of layers of each part.

    Args:
        layout: such as ``"Et*3|(tt|)*2tL"``.
        num_layers: layers of the whole model.
        parts: parts of the model: stages, or chunks of all stages.

    Raises:
        ValueError: if the layout can't be read, or isn't one of the model's.
    """
    letters = _expand(layout)
    found = letters.split("|")
    if len(found) != parts:
        raise ValueError(f"{FLAG} {layout!r} has {len(found)} parts, but the stages have {parts}")
    if "m" in letters:
        raise ValueError(f"{FLAG} {layout!r}: multi-token prediction (m) is not supported")
    for letter, what, place in (("E", "embeddings", "first"), ("L", "loss", "last")):
        if letters.count(letter) != 1:
            raise ValueError(f"{FLAG} {layout!r} has {letter} {letters.count(letter)} times: give it once")
        end = letters[0] if letter == "E" else letters[-1]
        if end != letter:
            raise ValueError(f"{FLAG} {layout!r}: {letter}, the {what}, must come {place}")
    if (count := letters.count("t")) != num_layers:
        raise ValueError(f"{FLAG} {layout!r} has {count} layers (t), but --num-layers is {num_layers}")
    return [part.count("t") for part in found]


def _expand(layout: str) -> str:
    """The layout with everything written out: only E, t, m, L and | are left."""
    before, text = "", re.sub(r"[\s,]", "", layout)
    while text != before and len(text) <= _MOST_LETTERS:
        before = text
        text = _GROUP.sub(r"\1", _REPEATED.sub(_repeat, text))
    if len(text) > _MOST_LETTERS:
        raise ValueError(f"{FLAG} {layout!r} is longer than {_MOST_LETTERS} letters when written out")
    if bad := re.search("[^EtmL|]", text):
        raise ValueError(
            f"{FLAG} {layout!r}: can't make sense of {bad[0]!r}; it takes E (embeddings), t (a layer), "
            f"L (loss), | (end of a part), and n times with x*n or (...)*n"
        )
    return text


def _repeat(found: re.Match[str]) -> str:
    group, letter, times = found.groups()
    item = letter or group
    return str(item * min(int(times), _MOST_LETTERS // max(len(item), 1) + 1))
