"""NLTK's sentence splitter, for those who have the package and its data; never downloaded."""

import importlib
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

_LANGUAGE_DATA = "tokenizers/punkt_tab"


def punkt_splitter(language: str, keep_white_space: bool) -> Callable[[str], list[str]]:
    """A function that gives the sentences of a text as NLTK's Punkt model for a language tells them apart.

    Args:
        language: name of the model, such as ``english``.
        keep_white_space: leave the white space after a sentence in it.

    Raises:
        ValueError: if the package, or its data for the language, is missing or cannot be used, and how to get
            it without a network.
    """
    if importlib.util.find_spec("nltk") is None:
        raise ValueError(
            "the package nltk is not installed: pip install nltk, and put its data punkt_tab into a folder "
            "that NLTK_DATA names; or use --sentence-splitter builtin, which needs neither"
        )
    try:
        nltk_data: Any = importlib.import_module("nltk.data")
        punkt: Any = importlib.import_module("nltk.tokenize.punkt")
        nltk_data.find(f"{_LANGUAGE_DATA}/{language}/")
        tokenizer = punkt.PunktTokenizer(language)
    except (LookupError, OSError, ImportError, AttributeError) as error:
        reason = "" if isinstance(error, LookupError) else f" ({error})"
        raise ValueError(
            f"NLTK's data punkt_tab for {language} cannot be used{reason}: fetch punkt_tab.zip from the NLTK "
            "data pages where there is a network, unpack it into FOLDER/tokenizers and set NLTK_DATA=FOLDER; "
            "or use --sentence-splitter builtin, which needs neither"
        ) from None

    def split(text: str) -> list[str]:
        spans = list(tokenizer.span_tokenize(text))
        if not keep_white_space:
            return [text[start:stop] for start, stop in spans]
        starts = [0, *(start for start, _ in spans[1:]), len(text)]
        return [text[start:stop] for start, stop in itertools.pairwise(starts)]

    return split
