"""Turn text (JSON lines) into token files, ``PREFIX_KEY_document.bin`` and ``.idx``, ready for training.

The documents keep the order of the input, whatever ``--workers`` and ``--partitions`` are. The files appear
under their names only when they are complete.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from megatron.core.config import TokenizerConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, best_dtype
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.corpus import input_files, read_chunks
from megatron.core.tokenizers.documents import DocumentEncoder, EncodedChunk
from megatron.core.tokenizers.ordered_pool import OrderedPool, WorkerDiedError
from megatron.training.effects import tokenizer_flags_without_effect
from megatron.training.flags import FlagParser, add_flags, build
from megatron.training.foreign_flags import PREPROCESSING_FLAGS, add_foreign_flags, judge_foreign_flags

MAX_BYTES_IN_FLIGHT = 64 << 20
"""Text that has been read and whose tokens are not written yet."""


@dataclass(frozen=True)
class PreprocessConfig:
    """Text in, token files out."""

    input: tuple[str, ...]
    """JSON-lines files, one object a line, plain or gzip; taken in the order given."""
    output_prefix: str
    """Path of the output files up to _KEY_document.bin and _KEY_document.idx."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the texts; each becomes a dataset of its own."""
    split_sentences: bool = False
    """Make each sentence a sequence of its own; the files are then named _KEY_sentence."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document token."""
    vocab_size: int | None = None
    """Number of ids; NullTokenizer needs it, and others may not have more."""
    skip_bad_lines: bool = False
    """Count and leave out lines that cannot be used, instead of stopping at the first."""
    workers: int | None = None
    """Processes that tokenize; default: one for each CPU that this process may use."""
    partitions: int = 1
    """Accepted as elsewhere; all workers share all of the input, and the output does not depend on it."""
    keep_sequential_samples: bool = False
    """Accepted as elsewhere; the order of the input is always kept."""
    log_interval: int = 1000
    """Documents between two updates of the counts beside the progress bar."""

    def __post_init__(self) -> None:
        for name in ("workers", "partitions", "log_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if len(set(self.json_keys)) != len(self.json_keys):
            raise ValueError(f"--json-keys {' '.join(self.json_keys)}: a key is given twice")

    def output(self, key: str) -> str:
        """Path of the two files of one key, without their suffixes."""
        return f"{self.output_prefix}_{key}_{'sentence' if self.split_sentences else 'document'}"


@dataclass
class Counts:
    """What came of the corpus."""

    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    empty: dict[str, int] = field(default_factory=dict)
    bad_lines: int = 0

    def add(self, key: str, documents: int, tokens: int, empty: int) -> None:
        """Add what one chunk holds under one key."""
        for counts, more in ((self.documents, documents), (self.tokens, tokens), (self.empty, empty)):
            counts[key] = counts.get(key, 0) + more


def write_datasets(
    config: PreprocessConfig, encoded: Iterable[EncodedChunk], dtype: str, progress: "tqdm[NoReturn]"
) -> Counts:
    """Write one dataset for each key; leave none, not even a part of one, if anything goes wrong.

    Raises:
        ValueError: at the first line that cannot be used, unless those are to be skipped, and if nothing but
            empty documents is there.
    """
    counts, shown = Counts(), 0
    with contextlib.ExitStack() as stack:
        builders = {}
        for key in config.json_keys:
            builder = IndexedDatasetBuilder(config.output(key), dtype)
            stack.callback(builder.discard)
            builders[key] = builder
        for chunk in encoded:
            if chunk.bad_lines and not config.skip_bad_lines:
                raise ValueError(f"{chunk.bad_lines[0]}\n(--skip-bad-lines leaves out such lines)")
            counts.bad_lines += len(chunk.bad_lines)
            for (key, builder), part in zip(builders.items(), chunk.documents, strict=True):
                builder.add_many(part.tokens, part.sequence_lengths, part.sequences_per_document)
                counts.add(key, len(part.sequences_per_document), len(part.tokens), part.num_empty)
            progress.update(chunk.bytes_read - progress.n)
            done = max(counts.documents.values())
            if done >= shown + config.log_interval:
                shown = done
                progress.set_postfix(documents=done, tokens=sum(counts.tokens.values()), refresh=False)
        for key in config.json_keys:
            if not counts.documents.get(key):
                raise ValueError(
                    f"--input {' '.join(config.input)}: no document with any text under the key {key!r} "
                    f"({counts.empty.get(key, 0)} empty documents, {counts.bad_lines} unusable lines); "
                    "nothing was written"
                )
        for builder in builders.values():
            builder.finalize()
    return counts


@contextlib.contextmanager
def progress_bar(files: list[Path]) -> Iterator["tqdm[NoReturn]"]:
    """A bar over the bytes of the input; a log file gets a line of it twice a minute."""
    tqdm.monitor_interval = 0  # no thread of tqdm's beside the forked workers
    size = sum(path.stat().st_size for path in files)
    interval = 0.2 if sys.stderr.isatty() else 30.0
    with tqdm(total=size, unit="B", unit_scale=True, mininterval=interval, desc="tokenizing") as bar:
        yield bar


def report(config: PreprocessConfig, counts: Counts, seconds: float) -> None:
    """Print what was written and what was left out."""
    for key in config.json_keys:
        documents, tokens = counts.documents[key], counts.tokens[key]
        print(f"{config.output(key)}.bin and .idx: {documents} documents, {tokens} tokens")
        if counts.empty[key]:
            print(f"skipped {counts.empty[key]} empty documents under the key {key!r}")
    if counts.bad_lines:
        print(f"skipped {counts.bad_lines} unusable lines")
    print(f"took {seconds:.1f} s, {sum(counts.tokens.values()) / max(seconds, 1e-9):.0f} tokens/s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; 0 means that every output file is there."""
    parser = FlagParser(prog="preprocess_data.py", description=__doc__)
    for section in (PreprocessConfig, TokenizerConfig):
        add_flags(parser, section)
    add_foreign_flags(parser, PREPROCESSING_FLAGS)
    namespace = parser.parse_args(arguments)
    verdict = judge_foreign_flags(namespace, table=PREPROCESSING_FLAGS)
    if verdict.refusals:
        parser.error("; ".join(verdict.refusals))
    try:
        config = build(PreprocessConfig, namespace)
        files = input_files(config.input)
        tokenizer_config = build(TokenizerConfig, namespace)
        tokenizer = build_tokenizer(tokenizer_config, config.vocab_size)
        if config.append_eod:
            _ = tokenizer.eod  # if there is none, this says so
    except ValueError as error:
        parser.error(str(error))
    for note in (*verdict.notes, *tokenizer_flags_without_effect(tokenizer_config)):
        print(note, file=sys.stderr)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is one thread
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # unwinds, so nothing is left behind
    dtype = best_dtype(tokenizer.vocab_size)
    encode = DocumentEncoder(tokenizer, config.json_keys, dtype, config.append_eod, config.split_sentences)
    start = time.perf_counter()
    try:
        Path(config.output_prefix).parent.mkdir(parents=True, exist_ok=True)
        with (
            OrderedPool(encode, config.workers or len(os.sched_getaffinity(0))) as pool,
            progress_bar(files) as progress,
        ):
            encoded = pool.map(read_chunks(files), lambda chunk: chunk.num_bytes, MAX_BYTES_IN_FLIGHT)
            counts = write_datasets(config, encoded, dtype.str, progress)
    except (ValueError, OSError, WorkerDiedError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; nothing was written", file=sys.stderr)
        return 128 + signal.SIGINT
    report(config, counts, time.perf_counter() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
