#!/usr/bin/env python3
"""The whole of ``tools/preprocess_data.py`` against the libraries alone, and against the usual way.

    python benchmarks/preprocess.py --input corpus.jsonl --vocab-file vocab.json --merge-file merges.txt

The input, JSON lines or any text file (a document ends at a blank line), is repeated in shuffled order until
it has ``--megabytes``; what takes long gets ``--slow-megabytes``. Every side is a process of its own that
starts anew each round, and all sides take turns, so that a noisy machine hits them alike. Medians of rounds
count. A side's time is that of the whole process; for libraries also that of the work alone: files read, JSON
parsed, texts encoded, without imports and the loading of the tokenizer. CPU seconds are those of the whole
process and its children.

===========  =========================================================================================
ours         ``tools/preprocess_data.py``: checked, complete files on disk
ours, own    the same with ``--encoder own``: the tokenizer's own library does the work
gigatoken    gigatoken's reader of JSON lines and its encoder, on threads; ids in memory
tokenizers   ``encode_batch`` of the tokenizers library on all texts at once, on threads; ids in memory
row by row   a pool of processes that parses and encodes one line at a time and sends lists of ids back
===========  =========================================================================================
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SLOW_SIDES = ("ours, own", "tokenizers", "row by row")
ROWS_AT_ONCE = 32


def documents_in(path: Path) -> list[bytes]:
    """The lines of a JSON-lines file, or the paragraphs of a text file as such lines."""
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    if lines[0].startswith(b"{"):
        return lines
    paragraphs = path.read_text(encoding="utf-8", errors="replace").split("\n\n")
    return [json.dumps({"text": text}).encode() for text in paragraphs if text.strip()]


def make_corpus(documents: list[bytes], size: int, path: Path) -> None:
    """Write documents, shuffled anew for each repetition, until there are ``size`` bytes."""
    draw, written = random.Random(0), 0
    with path.open("wb") as file:
        while written < size:
            draw.shuffle(documents)
            for line in documents:
                written += file.write(line + b"\n")
                if written >= size:
                    break


def texts_of(corpus: str) -> list[str]:
    """The texts of a corpus."""
    with open(corpus, "rb") as file:
        return [json.loads(line)["text"] for line in file]


def gigatoken_alone(corpus: str, spec: str, threads: int) -> float:
    """Seconds that gigatoken takes for a corpus, once it is loaded."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    import awkward  # noqa: F401 - gigatoken loads it on the first call
    from gigatoken import JsonlFileSource, Tokenizer

    tokenizer = Tokenizer.from_json(Path(spec).read_bytes())
    start = time.perf_counter()
    tokenizer.encode_files(JsonlFileSource([corpus]), parallel=threads > 1)
    return time.perf_counter() - start


def tokenizers_alone(corpus: str, spec: str, threads: int) -> float:
    """Seconds that the tokenizers library takes for a corpus, once it is loaded."""
    os.environ.update(RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="true")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(spec)
    start = time.perf_counter()
    tokenizer.encode_batch(texts_of(corpus))
    return time.perf_counter() - start


def row_by_row(corpus: str, spec: str, threads: int) -> float:
    """Seconds that the usual way takes for a corpus, once its workers are there."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(spec)

    def encode(line: bytes) -> list[int]:
        ids: list[int] = tokenizer.encode(json.loads(line)["text"]).ids
        return ids

    globals()["_encode_row"] = encode
    with multiprocessing.get_context("fork").Pool(threads) as pool, open(corpus, "rb") as file:
        start = time.perf_counter()
        for _ in pool.imap(_row, file, ROWS_AT_ONCE):
            pass
        return time.perf_counter() - start


def _row(line: bytes) -> list[int]:
    ids: list[int] = globals()["_encode_row"](line)
    return ids


SIDES = {"gigatoken": gigatoken_alone, "tokenizers": tokenizers_alone, "row by row": row_by_row}


def timed(side: str, arguments: argparse.Namespace, corpus: Path, folder: Path) -> tuple[float, float, float]:
    """Seconds of a side's whole process, and of its work alone; and CPU seconds."""
    if side.startswith("ours"):
        command = [str(ROOT / "tools" / "preprocess_data.py"), "--input", str(corpus)]
        command += ["--output-prefix", str(folder / "out"), "--tokenizer-type", "GPT2BPETokenizer"]
        command += ["--vocab-file", arguments.vocab_file, "--merge-file", arguments.merge_file]
        command += ["--workers", str(arguments.threads), "--append-eod"]
        command += ["--encoder", "own"] if side == "ours, own" else []
    else:
        command = [__file__, "--side", side, "--input", str(corpus), "--spec", str(folder / "tokenizer.json")]
        command += ["--threads", str(arguments.threads)]
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    whole = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{side}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return whole, whole if side.startswith("ours") else float(done.stdout), cpu


def write_spec(arguments: argparse.Namespace, path: Path) -> None:
    """Write the tokenizer as one file, for the libraries."""
    from tokenizers import ByteLevelBPETokenizer

    ByteLevelBPETokenizer(arguments.vocab_file, arguments.merge_file).save(str(path))


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time all sides in turn; print and return medians and ratios of speed."""
    sides = ["ours", "gigatoken", *SLOW_SIDES]
    seconds: dict[str, list[tuple[float, float, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_spec(arguments, folder / "tokenizer.json")
        documents = documents_in(Path(arguments.input))
        sizes = {"whole": arguments.megabytes, "part": arguments.slow_megabytes}
        for corpus, megabytes in sizes.items():
            make_corpus(documents, int(megabytes * 1e6), folder / f"{corpus}.jsonl")
        for number in range(arguments.rounds):
            for side in sides:
                corpus = folder / ("part.jsonl" if side in SLOW_SIDES else "whole.jsonl")
                seconds[side].append(timed(side, arguments, corpus, folder))
                print(f"round {number + 1}: {side} {seconds[side][-1][0]:.2f} s", file=sys.stderr)
        bytes_of = {corpus: (folder / f"{corpus}.jsonl").stat().st_size for corpus in sizes}
    speeds: dict[str, tuple[float, float]] = {}
    for side in sides:
        size = bytes_of["part" if side in SLOW_SIDES else "whole"] / 1e6
        whole, alone, cpu = (statistics.median(times) for times in zip(*seconds[side], strict=True))
        speeds[side] = size / whole, size / alone
        shown = f"{size / whole:7.1f} MB/s whole, {size / alone:7.1f} alone, {cpu:6.2f} CPU s"
        print(f"{side:12} {size:6.1f} MB: {shown}")
    result: dict[str, Any] = {"MB/s": speeds}
    for side, other in (("ours", "gigatoken"), ("ours", "row by row"), ("ours, own", "tokenizers")):
        ratios = [speeds[side][0] / speed for speed in speeds[other]]
        result[f"{side} : {other}"] = ratios
        print(f"{side} is {ratios[0]:.2f} times {other} (of its work alone: {ratios[1]:.2f})")
    return result


def main() -> None:
    """Compare, or be one side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True, help="JSON lines with a key text, or any text file")
    parser.add_argument("--vocab-file", help="GPT-2's vocab.json")
    parser.add_argument("--merge-file", help="GPT-2's merges.txt")
    parser.add_argument("--megabytes", type=float, default=100, help="size of the corpus")
    parser.add_argument("--slow-megabytes", type=float, default=8, help="size for what takes long")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the result as JSON too")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(SIDES[arguments.side](arguments.input, arguments.spec, arguments.threads))
        return
    if not (arguments.vocab_file and arguments.merge_file):
        parser.error("--vocab-file and --merge-file are needed")
    result = compare(arguments)
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
