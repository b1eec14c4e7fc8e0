"""One training iteration, and the forward passes of one evaluation."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.communication import all_reduce
from megatron.core.optimizer import LossScaleError, NonFiniteGradientError
from megatron.core.pipeline_parallel.engine import ForwardStep, run_pipeline
from megatron.core.tensor_parallel import RandomStream
from megatron.training.data import MicrobatchReader
from megatron.training.progress import StepOutcome
from megatron.training.run import Division, EvaluationData, Run
from megatron.training.task import Batch


class NonFiniteLossError(ValueError):
    """A loss is NaN or infinite."""


def train_step(run: Run) -> StepOutcome:
    """Forward, backward and update over one global batch; all ranks together.

    The gradient is that of each loss's sum over the global batch divided by its count over the global batch,
    whatever the micro-batches, the masks or the data-parallel size.

    Raises:
        NonFiniteLossError: if a loss is NaN or infinite and such iterations are not to be skipped. This and
            the next two are raised on all ranks alike, the weights as before the step.
        NonFiniteGradientError: if a gradient is, and no loss scaling explains it.
        LossScaleError: if too many updates in a row were skipped at the minimum loss scale.
    """
    if run.meter is not None:
        run.meter.take()  # what was sent between iterations belongs to none of them
    progress = run.progress
    outcome = StepOutcome(
        losses={},
        learning_rate=run.schedule.learning_rate(progress.schedule_samples),
        weight_decay=run.schedule.weight_decay(progress.schedule_samples),
        loss_scale=run.optimizer.loss_scale,
        global_batch_size=run.division.batch.global_batch_size,
    )
    batches, waited = _take_timed(run)
    counts, data_seconds = _count_losses(run, batches, waited)
    outcome = replace(outcome, data_seconds=data_seconds)

    if not counts.any():
        reason = "no token of this global batch counts towards the loss: the update is skipped"
        return replace(outcome, losses=dict.fromkeys(run.task.loss_names, 0.0), remarks=(reason,))

    run.reducer.zero_grad(run.division.batch.num_microbatches)
    factors = outcome.loss_scale * run.reducer.loss_factor / counts.clamp(min=1)
    sums = _forward_backward(run, batches, factors)
    run.reducer.finish()
    run.shared_gradients.sum()
    losses = _mean_losses(run, _sum_over_losses(run, sums), counts)
    if not all(math.isfinite(value) for value in losses.values()):
        message = f"loss is not finite at iteration {progress.iteration + 1}: {losses}"
        if not run.config.skips_nonfinite:
            raise NonFiniteLossError(
                f"{message}; the weights are those of iteration {progress.iteration}. Lower --lr, look at "
                "the data, or pass --skip-nan-iterations to go on without such updates"
            )
        return replace(outcome, losses=losses, remarks=(f"{message}: the update is skipped",))

    try:
        result = run.optimizer.step(outcome.learning_rate, outcome.weight_decay)
    except (LossScaleError, NonFiniteGradientError) as error:
        raise type(error)(f"iteration {progress.iteration + 1}: {error}") from None
    if not result.updated:
        reason = result.problem or f"gradients overflowed at loss scale {outcome.loss_scale}"
        return replace(outcome, losses=losses, remarks=(f"{reason}: the update is skipped",))
    return replace(
        outcome, losses=losses, grad_norm=result.grad_norm, num_zeros=result.num_zeros, updated=True
    )


@torch.no_grad()
def evaluation_losses(run: Run, data: EvaluationData) -> dict[str, float]:
    """Each loss over the next global batches of a dataset, or all of them; all ranks together.

    A loss that nothing in them counts towards has no value, and is left out.
    """
    run.train_mode(False)
    totals = torch.zeros(2, len(run.task.loss_names), dtype=torch.float64)
    if data.whole and data.reader is not None:
        data.reader.rewind()
    for _ in range(data.iterations):
        batches = _take(data.reader, run.evaluation_division)
        totals[0] += _forward_only(run, batches)
        totals[1] += _loss_counts(run, batches)
    run.train_mode(True)
    sums, counts = _sum_over_losses(run, totals)
    means = _mean_losses(run, sums, counts)
    return {name: means[name] for name, count in zip(means, counts.tolist(), strict=True) if count}


def _take(reader: MicrobatchReader | None, division: Division) -> Sequence[Batch | None]:
    """This rank's micro-batches of one global batch; Nones on a stage that reads no data."""
    count = division.batch.num_microbatches
    return [None] * count if reader is None else reader.take(count)


def _take_timed(run: Run) -> tuple[Sequence[Batch | None], float]:
    """This rank's micro-batches of the next global batch of training, and the seconds that they took."""
    start = time.perf_counter()
    batches = _take(run.readers.train, run.division)
    return batches, time.perf_counter() - start


def _count_losses(run: Run, batches: Sequence[Batch | None], waited: float) -> tuple[Tensor, float]:
    """What each loss of the global batch is summed over, float64 [losses], and how long the data took.

    The seconds are the mean over the ranks that read data; they travel with the counts.
    """
    reads = run.readers.train is not None
    own = torch.tensor([waited if reads else 0.0, float(reads)], dtype=torch.float64, device=run.device)
    total = all_reduce(torch.cat((_own_losses(run, _loss_counts(run, batches)), own)), run.state.world_group)
    *counts, seconds, readers = total.tolist()
    return torch.tensor(counts, dtype=torch.float64), seconds / readers


def _loss_counts(run: Run, batches: Sequence[Batch | None]) -> Tensor:
    """What each loss of these micro-batches is summed over, float64 [losses]; zeros before the last stage."""
    counts = torch.zeros(len(run.task.loss_names), dtype=torch.float64)
    if run.holds_loss:
        for batch in batches:
            assert batch is not None
            counts += run.task.loss_counts(batch).to(counts)
    return counts


def _own_losses(run: Run, values: Tensor) -> Tensor:
    """``values`` on the ranks that hold a loss (last stage, first tensor-parallel rank), else zeros."""
    counted = run.holds_loss and run.state.rank("tp") == 0
    return values.to(run.device) if counted else torch.zeros_like(values, device=run.device)


def _sum_over_losses(run: Run, values: Tensor) -> Tensor:
    """Sum over the ranks that hold a loss; every rank gets it."""
    return all_reduce(_own_losses(run, values), run.state.world_group).cpu()


def _mean_losses(run: Run, sums: Tensor, counts: Tensor) -> dict[str, float]:
    means = (sums / counts.clamp(min=1)).tolist()
    return dict(zip(run.task.loss_names, means, strict=True))


def _microbatch_forward(run: Run, batches: Sequence[Batch | None]) -> ForwardStep:
    """The forward pass of a micro-batch; its dropout derives from its iteration and place in the batch."""
    stream = RandomStream.root(run.config.training.seed).fold("dropout", run.progress.iteration)
    replicas, replica = run.state.size("dp"), run.state.rank("dp")

    def forward(chunk: int, microbatch: int, hidden_states: Tensor | None) -> Tensor:
        own = stream.fold("microbatch", microbatch * replicas + replica)
        return run.task.forward(run.chunks[chunk].model, batches[microbatch], hidden_states, own)

    return forward


def _forward_backward(run: Run, batches: Sequence[Batch | None], factors: Tensor) -> Tensor:
    """Run the schedule; give the loss sums of this rank's micro-batches, float64 [losses].

    Args:
        run: the run.
        batches: this rank's micro-batches.
        factors: what each loss sum is multiplied by before the backward pass: loss scale / count.
    """
    forward = _microbatch_forward(run, batches)
    sums = torch.zeros(len(run.task.loss_names), dtype=torch.float64)
    kept: list[Tensor] = []
    weights = factors.to(run.device)

    def forward_and_scale(chunk: int, microbatch: int, hidden_states: Tensor | None) -> Tensor:
        output = forward(chunk, microbatch, hidden_states)
        if not run.chunks[chunk].stage.last:
            return output
        kept.append(output.detach())
        return (output * weights.to(output.dtype)).sum()

    run_pipeline(
        run.division.training_program,
        forward=forward_and_scale,
        schedule=run.division.pipeline.schedule,
        channels=run.channels,
        activation=run.activation,
        deferred=[chunk.deferred for chunk in run.chunks],
        recorder=run.recorder,
    )
    for output in kept:
        sums += output.to(sums)
    return sums


def _forward_only(run: Run, batches: Sequence[Batch | None]) -> Tensor:
    """Run the forward passes; give the loss sums of this rank's micro-batches, float64 [losses]."""
    forward = _microbatch_forward(run, batches)
    division = run.evaluation_division
    outputs = run_pipeline(
        division.evaluation_program,
        forward=forward,
        schedule=division.pipeline.schedule,
        channels=run.channels,
        activation=run.activation,
        forward_only=True,
    )
    sums = torch.zeros(len(run.task.loss_names), dtype=torch.float64)
    for output in outputs:
        sums += output.to(sums)
    return sums
