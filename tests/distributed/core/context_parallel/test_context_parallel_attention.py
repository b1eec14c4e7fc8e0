import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch.distributed import ProcessGroup

from megatron.core.communication import Meter, MeteredGroup
from megatron.core.context_parallel import context_parallel_attention, local_positions, take_local
from tests.harness import make_state, run_ranks
from tests.unit.core.context_parallel.dense import Problem, dense, error, make_problem

TYPES = ("p2p", "all_gather", "a2a")
# float64 in every way: how ranks meet, who sees whom, one key head, fewer key than query heads, as many.
EXACT = tuple(
    {"comm_type": comm_type, "causal": causal, "segments": segments, "groups": groups}
    for comm_type in TYPES
    for causal, segments, groups in itertools.product((True, False), (False, True), (1, 2, 4))
)
ROUNDED = tuple(
    {"comm_type": comm_type, "segments": segments, "groups": 2, "dtype": dtype}
    for comm_type in TYPES
    for segments, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16))
)
# Three groups over two or four ranks: neither number divides the other.
UNEVEN = ({"comm_type": "a2a", "segments": True, "groups": 3, "heads": 12},)
DROPOUT = 0.25


@dataclass
class Shard:
    """What a rank holds of a problem's results."""

    positions: torch.Tensor
    tensors: tuple[torch.Tensor, ...]  # output and the gradients of query, key and value


def _attend(
    problem: Problem, group: ProcessGroup, comm_type: str, dropout: float = 0.0, key: int | None = None
) -> Shard:
    parts = [take_local(x, 0, group) for x in (problem.query, problem.key, problem.value)]
    inputs = [x.clone().requires_grad_() for x in parts]
    output = context_parallel_attention(
        *inputs,
        group=group,
        comm_type=comm_type,
        causal=problem.causal,
        segment_ids=problem.segment_ids,
        dropout_probability=dropout,
        dropout_key=key,
    )
    output.backward(take_local(problem.gradient, 0, group))
    length = problem.query.shape[0]
    return Shard(local_positions(length, group), (output.detach(), *(x.grad for x in inputs)))


def _whole(shards: list[Shard]) -> tuple[torch.Tensor, ...]:
    order = torch.cat([shard.positions for shard in shards]).argsort()
    columns = zip(*(shard.tensors for shard in shards), strict=True)
    return tuple(torch.cat(column)[order] for column in columns)


def _all_cases(cp: int) -> list[Shard]:
    group = make_state(cp=cp).group("cp")
    shards = []
    for case in (*EXACT, *ROUNDED, *UNEVEN):
        arguments = dict(case)
        comm_type = arguments.pop("comm_type")
        shards.append(_attend(make_problem(**arguments), group, comm_type))
    return shards


@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_that_share_sequences_agree_with_all_scores_in_memory(cp):
    results = [_whole(list(shards)) for shards in zip(*run_ranks(cp, _all_cases, cp), strict=True)]
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 2e-2}
    for case, found in zip((*EXACT, *ROUNDED, *UNEVEN), results, strict=True):
        problem = make_problem(**{name: x for name, x in case.items() if name != "comm_type"})
        assert [x.dtype for x in found] == [problem.query.dtype] * 4
        assert error(found, dense(problem)) < tolerance[problem.query.dtype], case


def _dropout_problems(segments: bool) -> tuple[Problem, Problem]:
    """A problem, and one that shows its masks in the output: key j's value is the j-th unit vector."""
    problem = make_problem(groups=4, d=32, causal=segments, segments=segments)
    unit_vectors = torch.eye(32, dtype=torch.float64)[:, None, None, :].expand(32, 2, 4, 32).contiguous()
    return problem, replace(problem, value=unit_vectors)


def _with_dropout(cp: int) -> dict[tuple[str, bool], list[Shard]]:
    """A problem twice with one key and once with another, and what shows the masks of the first key."""
    group = make_state(cp=cp).group("cp")
    results = {}
    for comm_type, segments in itertools.product(TYPES, (False, True)):
        problem, showing = _dropout_problems(segments)
        runs = [(problem, 5), (problem, 5), (problem, 6), (showing, 5)]
        results[comm_type, segments] = [_attend(each, group, comm_type, DROPOUT, key) for each, key in runs]
    return results


def test_dropout_masks_are_drawn_again_and_differ_by_rank_head_and_block():
    ranks = run_ranks(2, _with_dropout, 2)
    for comm_type, segments in itertools.product(TYPES, (False, True)):
        runs = zip(*(rank[comm_type, segments] for rank in ranks), strict=True)
        first, again, other_key, shown = (_whole(list(shards)) for shards in runs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[0], other_key[0])
        kept = shown[0].permute(1, 2, 0, 3) != 0  # [b, n, s, s]
        mask = kept.double() / (1 - DROPOUT)
        assert error(first, dense(_dropout_problems(segments)[0], mask)) < 1e-10
        if not segments:  # every token sees every other
            assert abs(kept.double().mean().item() - (1 - DROPOUT)) < 0.02  # 4 standard deviations: 0.019
            # [b, n, chunk of queries, chunk of keys, 8 * 8]: chunks 0 and 3 are rank 0's, 1 and 2 rank 1's.
            blocks = kept.view(2, 4, 4, 8, 4, 8).transpose(3, 4).flatten(4)
            assert len({tuple(block) for block in blocks.flatten(0, 3).tolist()}) == 2 * 4 * 4 * 4


def _traffic(cp: int) -> dict[tuple[str, int], tuple[dict, dict]]:
    """What the forward and the backward pass send, by kind of communication and key heads."""
    inner = make_state(cp=cp).group("cp")
    results = {}
    for comm_type, groups in itertools.product(TYPES, (1, 2, 4)):
        meter = Meter()
        group = MeteredGroup(inner, "cp", meter)
        problem = make_problem(groups=groups, dtype=torch.bfloat16)
        parts = [take_local(x, 0, group) for x in (problem.query, problem.key, problem.value)]
        inputs = [x.clone().requires_grad_() for x in parts]
        output = context_parallel_attention(
            *inputs,
            group=group,
            comm_type=comm_type,
            causal=True,
            segment_ids=None,
            dropout_probability=0.0,
            dropout_key=None,
        )
        forward = meter.take()
        output.backward(take_local(problem.gradient, 0, group))
        results[comm_type, groups] = _counts(forward), _counts(meter.take())
    return results


def _counts(traffic: dict) -> dict[str, tuple[int, float]]:
    return {kind: (entry.calls, entry.moved_bytes) for (_, kind), entry in traffic.items()}


@pytest.mark.parametrize("cp", [2, 4])
def test_traffic_is_what_the_documentation_derives(cp):
    s, b, n, d, e = 32, 2, 4, 8, 2
    for rank in run_ranks(cp, _traffic, cp):
        for g in (1, 2, 4):
            key_value = 2 * s // cp * b * g * d * e
            query = s // cp * b * n * d * e
            repeated = 2 * s // cp * b * {1: cp, 2: max(2, cp), 4: 4}[g] * d * e
            others = cp - 1
            assert rank["p2p", g] == (
                {"send": (others, others * key_value)},
                {"send": (2 * others, 2 * others * key_value)},
            )
            assert rank["all_gather", g] == (
                {"all_gather": (1, others * key_value)},
                {"all_gather": (1, others * key_value), "reduce_scatter": (1, others * key_value)},
            )
            there_and_back = {"all_to_all": (2, others / cp * (2 * query + repeated))}
            assert rank["a2a", g] == (there_and_back, there_and_back)


def _refused(cp: int) -> list[str]:
    group = make_state(cp=cp).group("cp")
    messages = []
    for comm_type, heads, length in (("a2a", 3, 32), ("p2p", 4, 34)):
        x = torch.zeros(length // cp, 1, heads, 8)
        with pytest.raises(ValueError, match="--context-parallel-size 2") as caught:
            context_parallel_attention(
                x,
                x,
                x,
                group=group,
                comm_type=comm_type,
                causal=True,
                segment_ids=None,
                dropout_probability=0.0,
                dropout_key=None,
            )
        messages.append(str(caught.value))
    return messages


def test_what_does_not_divide_is_refused_with_flags_and_numbers():
    heads, length = run_ranks(2, _refused, 2)[0]
    for word in ("--cp-comm-type a2a", "--num-attention-heads", "--tensor-model-parallel-size", "3 heads"):
        assert word in heads
    for word in ("--seq-length 34", "multiples of 4", "32 or 36"):
        assert word in length
