"""The manifest of a checkpoint: one JSON file that says which part of which tensor lies where.

``manifest.json`` holds::

    format, version         "megatron-sharded", 1
    digest                  of everything else, so that an edited manifest is noticed
    save_id                 random, the same in the header of every file of this save
    iteration
    files                   file name -> size in bytes
    tensors                 name -> dtype (safetensors' code), shape, shards: [{file, key, offset, shape}]
    state                   what the trainer wants to keep besides: plain JSON
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.checkpoint.errors import CheckpointError
from megatron.core.checkpoint.files import write_durably
from megatron.core.checkpoint.sharded_tensor import Rectangle, check_tiling

MANIFEST_NAME = "manifest.json"
FORMAT = "megatron-sharded"
VERSION = 1


@dataclass(frozen=True)
class StoredShard:
    """A rectangle of a stored tensor: the file, and the key in it."""

    rectangle: Rectangle
    file: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the whole model as it lies in a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    """Safetensors' code for the number format, such as ``"BF16"``."""
    shards: tuple[StoredShard, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    save_id: str
    iteration: int
    files: Mapping[str, int]
    """Size in bytes of each file."""
    tensors: Mapping[str, StoredTensor]
    state: Mapping[str, Any]

    def names(self, prefix: str = "") -> list[str]:
        """Names of the tensors that start with ``prefix``; none means that this part was not saved."""
        return [name for name in self.tensors if name.startswith(prefix)]


def encode_manifest(manifest: Manifest) -> str:
    """The text of ``manifest.json``.

    Raises:
        TypeError: if ``state`` holds something that JSON has no words for.
    """
    body = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": manifest.save_id,
        "iteration": manifest.iteration,
        "files": dict(manifest.files),
        "tensors": {name: _encode_tensor(tensor) for name, tensor in manifest.tensors.items()},
        "state": dict(manifest.state),
    }
    # Through JSON once: the digest is of what a reader will see, lists for tuples and strings for keys.
    body = json.loads(json.dumps(body))
    return json.dumps({"digest": _digest(body), **body})


def decode_manifest(text: str, source: str) -> Manifest:
    """Read the text of a manifest and check it: digest, version, and that rectangles tile each tensor.

    Args:
        text: content of the file.
        source: what to call it in messages, usually its path.

    Raises:
        CheckpointError: if it is no manifest, was edited, is of a later version, or does not tile.
    """
    try:
        body = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{source} is not JSON ({error}): the checkpoint is damaged") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{source} is not the manifest of a checkpoint (no format {FORMAT!r} in it)")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{source} is of format version {body.get('version')}, and this program reads version {VERSION}"
        )
    digest = body.pop("digest", None)
    if digest != _digest(body):
        raise CheckpointError(f"{source} was changed after it was written (its digest does not fit)")
    tensors = {name: _decode_tensor(tensor) for name, tensor in body["tensors"].items()}
    for name, tensor in tensors.items():
        check_tiling(name, tensor.shape, [shard.rectangle for shard in tensor.shards])
    return Manifest(body["save_id"], body["iteration"], body["files"], tensors, body["state"])


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into ``folder``, on disk when this returns."""
    write_durably(folder / MANIFEST_NAME, encode_manifest(manifest).encode())


def read_manifest_text(folder: Path) -> str:
    """The manifest of a checkpoint folder as it stands.

    Raises:
        CheckpointError: if there is none.
    """
    try:
        return (folder / MANIFEST_NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{folder} has no readable {MANIFEST_NAME} ({error}): not a complete checkpoint"
        ) from error


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder (the files that it names are not looked at).

    Raises:
        CheckpointError: if it is missing, edited, of a later version, or does not tile its tensors.
    """
    return decode_manifest(read_manifest_text(folder), str(folder / MANIFEST_NAME))


def _digest(body: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def _encode_tensor(tensor: StoredTensor) -> dict[str, Any]:
    shards = [
        {
            "file": shard.file,
            "key": shard.key,
            "offset": shard.rectangle.offset,
            "shape": shard.rectangle.shape,
        }
        for shard in tensor.shards
    ]
    return {"dtype": tensor.dtype, "shape": tensor.shape, "shards": shards}


def _decode_tensor(entry: dict[str, Any]) -> StoredTensor:
    shards = tuple(
        StoredShard(Rectangle(tuple(shard["offset"]), tuple(shard["shape"])), shard["file"], shard["key"])
        for shard in entry["shards"]
    )
    return StoredTensor(tuple(entry["shape"]), entry["dtype"], shards)
