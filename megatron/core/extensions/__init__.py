"""Optional accelerators, one adapter file each. None is required; plain PyTorch says what each computes."""

from megatron.core.extensions.registry import Extension, Finding, probe, probe_all
from megatron.core.extensions.signatures import LayerNormFunction

__all__ = ["Extension", "Finding", "LayerNormFunction", "probe", "probe_all"]
