"""Pipeline schedules as data: in what order each stage runs its micro-batches.

Each schedule is a pure function of the numbers of stages and micro-batches (and chunks). One engine runs any
of them, one simulator times any of them, one painter draws any of them.
"""

from megatron.core.pipeline_parallel.actions import Action as Action
from megatron.core.pipeline_parallel.actions import Schedule

# Until the engine runs programs of the new kind.
from megatron.core.pipeline_parallel.blocking import SCHEDULES as SCHEDULES
from megatron.core.pipeline_parallel.blocking import Exchange as Exchange
from megatron.core.pipeline_parallel.blocking import Operation as Operation
from megatron.core.pipeline_parallel.blocking import Program as Program
from megatron.core.pipeline_parallel.blocking import lower as lower


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965, section 2.3).

    At its peak every stage holds the activations of all micro-batches. Backwards run in the order of the
    forwards, so that gradients add up in the same order as in :func:`one_f_one_b`.

    Args:
        stages: pipeline stages, at least 1.
        microbatches: micro-batches of a step, at least 1.
    """
    order = [_forward(i) for i in range(microbatches)] + [_backward(i) for i in range(microbatches)]
    return Schedule((tuple(order),) * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B: no more forwards ahead than needed (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    Warm-up: ``stages - 1 - stage`` forwards. Steady state: one forward, one backward in turn. Cool-down: the
    backwards that are left. A stage holds the activations of at most ``stages - stage`` micro-batches.

    Args:
        stages: pipeline stages, at least 1.
        microbatches: micro-batches of a step, at least 1.
    """
    orders = []
    for stage in range(stages):
        warmup = min(stages - 1 - stage, microbatches)
        actions = [_forward(i) for i in range(warmup)]
        for i in range(microbatches - warmup):
            actions += [_forward(warmup + i), _backward(i)]
        orders.append((*actions, *map(_backward, range(microbatches - warmup, microbatches))))
    return Schedule(tuple(orders))


def build_schedule(
    name: str, *, stages: int, microbatches: int, chunks: int = 1, group_size: int | None = None
) -> Schedule:
    """The schedule that ``--pipeline-schedule`` names.

    Args:
        name: gpipe or 1f1b.
        stages: pipeline stages.
        microbatches: micro-batches of a step.
        chunks: model chunks of each stage.
        group_size: micro-batches that a stage runs through one chunk before it turns to the next
            (interleaved); default the number of stages.

    Raises:
        ValueError: naming the flags that don't fit.
    """
    if stages < 1 or microbatches < 1:
        raise ValueError(
            f"{stages} stages and {microbatches} micro-batches: a schedule needs at least 1 of each"
        )
    return {"gpipe": gpipe, "1f1b": one_f_one_b}[name](stages, microbatches)


def _forward(microbatch: int) -> Action:
    return Action("forward", 0, microbatch)


def _backward(microbatch: int) -> Action:
    return Action("backward", 0, microbatch)
