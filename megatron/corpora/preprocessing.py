"""From a corpus to token files: the work of ``tools/preprocess_data.py``."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from megatron.core.datasets.indexed_dataset import best_dtype
from megatron.core.datasets.parts import PartedWriter
from megatron.core.tokenizers import Tokenizer
from megatron.core.tokenizers.blocks import Stretch, plan_parts, read_parts
from megatron.core.tokenizers.documents import DocumentEncoder, EncodedBlock, sample_texts
from megatron.core.tokenizers.fast_encoder import BatchEncoder, ReferenceEncoder, choose_encoder
from megatron.core.tokenizers.ordered_pool import OrderedPool
from megatron.core.tokenizers.sentences import sentence_splitter

MAX_BYTES_IN_FLIGHT: Final = 64 << 20
"""Text that has been read and whose tokens are not written yet."""
PART_BYTES: Final = 4 << 30
"""Input, as it lies on disk, for which one more part is made where ``--partitions`` is not given."""


@dataclass(frozen=True)
class PreprocessConfig:
    """Text in, token files out."""

    input: tuple[str, ...]
    """Files or patterns, in order: JSON lines, one object a line, plain, gzip, zstd or bzip2; or parquet."""
    output_prefix: str
    """Path of the output files up to _KEY_document.bin and _KEY_document.idx."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys (of parquet, columns) of the texts; each becomes a dataset of its own."""
    split_sentences: bool = False
    """Make each sentence a sequence of its own; the files are then named _KEY_sentence."""
    sentence_splitter: Literal["builtin", "nltk", "auto"] = "builtin"
    """What splits: rules that need no data; NLTK's Punkt; or NLTK's where the package and its data are
    there."""
    lang: str = "english"
    """Language for splitting sentences; the built-in rules know English."""
    keep_newlines: bool = False
    """Keep the white space after a sentence in it."""
    encoder: Literal["fastest", "own"] = "fastest"
    """What makes ids: gigatoken where its ids are the tokenizer's, or always the tokenizer's own library."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document token."""
    vocab_size: int | None = None
    """Number of ids; NullTokenizer needs it, and others may not have more."""
    skip_bad_lines: bool = False
    """Count and leave out lines that cannot be used, instead of stopping at the first."""
    workers: int | None = None
    """Processes that tokenize; default: one for each CPU that this process may use."""
    partitions: int | None = None
    """Parts of the input; those that a crash finds finished are kept for --resume. Default: one a 4 GiB."""
    keep_sequential_samples: bool = False
    """Accepted as elsewhere; the order of the input is always kept."""
    resume: bool = False
    """Go on from the parts that an earlier run of the same input and flags has finished."""
    log_interval: int = 1000
    """Documents between two updates of the counts beside the progress bar."""

    def __post_init__(self) -> None:
        for name in ("workers", "partitions", "log_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.output_prefix.endswith("/"):
            raise ValueError(
                f"--output-prefix {self.output_prefix}: names a folder; give the beginning of the file names "
                f"in it, such as {self.output_prefix}corpus"
            )
        if len(set(self.json_keys)) != len(self.json_keys):
            raise ValueError(f"--json-keys {' '.join(self.json_keys)}: a key is given twice")

    def output(self, key: str) -> str:
        """Path of the two files of one key, without their suffixes."""
        return f"{self.output_prefix}_{key}_{'sentence' if self.split_sentences else 'document'}"


class EncoderDiffersError(Exception):
    """The fast encoder was found to give other ids than the tokenizer."""


class Preprocessing:
    """One corpus on its way to its datasets.

    Args:
        config: what to do.
        tokenizer: where ids come from.
        files: the input.

    Attributes:
        size: bytes of input on disk.
        counts: what has come of the input so far: ``documents KEY``, ``tokens KEY`` and ``empty KEY`` for
            each key, and ``bad lines``.
        first_bad_line: the first line that was skipped.
        kept_parts: how many finished parts an unfinished run has left behind.

    Raises:
        ValueError: if the input, or what is to split sentences, cannot be used.
    """

    def __init__(self, config: PreprocessConfig, tokenizer: Tokenizer, files: Sequence[Path]) -> None:
        self._config, self._tokenizer, self._files = config, tokenizer, list(files)
        self._split, self._notes = None, list[str]()
        if config.split_sentences:
            self._split, note = sentence_splitter(config.sentence_splitter, config.lang, config.keep_newlines)
            self._notes.append(note)
        self._stats = self._state_of_files()
        self.size = sum(size for size, _ in self._stats)
        self._num_parts = config.partitions or max(1, -(-self.size // PART_BYTES))
        planned = enumerate(plan_parts(files, self._num_parts))
        self._parts: dict[int, list[Stretch]] = {part: found for part, found in planned if found}
        self._workers = config.workers or len(os.sched_getaffinity(0))
        self.counts: Counter[str] = Counter()
        self.first_bad_line: str | None = None
        self.kept_parts = 0
        self._reports: dict[int, Counter[str]] = {}
        self._advanced = 0
        self._began_anew = False

    def _state_of_files(self) -> list[tuple[int, int]]:
        return [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, self._files)]

    def identity(self) -> dict[str, Any]:
        """JSON values that are equal only where the parts of two runs are."""
        flags = ("json_keys", "split_sentences", "lang", "keep_newlines", "append_eod")
        files = zip(map(os.path.abspath, self._files), self._stats, strict=True)
        return {
            "input": [{"file": file, "size": stat[0], "changed": stat[1]} for file, stat in files],
            **{f"--{name.replace('_', '-')}": getattr(self._config, name) for name in flags},
            "sentences": self._notes,
            "number of parts": self._num_parts,
            "tokenizer": self._tokenizer.identity,
        }

    def run(self, advance: Callable[[int], None], note: Callable[[str], None]) -> None:
        """Write the datasets: all of them whole, or none.

        Args:
            advance: is told after each block how many more bytes of the input are done.
            note: is told what the user should know, a line at a time.

        Raises:
            ValueError: at the first line that cannot be used, unless those are to be skipped; if nothing but
                empty documents is there; if the input changes meanwhile.
            OSError: if a file cannot be read or written.
            WorkerDiedError: if a worker does.
        """
        for line in self._notes:
            note(line)
        encode: BatchEncoder = ReferenceEncoder(self._tokenizer)
        if self._config.encoder == "fastest":
            everything = [stretch for stretches in self._parts.values() for stretch in stretches]
            encode, why = choose_encoder(self._tokenizer, sample_texts(everything, self._config.json_keys))
            note(why)
        try:
            self._write(encode, self._config.resume, advance, note)
        except EncoderDiffersError as difference:
            note(f"{difference}: beginning anew with the tokenizer's own library")
            self._advance(-self._advanced, advance)
            self._began_anew = True
            self.counts.clear()
            self._write(ReferenceEncoder(self._tokenizer), False, advance, note)

    def _write(
        self, encode: BatchEncoder, resume: bool, advance: Callable[[int], None], note: Callable[[str], None]
    ) -> None:
        config, tokenizer = self._config, self._tokenizer
        dtype = best_dtype(tokenizer.vocab_size)
        outputs = {key: config.output(key) for key in config.json_keys}
        folder = Path(f"{outputs[config.json_keys[0]]}.parts")
        worker = DocumentEncoder(
            encode,
            config.json_keys,
            dtype,
            tokenizer.prefix,
            tokenizer.eod if config.append_eod else None,
            self._split,
            None if isinstance(encode, ReferenceEncoder) else ReferenceEncoder(tokenizer),
        )
        # The workers are forked before the lock on the parts is taken, which they would hold on to.
        with OrderedPool(worker, self._workers) as pool, contextlib.ExitStack() as stack:
            writer = PartedWriter(outputs, dtype, list(self._parts), folder, self.identity(), resume)
            stack.callback(self._close, writer)
            self._take_up(writer, advance, note)
            todo = {part: found for part, found in self._parts.items() if part not in writer.finished}
            blocks = read_parts(todo, config.json_keys, self._workers)
            for result in pool.map(blocks, lambda block: block.weight, MAX_BYTES_IN_FLIGHT):
                part = result.block.part
                if result.block.ends_part:
                    self._refuse_changes()
                    writer.finish(part, self._reports[part])
                else:
                    self._take(result, writer)
                    self._advance(result.block.disk_bytes, advance)
            self._refuse_emptiness()
            writer.complete()

    def _take_up(
        self, writer: PartedWriter, advance: Callable[[int], None], note: Callable[[str], None]
    ) -> None:
        """Count in what an earlier run has finished."""
        if writer.deleted and not self._began_anew:
            note(f"deleted {writer.deleted} finished parts of an earlier run; --resume would go on from them")
        if writer.finished:
            note(f"{len(writer.finished)} of {len(self._parts)} parts are finished already")
        self._reports = {part: Counter(writer.finished.get(part)) for part in self._parts}
        for part in writer.finished:
            self.counts.update(self._reports[part])
            self._advance(sum(stretch.stop - stretch.start for stretch in self._parts[part]), advance)
        if self.counts["bad lines"] and not self._config.skip_bad_lines:
            raise ValueError(
                f"--resume: {self.counts['bad lines']} lines of the finished parts were skipped as unusable; "
                "give --skip-bad-lines again, or leave out --resume to begin anew"
            )

    def _advance(self, more: int, advance: Callable[[int], None]) -> None:
        self._advanced += more
        advance(more)

    def _take(self, result: EncodedBlock, writer: PartedWriter) -> None:
        if result.problem is not None:
            raise ValueError(result.problem)
        if result.difference is not None:
            raise EncoderDiffersError(result.difference)
        if result.bad_line is not None and not self._config.skip_bad_lines:
            raise ValueError(f"{result.bad_line.in_file()} (--skip-bad-lines leaves out such lines)")
        if result.bad_line is not None and self.first_bad_line is None:
            self.first_bad_line = str(result.bad_line.in_file())
        part, found = result.block.part, Counter({"bad lines": result.num_bad})
        for key, documents in zip(self._config.json_keys, result.documents, strict=True):
            lengths, counts = documents.sequence_lengths, documents.sequences_per_document
            writer.add(part, key, documents.tokens, lengths, counts)
            found[f"documents {key}"] = len(counts)
            found[f"tokens {key}"] = len(documents.tokens)
            found[f"empty {key}"] = documents.num_empty
        self._reports[part].update(found)
        self.counts.update(found)

    def _refuse_changes(self) -> None:
        now = self._state_of_files()
        for path, before, after in zip(self._files, self._stats, now, strict=True):
            if before != after:
                raise ValueError(f"{path}: the file was changed while it was read")

    def _refuse_emptiness(self) -> None:
        for key in self._config.json_keys:
            empty, bad = self.counts[f"empty {key}"], self.counts["bad lines"]
            if not self.counts[f"documents {key}"]:
                raise ValueError(
                    f"--input {' '.join(self._config.input)}: no document with any text under the key "
                    f"{key!r} ({empty} empty documents, {bad} unusable lines); nothing was written"
                )

    def _close(self, writer: PartedWriter) -> None:
        self.kept_parts = len(writer.close())
