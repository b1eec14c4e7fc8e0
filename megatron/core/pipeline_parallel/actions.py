"""What pipeline stages do, as data: the words that schedules, programs, the engine and the simulator share.

A :class:`Schedule` says in what order each stage runs its micro-batches. A :data:`Program` is one stage's
part of it together with the transfers (:mod:`megatron.core.pipeline_parallel.lowering`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
"""``backward`` forms all gradients; the other two form those of the input and of the weights only."""

Placement = Literal["loop", "v"]
Channel = Literal["activations", "gradients"]


class Action(NamedTuple):
    """One pass of one micro-batch through one model chunk of a stage."""

    kind: Kind
    chunk: int
    microbatch: int

    @property
    def channel(self) -> Channel | None:
        """What its output is to the stage that gets it; None if nothing leaves."""
        if self.kind == "backward_weight":
            return None
        return "activations" if self.kind == "forward" else "gradients"


Transfer = Action
"""A tensor on its way, named after an action of this stage: one whose output leaves, or that needs what
arrives."""


class Exchange(NamedTuple):
    """One tensor that a stage sends to another or receives from it; exactly one of the two is set."""

    peer: int
    """The other stage."""
    send: Transfer | None
    """The action whose output leaves."""
    receive: Transfer | None
    """The action of this stage that needs what arrives."""
    channel: Channel
    """Each channel carries its transfers in the order in which they were started."""


@dataclass(frozen=True, slots=True)
class Start:
    """Post a transfer and go on."""

    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait until a transfer is through."""

    exchange: Exchange


Operation = Action | Start | Finish
Program = list[Operation]


@dataclass(frozen=True)
class Schedule:
    """In what order each stage runs its actions, and where the parts of the model are.

    The model is cut into ``len(stages) * chunks`` parts, numbered from the embeddings to the loss.
    """

    stages: tuple[tuple[Action, ...], ...]
    """The actions of each stage, in order."""
    chunks: int = 1
    """Parts of the model that each stage holds."""
    placement: Placement = "loop"
    """With p stages, ``loop`` makes chunk c of stage s part c p + s; ``v`` makes chunk 0 of stage s part s
    and chunk 1 part 2p - 1 - s, so that the model turns round on the last stage and ends on the first."""

    def __post_init__(self) -> None:
        if self.placement == "v" and self.chunks != 2:
            raise ValueError(f"{self.chunks} chunks: a V has two, one down and one up")

    def part(self, stage: int, chunk: int) -> int:
        """Which part of the model a chunk of a stage is, from 0."""
        if self.placement == "v" and chunk == 1:
            return 2 * len(self.stages) - 1 - stage
        return chunk * len(self.stages) + stage

    def place(self, part: int) -> tuple[int, int]:
        """The stage and the chunk of a part of the model."""
        chunk, stage = divmod(part, len(self.stages))
        if self.placement == "v" and chunk == 1:
            return len(self.stages) - 1 - stage, chunk
        return stage, chunk

    @property
    def last_part(self) -> int:
        """The part that makes the loss."""
        return len(self.stages) * self.chunks - 1

    def target(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and its action that need the output of ``action``; None if no other part does."""
        if action.kind == "backward_weight":
            return None
        return self._beside(stage, action, self._next if action.kind == "forward" else self._previous)

    def source(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and its action whose output ``action`` needs; None if that is no other part's."""
        if action.kind == "backward_weight":
            return None
        return self._beside(stage, action, self._previous if action.kind == "forward" else self._next)

    @staticmethod
    def _beside(
        stage: int, action: Action, neighbours: dict[tuple[int, int], tuple[int, int]]
    ) -> tuple[int, Action] | None:
        place = neighbours.get((stage, action.chunk))
        if place is None:
            return None
        return place[0], Action(action.kind, place[1], action.microbatch)

    @cached_property
    def _next(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each place but the last part's, the place of the next part."""
        return {self.place(part): self.place(part + 1) for part in range(self.last_part)}

    @cached_property
    def _previous(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each place but the first part's, the place of the part before."""
        return {after: before for before, after in self._next.items()}

    @cached_property
    def splits_backward(self) -> bool:
        """Whether backward passes come in two halves."""
        return any(action.kind == "backward_weight" for action in self.stages[0])
