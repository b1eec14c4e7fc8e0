"""Runs the operations of a pipeline stage, whatever schedule they came from."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.pipeline_parallel.actions import (
    Action,
    Exchange,
    Finish,
    Operation,
    Schedule,
    Start,
)
from megatron.core.pipeline_parallel.p2p import (
    PipelineChannels,
    Receiving,
    Sending,
    TensorSpec,
    start_receive,
    start_send,
)
from megatron.core.pipeline_parallel.timeline import EventKind, TimelineEvent
from megatron.core.weight_gradients import DeferredGradients

ForwardStep = Callable[[int, int, Tensor | None], Tensor]
Recorder = Callable[[TimelineEvent], None]
_Pass = tuple[int, int]
"""A model chunk of this stage and a micro-batch."""


def run_pipeline(
    program: Sequence[Operation],
    *,
    schedule: Schedule,
    forward: ForwardStep,
    channels: PipelineChannels,
    activation: TensorSpec,
    deferred: Sequence[DeferredGradients] | None = None,
    forward_only: bool = False,
    recorder: Recorder | None = None,
) -> list[Tensor]:
    """Run this stage's share of a step; every stage calls it with its own program.

    An activation of which the next part of the model is on the same stage is handed over as it is; all others
    travel over ``channels``, started and finished where the program says. What has been sent is let go once
    its send is finished, and so is the graph of a pass after its backward.

    An exception of ``forward`` goes straight through to the caller; the other stages then wait for this one
    until its process ends or the group's timeout is over.

    Args:
        program: this stage's list out of :func:`megatron.core.pipeline_parallel.lowering.lower`.
        schedule: what ``program`` was made from; says which part of the model each chunk of each stage is.
        forward: called with the chunk, the micro-batch and, for all parts of the model but the first, the
            activation of the part before. Gives the activation for the next part, as ``activation`` says; for
            the last part in training a scalar loss, already scaled so that the gradients of all micro-batches
            simply add up; for the last part in evaluation any tensor.
        channels: the pipeline's groups; a rank in them is a stage. On NCCL opened before, by
            :func:`megatron.core.pipeline_parallel.p2p.open_channels`.
        activation: what travels between parts, each way.
        deferred: for each chunk of this stage where its layers hand over the recipes of weight gradients.
            Needed where the schedule splits backward passes; a ``backward_weight`` then forms those of the
            oldest pass of its chunk.
        forward_only: evaluation: no graph is kept.
        recorder: told of each action and, as kind ``wait``, of each time that this stage waited for a
            transfer, in order. Times are those of the host's monotonic clock, one for all processes of a
            host; each is taken when the current stream has done what it was given, so that a GPU, while it
            is recorded, does not run ahead of its host.

    Returns:
        On the stage that holds the last part what ``forward`` gave for it, detached, in the order of the
        micro-batches; elsewhere an empty list. Gradients are added to those of the parameters.

    Raises:
        ValueError: if the arguments don't fit each other, or ``forward`` gives a wrong kind of tensor.
    """
    _check_arguments(program, schedule, channels, deferred, forward_only)
    stage = _Stage(schedule, forward, channels, activation, deferred or (), forward_only)
    with torch.set_grad_enabled(not forward_only):
        for operation in program:
            if recorder is None:
                stage.run(operation)
            else:
                _run_recorded(stage, operation, recorder)
    stage.check_empty()
    return [stage.results[microbatch] for microbatch in sorted(stage.results)]


def _check_arguments(
    program: Sequence[Operation],
    schedule: Schedule,
    channels: PipelineChannels,
    deferred: Sequence[DeferredGradients] | None,
    forward_only: bool,
) -> None:
    """Refuse what doesn't fit each other before anything travels."""
    kinds = [operation.kind for operation in program if isinstance(operation, Action)]
    backwards = len(kinds) - kinds.count("forward")
    if forward_only != (backwards == 0):
        raise ValueError(
            f"forward_only={forward_only}, but {backwards} backwards: lower the schedule likewise"
        )
    if len(schedule.stages) != channels.activations.size():
        raise ValueError(
            f"a schedule of {len(schedule.stages)} stages, but the pipeline group has "
            f"{channels.activations.size()} ranks"
        )
    if "backward_input" in kinds and (deferred is None or len(deferred) != schedule.chunks):
        raise ValueError(
            f"the schedule splits backward passes: it needs one DeferredGradients for each of the "
            f"{schedule.chunks} chunks of a stage, not {0 if deferred is None else len(deferred)}"
        )


def _run_recorded(stage: "_Stage", operation: Operation, recorder: Recorder) -> None:
    """Run an operation and tell how long it took."""
    if isinstance(operation, Start):
        stage.run(operation)
        return
    start = stage.milliseconds()
    stage.run(operation)
    end = stage.milliseconds()
    action = _subject(operation.exchange) if isinstance(operation, Finish) else operation
    kind: EventKind = action.kind if action is operation else "wait"
    recorder(TimelineEvent(stage.number, kind, action.chunk, action.microbatch, start, end))


class _Stage:
    """The tensors in flight on one stage during one step."""

    def __init__(
        self,
        schedule: Schedule,
        forward: ForwardStep,
        channels: PipelineChannels,
        activation: TensorSpec,
        deferred: Sequence[DeferredGradients],
        forward_only: bool,
    ) -> None:
        self.number = channels.activations.rank()
        self.results: dict[int, Tensor] = {}
        self._schedule = schedule
        self._forward_step = forward
        self._channels = channels
        self._activation = activation
        self._deferred = deferred
        self._forward_only = forward_only
        self._clock_hand = torch.zeros((), device=activation.device)
        self._arrived: dict[Action, Tensor] = {}
        self._leaving: dict[Action, Tensor] = {}
        self._moving: dict[Exchange, Sending | Receiving] = {}
        self._inputs: dict[_Pass, Tensor] = {}
        # An edge holds the graph but not the output, which is free once sent unless the graph needs it.
        self._graphs: dict[_Pass, GradientEdge] = {}

    def milliseconds(self) -> float:
        """The time when the current stream has done what it was given; other streams are not waited for."""
        self._clock_hand.item()  # a copy to the host waits for the current stream alone
        return time.perf_counter() * 1e3

    def run(self, operation: Operation) -> None:
        """Run one operation."""
        if isinstance(operation, Start):
            self._start(operation.exchange)
        elif isinstance(operation, Finish):
            self._finish(operation.exchange)
        elif operation.kind == "forward":
            self._forward(operation)
        elif operation.kind == "backward_weight":
            self._deferred[operation.chunk].run_pass()
        else:
            self._backward(operation)

    def check_empty(self) -> None:
        """Nothing may be left over when all operations have run."""
        kept = [*self._arrived, *self._leaving, *self._moving, *self._inputs, *self._graphs]
        assert not kept, f"the program leaves tensors behind: {kept}"
        owed = [deferred.owed for deferred in self._deferred]
        assert not any(owed), f"the program leaves the weight gradients of so many passes behind: {owed}"

    def _start(self, exchange: Exchange) -> None:
        """Let what has been made leave, or make room for what is needed."""
        channel, peer = exchange.channel, exchange.peer
        if exchange.send is not None:
            tensor = self._leaving.pop(exchange.send)
            self._moving[exchange] = start_send(self._channels, channel, peer, tensor)
        else:
            self._moving[exchange] = start_receive(self._channels, channel, peer, self._activation)

    def _finish(self, exchange: Exchange) -> None:
        """Wait until a transfer is through."""
        tensor = self._moving.pop(exchange).finish()
        if tensor is not None:
            self._arrived[_subject(exchange)] = tensor

    def _forward(self, action: Action) -> None:
        """Run one forward and put its output where it goes."""
        own = (action.chunk, action.microbatch)
        part = self._schedule.part(self.number, action.chunk)
        hidden = None if part == 0 else self._arrived.pop(action)
        if hidden is not None and not self._forward_only:
            self._inputs[own] = hidden.requires_grad_()
        output = self._forward_step(action.chunk, action.microbatch, hidden)
        if not self._forward_only:
            self._keep_graph(part, own, output)
        if part == self._schedule.last_part:
            self.results[action.microbatch] = output.detach()
        else:
            self._activation.check(output)
            self._hand_on(action, output.detach())

    def _keep_graph(self, part: int, own: _Pass, output: Tensor) -> None:
        """Remember where the backward of a micro-batch starts."""
        if part == self._schedule.last_part and output.dim() != 0:
            raise ValueError(f"the loss must be a scalar, but the last stage gave {tuple(output.shape)}")
        if not output.requires_grad:
            raise ValueError(
                f"nothing to train: the output of chunk {own[0]} of stage {self.number} requires no gradient"
            )
        self._graphs[own] = get_gradient_edge(output)

    def _backward(self, action: Action) -> None:
        """Run one backward, whole or for its input alone.

        The graph is gone afterwards; of the activations remain those that recipes of weight gradients need.
        """
        own = (action.chunk, action.microbatch)
        part = self._schedule.part(self.number, action.chunk)
        if part == self._schedule.last_part:
            gradient = torch.ones_like(self.results[action.microbatch])
        else:
            gradient = self._arrived.pop(action)
        if action.kind == "backward":
            torch.autograd.backward(self._graphs.pop(own), gradient)
        else:
            self._backward_deferring(self._deferred[action.chunk], self._graphs.pop(own), gradient)
        if part == 0:
            return
        hidden = self._inputs.pop(own)
        if hidden.grad is None:
            raise ValueError(
                f"the output of chunk {action.chunk} of stage {self.number} does not depend on its input"
            )
        self._hand_on(action, hidden.grad)

    def _backward_deferring(self, deferred: DeferredGradients, graph: GradientEdge, gradient: Tensor) -> None:
        """Run a backward in which layers hand over recipes instead of forming their weights' gradients."""
        deferred.deferring = True
        try:
            torch.autograd.backward(graph, gradient)
        finally:
            deferred.deferring = False
        deferred.close_pass()

    def _hand_on(self, action: Action, tensor: Tensor) -> None:
        """Give what an action made to the action that needs it: at once if that is on this stage too."""
        target = self._schedule.target(self.number, action)
        assert target is not None, "neither a loss nor the gradient of a sample is handed on"
        stage, needy = target
        if stage == self.number:
            self._arrived[needy] = tensor
        else:
            self._leaving[action] = tensor


def _subject(exchange: Exchange) -> Action:
    """The action of this stage that an exchange is about."""
    action = exchange.send if exchange.receive is None else exchange.receive
    assert action is not None, "an exchange sends or receives"
    return action
