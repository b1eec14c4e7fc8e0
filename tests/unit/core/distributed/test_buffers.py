"""Where parameters lie in the flat buckets, and which elements count."""

from dataclasses import dataclass

import pytest
import torch

from megatron.core.distributed.buffers import ALIGNMENT, ParameterBuffers, default_bucket_size
from megatron.core.parameter import NamedParameter, ParameterFacts, Piece, Placement, make_parameter
from tests.unit.core.distributed.toy import Probe, TwoLayers, parameters


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


@dataclass(frozen=True)
class Place:
    """A rank's place in a group, or (of the parallel state) on its axes, without any process group."""

    own: int
    extent: int

    def rank(self, axis: str = "tp") -> int:
        return self.own if axis == "tp" else 0

    def size(self, axis: str = "tp") -> int:
        return self.extent if axis == "tp" else 1


@dataclass(frozen=True)
class StagePlace:
    """A rank's place among two stages."""

    stage: int

    def rank(self, axis: str) -> int:
        return self.stage if axis == "pp" else 0

    def size(self, axis: str) -> int:
        return 2 if axis == "pp" else 1


def layout(buffers: ParameterBuffers) -> list[list[tuple[str, int, int, int]]]:
    """Name, start, stop and offset of each part, by bucket."""
    return [
        [(part.named.name, part.start, part.stop, part.offset) for part in bucket.parts]
        for bucket in buffers.buckets
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tensor_parallel_ranks_lay_out_their_buckets_alike(tp: int):
    """Although rank 0 alone counts replicated parameters, some ranks share rows, and the last has padding."""
    layouts = [
        layout(ParameterBuffers(parameters(Probe(Place(rank, tp), torch.float64)), bucket_size=50))  # type: ignore[arg-type]
        for rank in range(tp)
    ]
    assert all(found == layouts[0] for found in layouts)
    assert len(layouts[0]) > 1


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_slices_are_equal_and_tile_every_parameter(replicas: int):
    sizes = {named.name: named.parameter.numel() for named in parameters(TwoLayers(torch.bfloat16))}
    whole = ParameterBuffers(parameters(TwoLayers(torch.bfloat16)), bucket_size=None).flat_buckets[0]
    covered: dict[str, list[int]] = {name: [] for name in sizes}
    counted = 0
    lengths = set()
    for rank in range(replicas):
        model = TwoLayers(torch.bfloat16)
        group = Place(rank, replicas)
        for strategy in ("optim", "optim_grads"):
            buffers = ParameterBuffers(
                parameters(model),
                bucket_size=None,
                strategy=strategy,
                data_group=group,  # type: ignore[arg-type]
            )
            (bucket,) = buffers.buckets
            assert buffers.sharded
            assert bucket.gradients.dtype == torch.float32
            assert bucket.weights.numel() == bucket.gradients.numel()
            assert bucket.weights.numel() % ALIGNMENT == 0
        lengths.add(bucket.weights.numel())
        counted += bucket.counted_size
        flat = buffers.flat_buckets[0].weights
        # The slices stand in the order of ranks in the whole bucket, which is the unsharded one and padding.
        assert torch.equal(bucket.weights, flat.view(replicas, -1)[rank])
        assert torch.equal(flat[: whole.size], whole.weights)
        assert not flat[whole.size :].any()
        for part in bucket.parts:
            covered[part.named.name] += range(part.start, part.stop)
            assert torch.equal(
                part.view(bucket.weights), part.named.parameter.view(-1)[part.start : part.stop]
            )
        decays = [part.named.facts.weight_decay for part in bucket.parts]
        assert len(bucket.decay_ranges(True)) == (True in decays)
    # 192 elements: one slice, halves of 128 (256 elements), 64 a rank, and of four ranks one with nothing.
    assert lengths == {{1: 192, 2: 128, 3: 64, 4: 64}[replicas]}
    assert {name: sorted(indices) for name, indices in covered.items()} == {
        name: list(range(size)) for name, size in sizes.items()
    }
    assert counted == 77


def test_tied_parameters_are_cut_alike_on_both_stages():
    """They lie at other places of the two stages' module trees, among other parameters."""
    cuts = []
    for stage in (0, 1):
        probe = Probe(StagePlace(stage), torch.float64)  # type: ignore[arg-type]
        buffers = ParameterBuffers(
            parameters(probe),
            bucket_size=None,
            strategy="optim",
            data_group=Place(0, 2),  # type: ignore[arg-type]
        )
        tied = [bucket for bucket in layout(buffers) if bucket[0][0] == "embedding.weight"]
        assert len(tied) == 1
        cuts.append(tied[0])
    assert cuts[0] == cuts[1] == [("embedding.weight", 0, 44, 0)]


def test_a_parameter_of_two_chunks_is_used_twice():
    entries = parameters(TwoLayers(torch.float32))
    buffers = ParameterBuffers([*entries, entries[0]], bucket_size=None)
    assert {slot.named.name: slot.uses for _, slot in buffers.slots()} == {"first": 2, "bias": 1, "second": 1}


def test_refusals_and_default_size():
    with pytest.raises(ValueError, match="--ddp-bucket-size 0"):
        ParameterBuffers(parameters(TwoLayers(torch.float32)), bucket_size=0)
    with pytest.raises(ValueError, match="one device"):
        ParameterBuffers([], bucket_size=None)
    assert default_bucket_size(8) == 40_000_000
    assert default_bucket_size(64) == 64_000_000
