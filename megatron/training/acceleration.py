"""Which optional accelerators a run uses."""

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.communication import all_reduce
from megatron.core.extensions import Finding, probe_all
from megatron.core.transformer import use_layer_norm
from megatron.training.initialize import Runtime

log = logging.getLogger(__name__)


def accelerate(models: Sequence[nn.Module], runtime: Runtime) -> None:
    """Put the accelerated functions that every rank has found into ``models``, and say once which they are.

    They are made for GPUs, and elsewhere left alone. All ranks call this together: a function that some rank
    lacks is used by none, since two functions round differently.
    """
    findings = probe_all(runtime.device)
    usable = [finding.function is not None and runtime.device.type == "cuda" for finding in findings]
    everywhere = torch.tensor(usable, dtype=torch.int32, device=runtime.device)
    all_reduce(everywhere, runtime.state.world_group, dist.ReduceOp.MIN)
    used = [finding for finding, use in zip(findings, everywhere.tolist(), strict=True) if use]
    for finding in used:
        assert finding.function is not None
        for model in models:
            use_layer_norm(model, finding.function)
    if runtime.rank == 0:
        _say(findings, used)


def _say(findings: list[Finding], used: list[Finding]) -> None:
    for finding in findings:
        if finding.problem is not None:
            log.warning(
                "%s is installed but not fit for use (%s): plain PyTorch takes the place of its %s",
                finding.extension.package,
                finding.problem,
                finding.extension.provides,
            )
    names = [f"{finding.extension.package} ({finding.extension.provides})" for finding in used]
    log.info("> optional extensions in use: %s", ", ".join(names) or "none")
