import itertools
import random
import re
import time

import pytest
import torch

from megatron.core.checkpoint import (
    CheckpointError,
    Rectangle,
    ShardedTensor,
    check_tiling,
    sharded_parameter,
    sharded_slice,
    share_among_replicas,
    whole_tensor,
)
from megatron.core.parameter import ParameterFacts, Piece


def _facts(shape, dim, *pieces, copy_of=None):
    return ParameterFacts(shape, dim, pieces, init_std=1.0, copy_of=copy_of)


def test_intersections_are_the_common_indices():
    random.seed(0)
    for _ in range(200):
        a, b = (
            Rectangle(
                tuple(random.randrange(4) for _ in range(3)), tuple(random.randrange(4) for _ in range(3))
            )
            for _ in range(2)
        )
        cells = [
            set(itertools.product(*(range(s, e) for s, e in zip(r.offset, r.end, strict=True))))
            for r in (a, b)
        ]
        common = a.intersection(b)
        found = set() if common is None else set(itertools.product(*map(range, common.offset, common.end)))
        assert found == cells[0] & cells[1]


def test_two_pieces_of_a_fused_weight_become_two_rectangles():
    # Rank 1 of 2 of a SwiGLU weight of 4 gate and 4 up rows: local rows are gate 2, 3 and up 2, 3.
    whole = torch.arange(16.0).reshape(8, 2)
    local = torch.cat([whole[2:4], whole[6:8]])
    facts = _facts((8, 2), 0, Piece(0, 2, 2), Piece(2, 6, 2))
    sharded = sharded_parameter("w", local, facts, primary_only=True)
    assert [rectangle for rectangle, _ in sharded.shards] == [
        Rectangle((2, 0), (2, 2)),
        Rectangle((6, 0), (2, 2)),
    ]
    for rectangle, view in sharded.shards:
        first = rectangle.offset[0]
        assert torch.equal(view, whole[first : first + 2])
    sharded.shards[1][1].zero_()
    assert local[2:].abs().sum() == 0, "a shard is a view of the local tensor"


def test_what_another_rank_saves_is_loaded_and_not_saved():
    local = torch.zeros(4, 2)
    facts = _facts((8, 2), 0, Piece(0, 0, 2), Piece(2, 6, 2, primary=False))
    assert len(sharded_parameter("w", local, facts, primary_only=True).shards) == 1
    assert len(sharded_parameter("w", local, facts, primary_only=False).shards) == 2
    copy = _facts((8, 2), 0, Piece(0, 0, 4), copy_of="w")
    assert sharded_parameter("w", local, copy, primary_only=True).shards == ()
    assert len(sharded_parameter("w", local, copy, primary_only=False).shards) == 1


def test_padding_lies_in_no_rectangle():
    # Vocabulary 101 padded to 128 over 4: rank 3 holds rows 96 to 127, of which 5 are true; or none are.
    last = sharded_parameter("w", torch.ones(32, 2), _facts((101, 2), 0, Piece(0, 96, 5)), primary_only=True)
    assert [rectangle for rectangle, _ in last.shards] == [Rectangle((96, 0), (5, 2))]
    none = sharded_parameter("w", torch.ones(32, 2), _facts((101, 2), 0, Piece(0, 101, 0)), primary_only=True)
    assert none.shards == ()


def test_a_shard_must_fit_its_rectangle():
    rectangle = Rectangle((0, 0), (2, 2))
    with pytest.raises(ValueError, match="w: rectangle"):
        ShardedTensor("w", (2, 2), torch.float32, ((rectangle, torch.zeros(2, 3)),))
    with pytest.raises(ValueError, match="bfloat16"):
        ShardedTensor("w", (2, 2), torch.float32, ((rectangle, torch.zeros(2, 2, dtype=torch.bfloat16)),))
    with pytest.raises(CheckpointError, match="not inside"):
        ShardedTensor("w", (2, 1), torch.float32, ((rectangle, torch.zeros(2, 2)),))


def _random_tiling(shape, cuts):
    """Cut a tensor at random into rectangles that cover it exactly."""
    pieces = [Rectangle((0,) * len(shape), shape)]
    for _ in range(cuts):
        piece = pieces.pop(random.randrange(len(pieces)))
        dim = random.randrange(len(shape))
        cut = random.randint(0, piece.shape[dim])
        for start, length in ((0, cut), (cut, piece.shape[dim] - cut)):
            offset, extent = list(piece.offset), list(piece.shape)
            offset[dim] += start
            extent[dim] = length
            pieces.append(Rectangle(tuple(offset), tuple(extent)))
    return pieces


def test_exact_covers_pass_and_any_gap_or_overlap_is_named():
    random.seed(1)
    for _ in range(60):
        pieces = _random_tiling((7, 5, 6), random.randrange(12))
        check_tiling("w", (7, 5, 6), pieces)
        solid = [piece for piece in pieces if piece.size]
        victim = random.choice(solid)
        rest = [piece for piece in pieces if piece is not victim]
        with pytest.raises(CheckpointError, match=r"tensor w of shape .*no rank holds") as gap:
            check_tiling("w", (7, 5, 6), rest)
        # The part that it names lies in the rectangle that was left out.
        spans = re.findall(r"(\d+):(\d+)", str(gap.value))
        limits = zip(victim.offset, victim.end, strict=True)
        for (start, stop), (low, high) in zip(spans, limits, strict=True):
            assert low <= int(start) < int(stop) <= high
        with pytest.raises(CheckpointError, match=r"tensor w: .*overlap"):
            check_tiling("w", (7, 5, 6), [*pieces, Rectangle(victim.offset, (1, 1, 1))])


def test_equal_sizes_do_not_hide_an_overlap_beside_a_gap():
    with pytest.raises(CheckpointError, match="overlap"):
        check_tiling("w", (4,), [Rectangle((0,), (2,)), Rectangle((1,), (2,))])


def test_scalars_and_empty_tensors_tile():
    scalar = Rectangle((), ())
    check_tiling("s", (), [scalar])
    check_tiling("e", (0, 5), [])
    check_tiling("e", (0, 5), [Rectangle((0, 0), (0, 5))])
    with pytest.raises(CheckpointError, match="no rank holds"):
        check_tiling("s", (), [])
    with pytest.raises(CheckpointError, match="scalar s is given 2 times"):
        check_tiling("s", (), [scalar, scalar])
    with pytest.raises(CheckpointError, match="not inside"):
        check_tiling("w", (4,), [Rectangle((3,), (2,))])


def test_thousands_of_rectangles_are_checked_at_once():
    rows = [Rectangle((index, 0), (1, 64)) for index in range(3000)]
    columns = [Rectangle((0, index), (64, 1)) for index in range(3000)]
    begin = time.process_time()
    check_tiling("rows", (3000, 64), rows)
    check_tiling("columns", (64, 3000), columns)
    assert time.process_time() - begin < 2


def test_replicas_share_the_bytes_and_give_each_tensor_once():
    tensors = [
        whole_tensor(f"t{index}", torch.zeros(size)) for index, size in enumerate([8, 1, 5, 5, 9, 2, 0])
    ]
    shares = [share_among_replicas(tensors, rank, 3) for rank in range(3)]
    assert sorted(tensor.name for share in shares for tensor in share) == [f"t{index}" for index in range(7)]
    # 30 elements of 4 bytes over 3 replicas, the largest tensor being 9 of them: 40 bytes each, as they fall.
    assert sorted(sum(tensor.local_bytes for tensor in share) for share in shares) == [40, 40, 40]


@pytest.mark.parametrize(
    ("shape", "dim", "pieces"),
    [
        ((7,), 0, [Piece(0, 10, 7)]),
        ((5, 4), 0, [Piece(0, 3, 2), Piece(2, 8, 2)]),  # two pieces apart in the whole, and a row of padding
        ((3, 4), 1, [Piece(0, 6, 1), Piece(1, 11, 3)]),
        ((3, 2, 4), 0, [Piece(0, 2, 3)]),
        ((3, 4, 2), 1, [Piece(0, 5, 3)]),
        ((1, 4), 0, [Piece(0, 0, 0)]),
    ],
)
def test_slices_of_a_parameter_are_the_same_elements_as_the_whole(shape, dim, pieces):
    """Every run of elements, against a mask that is filled and cut like the parameter itself."""
    global_shape = tuple(20 if d == dim else size for d, size in enumerate(shape))
    facts = _facts(global_shape, dim, *pieces)
    local = torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(local.numel() + 1), 2):
        chosen = torch.zeros_like(local).flatten()
        chosen[start:stop] = local.flatten()[start:stop]
        chosen = chosen.view(shape)
        expected = torch.zeros(global_shape)
        for piece in pieces:
            rows = chosen.narrow(dim, piece.local, piece.length)
            expected.narrow(dim, piece.start, piece.length).copy_(rows)
        flat = local.flatten()[start:stop].clone()
        sharded = sharded_slice("w", flat, facts, shape, start, primary_only=True)
        found = torch.zeros(global_shape)
        for rectangle, view in sharded.shards:
            place = tuple(slice(a, b) for a, b in zip(rectangle.offset, rectangle.end, strict=True))
            assert not found[place].any()
            found[place] = view
        assert torch.equal(found, expected)
        assert len(sharded.shards) <= (2 * len(shape) - 1) * len(pieces)
        for _, view in sharded.shards:
            view.zero_()  # a shard is a view
        assert flat.count_nonzero() == stop - start - expected.count_nonzero()


def test_slices_of_what_another_rank_saves_are_loaded_and_not_saved():
    flat = torch.zeros(5)
    facts = _facts((8, 2), 0, Piece(0, 0, 2), Piece(2, 6, 2, primary=False))
    saved = sharded_slice("w", flat, facts, (4, 2), 2, primary_only=True)
    assert [rectangle for rectangle, _ in saved.shards] == [Rectangle((1, 0), (1, 2))]
    loaded = sharded_slice("w", flat, facts, (4, 2), 2, primary_only=False)
    assert [rectangle for rectangle, _ in loaded.shards] == [
        Rectangle((1, 0), (1, 2)),
        Rectangle((6, 0), (1, 2)),
        Rectangle((7, 0), (1, 1)),
    ]
    copy = _facts((8, 2), 0, Piece(0, 0, 4), copy_of="w")
    assert sharded_slice("w", flat, copy, (4, 2), 0, primary_only=True).shards == ()
    assert len(sharded_slice("w", flat, copy, (4, 2), 0, primary_only=False).shards) == 2
    assert sharded_slice("w", flat[:0], facts, (4, 2), 8, primary_only=False).shards == ()
