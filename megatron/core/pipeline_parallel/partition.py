"""Which layers each part of the model holds, when stages share it.

The model is cut into ``stages * chunks`` parts, numbered from the embeddings to the loss; which stage holds
which is the schedule's placement.
"""

import itertools
from collections.abc import Sequence

from megatron.core.pipeline_parallel.actions import Placement, Schedule
from megatron.core.pipeline_parallel.layout import layout_parts, read_layout

FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
LAYOUT = "--pipeline-model-parallel-layout"
STAGES = "--pipeline-model-parallel-size"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
CHUNK_LAYERS = "--num-layers-per-virtual-pipeline-stage"


def count_chunks(
    num_layers: int,
    stages: int,
    *,
    layers_per_chunk: int | None = None,
    chunks: int | None = None,
    layout: str | None = None,
) -> int | None:
    """How many chunks of the model each stage holds, as far as flags say.

    Args:
        num_layers: layers of the whole model.
        stages: pipeline stages.
        layers_per_chunk: ``--num-layers-per-virtual-pipeline-stage``.
        chunks: ``--num-virtual-stages-per-pipeline-rank``.
        layout: ``--pipeline-model-parallel-layout``, which has a part for each chunk of each stage.

    Returns:
        The number, or None if no flag says one: it is the schedule's usual, then.

    Raises:
        ValueError: if a flag doesn't go with the others, with what would be valid.
    """
    if chunks is not None and layers_per_chunk is not None:
        raise ValueError(
            f"{CHUNKS} {chunks} and {CHUNK_LAYERS} {layers_per_chunk} say the same thing: give one"
        )
    if chunks is not None and chunks < 1:
        raise ValueError(f"{CHUNKS} {chunks}: must be at least 1")
    if layers_per_chunk is not None:
        chunks = _chunks_of(num_layers, stages, layers_per_chunk)
    if layout is None:
        return chunks
    parts = layout_parts(layout)
    if parts % stages:
        raise ValueError(
            f"{LAYOUT} {layout!r} has {parts} parts, which can't be dealt over {STAGES} {stages}: its number "
            f"of | is one less than a multiple of the stages"
        )
    if chunks not in (None, parts // stages):
        raise ValueError(
            f"{LAYOUT} {layout!r} has {parts} parts, so {parts // stages} for each of {STAGES} {stages}, not "
            f"{chunks}: drop {CHUNKS} and {CHUNK_LAYERS}, the layout says it all"
        )
    return parts // stages


def deal_layers(  # noqa: PLR0913 - what the flags say, one argument each
    num_layers: int,
    stages: int,
    chunks: int,
    placement: Placement,
    *,
    first: int | None = None,
    last: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    layout: str | None = None,
) -> list[range]:
    """Deal the layers over the parts of the model: each layer once, in order.

    Layers are dealt over the stages as evenly as they go, and those of a stage over its chunks. Where they
    don't divide, the middle stages get the extra ones: the first stage has the embeddings too and under 1F1B
    holds the most activations, the last one has the output layer and the loss.

    Args:
        num_layers: layers of the whole model.
        stages: pipeline stages.
        chunks: chunks of each stage.
        placement: which part is which chunk of which stage, see
            :class:`megatron.core.pipeline_parallel.actions.Schedule`. Under ``v`` the first stage holds the
            loss too.
        first: ``--decoder-first-pipeline-num-layers``: layers of the first stage, all its chunks together.
        last: ``--decoder-last-pipeline-num-layers``: likewise of the last stage.
        account_for_embedding: ``--account-for-embedding-in-pipeline-split``: the embeddings count as a layer.
        account_for_loss: ``--account-for-loss-in-pipeline-split``: output layer and loss count as a layer.
        layout: ``--pipeline-model-parallel-layout``: what each part holds, which leaves nothing to deal.

    Returns:
        For each part, in the model's order, the global numbers (from 0) of its layers. A part can be without
        layers only if ``layout`` says so, or if it holds what is counted as a layer. No stage is empty.

    Raises:
        ValueError: naming the flags that don't fit, with their values and what would be valid.
    """
    if stages < 1:
        raise ValueError(f"{STAGES} {stages}: must be at least 1")
    shape = Schedule(((),) * stages, chunks=chunks, placement=placement)
    accounted = account_for_embedding + account_for_loss
    flags = _flags(first, last, account_for_embedding, account_for_loss)
    if layout is not None:
        if flags:
            raise ValueError(f"{LAYOUT} says what each stage holds: drop {' and '.join(flags)}")
        sizes = read_layout(layout, num_layers, stages * chunks)
        _check_each_holds_something(sizes, shape, layout)
        return _ranges(sizes)
    if accounted and (first is not None or last is not None):
        raise ValueError(f"{' and '.join(flags)} contradict each other: give a number of layers, or account")
    if first is not None or last is not None:
        by_stage = _with_given_ends(num_layers, stages, chunks, first, last)
    else:
        by_stage = _even(num_layers + accounted, stages, chunks, accounted)
    sizes = [0] * (stages * chunks)
    for stage, size in enumerate(by_stage):
        for chunk, part_size in enumerate(_split(size, chunks)):
            sizes[shape.part(stage, chunk)] = part_size
    sizes[0] -= account_for_embedding
    sizes[-1] -= account_for_loss
    return _ranges(sizes)


def _chunks_of(num_layers: int, stages: int, layers_per_chunk: int) -> int:
    """Chunks of a stage of which each has so many layers."""
    if layers_per_chunk >= 1 and num_layers % (stages * layers_per_chunk) == 0:
        return num_layers // (stages * layers_per_chunk)
    each = num_layers // stages
    several = [str(size) for size in range(1, each) if each % size == 0 and num_layers % stages == 0]
    raise ValueError(
        f"{CHUNK_LAYERS} {layers_per_chunk}: --num-layers {num_layers} can't be dealt over {STAGES} {stages} "
        f"in chunks of {layers_per_chunk}; {', '.join(several) or 'no number'} would make several chunks, or "
        f"use {CHUNKS}, whose chunks need not be equal"
    )


def _flags(first: int | None, last: int | None, embedding: bool, loss: bool) -> list[str]:
    """The flags that say how layers are dealt, as the user gave them."""
    flags = [f"{flag} {value}" for flag, value in ((FIRST, first), (LAST, last)) if value is not None]
    flags += ["--account-for-embedding-in-pipeline-split"] * embedding
    flags += ["--account-for-loss-in-pipeline-split"] * loss
    return flags


def _check_each_holds_something(sizes: Sequence[int], shape: Schedule, layout: str) -> None:
    """Refuse a stage that has neither layers nor an end of the model: it would have no parameter."""
    stages = range(len(shape.stages))
    full = {shape.place(part)[0] for part, size in enumerate(sizes) if size or part in (0, shape.last_part)}
    for stage in stages:
        if stage not in full:
            raise ValueError(
                f"{LAYOUT} {layout!r} leaves stage {stage} of {STAGES} {len(stages)} with nothing: give it a "
                "layer (t), or use fewer stages"
            )


def _even(size: int, stages: int, chunks: int, accounted: int) -> list[int]:
    """So many layers, some of them only accounted for, over all stages."""
    parts = stages * chunks
    if size < parts:
        layers = size - accounted
        counted = f" and {accounted} more that are counted as layers" if accounted else ""
        each, what = (f" of {chunks} chunks", "chunks of all stages") if chunks > 1 else ("", "stages")
        raise ValueError(
            f"--num-layers {layers}{counted} leaves some of the {STAGES} {stages} stages{each} without a "
            f"layer: use at most {size} {what}"
        )
    return _split(size, stages)


def _with_given_ends(
    num_layers: int, stages: int, chunks: int, first: int | None, last: int | None
) -> list[int]:
    """Layers of each stage where those of the first or the last are given."""
    given = " and ".join(_flags(first, last, False, False))
    for flag, value in ((FIRST, first), (LAST, last)):
        if value is not None and value < chunks:
            raise ValueError(f"{flag} {value}: its stage has {chunks} chunks, so give at least {chunks}")
    ends = [value for value in (first, last) if value is not None]
    if stages == 1:
        if any(value != num_layers for value in ends):
            raise ValueError(
                f"{given}, but {STAGES} 1 has one stage, which holds all of --num-layers {num_layers}: drop "
                f"the flag or use more stages"
            )
        return [num_layers]
    rest, others = num_layers - sum(ends), stages - len(ends)
    if others == 0 and rest != 0:
        raise ValueError(
            f"{given} make {sum(ends)} layers, but {STAGES} 2 has no other stage and --num-layers is "
            f"{num_layers}: the two must add up to it"
        )
    if rest < others * chunks:
        each = f" of {chunks} chunks" if chunks > 1 else ""
        raise ValueError(
            f"{given} leave {max(rest, 0)} of --num-layers {num_layers} for the other {others} stages{each} "
            f"of {STAGES} {stages}: leave at least {others * chunks}"
        )
    sizes = _split(rest, others) if others else []
    return ([] if first is None else [first]) + sizes + ([] if last is None else [last])


def _split(size: int, parts: int) -> list[int]:
    """Cut into parts as equal as they go, with longer ones in the middle."""
    each, extra = divmod(size, parts)
    first_longer = (parts - extra) // 2
    return [each + (first_longer <= part < first_longer + extra) for part in range(parts)]


def _ranges(sizes: Sequence[int]) -> list[range]:
    bounds = itertools.accumulate(sizes, initial=0)
    return [range(first, end) for first, end in itertools.pairwise(bounds)]
