"""Runs that are killed at any moment, and resume from a complete checkpoint each time."""

import datetime
import multiprocessing
import random
import time

import pytest
import torch
import torch.distributed as dist

from megatron.core.checkpoint import (
    Rectangle,
    ShardedTensor,
    find,
    load,
    open_checkpoint,
    save,
    survey,
    verify,
)

CPU = torch.device("cpu")
RANKS = 2
ROWS = 20_000


def _shards(rank, value):
    local = torch.full((ROWS, 4), value)
    return [
        ShardedTensor(
            name, (RANKS * ROWS, 4), local.dtype, ((Rectangle((rank * ROWS, 0), (ROWS, 4)), local),)
        )
        for name in ("model.w", "optimizer.main.w")
    ]


def _run(rank, folder, root):
    """Resume where there is something, then save each iteration twice, as fast as it goes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=20),
    )
    group = dist.new_group([0, 1])
    iteration = 0
    empty = [survey(root).empty]
    dist.broadcast_object_list(empty, src=0)
    if not empty[0]:
        checkpoint = open_checkpoint(root, group, CPU)
        iteration = checkpoint.manifest.state["iteration"]
        found = _shards(rank, -1.0)
        load(checkpoint, found, group, CPU)
        for tensor in found:
            assert bool((tensor.shards[0][1] == float(iteration)).all())
    (folder / f"resumed_{rank}").write_text(str(iteration))
    while True:
        iteration += 1
        for _ in range(2):
            save(root, iteration, _shards(rank, float(iteration)), {"iteration": iteration}, group, CPU)


def _wait_for(condition, processes):
    deadline = time.monotonic() + 30
    while not condition():
        assert all(process.exitcode is None for process in processes), "a rank ended by itself"
        assert time.monotonic() < deadline, "no rank got on"
        time.sleep(0.002)


def _kill_rounds(tmp_path, rounds):
    root = tmp_path / "checkpoints"
    context = multiprocessing.get_context("forkserver")
    reached = 0
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        processes = [context.Process(target=_run, args=(rank, folder, root)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        try:
            resumed = [folder / f"resumed_{rank}" for rank in range(RANKS)]
            _wait_for(
                lambda files=resumed: all(file.exists() and file.read_text() for file in files), processes
            )
            # Each round goes on from what was there; the first may have been killed in its very first save.
            assert {int(file.read_text()) for file in resumed} == {reached}
            time.sleep(random.uniform(0, 0.25))
        finally:
            for process in random.sample(processes, RANKS):
                process.kill()
            for process in processes:
                process.join()
        inventory = survey(root)
        for path in list(inventory.complete.values())[-3:]:
            verify(path)
        if not inventory.empty:
            reached = verify(find(root)).manifest.iteration
    return reached


def test_a_few_kills(tmp_path):
    random.seed(0)
    assert _kill_rounds(tmp_path, 6) > 0


@pytest.mark.nightly
def test_many_kills(tmp_path):
    assert _kill_rounds(tmp_path, 40) > 0
