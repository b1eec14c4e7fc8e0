"""Orders of actions as short texts, and what an action needs by the chain rule."""

from megatron.core.pipeline_parallel.actions import Action, Schedule

KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def read(text):
    """``"F0 B0 F1'"`` as actions: kind, micro-batch, and a dash for each chunk after the first."""
    return tuple(Action(KINDS[word[0]], word.count("'"), int(word[1:].rstrip("'"))) for word in text.split())


def schedule(*orders, chunks=1, placement="loop"):
    """A schedule out of texts, one a stage."""
    return Schedule(tuple(map(read, orders)), chunks=chunks, placement=placement)


def places(stages, chunks, placement):
    """The (stage, chunk) of each part of the model."""
    if placement == "v":
        return [(s, 0) for s in range(stages)] + [(s, 1) for s in reversed(range(stages))]
    return [(s, c) for c in range(chunks) for s in range(stages)]


def needs(parts, part, kind, microbatch):
    """What must have run, as (part, kind, micro-batch), before a pass of a part of the model."""
    if kind == "forward":
        return [(part - 1, kind, microbatch)] if part > 0 else []
    if kind == "backward_weight":
        return [(part, "backward_input", microbatch)]
    later = [(part + 1, kind, microbatch)] if part < parts - 1 else []
    return [(part, "forward", microbatch), *later]


def random_schedule(rng, *, stages, chunks, placement, microbatches, split):
    """Any order that respects the needs, cut into stages."""
    where = places(stages, chunks, placement)
    kinds = ("forward", "backward_input", "backward_weight") if split else ("forward", "backward")
    left = {(part, kind, i) for part in range(len(where)) for kind in kinds for i in range(microbatches)}
    owed = [[] for _ in where]
    orders = [[] for _ in range(stages)]
    while left:
        ready = [
            node
            for node in sorted(left)
            if not any(need in left for need in needs(len(where), *node))
            and (node[1] != "backward_weight" or owed[node[0]][0] == node[2])
        ]
        part, kind, microbatch = node = rng.choice(ready)
        left.remove(node)
        if kind == "backward_input":
            owed[part].append(microbatch)
        elif kind == "backward_weight":
            owed[part].pop(0)
        stage, chunk = where[part]
        orders[stage].append(Action(kind, chunk, microbatch))
    return Schedule(tuple(map(tuple, orders)), chunks=chunks, placement=placement)
