"""Datasets in parts: the bytes of one run, however it is cut up, stopped and taken up again."""

import errno
import json
import os
import re
import subprocess

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.parts import PartedWriter

IDENTITY = {"input": [{"file": "a", "size": 3}], "eod": True}
DRAW = np.random.default_rng(0)
DOCUMENTS = {  # of each dataset, for each of three parts, the lengths of its documents
    "text": [[3, 1, 4], [], [1, 5, 9, 2]],
    "title": [[1], [2, 2], [1]],
}
TOKENS = {
    name: [DRAW.integers(0, 1000, sum(lengths), dtype=np.uint16) for lengths in parts]
    for name, parts in DOCUMENTS.items()
}


def writer(folder, parts=(0, 1, 2), identity=IDENTITY, resume=False):
    outputs = {name: str(folder / f"out_{name}") for name in DOCUMENTS}
    return PartedWriter(outputs, "<u2", parts, folder / "out.parts", identity, resume)


def add(target, part):
    for name, parts in DOCUMENTS.items():
        lengths = np.array(parts[part], np.int64)
        target.add(part, name, TOKENS[name][part], lengths, np.ones(len(lengths), np.int64))
    target.finish(part, {"documents": len(DOCUMENTS["text"][part])})


def outputs(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    for name, parts in DOCUMENTS.items():
        with IndexedDatasetBuilder(folder / f"out_{name}", "<u2") as builder:
            for tokens, lengths in zip(TOKENS[name], parts, strict=True):
                builder.add_many(tokens, lengths, [1] * len(lengths))
    return outputs(folder)


def names_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_parts_in_any_order_make_the_bytes_of_one_dataset(tmp_path, expected):
    target = writer(tmp_path)
    for part in (2, 0, 1):
        add(target, part)
    target.complete()
    assert list(target.close()) == []
    assert outputs(tmp_path) == expected
    assert names_in(tmp_path) == sorted(expected)


def test_finished_parts_outlive_a_crash_and_others_do_not(tmp_path, expected):
    target = writer(tmp_path)
    add(target, 1)
    target.add(0, "text", TOKENS["text"][0][:1], np.array([1]), np.array([1]))
    assert list(target.close()) == [1]
    left = names_in(tmp_path)
    assert [name for name in left if name.startswith("part-00000")] == []
    assert not set(left) & set(expected)
    (tmp_path / "out.parts" / "part-00000.0.bin.partial-12").touch()  # as a killed process leaves it
    (tmp_path / "out.parts" / "part-00002.0.bin").touch()
    again = writer(tmp_path, resume=True)
    assert again.finished == {1: {"documents": 0}}
    add(again, 0)
    add(again, 2)
    again.complete()
    again.close()
    assert outputs(tmp_path) == expected
    assert names_in(tmp_path) == sorted(expected)


def test_nothing_finished_leaves_nothing(tmp_path):
    target = writer(tmp_path)
    target.add(0, "text", TOKENS["text"][0][:1], np.array([1]), np.array([1]))
    assert list(target.close()) == []
    assert list(tmp_path.iterdir()) == []
    fresh = writer(tmp_path, resume=True)  # nothing to resume is no error
    assert fresh.finished == {}
    fresh.close()


def test_parts_of_something_else_are_refused_or_deleted(tmp_path):
    target = writer(tmp_path)
    add(target, 1)
    target.close()
    changed = {"input": [{"file": "a", "size": 4}], "eod": True}
    with pytest.raises(
        ValueError, match=r"--resume: .* from something else: input 0 size was 3 and is 4; leave"
    ):
        writer(tmp_path, identity=changed, resume=True)
    with pytest.raises(ValueError, match="more was None and is 1"):
        writer(tmp_path, identity={**IDENTITY, "more": 1}, resume=True)
    anew = writer(tmp_path, identity=changed)
    assert (anew.finished, anew.deleted) == ({}, 1)
    anew.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["part-00001.0.bin", "part-00001.1.idx", "part-00001.json"])
def test_a_part_that_is_damaged_is_not_used(tmp_path, name):
    target = writer(tmp_path)
    add(target, 1)
    add(target, 0)
    target.close()
    path = tmp_path / "out.parts" / name
    path.write_bytes(path.read_bytes()[:-1] if path.stat().st_size else b"x")
    again = writer(tmp_path, resume=True)
    assert list(again.finished) == [0]
    again.close()


def test_two_runs_never_share_a_folder(tmp_path):
    target = writer(tmp_path)
    with pytest.raises(ValueError, match="another run is at work here"):
        writer(tmp_path, resume=True)
    target.close()
    writer(tmp_path).close()


def test_one_part_goes_straight_to_its_place(tmp_path):
    target = writer(tmp_path, parts=(1,))
    assert list(tmp_path.iterdir()) == []
    add(target, 1)
    assert not (tmp_path / "out_text.idx").exists()
    target.complete()
    target.close()
    assert sorted(outputs(tmp_path)) == ["out_text.bin", "out_text.idx", "out_title.bin", "out_title.idx"]
    stale = tmp_path / "out.parts"
    stale.mkdir()
    (stale / "run.json").write_text(json.dumps({"input": "other"}))
    with pytest.raises(ValueError, match="from something else"):
        writer(tmp_path, parts=(1,), resume=True)
    writer(tmp_path, parts=(1,)).close()
    assert not stale.exists()


@pytest.mark.parametrize("parts", [(0,), (0, 1, 2)])
def test_what_a_killed_run_left_beside_the_output_is_deleted(tmp_path, parts):
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale = [f"out_{name}{suffix}.partial-{ended.pid}" for name in DOCUMENTS for suffix in (".bin", ".idx")]
    kept = [
        f"out_text.bin.partial-{os.getppid()}",
        "out_text.bin.partial-x",
        f"out_texts.bin.partial-{ended.pid}",
    ]
    for name in [*stale, *kept]:
        (tmp_path / name).write_bytes(b"x")
    target = writer(tmp_path, parts)
    target.close()
    assert names_in(tmp_path) == sorted(kept)


@pytest.mark.parametrize("parts", [(0,), (0, 1, 2)])
def test_an_error_of_the_disk_names_the_file(tmp_path, monkeypatch, parts):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = writer(tmp_path, parts)
    monkeypatch.setattr(IndexedDatasetBuilder, "add_many", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{re.escape(str(tmp_path))}/out"):
        add(target, 0)
    target.close()
