"""Turn text (JSON lines, parquet) into token files, ``PREFIX_KEY_document.bin`` and ``.idx``, for training.

The documents keep the order of the input, and the files are the same bytes whatever ``--workers`` and
``--partitions`` are. They appear under their names only when they are complete.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.corpus import input_files
from megatron.core.tokenizers.ordered_pool import WorkerDiedError
from megatron.corpora.preprocessing import PreprocessConfig, Preprocessing
from megatron.training.effects import settle_tokenizer, tokenizer_flags_without_effect
from megatron.training.flags import FlagParser, add_flags, build
from megatron.training.foreign_flags import PREPROCESSING_FLAGS, add_foreign_flags, judge_foreign_flags


def splitting_flags_without_effect(config: PreprocessConfig) -> list[str]:
    """A line for the flags that say how to split sentences where none are split."""
    defaults = {"--sentence-splitter": "builtin", "--lang": "english", "--keep-newlines": False}
    values = (config.sentence_splitter, config.lang, config.keep_newlines)
    given = [
        flag for (flag, default), value in zip(defaults.items(), values, strict=True) if value != default
    ]
    if config.split_sentences or not given:
        return []
    return [f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect without --split-sentences"]


class Progress:
    """A bar over the bytes of the input, with rates and the time left; a log gets a line twice a minute.

    It appears with the first bytes, below what is said before.

    Args:
        work: whose counts stand beside the bar.
        log_interval: documents between two updates of the counts.
    """

    def __init__(self, work: Preprocessing, log_interval: int) -> None:
        self._work, self._interval = work, log_interval
        self._bar: tqdm[NoReturn] | None = None
        self._start, self._shown = 0.0, 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def note(self, line: str) -> None:
        """Say something without harm to the bar."""
        tqdm.write(line, file=sys.stderr)

    def advance(self, num_bytes: int) -> None:
        """Count some bytes of the input as done."""
        if self._bar is None:
            tqdm.monitor_interval = 0  # no thread of tqdm's beside the forked workers
            self._start = time.perf_counter()
            often, size = 0.2 if sys.stderr.isatty() else 30.0, self._work.size
            self._bar = tqdm(total=size, unit="B", unit_scale=True, mininterval=often, desc="tokenizing")
        self._bar.update(num_bytes)
        counts = self._work.counts
        documents = max((value for name, value in counts.items() if name.startswith("documents ")), default=0)
        if abs(documents - self._shown) >= self._interval:
            self._shown = documents
            rate = documents / max(1e-9, time.perf_counter() - self._start)
            self._bar.set_postfix_str(f"{documents} docs, {rate:.0f} docs/s", refresh=False)


def report(config: PreprocessConfig, work: Preprocessing, seconds: float) -> None:
    """Print what was written and what was left out."""
    counts = work.counts
    for key in config.json_keys:
        documents, tokens = counts[f"documents {key}"], counts[f"tokens {key}"]
        print(f"{config.output(key)}.bin and .idx: {documents} documents, {tokens} tokens")
        if counts[f"empty {key}"]:
            print(f"skipped {counts[f'empty {key}']} empty documents under the key {key!r}")
    if counts["bad lines"]:
        first = f", the first {work.first_bad_line}" if work.first_bad_line else ""
        print(f"skipped {counts['bad lines']} unusable lines{first}")
    tokens = sum(counts[f"tokens {key}"] for key in config.json_keys)
    speed = f"{work.size / 1e6 / seconds:.1f} MB/s of input, {tokens / seconds:.0f} tokens/s"
    print(f"took {seconds:.1f} s, {speed}")


def what_is_kept(work: Preprocessing) -> str:
    """What to say of the parts that an unfinished run has left."""
    return (
        f" ({work.kept_parts} finished parts are kept: --resume goes on from them)" if work.kept_parts else ""
    )


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
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is one thread
    start = time.perf_counter()
    for note in settle_tokenizer(namespace):
        print(note, file=sys.stderr)
    try:
        config = build(PreprocessConfig, namespace)
        tokenizer_config = build(TokenizerConfig, namespace)
        files = input_files(config.input)
        tokenizer = build_tokenizer(tokenizer_config, config.vocab_size)
        if config.append_eod:
            _ = tokenizer.eod  # if there is none, this says so
        work = Preprocessing(config, tokenizer, files)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    without_effect = (
        *tokenizer_flags_without_effect(tokenizer_config),
        *splitting_flags_without_effect(config),
    )
    for note in (*verdict.notes, *without_effect):
        print(note, file=sys.stderr)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # unwinds, so nothing is left behind
    try:
        Path(config.output_prefix).parent.mkdir(parents=True, exist_ok=True)
        with Progress(work, config.log_interval) as progress:
            work.run(progress.advance, progress.note)
    except (ValueError, OSError, WorkerDiedError) as error:
        print(f"{parser.prog}: error: {error}{what_is_kept(work)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; nothing was written{what_is_kept(work)}", file=sys.stderr)
        return 128 + signal.SIGINT
    report(config, work, time.perf_counter() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
