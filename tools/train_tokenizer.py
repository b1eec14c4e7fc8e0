"""Train a byte-level BPE tokenizer on the texts of JSON-lines files."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.tokenizers.corpus import input_files, read_chunks, texts_on_line
from megatron.core.tokenizers.training import save_tokenizer, train_byte_level_bpe
from megatron.training.console import INTERRUPTED
from megatron.training.flags import FlagParser, add_flags, build


@dataclass(frozen=True)
class TrainTokenizerConfig:
    """Text in, tokenizer out."""

    input: tuple[str, ...]
    """JSON-lines files, one object a line, plain or gzip."""
    vocab_size: int
    """Entries of the vocabulary, the 256 bytes and <|endoftext|> among them."""
    output: str
    """Folder for tokenizer.json, tokenizer_config.json, vocab.json and merges.txt."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the texts to train on."""


def texts_in(files: Sequence[Path], keys: Sequence[str]) -> Iterator[str]:
    """Every text under the keys, in order.

    Raises:
        ValueError: at the first line that cannot be used, naming it.
    """
    for chunk in read_chunks(files):
        for number, line in enumerate(chunk.lines, start=chunk.first_line):
            try:
                texts = texts_on_line(line, keys)
            except ValueError as error:
                raise ValueError(f"{chunk.path}:{number}: {error}") from None
            for of_key in texts or ():
                yield from of_key


def main() -> int:
    """Run the tool; 0 means that the tokenizer is there."""
    parser = FlagParser(prog="train_tokenizer.py", description=__doc__)
    add_flags(parser, TrainTokenizerConfig)
    namespace = parser.parse_args()
    try:
        config = build(TrainTokenizerConfig, namespace)
        texts = texts_in(input_files(config.input), config.json_keys)
        tokenizer = train_byte_level_bpe(texts, config.vocab_size, show_progress=sys.stderr.isatty())
        files = save_tokenizer(tokenizer, Path(config.output))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    size = tokenizer.get_vocab_size()
    short = (
        f" ({config.vocab_size} asked for, but the texts hold no more)" if size < config.vocab_size else ""
    )
    print(f"{size} tokens{short}: {', '.join(map(str, files))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
