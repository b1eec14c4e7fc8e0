import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron.core.context_parallel import block_attention, context_parallel_attention
from megatron.core.context_parallel.fused_kernels import CudaEfficient, CudaFlash
from megatron.core.context_parallel.kernels import TiledKernel
from tests.unit.core.context_parallel.dense import Problem, dense, error, make_problem
from tests.unit.core.tensor_parallel.single import single_rank_group

CASES = list(itertools.product((1, 2, 4), (True, False), (False, True)))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = True,
    segment_ids: Tensor | None = None,
    dropout: float = 0.0,
    dropout_key: int | None = None,
) -> Tensor:
    return context_parallel_attention(
        query,
        key,
        value,
        group=single_rank_group(),
        comm_type="p2p",
        causal=causal,
        segment_ids=segment_ids,
        dropout_probability=dropout,
        dropout_key=dropout_key,
    )


def _attend(problem: Problem, **dropout: float) -> tuple[Tensor, ...]:
    inputs = [x.clone().requires_grad_() for x in (problem.query, problem.key, problem.value)]
    output = _attention(*inputs, problem.causal, problem.segment_ids, **dropout)
    output.backward(problem.gradient)
    return output.detach(), *(x.grad for x in inputs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("budget", [None, 4 * 32 * 32, 150])
def test_one_rank_agrees_with_all_scores_in_memory(dtype, budget, monkeypatch):
    if budget is not None:
        monkeypatch.setattr(block_attention, "choose_kernel", lambda *_: TiledKernel(budget))
    for groups, causal, segments in CASES:
        problem = make_problem(groups=groups, causal=causal, segments=segments, dtype=dtype)
        found = _attend(problem)
        assert [x.dtype for x in found] == [dtype] * 4
        assert error(found, dense(problem)) < TOLERANCE[dtype], (groups, causal, segments)


def test_slices_of_one_fused_projection_are_taken_as_they_lie():
    torch.manual_seed(0)
    fused = torch.randn(32, 2, 2, 4, 8, dtype=torch.float64, requires_grad=True)  # [s, b, g, n/g + 2, d]
    query, key, value = fused.split((2, 1, 1), dim=3)
    output = _attention(query.flatten(2, 3), key.squeeze(3), value.squeeze(3))
    heads = (x.permute(1, 2, 0, 3) for x in (query.flatten(2, 3), key.squeeze(3), value.squeeze(3)))
    expected = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)
    gradient = torch.randn_like(output)
    found, wanted = (torch.autograd.grad(x, fused, gradient)[0] for x in (output, expected))
    assert (output - expected).abs().max() < 1e-12
    assert (found - wanted).abs().max() < 1e-12


def test_gradients_with_dropout_are_those_of_finite_differences(monkeypatch):
    monkeypatch.setattr(block_attention, "choose_kernel", lambda *_: TiledKernel(20, _[2]))
    torch.manual_seed(0)
    inputs = [torch.randn(6, 1, n, 3, dtype=torch.float64, requires_grad=True) for n in (2, 1, 1)]
    ids = torch.tensor([[0, 0, 1, 1, 1, 0]])
    assert torch.autograd.gradcheck(lambda *x: _attention(*x, True, ids, 0.3, 11), inputs)


def test_the_same_key_draws_the_same_mask_in_recomputation():
    problem = make_problem(segments=True, dtype=torch.float32)
    inputs = [x.clone().requires_grad_() for x in (problem.query, problem.key, problem.value)]

    def attend(*tensors: Tensor) -> Tensor:
        return _attention(*tensors, True, problem.segment_ids, 0.1, 2**64 - 1)

    straight = torch.autograd.grad(attend(*inputs), inputs, problem.gradient)
    torch.rand(3)  # whatever else is drawn in between
    again = torch.utils.checkpoint.checkpoint(attend, *inputs, use_reentrant=False)
    assert torch.equal(again, attend(*inputs))
    for a, b in zip(straight, torch.autograd.grad(again, inputs, problem.gradient), strict=True):
        assert torch.equal(a, b)


def test_only_inputs_output_and_a_number_a_row_are_kept_for_the_backward_pass():
    problem = make_problem(groups=2, dtype=torch.bfloat16)
    inputs = [x.clone().requires_grad_() for x in (problem.query, problem.key, problem.value)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        _attention(*inputs, True, problem.segment_ids, 0.1, 3)
    s, b, n, g, d = 32, 2, 4, 2, 8
    assert sum(x.nbytes for x in kept) == 2 * (2 * s * b * n * d + 2 * s * b * g * d) + 4 * s * b * n


def _largest_allocation(run: Callable[[], None]) -> int:
    """Bytes of the largest piece of memory that is asked for, inside of kernels too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("kind", ["fused", "documents", "dropout"])
def test_no_memory_is_quadratic_in_the_sequence(kind):
    s, heads = 4096, 1
    inputs = [torch.randn(s, 1, heads, 16, requires_grad=True) for _ in range(3)]
    ids = torch.arange(s).div(700, rounding_mode="floor")[None] if kind == "documents" else None
    dropout = (0.1, 1) if kind == "dropout" else (0.0, None)

    def run() -> None:
        _attention(*inputs, True, ids, *dropout).sum().backward()

    # float32 scores take 4 s^2 bytes and a boolean mask s^2; the numbers of the tensors themselves 64 s.
    assert (
        _largest_allocation(run) <= {"fused": s**2 // 8, "documents": s**2 // 8, "dropout": s**2 // 2}[kind]
    )


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(CudaFlash(), torch.bfloat16), (CudaEfficient(), torch.float32)]
)
def test_kernels_of_a_gpu_are_called_as_their_signatures_want(kernel, dtype):
    query = torch.empty(40, 3, 8, 16, dtype=dtype, device="meta").permute(1, 2, 0, 3)[1:, :, 3:]
    key, value = torch.empty(2, 50, 3, 2, 16, dtype=dtype, device="meta").permute(0, 2, 3, 1, 4)[:, 1:]
    output, lse = kernel.forward(query, key, value, causal=False, place=())
    assert (output.shape, output.dtype) == (query.shape, dtype)
    assert (lse.shape, lse.dtype) == ((2, 8, 37), torch.float32)
    gradients = kernel.backward(output, (query, key, value), (output, lse), causal=False, place=())
    assert [x.shape for x in gradients] == [query.shape, key.shape, value.shape]
