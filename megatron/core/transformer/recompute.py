"""Activation recomputation: keep less for the backward pass, run parts of the forward again in it.

*Full* recomputation keeps a unit's input and runs its layers again (Narayanan et al. 2021, section 3.5), with
their collectives. *Selective* recomputation runs only the named modules of every layer again (Korthikanti et
al. 2022, section 5). Neither keeps generator state: dropout streams are derived, so that what runs again
draws the same masks. A parameter's gradient arrives once in a backward pass either way, as its hooks expect:
the graph of the first forward is the one that runs backward, and takes from the second what it did not keep.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from megatron.core.communication import all_gather
from megatron.core.config import TransformerConfig
from megatron.core.parallel_state import ModelParallel
from megatron.core.tensor_parallel.mappings import apply_function


def recomputed_modules(config: TransformerConfig) -> frozenset[str]:
    """What selective recomputation names: some of ``core_attn``, ``mlp`` and ``layernorm``; else nothing."""
    if config.recompute_granularity != "selective":
        return frozenset()
    return frozenset(config.recompute_modules or ("core_attn",))


def recompute(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """``function(*args)``, of which only the tensors among ``args`` are kept for the backward.

    The backward runs it again as far as it needs to, when the first of its nodes asks for what it saved.

    (``torch.utils.checkpoint`` does the same, and loads 800 modules and 77 MB into every rank on its way.)

    Args:
        function: draws random numbers from streams that it derives itself, the same each time.
        args: its arguments; what is no tensor is kept alive as it is.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    call = _Call(function, args)
    with saved_tensors_hooks(call.pack, call.unpack):
        return function(*args)


class _AllFoundError(Exception):
    """Ends a second run that has saved all that the first one did."""


class _Call:
    """Finds what a call saved for the backward by making it again."""

    def __init__(self, function: Callable[..., torch.Tensor], args: Sequence[Any]) -> None:
        self._function = function
        self._args = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        tensors = {place: arg for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        self._needs_gradient = {place: tensor.requires_grad for place, tensor in tensors.items()}
        # A node saves the tensors, so that hooks around the call see them and changes in place are noticed.
        anchor = torch.empty(0, requires_grad=True)
        self._keeper: Any = apply_function(_Keep, anchor, *tensors.values()).grad_fn
        self._saved = 0
        self._found: dict[int, torch.Tensor] = {}

    def pack(self, _: torch.Tensor) -> int:
        """Number what the first run saves."""
        self._saved += 1
        return self._saved - 1

    def unpack(self, number: int) -> torch.Tensor:
        """Give out what was saved under a number, and forget it."""
        if number not in self._found:
            self._run_again()
        return self._found.pop(number)

    def _run_again(self) -> None:
        args = list(self._args)
        for (place, needed), tensor in zip(
            self._needs_gradient.items(), self._keeper.saved_tensors, strict=True
        ):
            args[place] = tensor.detach().requires_grad_(needed)
        found: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> None:
            found[len(found)] = tensor.detach()
            if len(found) == self._saved:
                raise _AllFoundError

        with suppress(_AllFoundError), torch.enable_grad(), saved_tensors_hooks(pack, _unused):
            self._function(*args)
        assert len(found) == self._saved, f"saved {self._saved} tensors at first and {len(found)} now"
        self._found = found


def _unused(_: object) -> torch.Tensor:
    raise AssertionError("the graph of a second run is never run backward")


class _Keep(torch.autograd.Function):
    """Saves tensors; nothing runs it backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise AssertionError("the output is used by nobody")


@contextmanager
def recomputed_where_saved(module: nn.Module, x: torch.Tensor, output: torch.Tensor) -> Iterator[None]:
    """Inside the block, autograd keeps no ``output`` and runs ``module(x)`` again where it needs it.

    This spares the input of a linear layer that is a norm's output, which a norm that merely ran again would
    not: it is the linear layer that keeps it.

    Args:
        module: cheap, and kept with its ``x`` for its own backward anyway.
        x: any shape and layout.
        output: ``module(x)``, which what runs inside the block takes.
    """
    kept_by = output.untyped_storage().data_ptr()
    x = x.detach()

    def pack(tensor: torch.Tensor) -> "torch.Tensor | _View":
        if tensor.untyped_storage().data_ptr() != kept_by:
            return tensor
        return _View(tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(packed: "torch.Tensor | _View") -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        with torch.no_grad():
            again: torch.Tensor = module(x)
        return again.as_strided(packed.size, packed.stride, packed.offset)

    with saved_tensors_hooks(pack, unpack):
        yield


@dataclass(frozen=True)
class _View:
    """How a tensor lies in the storage of another."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def recompute_units(config: TransformerConfig, num_layers: int) -> list[tuple[range, bool]]:
    """Cut a stage's layers into consecutive units, each with whether it is recomputed as a whole.

    Args:
        config: its ``recompute_*`` fields decide. ``uniform`` cuts units of ``recompute_num_layers`` layers
            (1 if not given; the last unit may be shorter) and recomputes all of them, ``block`` recomputes
            the first ``recompute_num_layers`` layers, each by itself, and keeps the others' activations.
        num_layers: layers of the stage.

    Returns:
        (positions within the stage, recomputed) for each unit, in order; every layer is in exactly one.

    Raises:
        ValueError: if full recomputation is asked for without a method.
    """
    if config.recompute_granularity != "full":
        return [(range(num_layers), False)]
    count = 1 if config.recompute_num_layers is None else config.recompute_num_layers
    if config.recompute_method == "uniform":
        starts = range(0, num_layers, count)
        return [(range(start, min(start + count, num_layers)), True) for start in starts]
    if config.recompute_method == "block":
        kept_from = min(count, num_layers)
        units = [(range(layer, layer + 1), True) for layer in range(kept_from)]
        return [*units, (range(kept_from, num_layers), False)]
    raise ValueError("--recompute-granularity full needs --recompute-method uniform or block")


def divides_saved_inputs_over(config: TransformerConfig, parallel: ModelParallel) -> ProcessGroup | None:
    """The group over which recomputed units divide the inputs that they keep; None where each keeps its own.

    Under sequence parallelism an input is a rank's own part already.

    Raises:
        ValueError: if the hidden size does not divide over the group.
    """
    ranks = parallel.tp.size()
    if not config.distribute_saved_activations or parallel.sequence_parallel or ranks == 1:
        return None
    if config.hidden_size % ranks:
        raise ValueError(
            f"--distribute-saved-activations: --hidden-size {config.hidden_size} does not divide by "
            f"--tensor-model-parallel-size {ranks}; leave it out, or give a size that divides"
        )
    return parallel.tp


def run_layers(
    layers: Sequence[nn.Module],
    units: list[tuple[range, bool]],
    hidden_states: torch.Tensor,
    *layer_args: Any,
    divided_over: ProcessGroup | None = None,
) -> torch.Tensor:
    """Send [s, b, h] (or [s/tp, b, h]) through all ``layers``, keeping nothing inside recomputed units.

    Args:
        layers: called as ``layer(hidden_states, *layer_args)``.
        units: from :func:`recompute_units`. Without gradients nothing is kept anyway and they don't matter.
        hidden_states: input of the first layer.
        layer_args: passed to every layer.
        divided_over: where inputs of layers are replicated, the group whose ranks each keep an equal part of
            a recomputed unit's input, all-gathered in the backward; None: each rank keeps all of it.
    """
    for positions, recomputed in units:
        unit = _chain([layers[position] for position in positions])
        if not recomputed:
            hidden_states = unit(hidden_states, *layer_args)
        elif divided_over is None or not torch.is_grad_enabled():
            hidden_states = recompute(unit, hidden_states, *layer_args)
        else:
            hidden_states = _recompute_divided(unit, hidden_states, layer_args, divided_over)
    return hidden_states


def _recompute_divided(
    unit: Callable[..., torch.Tensor], hidden_states: torch.Tensor, layer_args: Any, group: ProcessGroup
) -> torch.Tensor:
    """As :func:`recompute`, keeping this rank's part of ``hidden_states`` (replicated over ``group``)."""
    shape, needs_gradient = hidden_states.shape, hidden_states.requires_grad
    own_part = hidden_states.detach().reshape(group.size(), -1)[group.rank()].clone()
    first_input = [hidden_states]  # gone once it has been used, so that only the part outlives the forward

    def run(part: torch.Tensor) -> torch.Tensor:
        if first_input:
            return unit(first_input.pop(), *layer_args)
        again = all_gather(part, group).view(shape)
        return unit(again.requires_grad_(needs_gradient), *layer_args)

    return recompute(run, own_part)


def _chain(layers: Sequence[nn.Module]) -> Callable[..., torch.Tensor]:
    def run(hidden_states: torch.Tensor, *layer_args: Any) -> torch.Tensor:
        for layer in layers:
            hidden_states = layer(hidden_states, *layer_args)
        return hidden_states

    return run
