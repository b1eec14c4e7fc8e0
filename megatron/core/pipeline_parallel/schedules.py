"""Pipeline schedules as data: in what order each stage runs its micro-batches.

Each schedule is a pure function of the numbers of stages and micro-batches (and chunks). One engine runs any
of them, one simulator times any of them, one painter draws any of them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.pipeline_parallel.actions import Action, Kind, Schedule
from megatron.core.pipeline_parallel.zero_bubble import zb_h1, zb_v

SCHEDULE_CHUNKS: dict[str, range] = {
    "gpipe": range(1, 2),
    "1f1b": range(1, 2),
    "interleaved": range(2, 1_000_000),
    "zb-h1": range(1, 2),
    "zb-v": range(2, 3),
}
"""Schedules by the name that ``--pipeline-schedule`` takes, with the chunks that a stage may have."""


@dataclass(frozen=True)
class ScheduleFlags:
    """What a user calls the numbers that a schedule is made of; those of a training run."""

    schedule: str = "--pipeline-schedule"
    stages: str = "--pipeline-model-parallel-size"
    microbatches: str = "--global-batch-size or --micro-batch-size"
    chunks: str = "--num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage"
    group_size: str = "--microbatch-group-size-per-virtual-pipeline-stage"


TRAINING_FLAGS = ScheduleFlags()


def build_schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    group_size: int | None = None,
    flags: ScheduleFlags = TRAINING_FLAGS,
) -> Schedule:
    """The schedule that ``--pipeline-schedule`` names.

    Args:
        name: one of :data:`SCHEDULE_CHUNKS`.
        stages: pipeline stages.
        microbatches: micro-batches of a step.
        chunks: model chunks of each stage: several for interleaved, two for zb-v, otherwise one.
        group_size: of interleaved only, see :func:`interleaved`.
        flags: what to call these numbers in messages.

    Raises:
        ValueError: naming the flags that don't fit, with their values and what would be valid.
    """
    if name not in SCHEDULE_CHUNKS:
        raise ValueError(f"{flags.schedule} {name}: there is {', '.join(SCHEDULE_CHUNKS)}")
    if stages < 1 or microbatches < 1:
        raise ValueError(
            f"{stages} stages and {microbatches} micro-batches: a schedule needs at least 1 of each"
        )
    if chunks not in SCHEDULE_CHUNKS[name]:
        wanted = {1: "1 chunk", 2: "2 chunks"}[SCHEDULE_CHUNKS[name].start]
        more = " or more" if name == "interleaved" else ""
        raise ValueError(
            f"{flags.schedule} {name} takes {wanted}{more} a stage, not {chunks}: see {flags.chunks}"
        )
    if name == "interleaved":
        return interleaved(stages, microbatches, chunks, group_size, flags)
    if group_size is not None:
        raise ValueError(f"{flags.group_size} {group_size} is for {flags.schedule} interleaved, not {name}")
    simple: dict[str, Callable[[int, int], Schedule]] = {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "zb-h1": zb_h1,
        "zb-v": zb_v,
    }
    return simple[name](stages, microbatches)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965, section 2.3).

    At its peak every stage holds the activations of all micro-batches. Backwards run in the order of the
    forwards, so that gradients add up in the same order as in :func:`one_f_one_b`.

    Args:
        stages: pipeline stages, at least 1.
        microbatches: micro-batches of a step, at least 1.
    """
    order = _passes("forward", microbatches) + _passes("backward", microbatches)
    return Schedule((tuple(order),) * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B: no more forwards ahead than needed (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    Warm-up: ``stages - 1 - stage`` forwards. Steady state: one forward, one backward in turn. Cool-down: the
    backwards that are left. A stage holds the activations of at most ``stages - stage`` micro-batches.

    Args:
        stages: pipeline stages, at least 1.
        microbatches: micro-batches of a step, at least 1.
    """
    forwards, backwards = _passes("forward", microbatches), _passes("backward", microbatches)
    return Schedule(
        tuple(_one_forward_one_backward(forwards, backwards, stages - 1 - stage) for stage in range(stages))
    )


def interleaved(
    stages: int,
    microbatches: int,
    chunks: int,
    group_size: int | None = None,
    flags: ScheduleFlags = TRAINING_FLAGS,
) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    Each stage holds several chunks of the model. It runs a group of micro-batches through its first chunk,
    the same group through the next, and so on, then the next group; backwards likewise from the last chunk
    to the first. With as many micro-batches in a group as stages, a chunk's output comes back from its round
    over all stages when its turn has come. Warm-up: ``2 (stages - 1 - stage) + (chunks - 1) group_size``
    forwards, so a stage holds at most one more than that many micro-batches, of one chunk each.

    Args:
        stages: pipeline stages, at least 1.
        microbatches: micro-batches of a step, at least 1.
        chunks: model chunks of each stage, at least 2.
        group_size: micro-batches of a group, at least ``stages``; default ``stages``. The last group may be
            smaller than the others, but not than ``stages``: its outputs would not be back in time.
        flags: what to call these numbers in messages.

    Raises:
        ValueError: if the groups are too small, with the counts of micro-batches that would be valid.
    """
    group_size = stages if group_size is None else group_size
    if group_size < stages:
        raise ValueError(
            f"{flags.group_size} {group_size} is less than {flags.stages} {stages}: a stage would wait in "
            f"every turn; give at least {stages}"
        )
    if not _groups_are_full(microbatches, stages, group_size):
        raise ValueError(_why_not_interleaved(microbatches, stages, group_size, flags))
    groups = [range(i, min(i + group_size, microbatches)) for i in range(0, microbatches, group_size)]
    down, up = range(chunks), range(chunks - 1, -1, -1)
    forwards = [Action("forward", chunk, i) for group in groups for chunk in down for i in group]
    backwards = [Action("backward", chunk, i) for group in groups for chunk in up for i in group]
    turns = (chunks - 1) * len(groups[0])
    return Schedule(
        tuple(
            _one_forward_one_backward(forwards, backwards, 2 * (stages - 1 - stage) + turns)
            for stage in range(stages)
        ),
        chunks=chunks,
    )


def _passes(kind: Kind, microbatches: int) -> list[Action]:
    """All micro-batches in order through the only chunk."""
    return [Action(kind, 0, i) for i in range(microbatches)]


def _one_forward_one_backward(
    forwards: list[Action], backwards: list[Action], warmup: int
) -> tuple[Action, ...]:
    """Some forwards, then one forward and one backward in turn, then the other backwards."""
    warmup = min(warmup, len(forwards))
    steady = zip(forwards[warmup:], backwards, strict=False)
    return (
        *forwards[:warmup],
        *itertools.chain.from_iterable(steady),
        *backwards[len(forwards) - warmup :],
    )


def _groups_are_full(microbatches: int, stages: int, group_size: int) -> bool:
    """Whether also the last group has a micro-batch for each stage."""
    rest = microbatches % group_size
    return rest == 0 or rest >= stages


def _why_not_interleaved(microbatches: int, stages: int, group_size: int, flags: ScheduleFlags) -> str:
    """What is wrong with a number of micro-batches, and which would do."""
    rest = microbatches % group_size
    first = max(microbatches - 2 * group_size, stages)
    counts = range(first, microbatches + 2 * group_size + 1)
    valid = ", ".join(str(n) for n in counts if _groups_are_full(n, stages, group_size))
    message = (
        f"{flags.schedule} interleaved cannot run {microbatches} micro-batches in groups of {group_size} "
        f"over {flags.stages} {stages}: the last group would have {rest}, fewer than the stages. Valid "
        f"counts of micro-batches near it: {valid}. Change {flags.microbatches}"
    )
    if microbatches < stages:
        return message
    size = next(n for n in itertools.count(stages) if _groups_are_full(microbatches, stages, n))
    return f"{message}, or give {flags.group_size} {size}"
