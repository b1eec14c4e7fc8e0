"""The index cache: built once, complete or absent, and never stale."""

import multiprocessing
import os
import pickle
import time

import numpy as np
import pytest

from megatron.core.datasets import index_cache
from megatron.core.datasets.index_cache import IndexCache

KEY = {"seed": 1, "files": [94, 20]}


def build(allocate):
    mapped = allocate("mapped", (3, 2), np.int64)
    mapped[:] = [[1, 2], [3, 4], [5, 6]]
    return {"mapped": mapped, "plain": np.arange(4, dtype=np.uint32)}


def refuse_to_build(allocate):
    raise AssertionError("should have been found")


def check(arrays):
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "mapped": [[1, 2], [3, 4], [5, 6]],
        "plain": [0, 1, 2, 3],
    }


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_built_once_then_found(tmp_path):
    cache = IndexCache(tmp_path / "cache", required=True)
    check(cache.get("Toy", KEY, build))
    check(cache.get("Toy", KEY, refuse_to_build))
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.name.endswith("-Toy")
    assert names(folder) == ["description.txt", "mapped.npy", "plain.npy"]
    assert '"seed": 1' in (folder / "description.txt").read_text()


def test_any_change_of_the_key_builds_anew(tmp_path):
    cache = IndexCache(tmp_path, required=True)
    for key in (KEY, KEY | {"seed": 2}, KEY | {"files": [94, 21]}):
        cache.get("Toy", key, build)
    assert len(names(tmp_path)) == 3


def test_mapped_arrays_are_pickled_by_their_place(tmp_path):
    arrays = IndexCache(tmp_path, required=True).get("Toy", KEY, lambda allocate: {"a": np.zeros(10**6)})
    assert len(pickle.dumps(arrays)) < 1000
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(arrays))["a"], np.zeros(10**6))


def test_without_a_folder_arrays_stay_in_memory():
    arrays = IndexCache(None, required=True).get("Toy", KEY, build)
    check(arrays)
    check(pickle.loads(pickle.dumps(arrays)))


def test_failed_build_leaves_nothing(tmp_path):
    def fail(allocate):
        allocate("mapped", (3,), np.int64)
        raise RuntimeError("disk full")

    cache = IndexCache(tmp_path, required=True)
    with pytest.raises(RuntimeError, match="disk full"):
        cache.get("Toy", KEY, fail)
    assert [name for name in names(tmp_path) if not name.endswith(".lock")] == []
    check(cache.get("Toy", KEY, build))


def test_what_a_killed_build_left_is_deleted_in_time(tmp_path):
    cache = IndexCache(tmp_path, required=True)
    cache.get("Toy", KEY, build)
    (folder,) = tmp_path.iterdir()
    old, young = (tmp_path / f"{folder.name}.host-{pid}.partial" for pid in (1, 2))
    folder.rename(old)
    young.mkdir()
    os.utime(old, (time.time() - 2 * index_cache.STALE_SECONDS,) * 2)
    cache.get("Toy", KEY, build)
    assert names(tmp_path) == [folder.name, young.name]


def slow_build_in_process(folder, results):
    def slow(allocate):
        time.sleep(0.3)
        (folder / f"built-by-{os.getpid()}").touch()
        return build(allocate)

    results.put(IndexCache(folder, required=True).get("Toy", KEY, slow)["mapped"].sum())


def run_builders(folder):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=slow_build_in_process, args=(folder, results)) for _ in range(4)]
    for process in processes:
        process.start()
    sums = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert sums == [21] * 4
    assert [name for name in names(folder) if name.endswith((".partial", ".lock"))] == []
    return len([name for name in names(folder) if name.startswith("built-by")])


def test_several_processes_build_once(tmp_path):
    assert run_builders(tmp_path) == 1


def test_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(index_cache.fcntl, "flock", no_locks)
    assert run_builders(tmp_path) > 1


def test_waiting_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(index_cache, "REPORT_SECONDS", 0.05)
    lock = tmp_path / "x.lock"
    with index_cache._locked(lock):
        context = multiprocessing.get_context("fork")
        waiting = context.Process(target=wait_for_lock, args=(lock,))
        waiting.start()
        time.sleep(0.3)
    waiting.join()
    assert waiting.exitcode == 0


def wait_for_lock(lock):
    messages = []
    index_cache.logger.warning = lambda text, *values: messages.append(text % values)
    with index_cache._locked(lock):
        assert "for another process that builds x" in messages[0]


def test_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    with pytest.raises(ValueError, match=r"--data-cache-path .*/file/cache"):
        IndexCache(folder, required=True).get("Toy", KEY, build)
    check(IndexCache(folder, required=False).get("Toy", KEY, build))
    assert "builds its index in memory" in caplog.text
