"""What ranks tell one another during a save or a load: JSON, as bytes in tensors, never pickled.

A rank that fails still takes part in every collective, and says so there: then all ranks raise together, and
none waits for one that has left.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from megatron.core.communication import plain

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """What came of an action: its value, or the error that it raised."""

    value: T | None
    error: Exception | None

    @property
    def failure(self) -> str | None:
        """The error in words, for the other ranks; None if there was none."""
        if self.error is None:
            return None
        kind = "" if isinstance(self.error, CheckpointError) else f"{type(self.error).__name__}: "
        return f"{kind}{self.error}"

    def get(self) -> T:
        """The value of an action that did not fail."""
        assert self.error is None, self.error
        return self.value  # type: ignore[return-value]


def attempt(action: Callable[[], T]) -> Attempt[T]:
    """Call ``action``, holding back whatever it raises until the peers have heard of it."""
    try:
        return Attempt(action(), None)
    except Exception as error:  # noqa: BLE001 - peers wait for this rank in a collective, whatever went wrong
        return Attempt(None, error)


@dataclass(frozen=True)
class Peers:
    """The ranks that save or load together, and the device on which their collectives run."""

    group: ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        """This rank's position in the group."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    @property
    def _uncounted(self) -> ProcessGroup:
        """The group as ``torch.distributed`` knows it: what is agreed on here is no traffic of training."""
        return plain(self.group)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, by rank, on rank 0; an empty list on the others."""
        message = self._encode(value)
        longest = torch.tensor([message.numel()], dtype=torch.int64, device=self.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self._uncounted)
        padded = torch.nn.functional.pad(message, (0, int(longest) - message.numel()))
        received = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(padded, received, group=self._uncounted, group_dst=0)
        return [_decode(packed) for packed in received or []]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank; the others' argument is not looked at."""
        message = self._encode(value if self.rank == 0 else None)
        length = torch.tensor([message.numel()], dtype=torch.int64, device=self.device)
        dist.broadcast(length, group=self._uncounted, group_src=0)
        if self.rank != 0:
            message = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        dist.broadcast(message, group=self._uncounted, group_src=0)
        return _decode(message)

    def on_first(self, action: Callable[[], T], doing: str) -> T:
        """Run ``action`` on rank 0 and give its JSON value to all; if it fails, all ranks raise the same.

        Raises:
            CheckpointNotFoundError: if the action raised one.
            CheckpointError: if it raised anything else.
        """
        tried: Attempt[T] = attempt(action) if self.rank == 0 else Attempt(None, None)
        missing = isinstance(tried.error, CheckpointNotFoundError)
        verdict = self.broadcast({"failure": tried.failure, "missing": missing, "value": tried.value})
        if verdict["failure"] is not None:
            kind = CheckpointNotFoundError if verdict["missing"] else CheckpointError
            raise kind(f"{doing}: {verdict['failure']}") from tried.error
        value: T = verdict["value"]
        return value

    def agree(self, tried: Attempt[Any], doing: str) -> None:
        """Return if no rank has failed, else raise on all of them.

        Raises:
            CheckpointError: naming the ranks that failed, and why.
        """
        failures = self.gather(tried.failure)
        summary = self.broadcast(describe_failures(failures) if self.rank == 0 else None)
        if summary is not None:
            raise CheckpointError(f"{doing}: {summary}") from tried.error

    def _encode(self, value: Any) -> torch.Tensor:
        # Compressed, since a gather pads every rank's message to the longest.
        packed = zlib.compress(json.dumps(value).encode(), level=1)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self.device)


def describe_failures(failures: Sequence[str | None]) -> str | None:
    """The failures of a group by rank, the first few in full; None if there are none."""
    failed = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None]
    if not failed:
        return None
    more = f"; and {len(failed) - 4} more ranks" if len(failed) > 4 else ""
    return "; ".join(failed[:4]) + more


def _decode(message: torch.Tensor) -> Any:
    # A compressed stream knows its end: padding behind it is not looked at.
    return json.loads(zlib.decompressobj().decompress(message.cpu().numpy().data))
