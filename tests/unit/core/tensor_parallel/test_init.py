import torch
from torch import nn

from megatron.core.parameter import (
    ParameterFacts,
    Piece,
    Placement,
    make_parameter,
    named_parameters,
    replicated_facts,
)
from megatron.core.tensor_parallel import RandomStream, initialize_parameters
from megatron.core.tensor_parallel.init import BLOCK

CPU = torch.device("cpu")
SEED = 1234


class Holder(nn.Module):
    """One parameter called ``weight``."""

    def __init__(self, shape, facts, dtype=torch.float32):
        super().__init__()
        self.weight = make_parameter(shape, facts, Placement(dtype, CPU))


def drawn(shape, facts, dtype=torch.float32, name="layer"):
    model = nn.ModuleDict({name: Holder(shape, facts, dtype)})
    with torch.no_grad():
        model[name].weight.fill_(7.0)  # what lay in memory before must not show
    initialize_parameters(model, SEED)
    return model[name].weight.detach()


def whole(shape, dim=0, std=0.02):
    return drawn(shape, ParameterFacts(shape, dim, (Piece(0, 0, shape[dim]),), std))


def runs(size, ranks):
    return [Piece(0, rank * size // ranks, size // ranks) for rank in range(ranks)]


def test_values_are_the_named_blocks_of_the_stream():
    weight = whole((300, 5))
    for block, rows in enumerate((128, 128, 44)):
        generator = torch.Generator()
        generator.manual_seed(RandomStream.root(SEED).fold("init", "layer.weight", block).key)
        expected = torch.normal(torch.zeros(rows, 5), 0.02, generator=generator)
        assert torch.equal(weight[block * 128 : block * 128 + rows], expected)


def test_whole_weight_does_not_depend_on_how_rows_are_split():
    shape = (408, 6)  # shares of 204, 102 and 51 rows, none on a border between blocks
    dense = whole(shape)
    for ranks in (2, 4, 8):
        shards = [
            drawn((shape[0] // ranks, 6), ParameterFacts(shape, 0, (piece,), 0.02))
            for piece in runs(408, ranks)
        ]
        assert torch.equal(torch.cat(shards), dense)


def test_whole_weight_does_not_depend_on_how_columns_are_split():
    shape = (6, 408)
    dense = whole(shape, dim=1)
    for ranks in (2, 4, 8):
        shards = [
            drawn((6, shape[1] // ranks), ParameterFacts(shape, 1, (piece,), 0.02))
            for piece in runs(408, ranks)
        ]
        assert torch.equal(torch.cat(shards, dim=1), dense)


def test_a_gated_projection_has_a_piece_of_each_half():
    # The whole is [all 204 gate rows; all 204 up rows]; a rank has a third of each, gate first.
    shape = (408, 6)
    dense = whole(shape)
    for rank in range(3):
        pieces = (Piece(0, 68 * rank, 68), Piece(68, 204 + 68 * rank, 68))
        shard = drawn((136, 6), ParameterFacts(shape, 0, pieces, 0.02))
        gate, up = dense[:204], dense[204:]
        assert torch.equal(
            shard, torch.cat([gate[68 * rank : 68 * rank + 68], up[68 * rank : 68 * rank + 68]])
        )


def test_rows_that_several_ranks_hold_are_equal():
    # 2 query groups over 4 ranks: each rank has its own query rows and its group's key rows.
    shape = (2 * (256 + 64), 6)
    dense = whole(shape)
    for rank in range(4):
        group, half = divmod(rank, 2)
        first = group * 320
        pieces = (Piece(0, first + 128 * half, 128), Piece(128, first + 256, 64, primary=half == 0))
        shard = drawn((192, 6), ParameterFacts(shape, 0, pieces, 0.02))
        assert torch.equal(shard[:128], dense[first + 128 * half :][:128])
        assert torch.equal(shard[128:], dense[first + 256 :][:64])


def test_padding_is_zero_and_the_true_vocabulary_is_the_same_for_every_padding():
    shape = (101, 6)
    dense = whole(shape)
    for ranks, padded in ((1, 101), (1, 128), (2, 102), (4, 128), (4, 512)):
        rows = padded // ranks
        shards = []
        for rank in range(ranks):
            valid = min(max(101 - rank * rows, 0), rows)
            pieces = (Piece(0, rank * rows, valid),) if valid else ()
            shards.append(drawn((rows, 6), ParameterFacts(shape, 0, pieces, 0.02)))
        table = torch.cat(shards)
        assert torch.equal(table[:101], dense)
        assert table[101:].eq(0).all()


def test_a_copy_on_another_stage_draws_what_the_original_draws():
    shape = (101, 6)
    original = drawn(shape, ParameterFacts(shape, 0, (Piece(0, 0, 101),), 0.02), name="embedding")
    facts = ParameterFacts(shape, 0, (Piece(0, 0, 101),), 0.02, copy_of="embedding.weight")
    assert torch.equal(drawn(shape, facts, name="output_layer"), original)
    assert not torch.equal(whole(shape), original)  # another name, other values


def test_parameters_may_come_from_several_modules():
    facts = ParameterFacts((200, 6), 0, (Piece(0, 0, 200),), 0.02)
    chunks = [nn.ModuleDict({name: Holder((200, 6), facts)}) for name in ("layer", "other")]
    initialize_parameters([named for chunk in chunks for named in named_parameters(chunk)], SEED)
    assert torch.equal(chunks[0]["layer"].weight, whole((200, 6)))
    assert torch.equal(chunks[1]["other"].weight, drawn((200, 6), facts, name="other"))


def test_number_format_only_rounds():
    shape = (200, 6)
    facts = ParameterFacts(shape, 0, (Piece(0, 0, 200),), 0.02)
    single = drawn(shape, facts)
    assert torch.equal(drawn(shape, facts, torch.float64), single.double())
    assert torch.equal(drawn(shape, facts, torch.bfloat16), single.bfloat16())


def test_constants_and_moments():
    assert drawn((64,), replicated_facts((64,), 0, init_fill=1.0)).eq(1.0).all()
    assert drawn((64,), replicated_facts((64,), 3)).eq(0.0).all()
    weight = whole((1000, 1000), std=0.05).double()
    assert abs(weight.mean()) < 4 * 0.05 / 1000
    assert abs(weight.std() / 0.05 - 1) < 4 / (1000 * 2**0.5)
    # Blocks are independent: neighbouring ones do not correlate.
    one, two = weight[:BLOCK].flatten(), weight[BLOCK : 2 * BLOCK].flatten()
    assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 4 / (BLOCK * 1000) ** 0.5
