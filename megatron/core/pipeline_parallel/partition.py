"""Which layers a pipeline stage holds."""

import itertools


def layer_ranges(num_layers: int, stages: int) -> list[range]:
    """Deal the layers over the stages as evenly as they go, in order, none lost.

    Where they don't divide, the extra layers go to the middle: the first stage has the embeddings too and
    under 1F1B holds the most activations, the last one has the output layer and the loss.

    Args:
        num_layers: layers of the whole model.
        stages: pipeline stages.

    Returns:
        For each stage the global numbers (from 0) of its layers.

    Raises:
        ValueError: if a stage would stay empty.
    """
    if stages < 1:
        raise ValueError(f"--pipeline-model-parallel-size {stages}: must be at least 1")
    if num_layers < stages:
        raise ValueError(
            f"--num-layers {num_layers} leaves some of the --pipeline-model-parallel-size {stages} stages "
            f"without a layer: use at most {num_layers} stages"
        )
    each, extra = divmod(num_layers, stages)
    first_longer = (stages - extra) // 2
    sizes = [each + (first_longer <= stage < first_longer + extra) for stage in range(stages)]
    bounds = itertools.accumulate(sizes, initial=0)
    return [range(first, end) for first, end in itertools.pairwise(bounds)]
