"""Where parameters lie in the flat buckets, and which elements count."""

import pytest
import torch

from megatron.core.distributed.buffers import ALIGNMENT, ParameterBuffers, default_bucket_size
from megatron.core.parameter import NamedParameter, ParameterFacts, Piece, Placement, make_parameter
from tests.unit.core.distributed.toy import TwoLayers, parameters


def named(
    name: str, shape: tuple[int, ...], pieces: tuple[Piece, ...], *, dim: int = 0, copy_of: str | None = None
) -> NamedParameter:
    global_shape = tuple(100 if d == dim else size for d, size in enumerate(shape))
    facts = ParameterFacts(global_shape, dim, pieces, None, 0.0, len(shape) > 1, copy_of)
    parameter = make_parameter(shape, facts, Placement(torch.float32, torch.device("cpu")))
    torch.nn.init.normal_(parameter)
    return NamedParameter(name, parameter, facts)


def test_parameters_keep_their_values_and_become_views():
    model = TwoLayers(torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = ParameterBuffers(parameters(model), bucket_size=None)
    (bucket,) = buffers.buckets
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.untyped_storage().data_ptr() == bucket.weights.untyped_storage().data_ptr()
    bucket.weights.zero_()
    assert not model.first.any()
    assert all(part.offset % ALIGNMENT == 0 for part in bucket.parts)
    # 35 -> 64, 35 -> 64, 7 -> 64 elements; matrices (with weight decay) before the bias.
    assert bucket.weights.numel() == 192
    assert [part.named.name for part in bucket.parts] == ["second", "first", "bias"]
    assert bucket.decay_ranges(True) == [(0, 64 + 35)]
    assert bucket.decay_ranges(False) == [(128, 135)]


@pytest.mark.parametrize(
    ("dtype", "gradient"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_gradients_are_at_least_float32(dtype: torch.dtype, gradient: torch.dtype):
    (bucket,) = ParameterBuffers(parameters(TwoLayers(dtype)), bucket_size=None).buckets
    assert (bucket.weights.dtype, bucket.gradients.dtype) == (dtype, gradient)


def test_buckets_follow_the_backward_pass():
    model = TwoLayers(torch.float32)
    buffers = ParameterBuffers(parameters(model), bucket_size=36)
    names = [[part.named.name for part in bucket.parts] for bucket in buffers.buckets]
    assert names == [["second", "bias"], ["first"]]
    assert [entry.name for entry in buffers.parameters] == ["first", "bias", "second"]


def test_a_parameter_that_occurs_twice_counts_once():
    entries = parameters(TwoLayers(torch.float32))
    again = NamedParameter("tied", entries[0].parameter, entries[0].facts)
    buffers = ParameterBuffers([*entries, again], bucket_size=None)
    assert [entry.name for entry in buffers.parameters] == ["first", "bias", "second"]


def test_counted_elements_are_the_primary_pieces():
    entries = [
        named("padded", (10, 2), (Piece(0, 90, 7),)),  # three rows of padding
        named("shared", (6, 2), (Piece(0, 0, 2), Piece(2, 8, 4, primary=False))),
        named("columns", (3, 5), (Piece(0, 0, 2), Piece(2, 9, 3, primary=False)), dim=1),
        named("copy", (4, 2), (Piece(0, 0, 4),), copy_of="padded"),
        named("two", (6, 2), (Piece(0, 0, 3), Piece(3, 50, 3))),  # adjacent here, apart in the whole
        named("replica", (5,), (Piece(0, 0, 5, primary=False),)),
        named("bias", (5,), (Piece(0, 0, 5),)),
    ]
    (bucket,) = ParameterBuffers(entries, bucket_size=None).buckets
    counted = torch.zeros(bucket.weights.numel(), dtype=torch.bool)
    for start, stop in bucket.counted_ranges:
        counted[start:stop] = True
    expected = {
        "padded": [1] * 14 + [0] * 6,
        "shared": [1] * 4 + [0] * 8,
        "columns": [1, 1, 0, 0, 0] * 3,
        "copy": [0] * 8,
        "two": [1] * 12,
        "replica": [0] * 5,
        "bias": [1] * 5,
    }
    for part in bucket.parts:
        assert part.view(counted).int().tolist() == expected[part.named.name], part.named.name
    assert bucket.counted_size == sum(sum(values) for values in expected.values())
    rest = torch.ones_like(counted)
    for start, stop in bucket.uncounted_ranges:
        rest[start:stop] = False
    assert torch.equal(rest, counted)


def test_whole_parameters_are_counted_in_one_range_over_their_gaps():
    (bucket,) = ParameterBuffers(parameters(TwoLayers(torch.float32)), bucket_size=None).buckets
    assert bucket.counted_ranges == [(0, 135)]
    assert bucket.counted_size == 77


def test_refusals_and_default_size():
    with pytest.raises(ValueError, match="--ddp-bucket-size 0"):
        ParameterBuffers(parameters(TwoLayers(torch.float32)), bucket_size=0)
    with pytest.raises(ValueError, match="one device"):
        ParameterBuffers([], bucket_size=None)
    assert default_bucket_size(8) == 40_000_000
    assert default_bucket_size(64) == 64_000_000
