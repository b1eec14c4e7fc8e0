import json
import os
import shutil
import time

import pytest
import torch

from megatron.core.checkpoint import (
    CheckpointError,
    CheckpointNotFoundError,
    Rectangle,
    ShardedTensor,
    find,
    load,
    open_checkpoint,
    read_manifest,
    save,
    verify,
    whole_tensor,
)

CPU = torch.device("cpu")


def _tensors(value=0.0):
    return [
        whole_tensor("model.w", torch.full((3, 4), value, dtype=torch.bfloat16)),
        whole_tensor("optimizer.main.w", torch.arange(12.0).reshape(3, 4) + value),
        whole_tensor("optimizer.step", torch.tensor(7 + int(value))),
        whole_tensor("empty", torch.empty(0, 5, dtype=torch.float16)),
        whole_tensor("wide", torch.tensor([1 / 3, value], dtype=torch.float64)),
    ]


def _like(tensors):
    return [whole_tensor(t.name, torch.full(t.global_shape, -1, dtype=t.dtype)) for t in tensors]


def _assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.shards[0][1], b.shards[0][1]), a.name


def test_what_was_saved_comes_back_bit_for_bit(tmp_path, group):
    state = {"iteration": 3, "lr": 1e-4 / 3}
    folder = save(tmp_path / "deep" / "root", 3, _tensors(2.0), state, group, CPU)
    assert folder == tmp_path / "deep" / "root" / "iter_0000003"
    checkpoint = open_checkpoint(tmp_path / "deep" / "root", group, CPU)
    assert checkpoint.manifest.state == state
    assert checkpoint.manifest.iteration == 3
    assert checkpoint.manifest.tensors["empty"].shape == (0, 5)
    found = _like(_tensors())
    load(checkpoint, found, group, CPU)
    _assert_equal(found, _tensors(2.0))
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]


def test_only_what_is_asked_for_is_read(tmp_path, group):
    save(tmp_path, 1, _tensors(2.0), {}, group, CPU)
    checkpoint = open_checkpoint(tmp_path, group, CPU)
    found = _like(_tensors()[:1])
    load(checkpoint, found, group, CPU)
    _assert_equal(found, _tensors(2.0)[:1])
    assert checkpoint.manifest.names("optimizer.") == ["optimizer.main.w", "optimizer.step"]


def test_a_second_save_of_an_iteration_takes_the_place_of_the_first(tmp_path, group):
    save(tmp_path, 1, _tensors(2.0), {"run": 1}, group, CPU)
    save(tmp_path, 1, _tensors(3.0), {"run": 2}, group, CPU)
    checkpoint = open_checkpoint(tmp_path, group, CPU)
    found = _like(_tensors())
    load(checkpoint, found, group, CPU)
    _assert_equal(found, _tensors(3.0))
    assert checkpoint.manifest.state == {"run": 2}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_step_that_is_not_there_is_not_found(tmp_path, group):
    save(tmp_path, 1, _tensors(), {}, group, CPU)
    with pytest.raises(CheckpointNotFoundError, match="iteration 999"):
        open_checkpoint(tmp_path, group, CPU, step=999)


def test_number_formats_are_not_changed_unasked(tmp_path, group):
    # Moments that were stored in bf16 and are widened on load have lost bits for good.
    save(tmp_path, 1, _tensors(1 / 3), {}, group, CPU)
    checkpoint = open_checkpoint(tmp_path, group, CPU)
    widened = [whole_tensor("model.w", torch.zeros(3, 4))]
    with pytest.raises(CheckpointError, match=r"model.w \(checkpoint BF16, wanted F32\)"):
        load(checkpoint, widened, group, CPU)
    load(checkpoint, widened, group, CPU, cast=True)
    assert torch.equal(widened[0].shards[0][1], torch.full((3, 4), 0.333984375))  # 1/3 in bf16


def test_missing_tensors_and_other_shapes_are_named(tmp_path, group):
    save(tmp_path, 1, _tensors(), {}, group, CPU)
    checkpoint = open_checkpoint(tmp_path, group, CPU)
    absent = [whole_tensor(f"optimizer.exp_avg.{index}", torch.zeros(1)) for index in range(7)]
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: optimizer.exp_avg.0, .* and 2 more"):
        load(checkpoint, absent, group, CPU)
    taller = [whole_tensor("optimizer.main.w", torch.zeros(4, 4))]
    with pytest.raises(CheckpointError, match=r"main.w \(checkpoint \(3, 4\), model \(4, 4\)\)"):
        load(checkpoint, taller, group, CPU)
    assert taller[0].shards[0][1].abs().sum() == 0


def test_a_flat_slice_of_several_rectangles_goes_both_ways(tmp_path, group):
    # Elements 3 to 17 of a [4, 5] tensor lie flat: the end of row 0, rows 1 and 2, the start of row 3.
    def pieces(buffer):
        spans = [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 3))]
        shards, position = [], 0
        for offset, shape in spans:
            size = shape[0] * shape[1]
            shards.append((Rectangle(offset, shape), buffer[position : position + size].view(shape)))
            position += size
        return tuple(shards)

    whole = torch.arange(20.0).reshape(4, 5)
    flat = ShardedTensor("m", (4, 5), torch.float32, pieces(whole.reshape(-1)[3:18].clone()))
    ends = (
        (Rectangle((0, 0), (1, 3)), whole[0:1, 0:3]),
        (Rectangle((3, 3), (1, 2)), whole[3:4, 3:5]),
    )
    both = ShardedTensor("m", (4, 5), torch.float32, flat.shards + ends)
    save(tmp_path, 1, [both], {}, group, CPU)
    checkpoint = open_checkpoint(tmp_path, group, CPU)
    found = [whole_tensor("m", torch.zeros(4, 5))]
    load(checkpoint, found, group, CPU)
    assert torch.equal(found[0].shards[0][1], whole)
    buffer = torch.zeros(15)
    load(checkpoint, [ShardedTensor("m", (4, 5), torch.float32, pieces(buffer))], group, CPU)
    assert torch.equal(buffer, torch.arange(3.0, 18.0))


def test_a_tensor_given_twice_or_not_whole_is_no_checkpoint(tmp_path, group):
    twice = [whole_tensor("w", torch.zeros(2)), whole_tensor("w", torch.zeros(2))]
    with pytest.raises(CheckpointError, match="rank 0: tensor w is given twice"):
        save(tmp_path, 1, twice, {}, group, CPU)
    half = ShardedTensor("w", (4,), torch.float32, ((Rectangle((0,), (2,)), torch.zeros(2)),))
    with pytest.raises(CheckpointError, match=r"tensor w of shape \(4,\): no rank holds \[2:4\]"):
        save(tmp_path, 1, [half], {}, group, CPU)
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save(tmp_path, 1, _tensors(), {"x": torch.zeros(1)}, group, CPU)
    assert list(tmp_path.iterdir()) == []


def _spoil_truncate(folder, other):
    path = folder / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _spoil_remove(folder, other):
    (folder / "rank_00000.safetensors").unlink()


def _spoil_swap(folder, other):
    shutil.copy(other / "rank_00000.safetensors", folder)


def _spoil_manifest(folder, other):
    body = json.loads((folder / "manifest.json").read_text())
    body["state"]["iteration"] = 100
    (folder / "manifest.json").write_text(json.dumps(body))


def _spoil_foreign_manifest(folder, other):
    shutil.copy(other / "manifest.json", folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_spoil_truncate, "bytes, and"),
        (_spoil_remove, "is missing"),
        (_spoil_swap, "belongs elsewhere"),
        (_spoil_manifest, "was changed"),
        (_spoil_foreign_manifest, "belongs elsewhere"),
    ],
)
def test_a_spoilt_checkpoint_is_refused_and_never_left_for_an_older_one(tmp_path, group, spoil, message):
    other = save(tmp_path, 1, _tensors(1.0), {"iteration": 1}, group, CPU)
    folder = save(tmp_path, 2, _tensors(2.0), {"iteration": 2}, group, CPU)
    assert (folder / "rank_00000.safetensors").stat().st_size == (
        other / "rank_00000.safetensors"
    ).stat().st_size
    verify(folder)
    spoil(folder, other)
    with pytest.raises(CheckpointError, match=message) as found:
        open_checkpoint(tmp_path, group, CPU)
    assert "iter_0000002" in str(found.value)
    with pytest.raises(CheckpointError, match=message):
        verify(folder)
    assert open_checkpoint(tmp_path, group, CPU, step=1).manifest.state == {"iteration": 1}


def test_ten_thousand_tensors_take_seconds(tmp_path, group):
    tensors = [
        whole_tensor(f"layer.{index}.weight", torch.full((4,), float(index))) for index in range(10_000)
    ]
    begin = time.process_time()
    save(tmp_path, 1, tensors, {}, group, CPU)
    found = _like(tensors)
    load(open_checkpoint(tmp_path, group, CPU), found, group, CPU)
    assert time.process_time() - begin < 20
    _assert_equal(found, tensors)


class _Killed(BaseException):
    """Stands for the death of the process: nothing that catches errors catches it."""


_CALLS = [
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (os, "mkdir"),
    (os, "unlink"),
    (os, "rmdir"),
    (shutil, "rmtree"),
]


def _die_at(monkeypatch, call_number):
    """Die in place of the nth call that changes what lies on disk; with a large n, count them."""
    calls = []

    def dying(name, real):
        def wrapper(*args, **kwargs):
            calls.append(name)
            if len(calls) > call_number:
                raise _Killed
            return real(*args, **kwargs)

        return wrapper

    for module, name in _CALLS:
        monkeypatch.setattr(module, name, dying(name, getattr(module, name)))
    return calls


@pytest.mark.parametrize("again", [False, True], ids=["next", "same"])
def test_death_at_any_moment_leaves_a_complete_checkpoint(tmp_path, group, monkeypatch, again):
    """Die before each change to the disk in turn, while saving iteration 2 after 1, or over 2."""
    previous = 2 if again else 1
    deaths = 0
    while True:
        root = tmp_path / str(deaths)
        save(root, previous, _tensors(1.0), {"run": 1}, group, CPU)
        with monkeypatch.context() as patched:
            calls = _die_at(patched, deaths)
            try:
                save(root, 2, _tensors(2.0), {"run": 2}, group, CPU)
            except _Killed:
                assert len(calls) == deaths + 1
            else:
                break
        left = open_checkpoint(root, group, CPU)
        run = left.manifest.state["run"]
        found = _like(_tensors())
        load(left, found, group, CPU)
        _assert_equal(found, _tensors(float(run)))
        save(root, 3, _tensors(3.0), {"run": 3}, group, CPU)
        assert read_manifest(find(root)).state == {"run": 3}
        assert find(root, previous).name == f"iter_{previous:07d}"
        assert [path for path in root.iterdir() if path.suffix in (".partial", ".replaced")] == []
        deaths += 1
    assert deaths >= 8
