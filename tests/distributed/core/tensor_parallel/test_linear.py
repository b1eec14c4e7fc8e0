"""Linear layers under sequence parallelism and with weight gradients left for later."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.communication import all_gather, all_reduce
from megatron.core.parameter import Placement, facts_of
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    defer_weight_gradients,
    initialize_parameters,
)
from megatron.core.weight_gradients import DeferredGradients
from tests.distributed.core.models.collectives import recorded_collectives
from tests.harness import make_state, run_ranks

S, B, H, FF, V = 8, 2, 6, 12, 11
DOUBLE = Placement(torch.float64, torch.device("cpu"))
GENERATOR = torch.Generator().manual_seed(4)
TOKENS = torch.randint(V, (S, B), generator=GENERATOR)
UPSTREAM = torch.randn(S, B, H, generator=GENERATOR, dtype=torch.float64)
WEIGHTS = {
    "table.weight": torch.randn(V, H, generator=GENERATOR, dtype=torch.float64),
    "column.weight": torch.randn(FF, H, generator=GENERATOR, dtype=torch.float64),
    "column.bias": torch.randn(FF, generator=GENERATOR, dtype=torch.float64),
    "row.weight": torch.randn(H, FF, generator=GENERATOR, dtype=torch.float64),
    "row.bias": torch.randn(H, generator=GENERATOR, dtype=torch.float64),
}


class Net(nn.Module):
    """Embedding, column layer, activation and row layer: all that tensor parallelism consists of."""

    def __init__(self, group, sequence_parallel):
        super().__init__()
        layout = {
            "group": group,
            "sequence_parallel": sequence_parallel,
            "placement": DOUBLE,
            "init_std": 0.5,
        }
        self.table = VocabParallelEmbedding(V, 12, H, **layout)
        self.column = ColumnParallelLinear(H, FF, **layout)
        self.row = RowParallelLinear(FF, H, **layout)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                facts = facts_of(parameter)
                parameter.zero_()
                for piece in facts.pieces:
                    whole = WEIGHTS[name].narrow(facts.dim, piece.start, piece.length)
                    parameter.narrow(facts.dim, piece.local, piece.length).copy_(whole)

    def forward(self, tokens):
        return self.row(F.gelu(self.column(self.table(tokens))))


def _dense():
    weights = {name: weight.clone().requires_grad_() for name, weight in WEIGHTS.items()}
    hidden = F.linear(weights["table.weight"][TOKENS], weights["column.weight"], weights["column.bias"])
    output = F.linear(F.gelu(hidden), weights["row.weight"], weights["row.bias"])
    output.backward(UPSTREAM)
    return output.detach(), weights


def _close(actual, expected, what):
    assert actual.shape == expected.shape, what
    assert (actual - expected).abs().max() < 1e-12, what


def _check_gradients(net, weights, group):
    for name, parameter in net.named_parameters():
        facts = facts_of(parameter)
        gradient = parameter.grad
        if facts.partial_over_tp:
            gradient = all_reduce(gradient.clone(), group)
        for piece in facts.pieces:
            whole = weights[name].grad.narrow(facts.dim, piece.start, piece.length)
            _close(gradient.narrow(facts.dim, piece.local, piece.length), whole, name)


def _sequence_parallel(tp):
    group = make_state(tp=tp).group("tp")
    net = Net(group, sequence_parallel=True)
    expected, weights = _dense()
    own = slice(group.rank() * S // tp, (group.rank() + 1) * S // tp)
    kept = []
    with (
        recorded_collectives() as forward,
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x),
    ):
        output = net(TOKENS)
    _close(output, expected[own], "output")
    with recorded_collectives() as backward:
        output.backward(UPSTREAM[own])
    _check_gradients(net, weights, group)
    partial = {name for name, parameter in net.named_parameters() if facts_of(parameter).partial_over_tp}
    assert partial == ({"row.bias"} if tp > 1 else set())
    return forward, backward, kept


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_sequence_parallel_layers_equal_the_dense_ones_and_keep_shards_alone(tp):
    gathered = ("all_gather_single", (S, B, H), S * B * H * 8)
    scattered = ("reduce_scatter_single", (S // tp, B, H), S // tp * B * H * 8)
    for forward, backward, kept in run_ranks(tp, _sequence_parallel, tp):
        if tp == 1:
            assert forward == backward == []
            continue
        # The embedding's sum, the column layer's input, the row layer's sum.
        assert forward == [scattered, gathered, scattered]
        # The row layer's gradient; the column layer's input again and its gradient; the embedding's gradient.
        assert backward == [gathered, gathered, scattered, gathered]
        # The column layer keeps its shard of the input, the row layer its input (and tokens are kept).
        assert [shape for shape in kept if len(shape) == 3] == [
            (S // tp, B, H),
            (S, B, FF // tp),  # of gelu
            (S, B, FF // tp),
        ]


def _passes(net, count):
    """Gradients of ``count`` passes on other inputs each, formed at once and formed later."""
    deferred = DeferredGradients()
    defer_weight_gradients(net, deferred)
    own = S // net.row.group.size() if net.row.sequence_parallel else S
    upstream = UPSTREAM[:own]
    results = []
    for later in (False, True):
        net.zero_grad()
        deferred.deferring = later
        outputs = [net((TOKENS + shift) % V) for shift in range(count)]
        seen_at_once = []
        with recorded_collectives() as during:
            for output in outputs:
                output.backward(upstream)
                if later:
                    seen_at_once.append([net.column.weight.grad, net.row.weight.grad])
                    deferred.close_pass()
        biases = [net.column.bias.grad.clone(), net.row.bias.grad.clone()]
        with recorded_collectives() as after:
            for owed in range(deferred.owed, 0, -1):
                assert deferred.owed == owed
                deferred.run_pass()
        assert deferred.owed == 0
        assert all(gradient is None for pair in seen_at_once for gradient in pair)
        results.append(({name: p.grad for name, p in net.named_parameters()}, biases, during, after))
    return results


def _deferred(tp):
    group = make_state(tp=tp).group("tp")
    counts = []
    for sequence_parallel in (False, True):
        net = Net(group, sequence_parallel)
        arrivals = []  # a hook runs after each backward, with a gradient or without
        net.column.weight.register_post_accumulate_grad_hook(
            lambda weight, arrivals=arrivals: arrivals.append(weight.grad is not None)
        )
        (at_once, biases, during, _), (later, later_biases, later_during, after) = _passes(net, 3)
        for name, gradient in at_once.items():
            assert torch.equal(gradient, later[name]), name
        for gradient, other in zip(biases, later_biases, strict=True):
            assert torch.equal(gradient, other)  # not left for later
        assert sorted(during) == sorted(later_during + after)  # nothing more is sent than at once
        assert sum(arrivals) == 6  # one for each pass, formed at once or later
        counts.append((len(later_during), [collective.name for collective in after]))
    return counts


@pytest.mark.parametrize("tp", [1, 2])
def test_deferred_weight_gradients_are_those_formed_at_once_bit_for_bit(tp):
    for plain, sequence_parallel in run_ranks(tp, _deferred, tp):
        if tp == 1:
            assert plain == sequence_parallel == (0, [])
            continue
        assert plain == (3, [])
        # Each pass gathers the row layer's gradient, scatters the column layer's, gathers the embedding's; it
        # gathers the column layer's input when its weight's gradient is formed.
        assert sequence_parallel == (9, ["all_gather_single"] * 3)


def _indivisible():
    group = make_state(tp=2).group("tp")
    row = RowParallelLinear(4, 4, group=group, sequence_parallel=True, placement=DOUBLE, init_std=0.02)
    initialize_parameters(row, 0)
    with pytest.raises(ValueError, match="tokens") as error:
        row(torch.ones(63, 1, 2, dtype=torch.float64))
    # A sharded sequence comes together in the order of ranks.
    whole = all_gather(torch.full((1, 1), group.rank()), group)
    return str(error.value), whole.flatten().tolist()


def test_a_sequence_that_does_not_divide_is_refused():
    for message, order in run_ranks(2, _indivisible):
        assert "--sequence-parallel" in message
        assert "--tensor-model-parallel-size 2" in message
        assert "63 tokens" in message
        assert order == [0, 1]
