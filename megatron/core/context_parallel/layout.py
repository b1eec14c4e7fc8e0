"""Which tokens of a sequence a context-parallel rank holds.

The sequence is cut into 2 cp equal chunks, and rank r holds chunk r and chunk 2 cp - 1 - r, in that order.
Under a causal mask chunk i needs the keys of i + 1 chunks, the last of them in part, so the two chunks of any
rank need (r + 1) + (2 cp - r) = 2 cp + 1 together: every rank has the same work.
"""

import torch
from torch.distributed import ProcessGroup


def chunk_size(seq_length: int, cp_size: int) -> int:
    """Tokens of one of the 2 cp chunks of a sequence; of the whole sequence where cp is 1.

    Raises:
        ValueError: if the sequence does not divide into 2 cp equal chunks.
    """
    if cp_size == 1:
        return seq_length
    chunks = 2 * cp_size
    if seq_length % chunks:
        below = seq_length // chunks * chunks
        nearest = f"{below} or {below + chunks}" if below else f"{chunks}"
        raise ValueError(
            f"--seq-length {seq_length} does not divide into 2 x --context-parallel-size {cp_size} = "
            f"{chunks} equal chunks; valid lengths are multiples of {chunks}, the nearest {nearest}"
        )
    return seq_length // chunks


def held_chunks(cp_rank: int, cp_size: int) -> tuple[int, ...]:
    """Numbers of the chunks that a rank holds, in the order in which it holds them."""
    if cp_size == 1:
        return (0,)
    return cp_rank, 2 * cp_size - 1 - cp_rank


def local_positions(seq_length: int, group: ProcessGroup) -> torch.Tensor:
    """Positions in the whole sequence of the tokens that this rank holds.

    Args:
        seq_length: s, of the whole sequence.
        group: the context-parallel group.

    Returns:
        int64 [s/cp] on the CPU, ascending; 0 to s - 1 where cp is 1.

    Raises:
        ValueError: if the sequence does not divide into 2 cp equal chunks.
    """
    return take_local(torch.arange(seq_length), 0, group)


def take_local(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """This rank's part of a tensor of the whole sequence, in the order of :func:`local_positions`.

    Args:
        x: [..., s, ...], replicated over the group.
        dim: the dim of the sequence.
        group: the context-parallel group.

    Returns:
        [..., s/cp, ...], sharded on ``dim`` over cp; ``x`` itself where cp is 1.

    Raises:
        ValueError: if the sequence does not divide into 2 cp equal chunks.
    """
    if group.size() == 1:
        return x
    size = chunk_size(x.shape[dim], group.size())
    chunks = held_chunks(group.rank(), group.size())
    return torch.cat([x.narrow(dim, chunk * size, size) for chunk in chunks], dim=dim)


def natural_order(parts: torch.Tensor) -> torch.Tensor:
    """Put the tokens of all ranks in the order of the sequence.

    Args:
        parts: [cp, s/cp, ...], what each rank holds.

    Returns:
        [s, ...], a copy.
    """
    chunks = torch.unflatten(parts, 1, (2, -1))  # [cp, 2, s/(2 cp), ...]
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)


def dealt_order(x: torch.Tensor, cp_size: int) -> torch.Tensor:
    """Deal the tokens of a sequence over ranks: the inverse of :func:`natural_order`.

    Args:
        x: [s, ...] in the order of the sequence.
        cp_size: number of ranks.

    Returns:
        [cp, s/cp, ...], what each rank holds; a copy.
    """
    chunks = torch.unflatten(x, 0, (2, cp_size, -1))  # [2, cp, s/(2 cp), ...]
    return torch.stack([chunks[0], chunks[1].flip(0)], dim=1).flatten(1, 2)
