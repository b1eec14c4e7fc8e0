"""Optimizer state that data-parallel ranks divide: what it takes, and its way through checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.checkpoint import load, open_checkpoint, save, sharded_parameter, share_among_replicas
from megatron.core.config import OptimizerConfig, PrecisionConfig
from megatron.core.distributed import GradientReducer, ParameterBuffers
from megatron.core.distributed.buffers import Strategy
from megatron.core.optimizer import Optimizer, sharded_states
from megatron.core.parallel_state import ParallelState
from tests.harness import make_state, run_ranks
from tests.unit.core.distributed.toy import TwoLayers, parameters

CPU = torch.device("cpu")


class Engine:
    """A model of 6 x 7 matrices, which divide by nothing, with everything that updates it."""

    def __init__(self, state: ParallelState, strategy: Strategy, dtype: torch.dtype, seed: int = 0) -> None:
        self.state = state
        self.model = TwoLayers(dtype, width=6, seed=seed)
        group = state.data_group
        self.buffers = ParameterBuffers(
            parameters(self.model), bucket_size=43, strategy=strategy, data_group=group
        )
        self.reducer = GradientReducer(self.buffers, group, overlap=True)
        self.optimizer = Optimizer(
            self.buffers,
            OptimizerConfig(),
            PrecisionConfig(),
            model_group=state.model_group,
            data_group=group,
        )

    def step(self, number: int) -> None:
        """One step on the same 8 rows in all, however many ranks there are."""
        group = self.state.data_group
        rows = (torch.arange(48, dtype=torch.float64).view(8, 6) + number).sin()
        self.reducer.zero_grad(1)
        mine = rows.chunk(group.size())[group.rank()].to(self.model.first.dtype)
        (self.model(mine).to(torch.float64).square().sum() / 8).backward()
        self.reducer.finish()
        self.optimizer.step(0.01, 0.1)

    def save(self, root: str) -> None:
        """Save it as a run does: sharded state by its owners, all else shared out among the replicas."""
        group = self.state.data_group
        tensors = [
            sharded_parameter(f"model.{named.name}", named.parameter, named.facts, primary_only=True)
            for named in self.buffers.parameters
        ]
        own = sharded_states(self.optimizer.state_tensors(), "optimizer.", primary_only=True)
        if not self.buffers.sharded:
            tensors, own = tensors + own, []
        owned = share_among_replicas(tensors, group.rank(), group.size()) + own
        save(Path(root), 1, owned, self.optimizer.state_dict(), group, CPU)

    def load(self, root: str) -> None:
        """Load it as a run does: a model that is its own main copy from its own weights."""
        group = self.state.data_group
        checkpoint = open_checkpoint(Path(root), group, CPU)
        wanted = sharded_states(self.optimizer.state_tensors(), "optimizer.", primary_only=False)
        if not self.optimizer.has_main_weights:
            wanted += [
                sharded_parameter(
                    f"model.{named.name}", named.parameter.data, named.facts, primary_only=False
                )
                for named in self.buffers.parameters
            ]
        load(checkpoint, wanted, group, CPU)
        self.optimizer.load_state_dict(dict(checkpoint.manifest.state))
        self.optimizer.sync_model_weights()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def train_and_save(root: str, strategies: list[Strategy], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Two steps and a checkpoint, for each strategy; the weights after two more of the last."""
    state = make_state()
    for strategy in strategies:
        engine = Engine(state, strategy, dtype)
        for number in range(2):
            engine.step(number)
        engine.save(f"{root}/{strategy}")
    for number in range(2, 4):
        engine.step(number)
    return engine.weights()


def load_and_train(
    root: str, saved: list[Strategy], strategies: list[Strategy], dtype: torch.dtype
) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Weights after two more steps, by the strategies that saved and that loaded."""
    state = make_state()
    found = {}
    for one in saved:
        for strategy in strategies:
            engine = Engine(state, strategy, dtype, seed=1)
            engine.load(f"{root}/{one}")
            for number in range(2, 4):
                engine.step(number)
            found[one, strategy] = engine.weights()
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_any_division_takes_up_what_any_other_saved(tmp_path: Path, dtype: torch.dtype):
    """Saved by four ranks, one of which has an empty slice, and by two; loaded by two, one and four."""
    everything: list[Strategy] = ["no_shard", "optim", "optim_grads"]
    by_four, by_two = str(tmp_path / "four"), str(tmp_path / "two")
    straight = run_ranks(4, train_and_save, by_four, everything, dtype)[0]
    run_ranks(2, train_and_save, by_two, ["optim"], dtype)
    runs: list[tuple[int, str, list[Strategy], list[Strategy]]] = [
        (2, by_four, everything, ["no_shard", "optim_grads"]),
        (1, by_four, ["optim"], ["no_shard"]),
        (4, by_two, ["optim"], ["no_shard", "optim"]),
    ]
    for world, root, saved, strategies in runs:
        for found in run_ranks(world, load_and_train, root, saved, strategies, dtype):
            for case, weights in found.items():
                for name, weight in weights.items():
                    # In bfloat16 the sums over ranks round at other places, before main weights are rounded.
                    tolerance = 1e-12 if dtype == torch.float64 else 2.0**-7
                    torch.testing.assert_close(
                        weight, straight[name], rtol=tolerance, atol=tolerance, msg=f"{world} {case} {name}"
                    )


def state_bytes(strategy: Strategy, dtype: torch.dtype, world: int) -> float:
    """Bytes a parameter of all storages of a rank's model state, counted after a step."""
    state = make_state()
    group = state.data_group
    model = TwoLayers(dtype, width=64 * world, inner=64)  # no gaps, and all slices equal
    layer = parameters(model)[::2]
    buffers = ParameterBuffers(layer, bucket_size=64 * 64 * world, strategy=strategy, data_group=group)
    reducer = GradientReducer(buffers, group, overlap=True)
    optimizer = Optimizer(
        buffers, OptimizerConfig(), PrecisionConfig(), model_group=state.model_group, data_group=group
    )
    reducer.zero_grad(1)
    (model.first.sum() + model.second.sum()).backward()
    reducer.finish()
    optimizer.step(0.01, 0.1)
    tensors: list[Any] = [part.values for parts in optimizer.state_tensors().values() for part in parts]
    tensors += [named.parameter for named in layer]
    tensors += [bucket.gradients for bucket in buffers.buckets]
    assert all(named.parameter.grad is None for named in layer)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) / sum(named.parameter.numel() for named in layer)


def all_state_bytes() -> list[float]:
    world = dist.get_world_size()
    cases: list[tuple[Strategy, torch.dtype]] = [
        ("no_shard", torch.bfloat16),
        ("optim", torch.bfloat16),
        ("optim_grads", torch.bfloat16),
        ("optim", torch.float32),
    ]
    return [state_bytes(strategy, dtype, world) for strategy, dtype in cases]


@pytest.mark.parametrize("d", [2, 4])
def test_model_state_bytes_per_parameter(d: int):
    """Weight 2, gradient 4, main weight 4 and moments 8 bytes, of which d ranks divide the last 12 or 16.

    (Rajbhandari et al. 2020, section 5.) A float32 model has weight 4, gradient 4 and the moments.
    """
    for found in run_ranks(d, all_state_bytes):
        assert found == [18, 6 + 12 / d, 2 + 16 / d, 8 + 8 / d]
