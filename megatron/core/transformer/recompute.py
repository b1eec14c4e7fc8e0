"""Activation recomputation: keep less for the backward pass, run parts of the forward again in it.

*Full* recomputation keeps a unit's input and runs its layers again (Narayanan et al. 2021, section 3.5), with
their collectives. *Selective* recomputation runs only the named modules of every layer again (Korthikanti et
al. 2022, section 5). Neither keeps generator state: dropout streams are derived, so that what runs again
draws the same masks. A parameter's gradient arrives once in a backward pass either way, as its hooks expect:
the graph of the first forward is the one that runs backward, and takes from the second what it did not keep.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megatron.core.communication import all_gather
from megatron.core.config import TransformerConfig
from megatron.core.parallel_state import ModelParallel


def recomputed_modules(config: TransformerConfig) -> frozenset[str]:
    """What selective recomputation names: some of ``core_attn``, ``mlp`` and ``layernorm``; else nothing."""
    if config.recompute_granularity != "selective":
        return frozenset()
    return frozenset(config.recompute_modules or ("core_attn",))


def recompute(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """``function(*args)``, of which only the tensors among ``args`` are kept for the backward.

    Args:
        function: draws random numbers from streams that it derives itself, the same each time.
        args: its arguments; what is no tensor is kept alive as it is.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    output: torch.Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return output


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
