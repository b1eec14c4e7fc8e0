"""Texts for the tests of this folder: real English, and strings that are hard to get right."""

import json
import random
from pathlib import Path

CORPUS = Path(__file__).parents[4] / "data" / "moby_dick.jsonl"
CHAPTERS = [json.loads(line)["text"] for line in CORPUS.read_text(encoding="utf-8").splitlines()]

HARD = [
    "", " ", "  ", "\n", "\r\n", "\t \n  x", "a ", " a", "  a  b   ", "a\n\n\nb \n c", "\x00",
    "a\x00b\x1f\x7f", "don't we'll I'VE they'Re it's'd 'tis ''",
    "x1y22z333 1234567890 3.14 1,000,000 ½ ² ٣ Ⅷ",
    "a_b-c/d\\e@f#g", "café cafe\u0301 Å A\u030a ﬁ ＡＢＣ ｶﾞ", "ß ẞ İ ı ǅ ΑΣ ας ſ", "naïve NAÏVE Ångström",
    "\u00a0\u2003\u3000\u2028\u2029\u200b\u200d\u00ad x\u0085",
    "日本語と中文、한국어。 ไทย हिन्दी עברית العربية",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽☃️🦰", "\ufeffa\ufffdb\ufffe\uffff", "e" + "\u0301" * 40, "!" * 70 + "?!" * 40,
    "=" * 129, " " * 131 + "x", "\n" * 67, "a" * 150, "ab" * 200, "ABCabcDEFdef" * 20, "x" * 101, "y" * 100,
    "def f(x):\n    return {'a': [1, 2]}\n\n\tif x != 0 && y<=1: /* c */ // d\r\n",
    '<p class="a">&amp;&#39;</p>', "https://example.org/a?b=c&d=%20#e me@example.org",
    "▁ ▁a <0x0A> ##ing a##b ##", "Ġa Ċ ĉ â Ģ", "\\u0041 \\n \\ud800", "\ud7ff\ue000", "\u202eabc\u202c",
    "\x1c \x1d\x1e\x1f \x0b\x0c", "a\u0300\u0301\u0302 \u0300", "𝔘𝔫𝔦 𐍈 \U0001f9ff \U000e0001",
]  # fmt: skip
MARKERS = [
    "<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>", "<mask>", "<cls>", "<sep>", "[CLS]", "[SEP]", "[MASK]",
    "[PAD]", "[UNK]", "[BOS]", "[EOS]", "<eod>", "<bos>", "<EOD>", "<SPECIAL_7>",
    "<extra_id_0>", "<extra_id_1>",
]  # fmt: skip
"""Names of special tokens, which are ordinary text in a document."""

_PIECES = [
    *HARD, *MARKERS, " ", " ", "\n", "the", "The", " whale", "ship's", "ing", "1851", "Ω", "é", "中",
    "e\u0301", "文字", "ㄱ", "한", "ア", "ﷺ", "\u200d", "\ufe0f", "😀", "👨‍👩‍👧", "🇫🇷",
    "\u0300", "\x00", "\ufeff", "\u2028", "$", "€", "—", "“", "’",
]  # fmt: skip


def real_texts(count):
    """As many pieces of the sample corpus, of a line to a few pages."""
    draw = random.Random(1851)
    texts = []
    while len(texts) < count:
        chapter = draw.choice(CHAPTERS)
        start = draw.randrange(len(chapter))
        texts.append(chapter[start : start + draw.choice((20, 100, 500, 2000))])
    return texts


def nasty_texts(count):
    """As many hard strings: the list above, each marker, and mixtures of all."""
    draw = random.Random(1851)
    texts = [*HARD, *MARKERS, *(f"a{marker}b {marker} {marker}{marker}\n" for marker in MARKERS)]
    while len(texts) < count:
        texts.append("".join(draw.choices(_PIECES, k=draw.randint(1, 12))))
    return texts[:count]


REAL, NASTY = real_texts(1000), nasty_texts(1000)


def first_difference(texts, found, expected):
    """The first text for which two lists of ids differ, with them; None if there is none."""
    assert len(texts) == len(found) == len(expected)
    return next((row for row in zip(texts, found, expected, strict=True) if row[1] != row[2]), None)
