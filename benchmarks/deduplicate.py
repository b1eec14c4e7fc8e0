"""Rates of the corpus tools on one core, and how well deduplication finds what it should.

    python benchmarks/deduplicate.py --megabytes 20 --rounds 3

The texts are those of data/moby_dick.jsonl, their words shuffled, and near-copies of them. Each step runs in
turn in one process, round after round; the medians of the rounds are printed, in CPU time, so that a busy
machine does not matter much.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatron.core.tokenizers.corpus import read_chunks
from megatron.corpora.candidates import CandidateSearch, Corpus
from megatron.corpora.cleaning import Cleaning
from megatron.corpora.clusters import ClusterSearch
from megatron.corpora.filtering import FilterWork
from megatron.corpora.grams import GramTable, TestSet
from megatron.corpora.jobs import Job, Work, run_here
from megatron.corpora.overlap import OverlapWork, Removal
from megatron.corpora.shingle_sets import SetWork
from megatron.corpora.signatures import Banding, Shingling, SignatureWork
from megatron.corpora.work_folder import WorkFolder, write_array

TEXTS = Path(__file__).resolve().parents[1] / "data" / "moby_dick.jsonl"


def documents(megabytes: int) -> Iterator[str]:
    """Texts of some kilobytes; every fourth is an earlier one with up to one word in twenty replaced."""
    rng = random.Random(0)
    words = [word for line in TEXTS.open() for word in json.loads(line)["text"].split()]
    size, earlier = 0, [["the"]]
    while size < megabytes << 20:
        start = rng.randrange(len(words))
        text = words[start : start + int(rng.lognormvariate(6.5, 0.8))]
        rng.shuffle(text)
        if rng.random() < 0.25:
            text = list(rng.choice(earlier))
            for _ in range(rng.randrange(1 + len(text) // 20)):
                text[rng.randrange(len(text))] = "changed"
        else:
            earlier.append(text)
        size += sum(map(len, text)) + len(text)
        yield " ".join(text)


def seconds(step: Callable[[], object]) -> float:
    """CPU time of a step, its worker processes included."""
    before = os.times()
    step()
    return sum(os.times()[:4]) - sum(before[:4])


def steps(path: Path, folder: Path) -> dict[str, Callable[[], object]]:
    """What is timed, in an order in which each finds what it needs."""
    work = WorkFolder(folder / "work", (path,), {})
    work.open()
    test = folder / "test.jsonl"
    test.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[::50]))
    table = GramTable([TestSet("test", test)], ("text",), 8)
    banding, shingling = Banding(), Shingling()

    def doing(what: Work[object], name: str) -> Callable[[], object]:
        job = Job((path,), work.file(name, 0, ".bin"))
        what.prepare()
        return lambda: run_here(what, job)

    def candidates() -> None:
        corpus = Corpus.of(work)
        search = CandidateSearch(work, corpus, banding, 1 << 30)
        suspected = np.zeros(corpus.lines[-1], np.bool_)
        for band in range(banding.bands):
            search(band)
            members = np.fromfile(work.file("groups", band, ".members"), np.int64)
            suspected[members] = True
        write_array(work.file("suspects", 0, ".npy"), np.flatnonzero(suspected))

    def read() -> None:
        for _ in read_chunks([path]):
            pass

    return {
        "read lines": read,
        "clean, all languages": doing(Cleaning("text"), "clean"),
        "clean, English": doing(Cleaning("text", languages=("en",)), "english"),
        "deduplicate: signatures": doing(SignatureWork("text", shingling, banding), "signatures"),
        "deduplicate: candidates": candidates,
        "deduplicate: sets": doing(SetWork(work, "text", shingling), "sets"),
        "deduplicate: clusters": lambda: ClusterSearch(work, banding, 0.7, 1, 1 << 30).run(
            None, lambda _: None
        ),
        "deduplicate: filter": doing(FilterWork(work), "filtered"),
        "decontaminate": doing(OverlapWork(work, table, "text", Removal()), "overlap"),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "corpus.jsonl"
        with path.open("w") as file:
            count = 0
            for text in documents(args.megabytes):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                count += 1
        size = path.stat().st_size
        print(f"{size / 1e6:.1f} MB, {count} documents")
        todo = steps(path, Path(name))
        times: dict[str, list[float]] = {step: [] for step in todo}
        for _ in range(args.rounds):
            for step, function in todo.items():
                times[step].append(seconds(function))
        for step, of_step in times.items():
            print(f"{step:26} {size / 1e6 / statistics.median(of_step):8.1f} MB/s per core")
        for kind in ("signatures", "groups", "sets"):
            held = sum(file.stat().st_size for file in (Path(name) / "work" / kind).iterdir())
            print(f"{kind:26} {held / count:8.0f} bytes per document on disk")


if __name__ == "__main__":
    main()
