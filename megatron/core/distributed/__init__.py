"""Flat parameter and gradient storage, and the sums of gradients over ranks. Knows no layer."""

from megatron.core.distributed.buffers import (
    Bucket,
    ParameterBuffers,
    Slot,
    Strategy,
    default_bucket_size,
)
from megatron.core.distributed.data_parallel import GradientReducer
from megatron.core.distributed.own_bucket import OwnBucket, ParameterStore, Part
from megatron.core.distributed.replicas import ReplicaError, check_replicas, check_shares
from megatron.core.distributed.shared_gradients import SharedGradients

__all__ = [
    "Bucket",
    "GradientReducer",
    "OwnBucket",
    "ParameterBuffers",
    "ParameterStore",
    "Part",
    "ReplicaError",
    "SharedGradients",
    "Slot",
    "Strategy",
    "check_replicas",
    "check_shares",
    "default_bucket_size",
]
