"""The file of one rank: rectangles of tensors in the safetensors format.

Written here, tensor by tensor, so that a checkpoint costs no second copy of the state in memory; read through
the safetensors library. The header carries the identity of the save and the file's own name, so that a file
of another save, or of another rank, is noticed whatever its size. The format: eight bytes of header length
(little endian), a JSON header, then the data in the header's order (https://huggingface.co/docs/safetensors).
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron.core.checkpoint.errors import CheckpointError
from megatron.core.checkpoint.sharded_tensor import Rectangle

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Safetensors' code of each number format that a checkpoint can hold."""

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class SliceRead:
    """Read ``part`` of the rectangle that is stored under ``key``, and copy it into ``target``."""

    key: str
    stored: Rectangle
    dtype: str
    part: Rectangle
    target: torch.Tensor


def dtype_code(name: str, dtype: torch.dtype) -> str:
    """Safetensors' code of a number format.

    Raises:
        CheckpointError: naming the tensor, if the format cannot be stored.
    """
    if dtype not in DTYPE_CODES:
        raise CheckpointError(f"tensor {name}: a checkpoint cannot hold {dtype}")
    return DTYPE_CODES[dtype]


def write_shard_file(path: Path, save_id: str, tensors: Sequence[tuple[str, torch.Tensor]]) -> int:
    """Write tensors of any device, each under its key, into a new file, on disk when this returns.

    Returns:
        Size of the file in bytes.

    Raises:
        OSError: if the file cannot be made or written (it exists, or the disk is full).
    """
    # Wide formats first: each tensor then starts at a multiple of its element size.
    ordered = sorted(tensors, key=lambda entry: -entry[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"save_id": save_id, "file": path.name}}
    position = 0
    for key, tensor in ordered:
        stop = position + tensor.numel() * tensor.dtype.itemsize
        code = dtype_code(key, tensor.dtype)
        header[key] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb", buffering=_BUFFER_BYTES) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in ordered:
            host = tensor.detach().to("cpu").contiguous()
            file.write(host.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + position


def check_shard_file(path: Path, save_id: str, size: int) -> None:
    """Check that a file is there, has the size that was written, and belongs to the save.

    Raises:
        CheckpointError: naming the file, what was expected and what was found.
    """
    with _open_shard_file(path, save_id, size):
        pass


def read_slices(path: Path, save_id: str, size: int, reads: Iterable[SliceRead]) -> None:
    """Fill the targets with the parts asked for; nothing else of the file is read.

    A target of another number format than the file's is cast; whether that is wanted is for the caller to
    check.

    Raises:
        CheckpointError: if the file is not that of the save, or does not hold what its manifest says.
    """
    with _open_shard_file(path, save_id, size) as file, torch.no_grad():
        for read in reads:
            stored = file.get_slice(read.key)
            found = (stored.get_dtype(), tuple(stored.get_shape()))
            if found != (read.dtype, read.stored.shape):
                raise CheckpointError(
                    f"{path}: {read.key} is {found[0]} of shape {found[1]}, and the manifest says "
                    f"{read.dtype} of shape {read.stored.shape}"
                )
            index = read.part.inside(read.stored)
            read.target.detach().copy_(stored[index] if index else file.get_tensor(read.key))


@contextmanager
def _open_shard_file(path: Path, save_id: str, size: int) -> Iterator[Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is not whole")
    found_size = path.stat().st_size
    if found_size != size:
        raise CheckpointError(
            f"{path} has {found_size} bytes, and {size} were written: the checkpoint is damaged"
        )
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
            if found.get("save_id") != save_id or found.get("file") != path.name:
                raise CheckpointError(
                    f"{path} belongs elsewhere: it was written as {found.get('file')} of save "
                    f"{found.get('save_id')}, and the manifest is of save {save_id}"
                )
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): the checkpoint is damaged") from error
