"""Checkpoints of the whole model, independent of the layout that saved them; nothing is ever unpickled."""

from megatron.core.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from megatron.core.checkpoint.folders import Inventory, find, iteration_folder, survey
from megatron.core.checkpoint.manifest import Manifest, StoredShard, StoredTensor, read_manifest
from megatron.core.checkpoint.sharded_tensor import (
    Rectangle,
    ShardedTensor,
    check_tiling,
    sharded_parameter,
    sharded_slice,
    share_among_replicas,
    whole_tensor,
)
from megatron.core.checkpoint.store import Checkpoint, load, open_checkpoint, save, verify

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFoundError",
    "Inventory",
    "Manifest",
    "Rectangle",
    "ShardedTensor",
    "StoredShard",
    "StoredTensor",
    "check_tiling",
    "find",
    "iteration_folder",
    "load",
    "open_checkpoint",
    "read_manifest",
    "save",
    "sharded_parameter",
    "sharded_slice",
    "share_among_replicas",
    "survey",
    "verify",
    "whole_tensor",
]
