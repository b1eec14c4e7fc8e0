"""Our training step over two ranks, and our module under PyTorch's engines."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron.core.models import GPTModel, ModelStage
from megatron.core.parallel_state import ModelParallel, create_parallel_state
from megatron.core.parameter import Placement
from megatron.core.tensor_parallel import RandomStream, initialize_parameters
from megatron.training.arguments import parse_arguments, resolve
from megatron.training.config import RunConfig
from megatron.training.initialize import Runtime
from megatron.training.setup import build_run
from megatron.training.step import train_step
from parallel_sides.cases import WORLD, Case, batch_of
from parallel_sides.torch_sides import Step, adamw, layers_of_parts, own_rows, pipeline_step
from pretrain_gpt import GPTTask


def settings(case: Case, bf16: bool, world: int, flags: str) -> RunConfig:
    """The settings of a run of this case on so many ranks."""
    shape = case.shape
    replicas = world if "model-parallel-size" not in flags else 1
    argv = (
        f"--num-layers {shape.layers} --hidden-size {shape.hidden} --num-attention-heads {shape.heads} "
        f"--seq-length {shape.seq_length} --global-batch-size {case.batch} "
        f"--micro-batch-size {case.batch // replicas // case.microbatches} --vocab-size {shape.vocab} "
        "--tokenizer-type NullTokenizer --mock-data --attention-dropout 0 --hidden-dropout 0 "
        f"--train-iters 1000 --lr 1e-4 --lr-decay-style constant --clip-grad 1.0 {flags}"
    ).split()
    argv += [] if shape.tied else ["--untie-embeddings-and-output-weights"]
    argv += ["--bf16"] if bf16 else []
    return resolve(parse_arguments(argv, "benchmark"), None, shape.vocab, world)


def our_step(case: Case, bf16: bool) -> Step:
    """The training loop's own step, layout and engine ours."""
    config = settings(case, bf16, WORLD, case.ours)
    state = create_parallel_state(config.parallel, "cpu")
    runtime = Runtime(dist.get_rank(), WORLD, dist.get_rank(), torch.device("cpu"), state)
    run = build_run(config, GPTTask(), runtime, None)
    tokens, labels = batch_of(case)
    rows = torch.arange(case.batch).view(-1, state.size("dp"), config.training.micro_batch_size)
    micro = [
        {"tokens": tokens[own], "labels": labels[own], "loss_mask": torch.ones(own.numel(), tokens.shape[1])}
        for own in rows[:, state.rank("dp")]
    ]

    class SameBatch:
        def take(self, count: int) -> list[dict[str, Tensor]]:
            assert count == len(micro)
            return micro

    run.readers.train = SameBatch()  # type: ignore[assignment]
    return lambda: train_step(run).losses["lm loss"]


class Alone(nn.Module):
    """A part of our model, or all of it, whole on one rank: a module as PyTorch's engines take it."""

    def __init__(self, case: Case, layers: range, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        config = settings(case, False, 1, "").model
        # Every rank is a group of its own; all ranks take part in the making of each.
        alone = [dist.new_group([rank]) for rank in range(WORLD)][dist.get_rank()]
        assert alone is not None
        self.model = GPTModel(
            config,
            ModelStage(layers, pre_process=first, post_process=last),
            parallel=ModelParallel(alone, alone),
            placement=Placement(torch.float32, torch.device("cpu")),
        )
        initialize_parameters(self.model, 0)
        self.stream = RandomStream.root(0)
        self.first, self.last = first, last

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Tokens [b, s] or hidden states [s, b, h] -> hidden states, or in the last part the mean loss."""
        given = {"tokens" if self.first else "hidden_states": x}
        if not self.last:
            hidden_states: Tensor = self.model(**given, stream=self.stream)
            return hidden_states
        assert labels is not None
        total: Tensor = self.model(**given, labels=labels, stream=self.stream)
        return total / labels.numel()


def own_ddp(case: Case, bf16: bool) -> Step:
    """Our module under DistributedDataParallel."""
    assert not bf16
    model = DistributedDataParallel(Alone(case, range(case.shape.layers)), gradient_as_bucket_view=True)
    return _step(model, *own_rows(case))


def own_fully_sharded(case: Case, bf16: bool) -> Step:
    """Our module under ``fully_shard``, every layer and what is left."""
    assert not bf16
    model = Alone(case, range(case.shape.layers))
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.decoder.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _step(model, *own_rows(case))


def _step(model: nn.Module, tokens: Tensor, labels: Tensor) -> Step:
    optimizer = adamw(model.parameters())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def _own_pp(case: Case, bf16: bool, *, chunks: int) -> Step:
    assert not bf16
    parts: list[nn.Module] = [
        Alone(case, layers, first=first, last=last) for layers, first, last in layers_of_parts(case, chunks)
    ]
    return pipeline_step(case, parts, _loss_itself, bf16, interleaved=chunks > 1, give_labels=True)


def _loss_itself(output: Tensor, _: Tensor) -> Tensor:
    """Our last part gives the loss, having been given the labels."""
    return output


def own_pp(case: Case, bf16: bool) -> Step:
    """Our module under ``Schedule1F1B``."""
    return _own_pp(case, bf16, chunks=1)


def own_pp_interleaved(case: Case, bf16: bool) -> Step:
    """Our module under ``ScheduleInterleaved1F1B``."""
    return _own_pp(case, bf16, chunks=2)


SIDES: dict[str, Callable[[Case, bool], Step]] = {
    "ours": our_step,
    "own-ddp": own_ddp,
    "own-pp": own_pp,
    "own-pp-interleaved": own_pp_interleaved,
    "own-fully-shard": own_fully_sharded,
}
