import pytest
import torch

from megatron.core.tensor_parallel import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
)
from tests.harness import make_state, run_ranks

WHOLE = torch.arange(2 * 3 * 4, dtype=torch.float64).view(2, 3, 4)


def _operator(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An operator's output on this rank, the gradient given to it, and the one that reaches its input."""
    group = make_state(tp=2).group("tp")
    rank = group.rank()
    source = WHOLE * (rank + 1)
    if name == "gather":
        source = WHOLE[:, :, 2 * rank : 2 * rank + 2].clone()
    if name == "gather_sequence":
        source = WHOLE[rank : rank + 1].clone()
    source.requires_grad_()
    x = source * 1.0
    output = {
        "copy": lambda: copy_to_tensor_parallel_region(x, group),
        "reduce": lambda: reduce_from_tensor_parallel_region(x, group),
        "gather": lambda: gather_from_tensor_parallel_region(x, group, -1),
        "scatter": lambda: scatter_to_tensor_parallel_region(x, group, 2),
        "gather_sequence": lambda: gather_from_sequence_parallel_region(x, group),
        "reduce_scatter": lambda: reduce_scatter_to_sequence_parallel_region(x, group),
    }[name]()
    upstream = torch.arange(output.numel(), dtype=torch.float64).view(output.shape) + 10 * (rank + 1)
    output.backward(upstream)
    return output.detach(), upstream, source.grad


def test_copy_is_the_identity_and_sums_gradients():
    (out0, up0, grad0), (out1, up1, grad1) = run_ranks(2, _operator, "copy")
    assert torch.equal(out0, WHOLE)
    assert torch.equal(out1, 2 * WHOLE)
    assert torch.equal(grad0, up0 + up1)
    assert torch.equal(grad1, up0 + up1)


def test_reduce_sums_and_hands_the_gradient_on():
    (out0, up0, grad0), (out1, up1, grad1) = run_ranks(2, _operator, "reduce")
    assert torch.equal(out0, 3 * WHOLE)
    assert torch.equal(out1, 3 * WHOLE)
    assert torch.equal(grad0, up0)
    assert torch.equal(grad1, up1)


def test_gather_joins_and_keeps_its_own_gradient():
    (out0, up0, grad0), (out1, up1, grad1) = run_ranks(2, _operator, "gather")
    assert torch.equal(out0, WHOLE)
    assert torch.equal(out1, WHOLE)
    assert torch.equal(grad0, up0[:, :, :2])
    assert torch.equal(grad1, up1[:, :, 2:])


def test_scatter_keeps_its_own_and_joins_gradients():
    (out0, up0, grad0), (out1, up1, grad1) = run_ranks(2, _operator, "scatter")
    assert torch.equal(out0, WHOLE[:, :, :2])
    assert torch.equal(out1, 2 * WHOLE[:, :, 2:])
    assert torch.equal(grad0, torch.cat([up0, up1], dim=-1))
    assert torch.equal(grad1, torch.cat([up0, up1], dim=-1))


def test_gathering_a_sequence_joins_it_and_sums_and_splits_gradients():
    (out0, up0, grad0), (out1, up1, grad1) = run_ranks(2, _operator, "gather_sequence")
    assert torch.equal(out0, WHOLE)
    assert torch.equal(out1, WHOLE)
    assert torch.equal(grad0, (up0 + up1)[:1])
    assert torch.equal(grad1, (up0 + up1)[1:])


def test_reduce_scatter_sums_and_splits_a_sequence_and_joins_gradients():
    (out0, up0, grad0), (out1, up1, grad1) = run_ranks(2, _operator, "reduce_scatter")
    assert torch.equal(out0, 3 * WHOLE[:1])
    assert torch.equal(out1, 3 * WHOLE[1:])
    assert torch.equal(grad0, torch.cat([up0, up1]))
    assert torch.equal(grad1, torch.cat([up0, up1]))


def _shared_gradient() -> bool:
    """Whether the gradient that another branch of the graph gets survives the sum in f's backward."""
    group = make_state(tp=2).group("tp")
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    y = x * 1.0
    other = x * 1.0
    # Addition hands one and the same gradient tensor to both of its inputs.
    (copy_to_tensor_parallel_region(y, group) + other).sum().backward()
    return x.grad.tolist() == [3.0, 3.0, 3.0]  # 2 summed over ranks through f, and 1 directly


def test_the_sum_of_gradients_leaves_other_branches_alone():
    assert all(run_ranks(2, _shared_gradient))


def _refusal() -> str:
    group = make_state(tp=2).group("tp")
    with pytest.raises(ValueError, match="does not divide") as error:
        scatter_to_tensor_parallel_region(torch.ones(2, 5), group, 1)
    return str(error.value)


def test_scatter_refuses_what_does_not_divide():
    assert run_ranks(2, _refusal) == ["dim 1 of size 5 does not divide over 2 ranks"] * 2
