"""Cleaning: repaired texts, and no documents that are too short or in another language."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.core.tokenizers.corpus import Chunk
from megatron.core.tokenizers.documents import BadLine
from megatron.corpora.jobs import Job, add_reports, each_line, refuse_bad_lines
from megatron.corpora.json_lines import text_on_line, with_text
from megatron.corpora.output import complete_or_absent
from megatron.corpora.repair import Repair, repair

_BEGINNING: Final = 32
"""Characters for each token that a document must have: of a longer document the beginning is counted
first."""
_SAMPLES: Final = 4
"""Pieces of a document, evenly spread, that its language is judged by."""


class Cleaned(NamedTuple):
    """Some lines after cleaning."""

    lines: bytes
    """Those that are kept."""
    report: dict[str, Any]
    """Counts."""
    bad: list[BadLine]
    """Lines that cannot be used."""


@dataclass(frozen=True)
class Cleaning:
    """Repairs the encoding of each document, then drops it if it is too short or in another language.

    The cheaper filter comes first, and a document that both would drop counts for the first.
    """

    key: str
    """Key of the text."""
    repair: Repair = "encoding"
    """What is repaired."""
    min_tokens: int = 128
    """Tokens, or words without a tokenizer, that a document has at least."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """What counts tokens; without a type, words are counted: what stands between white space."""
    vocab_size: int | None = None
    """For NullTokenizer."""
    languages: tuple[str, ...] = ()
    """ISO 639 codes to keep; none: all."""
    min_language_probability: float = 0.5
    """How likely the kept languages are together, at least."""
    language_characters: int = 500
    """Characters that the language is judged by; 0: all."""
    skip_bad_lines: bool = False
    """Leave out lines that cannot be used."""

    def prepare(self) -> None:
        """Load the language model and the tokenizer.

        Raises:
            ValueError: if a language is not known, or the tokenizer's flags are wrong.
        """
        if self.languages:
            known = _identifier().labels
            unknown = [language for language in self.languages if language not in known]
            if unknown:
                raise ValueError(
                    f"--languages {' '.join(unknown)}: not known; known are {' '.join(sorted(known))}"
                )
        if self.tokenizer.tokenizer_type is not None:
            _tokenizer(self.tokenizer, self.vocab_size)

    def chunk(self, chunk: Chunk) -> Cleaned:
        """Clean some lines."""
        report = _empty_report()
        lines, bad = each_line(chunk, functools.partial(self._clean, report=report))
        report["skipped_bad_lines"] = len(bad)
        return Cleaned(b"".join(line.value for line in lines), report, bad)

    def collect(self, job: Job, results: Iterator[Cleaned]) -> dict[str, Any]:
        """Write what is kept.

        Raises:
            ValueError: at the first line that cannot be used, unless those are to be skipped.
        """
        report = _empty_report()
        with complete_or_absent(job.output) as file:
            for result in results:
                refuse_bad_lines(result.bad, self.skip_bad_lines)
                file.write(result.lines)
                add_reports(report, result.report)
        return report

    def _clean(self, line: bytes, report: dict[str, Any]) -> bytes | None:
        text = text_on_line(line, self.key)
        if text is None:
            return None
        report["documents"] += 1
        repaired = repair(text, self.repair)
        if repaired != text:
            report["repaired"] += 1
        if not self.is_long_enough(repaired):
            report["dropped"]["length"] += 1
            return None
        if self.languages and not self.is_in_language(repaired):
            report["dropped"]["language"] += 1
            return None
        report["kept"] += 1
        if repaired != text:
            report["repaired_and_kept"] += 1
            line = with_text(line, self.key, repaired)
        return line if line.endswith(b"\n") else line + b"\n"

    def is_long_enough(self, text: str) -> bool:
        """Whether a text has ``min_tokens`` tokens or words.

        A tokenizer counts the beginning of a long document first; twice the tokens there are enough.
        """
        if self.tokenizer.tokenizer_type is None:
            return len(text.split(maxsplit=self.min_tokens)) >= self.min_tokens
        tokenizer = _tokenizer(self.tokenizer, self.vocab_size)
        beginning = self.min_tokens * _BEGINNING
        if len(text) > beginning and len(tokenizer.encode(text[:beginning])) >= 2 * self.min_tokens:
            return True
        return len(tokenizer.encode(text)) >= self.min_tokens

    def is_in_language(self, text: str) -> bool:
        """Whether a text is likely enough in one of ``languages``."""
        ranking = _identifier().rank(sample(text, self.language_characters))
        likelihood = sum(probability for language, probability in ranking if language in self.languages)
        return float(likelihood) >= self.min_language_probability


def sample(text: str, characters: int) -> str:
    """Pieces of a text, evenly spread, with about so many characters together, or all of a short text."""
    if not characters or len(text) <= characters:
        return text
    piece = -(-characters // _SAMPLES)
    last = len(text) - piece
    return "\n".join(
        text[start : start + piece] for start in (last * n // (_SAMPLES - 1) for n in range(_SAMPLES))
    )


def _empty_report() -> dict[str, Any]:
    return {
        "documents": 0,
        "kept": 0,
        "repaired": 0,
        "repaired_and_kept": 0,
        "dropped": {"length": 0, "language": 0},
        "skipped_bad_lines": 0,
    }


@functools.cache
def _identifier() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@functools.cache
def _tokenizer(config: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    return build_tokenizer(config, vocab_size)
