"""Zero-bubble schedules: a backward in two halves, the second of which fills the gaps.

The gradient of a stage's input is what the stage before waits for; the gradients of its weights can wait.
With the two apart, stages get going earlier and do the weights where they would otherwise be idle (Qi et al.
2023, arXiv:2401.10241, section 2). In the comments F is a forward, B a backward of the input, W one of the
weights, all taken to last equally long.
"""

from megatron.core.pipeline_parallel.actions import Action, Schedule


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with the weights' gradients put off (Qi et al. 2023, arXiv:2401.10241, section 2.3.1).

    Stage s runs its forwards and its inputs' backwards in the order of 1F1B, and is s weights' backwards
    behind. Counting an activation as held until its weights' backward has ended, no stage holds more than
    ``stages`` micro-batches, which is what the first stage holds under 1F1B; the later stages hold more than
    theirs under 1F1B, up to that. With F = B = W and at least as many micro-batches as stages the bubble is
    ``(stages - 1) F``, a third of 1F1B's ``(stages - 1) (F + B + W)``.

    Args:
        stages: pipeline stages, at least 1.
        microbatches: micro-batches of a step, at least 1.
    """
    orders = []
    for stage in range(stages):
        order = _Order(microbatches)
        order.forward(0, stages - 1 - stage)
        for microbatch in range(microbatches):
            order.forward(0)
            order.backward_input(0)
            if microbatch >= stage:
                order.backward_weight(0)
        order.backward_weight(0, microbatches)
        orders.append(tuple(order.actions))
    return Schedule(tuple(orders))


def zb_v(stages: int, microbatches: int) -> Schedule:
    """ZB-V: two chunks a stage, placed in a V, and no idle time between a stage's first and last action.

    Sources: Qi et al. 2023, arXiv:2401.10241, and 2024, arXiv:2405.15362 (V-ZB). The first stage holds the
    first and the last part of the model, so it sees a loss as early as its own forwards allow. Counting an
    activation as held until its weights' backward has ended, no stage holds more than ``2 stages`` half-sized
    chunks, as much as 1F1B's first stage. With F = B = W and at least ``2 stages - 1`` micro-batches a stage
    is never idle once it has begun; the step takes ``stages - 1`` longer than the work of ``6
    microbatches``, until the last stage has its first input, which no schedule can do without.

    Args:
        stages: pipeline stages, at least 1.
        microbatches: micro-batches of a step, at least 1; with fewer than ``2 stages - 1`` it is the schedule
            of so many, without the micro-batches that are not there.
    """
    orders = []
    for stage in range(stages):
        order = _Order(max(microbatches, 2 * stages - 1))
        _zb_v_warmup(order, stage, stages)
        _zb_v_steady(order)
        _zb_v_cooldown(order, stage, stages)
        orders.append(tuple(action for action in order.actions if action.microbatch < microbatches))
    return Schedule(tuple(orders), chunks=2, placement="v")


def _zb_v_warmup(order: "_Order", stage: int, stages: int) -> None:
    """Fill the V: as many F as it takes until the first loss, then one more until the first B is here."""
    order.forward(0, 2 * (stages - stage) - 1)  # the first micro-batch is back after so many
    for _ in range(stage):
        order.forward(1)
        order.forward(0)
    for _ in range(stages - stage):
        order.forward(1)
        order.backward(1)


def _zb_v_steady(order: "_Order") -> None:
    """All six kinds of action in turn, until the forwards are done."""
    while order.forwards_left(0) or order.forwards_left(1):
        order.forward(0)
        order.backward(0)
        order.forward(1)
        order.backward(1)


def _zb_v_cooldown(order: "_Order", stage: int, stages: int) -> None:
    """B as they come, W in between and, on later stages, which have no more B to wait for, at the end."""
    for _ in range(stage):
        order.backward_input(0)
        order.backward_input(1)
    for _ in range(stages - stage):
        order.backward(0)
    for chunk in (1, 0):
        order.backward_weight(chunk, order.microbatches)


class _Order:
    """A stage's actions, each kind of each chunk in the order of the micro-batches, as long as there are."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.actions: list[Action] = []
        self._forwards = [0, 0]
        self._inputs = [0, 0]
        self._weights = [0, 0]

    def forwards_left(self, chunk: int) -> int:
        """Micro-batches that have yet to go through a chunk."""
        return self.microbatches - self._forwards[chunk]

    def forward(self, chunk: int, count: int = 1) -> None:
        """Append some F."""
        for _ in range(min(count, self.forwards_left(chunk))):
            self.actions.append(Action("forward", chunk, self._forwards[chunk]))
            self._forwards[chunk] += 1

    def backward_input(self, chunk: int) -> None:
        """Append a B."""
        self.actions.append(Action("backward_input", chunk, self._inputs[chunk]))
        self._inputs[chunk] += 1

    def backward_weight(self, chunk: int, count: int = 1) -> None:
        """Append some W, of those whose B is done."""
        for _ in range(min(count, self._inputs[chunk] - self._weights[chunk])):
            self.actions.append(Action("backward_weight", chunk, self._weights[chunk]))
            self._weights[chunk] += 1

    def backward(self, chunk: int) -> None:
        """Append a B, and the oldest W that is still owed."""
        self.backward_input(chunk)
        self.backward_weight(chunk)
