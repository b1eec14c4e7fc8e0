"""Steps of the plain GPT over two ranks, each split as PyTorch's documentation says.

All train with fused AdamW and clipped gradients; in bf16 under autocast over float32 weights, or with the
mixed precision of ``fully_shard``.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from parallel_sides.cases import WORLD, Case, batch_of
from parallel_sides.plain_gpt import PlainGPT, next_token_loss

Step = Callable[[], float]
LossFunction = Callable[[Tensor, Tensor], Tensor]


def own_rows(case: Case) -> tuple[Tensor, Tensor]:
    """This data-parallel rank's share of the batch."""
    tokens, labels = batch_of(case)
    rows = slice(dist.get_rank() * case.batch // WORLD, (dist.get_rank() + 1) * case.batch // WORLD)
    return tokens[rows], labels[rows]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """PyTorch's fast AdamW; tensors of one kind go into one group."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    groups = [{"params": group} for group in kinds.values()]
    return torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.01, fused=True)


def clip_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Clip to a norm of 1 over what each rank has alone and, once, what all have alike.

    For models whose parameters are partly split; of the others PyTorch's own function does the same.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    split = [grad.to_local() for grad in gradients if isinstance(grad, DTensor) and _is_split(grad)]
    whole = [
        grad.to_local() if isinstance(grad, DTensor) else grad
        for grad in gradients
        if not (isinstance(grad, DTensor) and _is_split(grad))
    ]
    square = torch.stack(torch._foreach_norm(split)).square().sum()
    dist.all_reduce(square, group=group)
    if whole:
        square += torch.stack(torch._foreach_norm(whole)).square().sum()
    torch._foreach_mul_([*split, *whole], (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0))


def ddp(case: Case, bf16: bool) -> Step:
    """DistributedDataParallel."""
    model = PlainGPT(case.shape, range(case.shape.layers))
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    tokens, labels = own_rows(case)
    optimizer = adamw(model.parameters())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = next_token_loss(wrapped(tokens), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def _tp_plan(layers: int, *, split_logits: bool, sequence: bool) -> dict[str, object]:
    """Which module is split how: columns then rows, as in the tutorial."""
    stream = Shard(1) if sequence else Replicate()
    plan: dict[str, object] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(
            input_layouts=stream,
            output_layouts=Shard(-1) if split_logits else Replicate(),
            use_local_output=not split_logits,
        ),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    for layer in range(layers):
        block = f"blocks.{layer}"
        for columns, rows in (("qkv", "proj"), ("fc", "out")):
            plan[f"{block}.{columns}"] = ColwiseParallel(input_layouts=stream)
            plan[f"{block}.{rows}"] = RowwiseParallel(output_layouts=stream)
        if sequence:
            plan[f"{block}.norm1"] = plan[f"{block}.norm2"] = SequenceParallel(use_local_output=True)
    if sequence:
        plan["blocks.0"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        )
    return plan


def _tp(case: Case, bf16: bool, *, split_logits: bool, sequence: bool = False) -> Step:
    mesh: DeviceMesh = init_device_mesh("cpu", (WORLD,))
    model = PlainGPT(case.shape, range(case.shape.layers))
    parallelize_module(model, mesh, _tp_plan(case.shape.layers, split_logits=split_logits, sequence=sequence))
    model.tie()
    tokens, labels = batch_of(case)
    parameters = list(model.parameters())
    optimizer = adamw(parameters)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(tokens)
            if split_logits:
                with loss_parallel():
                    loss = next_token_loss(logits, labels)
                    loss.backward()
            else:
                loss = next_token_loss(logits, labels)
        if not split_logits:
            loss.backward()
        clip_gradients(parameters, mesh.get_group())
        optimizer.step()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    return step


def tp(case: Case, bf16: bool) -> Step:
    """Tensor parallelism by ``parallelize_module``, logits gathered for the stock loss."""
    return _tp(case, bf16, split_logits=False)


def tp_loss_parallel(case: Case, bf16: bool) -> Step:
    """The same with logits that stay split, and PyTorch's ``loss_parallel``."""
    return _tp(case, bf16, split_logits=True)


def tp_sp(case: Case, bf16: bool) -> Step:
    """The same with ``SequenceParallel`` norms."""
    return _tp(case, bf16, split_logits=True, sequence=True)


def pipeline_step(
    case: Case,
    parts: list[nn.Module],
    loss_function: LossFunction,
    bf16: bool,
    *,
    interleaved: bool,
    give_labels: bool = False,
) -> Step:
    """A step of ``torch.distributed.pipelining`` over the parts of the model that this rank has."""
    rank, device, count = dist.get_rank(), torch.device("cpu"), WORLD * len(parts)
    stages = [PipelineStage(part, WORLD * chunk + rank, count, device) for chunk, part in enumerate(parts)]
    schedule = (
        ScheduleInterleaved1F1B(stages, case.microbatches, loss_function)
        if interleaved
        else Schedule1F1B(stages[0], case.microbatches, loss_function)
    )
    tokens, labels = batch_of(case)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = adamw(parameters)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            if rank == 0:
                schedule.step(tokens, return_outputs=False)
            else:
                given = {"labels": labels} if give_labels else {}
                schedule.step(target=labels, losses=losses, return_outputs=False, **given)
        _clip_over_stages(parameters)
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else 0.0

    return step


def _clip_over_stages(parameters: list[nn.Parameter]) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    square = torch.stack(torch._foreach_norm(gradients)).square().sum()
    dist.all_reduce(square)
    torch._foreach_mul_(gradients, (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0))


def layers_of_parts(case: Case, chunks: int) -> list[tuple[range, bool, bool]]:
    """For each chunk of this rank its layers, and whether it is the model's first and last part."""
    parts = WORLD * chunks
    each = case.shape.layers // parts
    mine = range(dist.get_rank(), parts, WORLD)
    return [(range(part * each, (part + 1) * each), part == 0, part == parts - 1) for part in mine]


def _pp(case: Case, bf16: bool, *, chunks: int) -> Step:
    parts: list[nn.Module] = [
        PlainGPT(case.shape, layers, first=first, last=last)
        for layers, first, last in layers_of_parts(case, chunks)
    ]
    return pipeline_step(case, parts, next_token_loss, bf16, interleaved=chunks > 1)


def pp(case: Case, bf16: bool) -> Step:
    """``Schedule1F1B``."""
    return _pp(case, bf16, chunks=1)


def pp_interleaved(case: Case, bf16: bool) -> Step:
    """``ScheduleInterleaved1F1B`` with two chunks a rank."""
    return _pp(case, bf16, chunks=2)


def fully_sharded(case: Case, bf16: bool) -> Step:
    """``fully_shard`` of every block and of what is left."""
    model = PlainGPT(case.shape, range(case.shape.layers))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    tokens, labels = own_rows(case)
    optimizer = adamw(model.parameters())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss(model(tokens).float(), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def _is_split(tensor: DTensor) -> bool:
    return any(isinstance(placement, Shard) for placement in tensor.placements)


SIDES: dict[str, Callable[[Case, bool], Step]] = {
    "ddp": ddp,
    "tp": tp,
    "tp-loss-parallel": tp_loss_parallel,
    "tp-sp": tp_sp,
    "pp": pp,
    "pp-interleaved": pp_interleaved,
    "fully-shard": fully_sharded,
}
