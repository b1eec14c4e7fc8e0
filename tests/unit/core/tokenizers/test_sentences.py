"""Where sentences end, in cases decided by hand."""

import time

import pytest

from megatron.core.tokenizers.sentences import split_sentences
from tests.unit.core.tokenizers.texts import CHAPTERS


@pytest.mark.parametrize("sentences", [
    ["Call me Ishmael.", "Some years ago I went to sea."],
    ["“Stop!”", "“Why?” he asked.", "(He knew.)", "So it was…", "Then nothing"],
    ["Mr. Starbuck met Dr. A. B. Smith of St. Elmo at 5 p.m. and left.", "So did I.", "It rained."],
    ["See No. 5, vol. 3 and Fig. 12.", "He said no.", "Then he left."],
    ["It costs 3.50 dollars, i.e. little.", "Version 2.0 is out.", "There were 12.", "Then 13."],
    ["CHAPTER 1.", "Loomings."],
    ["这是一句话。", "第二句！", "真的吗？"],
    ["A heading", "Its text goes on\nover a line end.", "And ends."],
])  # fmt: skip
def test_sentences(sentences):
    glue = "" if sentences[0].endswith("。") else " "
    text = glue.join(sentences).replace("A heading Its", "A heading\n \n Its")
    assert split_sentences(f" {text}\n") == sentences


def test_nothing_but_white_space_is_lost():
    for text in CHAPTERS[:10]:
        sentences = split_sentences(text)
        assert "".join("".join(sentences).split()) == "".join(text.split())
        assert len(sentences) > 10
    assert split_sentences(" \n\n ") == []


@pytest.mark.parametrize("piece", [".", " ", "\n", "\n ", "a.", '."', "。", "A. "])
def test_time_grows_with_the_length_only(piece):
    start = time.process_time()
    split_sentences(piece * 100_000)
    assert time.process_time() - start < 3
