"""Runs the operations of a pipeline stage, whatever schedule they came from."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup

from megatron.core.pipeline_parallel.p2p import TensorSpec, exchange
from megatron.core.pipeline_parallel.schedules import Action, Exchange, Operation

ForwardStep = Callable[[int, Tensor | None], Tensor]


def run_pipeline(
    operations: Sequence[Operation],
    *,
    forward: ForwardStep,
    group: ProcessGroup,
    activation: TensorSpec,
    on_last_backward: Callable[[], None] | None = None,
    forward_only: bool = False,
) -> list[Tensor]:
    """Run this stage's share of a step; every stage of the group calls it with its own operations.

    An exception of ``forward`` goes straight through to the caller; the other stages then wait for this one
    until its process ends or the group's timeout is over.

    Args:
        operations: this stage's list out of :func:`megatron.core.pipeline_parallel.schedules.lower`; for a
            group of one it has no exchanges.
        forward: called with the micro-batch and, on all stages but the first, the activation of the stage
            before. Gives the activation for the next stage, as ``activation`` says; on the last stage in
            training a scalar loss, already scaled so that the gradients of all micro-batches simply add up;
            on the last stage in evaluation any tensor.
        group: the pipeline group; a rank in it is a stage.
        activation: what travels between stages, each way.
        on_last_backward: called right before this stage's last backward, whose gradients are the final ones.
        forward_only: evaluation: no graph is kept.

    Returns:
        On the last stage what ``forward`` gave, detached, in the order of the micro-batches; elsewhere an
        empty list. Gradients are added to those of the parameters.

    Raises:
        ValueError: if ``operations`` and ``forward_only`` don't fit, or ``forward`` gives a wrong kind of
            tensor.
    """
    backwards = sum(isinstance(op, Action) and op.kind == "backward" for op in operations)
    if forward_only != (backwards == 0):
        raise ValueError(
            f"forward_only={forward_only}, but {backwards} backwards: lower the schedule likewise"
        )
    run = _Run(forward, group, activation, forward_only)
    with torch.set_grad_enabled(not forward_only):
        for operation in operations:
            if isinstance(operation, Exchange):
                run.exchange(operation)
            elif operation.kind == "forward":
                run.forward(operation)
            else:
                backwards -= 1
                if backwards == 0 and on_last_backward is not None:
                    on_last_backward()
                run.backward(operation)
    run.check_empty()
    return [run.results[microbatch] for microbatch in sorted(run.results)]


class _Run:
    """The tensors in flight on one stage during one step."""

    def __init__(
        self, forward: ForwardStep, group: ProcessGroup, activation: TensorSpec, forward_only: bool
    ) -> None:
        self.forward_step = forward
        self.group = group
        self.activation = activation
        self.forward_only = forward_only
        self.is_first = group.rank() == 0
        self.is_last = group.rank() == group.size() - 1
        self.arrived: dict[Action, Tensor] = {}
        self.leaving: dict[Action, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        # An edge holds the graph but not the output, which is free once sent unless the graph needs it.
        self.graphs: dict[int, GradientEdge] = {}
        self.results: dict[int, Tensor] = {}

    def exchange(self, operation: Exchange) -> None:
        """Send what has been made, receive what is needed next."""
        send = None if operation.send is None else self.leaving.pop(operation.send)
        receive = None if operation.receive is None else self.activation.empty()
        exchange(self.group, operation.peer, send=send, receive=receive)
        if operation.receive is not None and receive is not None:
            self.arrived[operation.receive] = receive

    def forward(self, action: Action) -> None:
        """Run one forward and put its output where it goes."""
        hidden = None if self.is_first else self.arrived.pop(action)
        if hidden is not None and not self.forward_only:
            self.inputs[action.microbatch] = hidden.requires_grad_()
        output = self.forward_step(action.microbatch, hidden)
        if not self.is_last:
            self.activation.check(output)
        if not self.forward_only:
            self._keep_graph(action.microbatch, output)
        if self.is_last:
            self.results[action.microbatch] = output.detach()
        else:
            self.leaving[action] = output.detach().contiguous()

    def _keep_graph(self, microbatch: int, output: Tensor) -> None:
        """Remember where the backward of a micro-batch starts."""
        if self.is_last and output.dim() != 0:
            raise ValueError(f"the loss must be a scalar, but the last stage gave {tuple(output.shape)}")
        if not output.requires_grad:
            raise ValueError(
                f"nothing to train: the output of stage {self.group.rank()} requires no gradient"
            )
        self.graphs[microbatch] = get_gradient_edge(output)

    def backward(self, action: Action) -> None:
        """Run one backward; the graph and the activations that it held are gone afterwards."""
        if self.is_last:
            gradient = torch.ones_like(self.results[action.microbatch])
        else:
            gradient = self.arrived.pop(action)
        torch.autograd.backward(self.graphs.pop(action.microbatch), gradient)
        if self.is_first:
            return
        hidden = self.inputs.pop(action.microbatch)
        if hidden.grad is None:
            raise ValueError(f"the output of stage {self.group.rank()} does not depend on its input")
        self.leaving[action] = hidden.grad.contiguous()

    def check_empty(self) -> None:
        """Nothing may be left over when all operations have run."""
        for kept in (self.arrived, self.leaving, self.inputs, self.graphs):
            assert not kept, f"the program leaves tensors behind: {list(kept)}"
