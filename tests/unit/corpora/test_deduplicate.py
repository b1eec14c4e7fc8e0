"""tools/deduplicate.py against similarities of all pairs, taken with Python's own sets."""

import gzip
import json
import random
import re

import numpy as np
import pytest

from megatron.corpora.candidates import CandidateSearch, Corpus, groups_of_equals, read_groups
from megatron.corpora.signatures import Banding
from megatron.corpora.work_folder import WorkFolder
from tests.unit.corpora.tools import last_line, read_corpus, report_of, run, write_corpus

FEW_BANDS = ("--bands", 12, "--rows", 2)
"""Quick, and they find all but 0.03% of the pairs at the threshold."""
LEVELS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.9)


def shingles(text, size=5):
    words = re.findall(r"\w+", text.lower())
    return (
        {tuple(words[start : start + size]) for start in range(max(len(words) - size + 1, 1))}
        if words
        else set()
    )


def similarity(one, other):
    return len(one & other) / len(one | other)


def words_of(rng, count):
    return [f"w{rng.randrange(20_000)}" for _ in range(count)]


def near_copy(rng, words, wanted):
    """A text whose end is another, so that it shares about as many n-grams as the similarity asks for."""
    shared = round(2 * wanted / (1 + wanted) * len(words))
    return words[:shared] + words_of(rng, len(words) - shared)


def planted(rng, pairs_at_each_level, alone):
    """Texts in random order: originals, near-copies at several similarities, and others."""
    texts = [" ".join(words_of(rng, rng.randrange(40, 200))) for _ in range(alone)]
    for level in LEVELS:
        for _ in range(pairs_at_each_level):
            words = words_of(rng, rng.randrange(60, 300))
            texts += [" ".join(words), " ".join(near_copy(rng, words, level + rng.uniform(0, 0.05)))]
    rng.shuffle(texts)
    return texts


def similar_pairs(texts, above):
    """All pairs above a similarity, found through the n-grams that they share."""
    sets = [shingles(text) for text in texts]
    holders = {}
    for number, of_text in enumerate(sets):
        for shingle in of_text:
            holders.setdefault(shingle, []).append(number)
    pairs = {(a, b) for among in holders.values() for b in among for a in among if a < b}
    return {pair for pair in pairs if similarity(sets[pair[0]], sets[pair[1]]) > above}


def clusters_of(pairs, count):
    """The first of each document's cluster, by following pairs until nothing changes."""
    first = list(range(count))
    changed = True
    while changed:
        changed = False
        for a, b in pairs:
            low = min(first[a], first[b])
            changed |= first[a] != low or first[b] != low
            first[a] = first[b] = low
    return first


def deduplicate(folder, *flags, work="work"):
    return run("deduplicate", "--work-folder", folder / work, "--workers", 1, *flags, cwd=folder)


def test_planted_copies_are_found_and_others_are_kept(tmp_path):
    texts = planted(random.Random(1), 15, 40)
    path = write_corpus(tmp_path / "in.jsonl", texts)
    report = report_of(
        deduplicate(tmp_path, "--input", path, "--output", "out.jsonl", "--clusters", "clusters.jsonl")
    )
    dropped = read_corpus(tmp_path / "clusters.jsonl")
    found = {(line["kept"]["line"] - 1, line["dropped"]["line"] - 1) for line in dropped}
    above, well_above = similar_pairs(texts, 0.7), similar_pairs(texts, 0.75)
    assert len(well_above) >= 40
    assert len(found & well_above) >= 0.95 * len(well_above)
    assert len(found & above) >= 0.95 * len(found)
    assert found <= above  # pairs only: no chain through a third document
    for line in dropped:
        one, other = (shingles(texts[line[side]["line"] - 1]) for side in ("kept", "dropped"))
        assert line["jaccard"] == pytest.approx(similarity(one, other), abs=5e-5)
    gone = {number for _, number in found}
    assert [line["id"] for line in read_corpus(tmp_path / "out.jsonl")] == [
        number for number in range(len(texts)) if number not in gone
    ]
    assert report["clusters"]["dropped"] == report["filter"]["dropped"] == len(gone)
    assert report["signatures"] == {"lines": len(texts), "documents": len(texts), "skipped_bad_lines": 0}


def chained(rng, links):
    """Texts each of which resembles the one before, the last not the first."""
    words = words_of(rng, 200)
    chain = [words]
    for _ in range(links):
        words = words[20:] + words_of(rng, 20)
        chain.append(words)
    return [" ".join(words) for words in chain]


def test_what_is_connected_through_others_is_one_cluster_and_its_first_is_kept(tmp_path):
    rng = random.Random(2)
    texts = [*chained(rng, 6), *chained(rng, 3), "alone among all", "", "   ", "Alone, among ALL!"]
    order = list(range(len(texts)))
    rng.shuffle(order)
    texts = [texts[number] for number in order]
    path = write_corpus(tmp_path / "in.jsonl", texts)
    report = report_of(
        deduplicate(tmp_path, "--input", path, "--output", "out.jsonl", "--clusters", "c.jsonl", *FEW_BANDS)
    )
    expected = clusters_of(similar_pairs(texts, 0.7), len(texts))
    assert len(set(expected)) == 5  # two chains, a short text twice, and two without words
    kept = [line["id"] for line in read_corpus(tmp_path / "out.jsonl")]
    assert kept == sorted(set(expected))
    pairs = {
        (line["dropped"]["line"] - 1, line["kept"]["line"] - 1) for line in read_corpus(tmp_path / "c.jsonl")
    }
    assert pairs == {(number, first) for number, first in enumerate(expected) if number != first}
    assert report["clusters"]["clusters"] == 3
    assert report["clusters"]["documents"] == len(texts) - 2


def test_shards_workers_memory_and_files_do_not_matter(tmp_path):
    texts = planted(random.Random(3), 3, 10)
    whole = write_corpus(tmp_path / "whole.jsonl", texts)
    report_of(
        deduplicate(
            tmp_path, "--input", whole, "--output", "out.jsonl", "--clusters", "one.jsonl", *FEW_BANDS
        )
    )
    lines = whole.read_bytes().splitlines(keepends=True)
    third = len(lines) // 3
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:third]) + b"\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[third : 2 * third])))
    (tmp_path / "c.jsonl").write_bytes(b"".join(lines[2 * third :]).rstrip(b"\n"))
    inputs = ["--input", "a.jsonl", "b.jsonl.gz", "c.jsonl", "--output-folder", "parts"]

    def stage(name, *flags):
        return report_of(deduplicate(tmp_path, *inputs, *FEW_BANDS, "--stage", name, *flags, work="shards"))

    for name in ("signatures", "candidates", "sets", "clusters", "filter"):
        shards = (["--memory", 1, "--workers", 3],)
        if name in ("signatures", "sets", "filter"):
            shards = [["--shard", f"{index}/2"] for index in (1, 0)]
        for flags in shards:
            stage(name, *flags, "--clusters", "shards.jsonl")
    parts = [
        (tmp_path / "parts" / "a.jsonl").read_bytes(),
        gzip.decompress((tmp_path / "parts" / "b.jsonl.gz").read_bytes()),
        (tmp_path / "parts" / "c.jsonl").read_bytes(),
    ]
    assert b"".join(parts) == (tmp_path / "out.jsonl").read_bytes()

    starts = {"whole.jsonl": 0, "a.jsonl": 0, "b.jsonl.gz": third, "c.jsonl": 2 * third}

    def clusters(path):
        lines = read_corpus(path)
        ends = [[line[side] for side in ("kept", "dropped")] for line in lines]
        places = [[end["line"] + starts[end["file"].rpartition("/")[2]] for end in pair] for pair in ends]
        return [(*pair, line["jaccard"]) for pair, line in zip(places, lines, strict=True)]

    assert clusters(tmp_path / "shards.jsonl") == clusters(tmp_path / "one.jsonl")


def test_sorting_in_parts_finds_the_same_groups(tmp_path):
    path = write_corpus(tmp_path / "in.jsonl", planted(random.Random(4), 10, 20))
    report_of(deduplicate(tmp_path, "--input", path, "--output", "o", "--stage", "signatures"))
    work = WorkFolder(tmp_path / "work", (path,), {})
    found = []
    for memory in (1 << 30, 1000):
        CandidateSearch(work, Corpus.of(work), Banding(), memory)(3)
        members, sizes = read_groups(work, 3)
        found.append(sorted(map(tuple, np.split(members, np.cumsum(sizes)[:-1].tolist()))))
    assert found[0] == found[1]
    assert len(found[0]) > 10


def test_groups_of_equals_are_those_of_a_dictionary():
    rng = np.random.default_rng(5)
    hashes = rng.integers(0, 50, 120).astype(np.uint64)
    documents = np.sort(rng.choice(10_000, 120, replace=False))
    members, sizes = groups_of_equals(hashes, documents)
    expected = {}
    for value, document in zip(hashes.tolist(), documents.tolist(), strict=True):
        expected.setdefault(value, []).append(document)
    groups = [part.tolist() for part in np.split(members, np.cumsum(sizes)[:-1])]
    assert groups == [expected[value] for value in sorted(expected) if len(expected[value]) > 1]
    members, sizes = groups_of_equals(np.empty(0, np.uint64), np.empty(0, np.int64))
    assert (members.tolist(), sizes.tolist()) == ([], [])


def test_lines_keep_their_bytes_and_bad_ones_are_named_or_skipped(tmp_path):
    odd = (
        b'{"n": 1.50e3, "text" : "caf\\u00e9 one two three four five six",  "big": 12345678901234567890123}\n'
    )
    bad = b'{"text": 5}\n'
    again = b'{"text": "CAF\\u00c9, one two three four five six"}\n'
    path = tmp_path / "in.jsonl"
    path.write_bytes(odd + b"\n" + bad + again + b'{"text": "last"}')
    stopped = deduplicate(tmp_path, "--input", path, "--output", "out.jsonl")
    assert stopped.returncode == 1
    assert last_line(stopped) == (
        f"error: {path}:3: key 'text' holds a number, but a string is wanted "
        "(--skip-bad-lines leaves out such lines)"
    )
    assert not (tmp_path / "out.jsonl").exists()
    assert not list(tmp_path.glob("work/**/*.part"))
    other = deduplicate(tmp_path, "--input", path, "--output", "out.jsonl", "--skip-bad-lines")
    assert other.returncode == 2
    assert "made with another skip_bad_lines: false then, true now" in last_line(other)
    report_of(deduplicate(tmp_path, "--input", path, "--output", "out.jsonl", "--skip-bad-lines", work="w2"))
    assert (tmp_path / "out.jsonl").read_bytes() == odd + b'{"text": "last"}\n'


def test_character_ngrams_compare_scripts_without_spaces(tmp_path):
    rng = random.Random(6)
    text = "".join(chr(0x4E00 + rng.randrange(2000)) for _ in range(300))
    changed = text[:150] + "山" + text[151:]
    path = write_corpus(tmp_path / "in.jsonl", [text, changed])
    flags = ["--input", path, "--output", "out.jsonl", "--clusters", "c.jsonl", *FEW_BANDS]
    report_of(deduplicate(tmp_path, *flags, work="words"))
    assert len(read_corpus(tmp_path / "out.jsonl")) == 2  # each text is a single word
    report_of(deduplicate(tmp_path, *flags, "--shingle-unit", "characters", work="characters"))
    sets = [{one[start : start + 5] for start in range(len(one) - 4)} for one in (text, changed)]
    (line,) = read_corpus(tmp_path / "c.jsonl")
    assert line["jaccard"] == pytest.approx(similarity(*sets), abs=5e-5)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    texts = planted(random.Random(7), 2, 5)
    for name in ("a", "b"):
        write_corpus(tmp_path / f"{name}.jsonl", texts)
    flags = ["--input", "a.jsonl", "b.jsonl", "--output", "out.jsonl", *FEW_BANDS]
    early = deduplicate(tmp_path, *flags, "--stage", "clusters")
    assert early.returncode == 1
    assert "--stage signatures is not done for 2 of 2 files, such as a.jsonl" in last_line(early)
    report_of(deduplicate(tmp_path, *flags, "--stage", "signatures", "--shard", "1/2"))
    report = report_of(deduplicate(tmp_path, *flags))
    assert report["signatures"]["documents"] == len(texts)  # those of the other file alone
    assert report["clusters"]["documents"] == 2 * len(texts)
    assert report["filter"]["dropped"] >= len(texts)
    size = (tmp_path / "b.jsonl").stat().st_size
    (tmp_path / "b.jsonl").write_text('{"text": "%s"}\n' % ("x" * (size - 13)))
    changed = deduplicate(tmp_path, *flags)
    assert changed.returncode == 2
    assert (
        f"made with another input: b.jsonl has been written since ({size} bytes then, {size} now); give the "
        "same again, or another folder, or delete this one to begin anew"
    ) in last_line(changed)
    other = deduplicate(tmp_path, "--input", "b.jsonl", "a.jsonl", *flags[3:])
    assert 'made with another input: "a.jsonl" then, "b.jsonl" now' in last_line(other)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--threshold", 0.4], "would find only 23% of the pairs at --threshold 0.4"),
        (["--shard", "2/2"], "--shard 2/2: two numbers i/n are wanted"),
        (["--shard", "0/2"], "--shard has no meaning with --stage all"),
        (["--output-folder", "x"], "give one of --output and --output-folder"),
        (["--input", "nowhere"], "--input: nowhere (no such file)"),
        (["--input", "in.jsonl", "in.jsonl"], "--input: in.jsonl is given 2 times"),
        (["--output", "in.jsonl"], "--output in.jsonl: is one of the inputs"),
        (["--stage", "filter", "--shard", "0/2"], "--output out.jsonl --shard 0/2: shards are shares"),
    ],
)
def test_wrong_flags_end_with_one_line(tmp_path, flags, reason):
    write_corpus(tmp_path / "in.jsonl", ["a"])
    result = deduplicate(tmp_path, "--input", "in.jsonl", "--output", "out.jsonl", *flags)
    assert result.returncode == 2
    assert reason in last_line(result)


def test_recall_of_bands_is_the_formula():
    assert Banding(25, 5).recall(0.75) == pytest.approx(0.99885, abs=1e-4)
    assert Banding(25, 5).recall(0.7) == pytest.approx(0.98996, abs=1e-4)
    assert Banding(1, 1).recall(0.3) == pytest.approx(0.3)


@pytest.mark.nightly
def test_planted_copies_at_scale(tmp_path):
    texts = planted(random.Random(8), 1000, 4000)
    path = write_corpus(tmp_path / "in.jsonl", texts)
    report_of(
        deduplicate(
            tmp_path, "--input", path, "--output", "out.jsonl", "--clusters", "c.jsonl", "--workers", 2
        )
    )
    found = {
        (json.loads(line)["kept"]["line"] - 1, json.loads(line)["dropped"]["line"] - 1)
        for line in (tmp_path / "c.jsonl").read_text().splitlines()
    }
    well_above = similar_pairs(texts, 0.75)
    assert len(found & well_above) >= 0.99 * len(well_above)
    assert found <= similar_pairs(texts, 0.7)
