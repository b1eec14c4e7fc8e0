import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel import local_positions, take_local
from megatron.core.context_parallel.layout import dealt_order, natural_order


def test_a_rank_holds_one_chunk_from_the_front_and_one_from_the_back():
    found = [local_positions(16, dist.ProcessGroup(rank, 4)).tolist() for rank in range(4)]
    assert found == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert local_positions(5, dist.ProcessGroup(0, 1)).tolist() == [0, 1, 2, 3, 4]


def test_a_rank_takes_its_tokens_along_any_dim_and_hands_gradients_back():
    group = dist.ProcessGroup(1, 2)
    x = torch.arange(16.0).view(2, 8).requires_grad_()
    part = take_local(x, 1, group)
    assert part.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    part.backward(torch.full_like(part, 7.0))
    assert x.grad.tolist() == [[0, 0, 7, 7, 7, 7, 0, 0]] * 2
    assert take_local(x, 1, dist.ProcessGroup(0, 1)) is x


@pytest.mark.parametrize(
    ("length", "valid"), [(30, "the nearest 24 or 32"), (3, "the nearest 8"), (12, "the nearest 8 or 16")]
)
def test_a_length_that_does_not_divide_is_refused_with_lengths_that_do(length, valid):
    with pytest.raises(ValueError, match=f"--seq-length {length}.*--context-parallel-size 4.*{valid}"):
        local_positions(length, dist.ProcessGroup(0, 4))


def test_tokens_of_all_ranks_go_back_into_their_order():
    whole = torch.arange(24).view(12, 2)
    parts = torch.stack([take_local(whole, 0, dist.ProcessGroup(rank, 3)) for rank in range(3)])
    assert torch.equal(natural_order(parts), whole)
    assert torch.equal(dealt_order(whole, 3), parts)
