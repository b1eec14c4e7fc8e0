"""ZeRO-3: what each rank holds and sends, and that a step is the one that whole parameters would make."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.checkpoint.sharded_tensor import Rectangle, check_tiling, sharded_slice
from megatron.core.communication import Meter, MeteredGroup
from megatron.core.config import OptimizerConfig, PrecisionConfig
from megatron.core.distributed.fully_sharded import FullyShardedStore
from megatron.core.optimizer import Optimizer
from megatron.core.parameter import replicated_facts
from tests.distributed.core.distributed.sharded_toy import ORDERS, Network, Order, run
from tests.harness import make_state, run_ranks


def divide(network: Network, group: Any, **options: Any) -> FullyShardedStore:
    return FullyShardedStore([network], [list(network.layers)], group, **options)


def inputs_of(count: int, width: int = 6, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, width, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def assert_slices(store: FullyShardedStore, whole: nn.Module, *, gradients: bool, what: str) -> None:
    """Every part of a bucket holds the same elements as the whole parameter, or its gradient."""
    for bucket in store.buckets:
        for part in bucket.parts:
            parameter = whole.get_parameter(part.named.name)
            expected = parameter.grad if gradients else parameter.detach()
            assert expected is not None
            held = part.view(bucket.gradients if gradients else bucket.weights)
            worst = (held - expected.flatten()[part.start : part.stop]).abs().max()
            assert worst <= 1e-12 * max(1.0, expected.abs().max().item()), (
                f"{what}: {part.named.name} by {worst}"
            )


def three_steps(recompute: int, order: Order, inputs_need_gradients: bool, average: bool) -> None:
    """Compare with whole parameters that see all micro-batches of all ranks; also what evaluation sees."""
    group = make_state().data_group
    whole, network = Network(), Network(recompute=recompute)
    store = divide(network, group, average=average)
    inputs = [x.requires_grad_(inputs_need_gradients) for x in inputs_of(4 * group.size())]
    own = inputs[group.rank() :: group.size()]
    for step in range(3):
        what = f"recompute {recompute}, {order[:3]}, step {step}"
        whole.zero_grad()
        for x in inputs:
            whole(x=x).backward()
        expected_input_gradient = inputs[group.rank()].grad
        inputs[group.rank()].grad = None
        store.zero_grad(4)
        run(network, own, order, store.loss_factor)
        store.finish()
        assert_slices(store, whole, gradients=True, what=what)
        if expected_input_gradient is not None:
            difference = own[0].grad / store.loss_factor - expected_input_gradient
            assert difference.abs().max() <= 1e-12 * expected_input_gradient.abs().max(), what
            own[0].grad = None
        with torch.no_grad():
            for bucket in store.buckets:
                bucket.weights.sub_(bucket.gradients, alpha=0.01)
            store.publish()
            for parameter in whole.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
            loss = whole(x=inputs[0])
            assert (network(x=inputs[0]) - loss).abs() <= 1e-12 * loss, what
    assert_slices(store, whole, gradients=False, what="weights")


Held = dict[str, tuple[int, int, Sequence[Rectangle]]]
"""By parameter: first row held, one past the last, and what this rank saves of it."""


def steps_and_rows(recomputes: Sequence[int]) -> Held:
    for recompute in recomputes:
        for name, order in ORDERS.items():
            three_steps(recompute, order, inputs_need_gradients=name == "1f1b", average=recompute == 1)
    store = divide(Network(), make_state().data_group)
    held = {}
    for bucket in store.buckets:
        for part in bucket.parts:
            facts, shape = part.named.facts, part.named.parameter.shape
            row = shape[1:].numel()
            saved = sharded_slice(
                part.named.name, part.view(bucket.weights), facts, shape, part.start, primary_only=True
            )
            rectangles = [rectangle for rectangle, _ in saved.shards]
            held[part.named.name] = (part.start // row, part.stop // row, rectangles)
    return held


@pytest.mark.parametrize(("world", "recomputes"), [(2, (0, 1, 2)), (4, (2,))])
def test_any_order_of_passes_on_any_number_of_ranks_makes_the_step_of_one_rank(
    world: int, recomputes: Sequence[int]
):
    ranks = run_ranks(world, steps_and_rows, recomputes)
    # Equal shares rounded up, the last ones shorter or empty: 6 rows over 4 ranks leave none for the last.
    shares = {
        2: {"ends": [(0, 3), (3, 6)], "layers.1.up": [(0, 4), (4, 7)]},
        4: {"ends": [(0, 2), (2, 4), (4, 6)], "layers.1.up": [(0, 2), (2, 4), (4, 6), (6, 7)]},
    }
    for name, expected in shares[world].items():
        assert [rank[name][:2] for rank in ranks if name in rank] == expected
    for name, parameter in Network().named_parameters():
        saved = [rectangle for rank in ranks if name in rank for rectangle in rank[name][2]]
        check_tiling(name, tuple(parameter.shape), saved)


WIDTH, INNER, LAYERS = 256, 128, 3
OF_LAYERS, OF_ENDS = LAYERS * (2 * WIDTH * INNER + WIDTH), WIDTH * WIDTH
"""Elements of the layers and of the root of a bfloat16 network whose shares need no gaps."""


def bfloat16_network() -> Network:
    return Network(torch.bfloat16, width=WIDTH, inner=INNER, layers=LAYERS)


def held_bytes() -> int:
    """Bytes of all tensors of this process since ``gc.freeze()``, each storage once."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if not isinstance(tensor, DTensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def whole_layers(network: Network) -> list[int]:
    """Numbers of the layers whose weights are here whole, in bfloat16."""
    weights = [layer.up for layer in network.layers]
    return [n for n, up in enumerate(weights) if not isinstance(up, DTensor) and up.dtype == torch.bfloat16]


def memory() -> tuple[list[int], list[list[int]]]:
    """Bytes held when divided, with the optimizer, and after a step; the whole layers whenever one runs."""
    state = make_state()
    gc.freeze()
    network = bfloat16_network()
    store = divide(network, state.data_group)
    seen = [held_bytes()]
    groups = {"model_group": state.model_group, "data_group": state.data_group}
    optimizer = Optimizer(store, OptimizerConfig(), PrecisionConfig(bf16=True), **groups)
    seen.append(held_bytes())
    whole: list[list[int]] = []

    def enter(*_: Any) -> None:
        whole.append(whole_layers(network))

    def leave(layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(enter)

    handles = [layer.register_forward_pre_hook(enter) for layer in network.layers]
    handles += [layer.register_forward_hook(leave) for layer in network.layers]
    store.zero_grad(1)
    run(network, inputs_of(1, WIDTH, torch.bfloat16), [("forward", 0), ("backward", 0)])
    store.finish()
    for handle in handles:
        handle.remove()
    optimizer.step(0.01, 0.1)
    seen.append(held_bytes())
    assert not whole_layers(network)
    return seen, whole


def test_a_rank_holds_sixteen_bytes_for_each_parameter_of_its_share_and_one_whole_layer():
    share = (OF_LAYERS + OF_ENDS) // 4
    for seen, whole in run_ranks(4, memory):
        # Weights and gradients in float32, two moments; nothing whole is left after a step.
        assert seen == pytest.approx([8 * share, 16 * share, 16 * share], abs=64)
        forwards = [[number] for number in range(LAYERS)]
        assert whole == [*forwards, *reversed(forwards)]


def traffic() -> list[dict[tuple[str, str], tuple[int, float]]]:
    """What a step of four micro-batches sends in each order of passes, then with sums in bfloat16."""
    found = []
    for order in ORDERS.values():
        for reduce_dtype in (None, torch.bfloat16):
            meter = Meter()
            store = divide(
                network := bfloat16_network(),
                MeteredGroup(make_state().data_group, "dp", meter),
                reduce_dtype=reduce_dtype,
            )
            store.zero_grad(4)
            run(network, inputs_of(4, WIDTH, torch.bfloat16), order)
            store.finish()
            found.append({key: (entry.calls, entry.moved_bytes) for key, entry in meter.take().items()})
    return found


def test_every_microbatch_gathers_layers_twice_and_the_rest_once_and_sums_all_gradients_once():
    world, microbatches = 2, 4
    sent = (world - 1) / world * microbatches
    gathers = microbatches * (2 * LAYERS + 1), sent * 2 * (2 * OF_LAYERS + OF_ENDS)
    for found in run_ranks(world, traffic):
        for number, seen in enumerate(found):
            width = 4 if number % 2 == 0 else 2
            sums = microbatches * (LAYERS + 1), sent * width * (OF_LAYERS + OF_ENDS)
            assert seen == {("dp", "all_gather"): gathers, ("dp", "reduce_scatter"): sums}


def small_gradients_after_a_large_one() -> list[torch.Tensor]:
    """A gradient of 1 and fifteen of 2^-10 on every rank, summed over ranks in either format."""
    group = make_state().data_group
    found = []
    for reduce_dtype in (None, torch.bfloat16):
        network = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        network.weight.facts = replicated_facts((8, 8), 0)
        store = FullyShardedStore([network], [[]], group, reduce_dtype=reduce_dtype)
        store.zero_grad(16)
        for size in [1.0] + [2.0**-10] * 15:
            network(torch.full((1, 8), size, dtype=torch.bfloat16)).sum().backward()
        store.finish()
        found.append(store.buckets[0].parts[0].view(store.buckets[0].gradients).clone())
    return found


def test_small_bfloat16_gradients_are_not_lost_beside_a_large_one():
    # In bfloat16 each of them would be less than half a step of the sum, and change nothing.
    for found in run_ranks(2, small_gradients_after_a_large_one):
        assert all(torch.equal(gradients, torch.full((32,), 2 + 15 * 2.0**-9)) for gradients in found)
