import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron.core.checkpoint import CheckpointError, Rectangle
from megatron.core.checkpoint.shard_file import (
    DTYPE_CODES,
    SliceRead,
    check_shard_file,
    read_slices,
    write_shard_file,
)


def test_bytes_are_those_of_the_format(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    tensors = [("b", torch.tensor([1.0, -2.0], dtype=torch.bfloat16)), ("a", torch.tensor([[3]]))]
    size = write_shard_file(path, "id", tensors)
    content = path.read_bytes()
    assert len(content) == size
    length = int.from_bytes(content[:8], "little")
    assert (8 + length) % 8 == 0
    assert json.loads(content[8 : 8 + length]) == {
        "__metadata__": {"save_id": "id", "file": "rank_00000.safetensors"},
        "a": {"dtype": "I64", "shape": [1, 1], "data_offsets": [0, 8]},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [8, 12]},
    }
    assert content[8 + length :].hex() == "0300000000000000" + "803f" + "00c0"


@pytest.mark.parametrize("dtype", list(DTYPE_CODES))
def test_the_library_reads_every_number_format_back(tmp_path, dtype):
    path = tmp_path / "rank_00000.safetensors"
    source = torch.randint(0, 2, (3, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    write_shard_file(
        path, "id", [("odd", torch.zeros(3, dtype=torch.uint8)), ("w", source), ("s", source[1, 1])]
    )
    found = load_file(path)
    assert found["w"].dtype == dtype
    assert torch.equal(found["w"].view(torch.uint8), source.view(torch.uint8))
    assert found["s"].shape == ()
    with safe_open(path, framework="pt") as file:
        assert file.get_slice("w").get_dtype() == DTYPE_CODES[dtype]


def test_views_that_are_not_contiguous_are_written_by_value(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    whole = torch.arange(24.0).reshape(4, 6)
    write_shard_file(path, "id", [("columns", whole[:, 2:4]), ("turned", whole.t())])
    found = load_file(path)
    assert torch.equal(found["columns"], torch.tensor([[2.0, 3.0], [8.0, 9.0], [14.0, 15.0], [20.0, 21.0]]))
    assert torch.equal(found["turned"], whole.t())


def test_reading_a_slice_touches_its_target_alone(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    whole = torch.arange(24.0).reshape(4, 6)
    size = write_shard_file(path, "id", [("w#0", whole)])
    # The file's rectangle begins at (10, 20) of its tensor.
    stored, part = Rectangle((10, 20), (4, 6)), Rectangle((11, 22), (2, 3))
    target = torch.full((3, 4), -1.0)
    read_slices(path, "id", size, [SliceRead("w#0", stored, "F32", part, target[1:, 1:])])
    expected = torch.full((3, 4), -1.0)
    expected[1:, 1:] = torch.tensor([[8.0, 9.0, 10.0], [14.0, 15.0, 16.0]])
    assert torch.equal(target, expected)
    wrong = SliceRead("w#0", stored, "F64", part, target[1:, 1:])
    with pytest.raises(CheckpointError, match=r"w#0 is F32 .*manifest says F64"):
        read_slices(path, "id", size, [wrong])


def test_a_damaged_or_foreign_file_is_named(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    size = write_shard_file(path, "id", [("w", torch.zeros(3))])
    check_shard_file(path, "id", size)
    with pytest.raises(CheckpointError, match="belongs elsewhere"):
        check_shard_file(path, "another", size)
    path.rename(tmp_path / "rank_00001.safetensors")
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors is missing"):
        check_shard_file(path, "id", size)
    with pytest.raises(CheckpointError, match=r"was written as rank_00000.safetensors"):
        check_shard_file(tmp_path / "rank_00001.safetensors", "id", size)
    save_file({"w": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match="belongs elsewhere"):
        check_shard_file(path, "id", path.stat().st_size)
    path.write_bytes(b"\xff" * size)
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors cannot be read"):
        check_shard_file(path, "id", size)


def test_no_file_is_written_over(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    path.mkdir()
    with pytest.raises(OSError, match="rank_00000"):
        write_shard_file(path, "id", [("w", torch.zeros(3))])


def test_a_format_that_cannot_be_stored_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tensor w: .*complex64"):
        write_shard_file(tmp_path / "f", "id", [("w", torch.zeros(3, dtype=torch.complex64))])
