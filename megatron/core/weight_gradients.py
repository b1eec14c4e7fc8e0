"""Weight gradients that wait: what lets a pipeline split a backward pass in two.

A zero-bubble schedule sends the gradient of a stage's *input* on as early as it can and forms the gradients
of the *weights* when there is nothing better to do (Qi et al. 2023, arXiv:2401.10241, section 2). A linear
layer that has a :class:`DeferredGradients` hands its weight's gradient over as a recipe while
:attr:`deferring` is on; the pipeline engine turns that on, and runs the recipes later.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

Recipe = Callable[[], Tensor]
"""Forms the gradient of a weight, in the weight's shape and format."""


class DeferredGradients:
    """The weight gradients that one model chunk still owes, pass by pass."""

    def __init__(self) -> None:
        self.deferring = False
        """Whether layers are to hand over recipes instead of gradients."""
        self._current: list[tuple[nn.Parameter, Recipe]] = []
        self._passes: deque[list[tuple[nn.Parameter, Recipe]]] = deque()

    def put(self, parameter: nn.Parameter, recipe: Recipe) -> None:
        """Take over the gradient of ``parameter`` of the backward pass that is running."""
        self._current.append((parameter, recipe))

    def close_pass(self) -> None:
        """Say that a backward pass has ended; its recipes are run together by one :meth:`run_pass`."""
        self._passes.append(self._current)
        self._current = []

    def run_pass(self) -> None:
        """Form the weight gradients of the oldest pass that is still owed, and accumulate them.

        Hooks on the parameters run as they do in a backward pass.
        """
        for parameter, recipe in self._passes.popleft():
            with torch.no_grad():
                gradient = recipe()
            torch.autograd.backward([parameter], [gradient])

    @property
    def owed(self) -> int:
        """Backward passes whose weight gradients have yet to be formed."""
        return len(self._passes)
