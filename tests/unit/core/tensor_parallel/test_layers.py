import pytest
import torch
import torch.nn.functional as F

from megatron.core.parameter import Piece, Placement, facts_of
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabShard,
    initialize_parameters,
)
from tests.unit.core.tensor_parallel.single import single_rank_group

DOUBLE = Placement(torch.float64, torch.device("cpu"))
BFLOAT = Placement(torch.bfloat16, torch.device("cpu"))


class TwoRanks:
    """Stands for rank 1 of a group of 2 where no collective runs."""

    def rank(self):
        return 1

    def size(self):
        return 2


def test_layers_say_what_they_hold():
    column = ColumnParallelLinear(8, 12, group=TwoRanks(), placement=DOUBLE, init_std=0.02)
    row = RowParallelLinear(12, 8, group=TwoRanks(), placement=DOUBLE, init_std=0.02, bias=False)
    table = VocabParallelEmbedding(101, 104, 8, group=TwoRanks(), placement=DOUBLE, init_std=0.02)
    assert "out=6 of 12, bias=True, tp rank 1 of 2" in repr(column)
    assert "in=6 of 12, out=8, bias=False, tp rank 1 of 2" in repr(row)
    assert "rows=52 of 104 (101 true)" in repr(table)


def test_facts_of_a_shard():
    column = ColumnParallelLinear(8, 12, group=TwoRanks(), placement=DOUBLE, init_std=0.02)
    assert column.weight.shape == (6, 8)
    assert facts_of(column.weight).pieces == (Piece(0, 6, 6),)
    assert facts_of(column.weight).global_shape == (12, 8)
    assert facts_of(column.weight).weight_decay
    assert facts_of(column.bias).global_shape == (12,)
    assert facts_of(column.bias).pieces == (Piece(0, 6, 6),)
    assert not facts_of(column.bias).weight_decay

    row = RowParallelLinear(12, 8, group=TwoRanks(), placement=DOUBLE, init_std=0.02)
    assert row.weight.shape == (8, 6)
    assert facts_of(row.weight).dim == 1
    assert facts_of(row.weight).pieces == (Piece(0, 6, 6),)
    assert facts_of(row.bias).pieces == (Piece(0, 0, 8, primary=False),)  # rank 0 counts it
    assert not facts_of(row.bias).weight_decay
    assert not facts_of(row.bias).partial_over_tp

    table = VocabParallelEmbedding(101, 104, 8, group=TwoRanks(), placement=DOUBLE, init_std=0.02)
    assert table.weight.shape == (52, 8)
    assert facts_of(table.weight).global_shape == (101, 8)
    assert facts_of(table.weight).pieces == (Piece(0, 52, 49),)


def test_a_row_layer_that_gives_a_part_of_the_sequence_sees_a_part_of_its_biass_gradient():
    layout = {"sequence_parallel": True, "placement": DOUBLE, "init_std": 0.02}
    row = RowParallelLinear(12, 8, group=TwoRanks(), **layout)
    assert facts_of(row.bias).partial_over_tp
    assert not facts_of(row.weight).partial_over_tp
    assert not facts_of(ColumnParallelLinear(8, 12, group=TwoRanks(), **layout).bias).partial_over_tp
    alone = RowParallelLinear(12, 8, group=single_rank_group(), **layout)
    assert not facts_of(alone.bias).partial_over_tp


def test_a_table_that_another_stage_holds_too_is_tied():
    table = VocabParallelEmbedding(101, 104, 8, group=TwoRanks(), placement=DOUBLE, init_std=0.02, tied=True)
    assert facts_of(table.weight).tied


def test_given_pieces_decide_the_rows():
    pieces = (Piece(0, 4, 2), Piece(2, 10, 1, primary=False))
    layer = ColumnParallelLinear(8, 12, group=TwoRanks(), placement=DOUBLE, init_std=0.02, pieces=pieces)
    assert layer.weight.shape == (3, 8)
    assert layer.bias.shape == (3,)
    assert facts_of(layer.bias).pieces == pieces


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"output size 13 .* size 2 .*--tensor-model-parallel-size"):
        ColumnParallelLinear(8, 13, group=TwoRanks(), placement=DOUBLE, init_std=0.02)
    with pytest.raises(ValueError, match=r"input size 13 .* size 2"):
        RowParallelLinear(13, 8, group=TwoRanks(), placement=DOUBLE, init_std=0.02)
    with pytest.raises(ValueError, match=r"padded vocabulary of 103 .*--make-vocab-size-divisible-by"):
        VocabParallelEmbedding(101, 103, 8, group=TwoRanks(), placement=DOUBLE, init_std=0.02)
    with pytest.raises(ValueError, match=r"padded vocabulary of 100 .* 101 true"):
        VocabParallelEmbedding(101, 100, 8, group=TwoRanks(), placement=DOUBLE, init_std=0.02)


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, (0, 40)), (1, (40, 40)), (2, (80, 21)), (3, (120, 0))], ids=str
)
def test_shard_of_a_padded_vocabulary(rank, expected):
    class Group:
        def rank(self):
            return rank

        def size(self):
            return 4

    shard = VocabShard.of(101, 160, Group())
    assert (shard.first, shard.valid) == expected
    assert (shard.rows, shard.vocab_size) == (40, 101)
    tokens = torch.arange(101)
    ids, mine = shard.local(tokens)
    assert tokens[mine].tolist() == list(range(expected[0], expected[0] + expected[1]))
    assert ids[mine].tolist() == list(range(expected[1]))
    assert ids[~mine].eq(0).all()


def test_one_rank_is_an_ordinary_linear_layer_and_embedding():
    group = single_rank_group()
    column = ColumnParallelLinear(8, 12, group=group, placement=DOUBLE, init_std=0.5)
    row = RowParallelLinear(12, 8, group=group, placement=DOUBLE, init_std=0.5)
    table = VocabParallelEmbedding(101, 104, 8, group=group, placement=DOUBLE, init_std=0.5)
    initialize_parameters(torch.nn.ModuleDict({"table": table, "column": column, "row": row}), 1)
    with torch.no_grad():
        column.bias.normal_()
        row.bias.normal_()
    tokens = torch.randint(0, 101, (3, 5))
    found = row(column(table(tokens)))
    dense = F.linear(F.linear(table.weight[tokens], column.weight, column.bias), row.weight, row.bias)
    torch.testing.assert_close(found, dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("token", [-1, 101, 103])
def test_tokens_outside_the_vocabulary_are_refused(token):
    table = VocabParallelEmbedding(101, 104, 8, group=single_rank_group(), placement=DOUBLE, init_std=0.5)
    with pytest.raises(RuntimeError, match="a token is outside the vocabulary of 101"):
        table(torch.tensor([[5, token]]))


def test_a_frequent_token_keeps_its_whole_gradient_in_bfloat16():
    # 4096 gradients of 1/64: the sum is 64, but a bfloat16 running sum stops growing at 256 / 64 = 4.
    table = VocabParallelEmbedding(11, 11, 2, group=single_rank_group(), placement=BFLOAT, init_std=0.5)
    initialize_parameters(table, 1)
    output = table(torch.full((64, 64), 3))
    output.backward(torch.full_like(output, 1 / 64))
    assert table.weight.grad[3].tolist() == [64.0, 64.0]
    assert table.weight.grad[[0, 1, 2, 4, 10]].eq(0).all()
