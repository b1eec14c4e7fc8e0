"""Finds out which optional accelerators are installed and fit for use.

A package that is absent is no problem. One that is there but does not load, or computes something other than
the plain PyTorch function, is reported and left alone: the plain function does the work.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.extensions import apex_layer_norm


@dataclass(frozen=True)
class Extension:
    """An accelerated function that an optional package may provide."""

    package: str
    """Name that the package is imported by."""
    provides: str
    """What the function computes, in words."""
    load: Callable[[], Callable[..., Any]]
    """Imports the package and gives the function; may raise anything."""
    check: Callable[[Callable[..., Any], torch.device], None]
    """Tries the function on a device against the plain one; raises if it can't be relied on."""


@dataclass(frozen=True)
class Finding:
    """What has become of one extension on this rank."""

    extension: Extension
    function: Callable[..., Any] | None
    """The function, if it is there and passed its check."""
    problem: str | None
    """Why a package that is installed is not used; None if it is used, or is not installed."""


LAYER_NORM = Extension(
    package="apex",
    provides="fused layer norm",
    load=apex_layer_norm.load,
    check=apex_layer_norm.check,
)


def probe_all(device: torch.device) -> list[Finding]:
    """Look for every extension; the order is the same on all ranks."""
    return [probe(LAYER_NORM, device)]


def probe(extension: Extension, device: torch.device) -> Finding:
    """Look for one extension, import it and try it on ``device``. Never raises."""
    try:
        if importlib.util.find_spec(extension.package) is None:
            return Finding(extension, None, None)
        function = extension.load()
        extension.check(function, device)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - broken packages raise anything on import
        reason = str(error).strip().split("\n")[0]
        return Finding(extension, None, f"{type(error).__name__}: {reason}".removesuffix(": "))
    return Finding(extension, function, None)
