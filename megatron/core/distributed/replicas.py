"""Do ranks that should hold the same parameters hold the same?"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from megatron.core.communication import all_gather, ranks_of
from megatron.core.distributed.exchange_json import gather_json
from megatron.core.distributed.own_bucket import ParameterStore

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
_MIX = -7046029254386353131  # 2^64 / golden ratio, odd, as a signed number


class ReplicaError(RuntimeError):
    """Ranks that should hold the same parameters do not."""


def check_replicas(store: ParameterStore, data_group: ProcessGroup, tp_group: ProcessGroup) -> None:
    """Compare a fingerprint of every parameter over the ranks that hold it; all of them call this together.

    It reads the parameters once, those that tensor-parallel ranks replicate twice, and exchanges 8 bytes for
    each of them.

    Args:
        store: this rank's parameters, none of them divided over the data-parallel ranks.
        data_group: ranks that hold the same parameters.
        tp_group: ranks that hold some of them alike (norms), or rows of them (keys and values).

    Raises:
        ReplicaError: on all ranks of the group alike, naming the first parameter that differs, and where.
    """
    store.wait_for_parameters()
    # Both checks before either raises: ranks of one group may differ where those of the other do not.
    own = dict(_own_pieces(store))
    problems = (
        _data_parallel_problem(store, data_group),
        _tensor_parallel_problem(own, tp_group, store.device),
    )
    for problem in problems:
        if problem is not None:
            raise ReplicaError(problem)


def check_shares(store: ParameterStore, tp_group: ProcessGroup) -> None:
    """The same where data-parallel ranks divide the rows of every parameter, so that none holds another's.

    What is left to compare is the shares that tensor-parallel ranks hold alike; their groups call this
    together.

    Raises:
        ReplicaError: on all ranks of the group alike, naming the first rows that differ, and where.
    """
    problem = _tensor_parallel_problem(dict(_own_shares(store)), tp_group, store.device)
    if problem is not None:
        raise ReplicaError(problem)


def _data_parallel_problem(store: ParameterStore, group: ProcessGroup) -> str | None:
    if group.size() == 1:
        return None
    fingerprints = [_fingerprint(named.parameter.detach()) for named in store.parameters]
    names = [named.name for named in store.parameters]
    held = torch.ones(group.size(), len(names), dtype=torch.bool, device=store.device)
    problem = _first_difference(names, torch.stack(fingerprints), held, group)
    if problem is None:
        return None
    return (
        f"data-parallel replicas differ: {problem}. All replicas must start from the same seed or the same "
        "checkpoint."
    )


def _own_pieces(store: ParameterStore) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's runs of rows of the whole model's parameters: what they are called, and their values."""
    for named in store.parameters:
        for piece in named.facts.pieces:
            if piece.length:
                rows = named.parameter.detach().narrow(named.facts.dim, piece.local, piece.length)
                yield f"{named.name}[{piece.start}:{piece.start + piece.length}]", rows


def _own_shares(store: ParameterStore) -> Iterator[tuple[str, torch.Tensor]]:
    """The same as far as they are in this rank's buckets; of parameters that are split along their rows.

    The others (those of row-parallel layers) no two tensor-parallel ranks hold alike.
    """
    for bucket in store.buckets:
        for part in bucket.parts:
            shape, facts = part.named.parameter.shape, part.named.facts
            if facts.dim != 0:
                continue
            values = part.view(bucket.weights).view(-1, *shape[1:])
            first = part.start // shape[1:].numel()
            for piece in facts.pieces:
                start = max(first, piece.local)
                length = min(first + values.shape[0], piece.local + piece.length) - start
                if length > 0:
                    whole = piece.start + start - piece.local
                    yield (
                        f"{part.named.name}[{whole}:{whole + length}]",
                        values.narrow(0, start - first, length),
                    )


def _tensor_parallel_problem(
    own: Mapping[str, torch.Tensor], group: ProcessGroup, device: torch.device
) -> str | None:
    """Compare the runs of rows that several ranks hold."""
    if group.size() == 1:
        return None
    held_by = gather_json(list(own), group, device)
    holders = Counter(key for keys in held_by for key in keys)
    shared = [key for key, count in holders.items() if count > 1]
    if not shared:
        return None
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    fingerprints = [_fingerprint(own[key]) if key in own else nothing for key in shared]
    sets = [set(keys) for keys in held_by]
    held = torch.tensor([[key in keys for key in shared] for keys in sets], device=device)
    problem = _first_difference(shared, torch.stack(fingerprints), held, group)
    if problem is None:
        return None
    return (
        f"tensor-parallel ranks differ in what they hold alike: {problem}. Their random streams or updates "
        "have come apart; start again from an earlier checkpoint."
    )


def _first_difference(
    names: Sequence[str], fingerprints: torch.Tensor, held: torch.Tensor, group: ProcessGroup
) -> str | None:
    """Where ranks differ in what they hold, in words; None if they do not.

    Args:
        names: of what is compared.
        fingerprints: int64 [names], this rank's.
        held: bool [ranks, names], which rank holds what.
        group: the ranks.
    """
    rows = all_gather(fingerprints, group).view(group.size(), len(names))
    first_holder = held.int().argmax(dim=0)  # [names]
    expected = rows.gather(0, first_holder[None])
    differs = (rows != expected) & held
    if not differs.any():
        return None
    number = int(differs.any(dim=0).nonzero()[0])
    ranks = ranks_of(group)
    odd = [rank for rank, is_odd in zip(ranks, differs[:, number].tolist(), strict=True) if is_odd]
    return (
        f"{names[number]} on ranks {odd} is not what it is on rank {ranks[int(first_holder[number])]} "
        f"({int(differs.any(dim=0).sum())} of {len(names)} parameters differ)"
    )


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """int64 scalar: a sum over the tensor's bits in which every element has an odd weight of its own."""
    bits = tensor.reshape(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start, chunk in _chunks(bits):
        places = torch.arange(start, start + chunk.numel(), device=tensor.device)
        total += ((chunk.to(torch.int64) + 1) * (places * _MIX | 1)).sum()
    return total


def _chunks(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, flat.numel(), _CHUNK):
        yield start, flat[start : start + _CHUNK]
