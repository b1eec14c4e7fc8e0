"""Clean a corpus: repair wrongly decoded text, drop documents that are too short or in another language.

The order of the input is kept. A document that passes unchanged is copied byte for byte; of a repaired one
only the text changes. Tokens are counted by the tokenizer that is given, or else words: what stands between
white space.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.config import TokenizerConfig
from megatron.corpora.cleaning import Cleaning
from megatron.corpora.running import (
    InputConfig,
    OutputConfig,
    RunConfig,
    run_jobs,
    show,
    unwind_when_terminated,
)
from megatron.training.console import run_as_program
from megatron.training.effects import settle_tokenizer
from megatron.training.flags import FlagParser, add_flags, build


@dataclass(frozen=True)
class CleanConfig:
    """What is repaired and what is dropped."""

    repair: Literal["encoding", "full", "none"] = "encoding"
    """Undo wrong decodings and take out control characters; or all that ftfy does, which makes curly quotes
    straight and resolves HTML entities too; or nothing."""
    min_tokens: int = 128
    """Drop documents with fewer tokens, or fewer words without a tokenizer; 0 keeps all."""
    languages: tuple[str, ...] = ()
    """Keep documents in these languages only (ISO 639 codes, such as en); default: all."""
    min_language_probability: float = 0.5
    """How likely the kept languages are together, at least, for a document that is kept."""
    language_characters: int = 500
    """Characters of a document that its language is judged by, in pieces spread over it; 0: all."""
    vocab_size: int | None = None
    """Number of ids, for NullTokenizer."""
    report: str | None = None
    """File for the report, in JSON; it is printed too."""

    def __post_init__(self) -> None:
        for name in ("min_tokens", "language_characters"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")
        if not 0 <= self.min_language_probability <= 1:
            raise ValueError(
                f"--min-language-probability {self.min_language_probability}: must lie between 0 and 1"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool."""
    parser = FlagParser(prog="clean_corpus.py", description=__doc__)
    for section in (InputConfig, OutputConfig, CleanConfig, TokenizerConfig, RunConfig):
        add_flags(parser, section)
    namespace = parser.parse_args(arguments)
    for note in settle_tokenizer(namespace):
        print(note, file=sys.stderr)
    try:
        corpus, config, run = (build(cls, namespace) for cls in (InputConfig, CleanConfig, RunConfig))
        cleaning = Cleaning(
            key=corpus.json_key,
            repair=config.repair,
            min_tokens=config.min_tokens,
            tokenizer=build(TokenizerConfig, namespace),
            vocab_size=config.vocab_size,
            languages=config.languages,
            min_language_probability=config.min_language_probability,
            language_characters=config.language_characters,
            skip_bad_lines=corpus.skip_bad_lines,
        )
        jobs = build(OutputConfig, namespace).jobs(corpus.files(), run.share)
        cleaning.prepare()
    except ValueError as error:
        parser.error(str(error))
    unwind_when_terminated()
    report = run_jobs(run, cleaning, jobs, "cleaning")
    unit = "words" if cleaning.tokenizer.tokenizer_type is None else "tokens"
    settings = {**asdict(config), "length_counted_in": unit, "shard": run.shard}
    show({**report, "settings": settings}, config.report)


if __name__ == "__main__":
    run_as_program(main)
