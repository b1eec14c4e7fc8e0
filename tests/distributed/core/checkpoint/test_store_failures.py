"""One rank fails: all learn of it together, and nothing half-written is taken for a checkpoint."""

import resource

import pytest
import torch
import torch.distributed as dist

from megatron.core.checkpoint import (
    CheckpointError,
    CheckpointNotFoundError,
    Rectangle,
    ShardedTensor,
    load,
    open_checkpoint,
    save,
    survey,
    whole_tensor,
)
from tests.harness import run_ranks

CPU = torch.device("cpu")


def _rows(name, rank, size, *, length=2, columns=4, dtype=torch.float32):
    local = torch.full((length, columns), float(rank), dtype=dtype)
    rectangle = Rectangle((rank * length, 0), (length, columns))
    return ShardedTensor(name, (size * length, columns), dtype, ((rectangle, local),))


def _message(action, kind=CheckpointError):
    with pytest.raises(kind) as found:
        action()
    return str(found.value)


def _good_save(root, iteration, group):
    return save(root, iteration, [_rows("w", group.rank(), group.size())], {}, group, CPU)


def _failing_save(root, spoil):
    """Save iteration 1, fail to save 2 as ``spoil`` has it, save 3; give back what the failure said."""
    group = dist.new_group(list(range(dist.get_world_size())))
    _good_save(root, 1, group)
    message = _message(lambda: save(root, 2, spoil(root, group), {}, group, CPU))
    before = survey(root)
    dist.barrier(group=group)
    _good_save(root, 3, group)
    return message, sorted(before.complete), before.tracked, [path.name for path in before.unfinished]


def _check_failure(tmp_path, spoil, *words):
    found = run_ranks(3, _failing_save, tmp_path, spoil, timeout_seconds=30)
    assert found[0] == found[1] == found[2]
    message, complete, tracked, unfinished = found[0]
    assert "iteration 2" in message
    for word in words:
        assert word in message
    assert complete == [1]
    assert tracked == 1
    assert unfinished == []
    assert sorted(survey(tmp_path).complete) == [1, 3]


def _folder_in_the_way(root, group):
    # Handed over as a generator, it is asked for while the rank writes: rank 1's path is then a folder.
    if group.rank() == 1:
        (root / "iter_0000002.partial" / "rank_00001.safetensors").mkdir()
    yield _rows("w", group.rank(), group.size())


def test_a_path_that_cannot_be_opened(tmp_path):
    _check_failure(tmp_path, _folder_in_the_way, "rank 1: ", "rank_00001.safetensors")


def _disk_full(root, group):
    if group.rank() == 2:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    yield _rows("w", group.rank(), group.size(), columns=100_000)


def _disk_full_save(root):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    group = dist.new_group(list(range(dist.get_world_size())))
    message = _message(lambda: save(root, 2, _disk_full(root, group), {}, group, CPU))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    _good_save(root, 3, group)
    return message


def test_a_disk_that_is_full(tmp_path):
    found = run_ranks(3, _disk_full_save, tmp_path)
    assert found[0] == found[1] == found[2]
    assert "rank 2: OSError: [Errno 27] File too large" in found[0]
    assert "rank 1" not in found[0]
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]


def _raise_anything(root, group):
    if group.rank() == 0:
        raise ZeroDivisionError("a fault of the program")
    yield _rows("w", group.rank(), group.size())


def test_an_error_of_any_kind(tmp_path):
    _check_failure(tmp_path, _raise_anything, "rank 0: ZeroDivisionError: a fault of the program")


def _overlap(root, group):
    return [whole_tensor("w", torch.zeros(2, 4))] if group.rank() < 2 else []


def test_two_ranks_that_give_the_same_rectangle(tmp_path):
    _check_failure(tmp_path, _overlap, "tensor w", "[0:2, 0:4]", "overlap")


def _gap(root, group):
    return [_rows("w", group.rank(), group.size())] if group.rank() != 1 else []


def test_a_rank_that_gives_nothing_of_what_it_holds(tmp_path):
    _check_failure(tmp_path, _gap, "tensor w of shape (6, 4): no rank holds [2:4, 0:4]")


def _other_shape(root, group):
    return [_rows("w", group.rank(), group.size(), columns=4 + group.rank() // 2)]


def test_one_name_with_two_shapes(tmp_path):
    _check_failure(tmp_path, _other_shape, "tensor w is F32 of shape (6, 4) on rank 0", "(6, 5) on rank 2")


def _other_format(root, group):
    dtype = torch.bfloat16 if group.rank() == 1 else torch.float32
    return [_rows("w", group.rank(), group.size(), dtype=dtype)]


def test_one_name_with_two_number_formats(tmp_path):
    _check_failure(tmp_path, _other_format, "tensor w is F32 of shape (6, 4) on rank 0", "BF16", "on rank 1")


def _root_is_a_file(root):
    group = dist.new_group([0, 1])
    (root / "file").touch()
    return _message(lambda: _good_save(root / "file", 1, group))


def test_a_root_that_cannot_be_made(tmp_path):
    found = run_ranks(2, _root_is_a_file, tmp_path)
    assert found[0] == found[1]
    assert "rank 0: FileExistsError" in found[0]


def _failing_loads(root):
    group = dist.new_group([0, 1, 2])
    messages = [_message(lambda: open_checkpoint(root / "typo", group, CPU), CheckpointNotFoundError)]
    folder = _good_save(root, 1, group)
    messages.append(_message(lambda: open_checkpoint(root, group, CPU, step=999), CheckpointNotFoundError))
    checkpoint = open_checkpoint(root, group, CPU)
    name = "w" if group.rank() != 1 else "v"
    wanted = _rows(name, group.rank(), group.size())
    messages.append(_message(lambda: load(checkpoint, [wanted], group, CPU)))
    if group.rank() == 0:
        (folder / "rank_00002.safetensors").unlink()
    dist.barrier(group=group)
    messages.append(_message(lambda: open_checkpoint(root, group, CPU)))
    # A rank that reads only its own, whole file hears of it as well.
    messages.append(_message(lambda: load(checkpoint, [_rows("w", group.rank(), 3)], group, CPU)))
    return messages


def test_loads_fail_on_all_ranks_together(tmp_path):
    found = run_ranks(3, _failing_loads, tmp_path, timeout_seconds=30)
    assert found[0] == found[1] == found[2]
    typo, step, name, opening, reading = found[0]
    assert "typo does not exist" in typo
    assert "iteration 999" in step
    assert "complete iterations: 1" in step
    assert "rank 1: not in the checkpoint: v" in name
    assert "rank_00002.safetensors is missing" in opening
    assert "rank 2: " in reading
    assert "rank_00002.safetensors is missing" in reading
