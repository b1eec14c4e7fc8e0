"""Save and load whole checkpoints, from and into any layout.

A save: rank 0 makes a partial folder; each rank writes its rectangles into a file of its own; rank 0 gathers
what was written, checks that it tiles every tensor and that the files are there, writes the manifest, renames
the folder and writes the tracker file. A load: rank 0 finds the checkpoint and hands its manifest to all,
which check the files between them; each rank then reads the slices that its own rectangles meet. The parts of
a checkpoint (weights, main weights, moments) are prefixes of names, nothing more: what is not given is not
saved, what is not asked for is not read.
"""

import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.core.checkpoint.agreement import Peers, attempt, describe_failures
from megatron.core.checkpoint.errors import CheckpointError
from megatron.core.checkpoint.folders import begin_partial, discard, find, partial_folder, publish
from megatron.core.checkpoint.manifest import (
    Manifest,
    StoredShard,
    StoredTensor,
    decode_manifest,
    read_manifest,
    read_manifest_text,
    write_manifest,
)
from megatron.core.checkpoint.shard_file import (
    SliceRead,
    check_shard_file,
    dtype_code,
    read_slices,
    write_shard_file,
)
from megatron.core.checkpoint.sharded_tensor import Rectangle, ShardedTensor, check_tiling

_NAMES_IN_MESSAGE = 5


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found and is whole."""

    folder: Path
    manifest: Manifest


def save(
    root: Path,
    iteration: int,
    tensors: Iterable[ShardedTensor],
    state: Mapping[str, Any],
    group: ProcessGroup,
    device: torch.device,
) -> Path:
    """Write a checkpoint; all ranks of ``group`` call this together, and return or raise together.

    Args:
        root: folder of all checkpoints of the run, on a file system that all ranks see.
        iteration: its number; a complete checkpoint of the same number is replaced once this one is complete.
        tensors: what this rank gives. All ranks' rectangles together cover each tensor exactly once: what
            several hold is given by one of them (``sharded_parameter(primary_only=True)``,
            ``share_among_replicas``). A rank may give nothing.
        state: plain JSON values to keep besides; rank 0's are stored.
        group: every rank that holds a part.
        device: device of the group's collectives.

    Returns:
        Folder of the checkpoint.

    Raises:
        CheckpointError: on every rank, if any failed; what was written is removed, and earlier checkpoints
            stay as they are.
    """
    peers = Peers(group, device)
    doing = f"checkpoint of iteration {iteration} in {root} not saved"
    partial = partial_folder(root, iteration)

    def begin() -> str:
        begin_partial(root, iteration)
        return secrets.token_hex(16)

    save_id = peers.on_first(begin, f"{doing}: rank 0")
    written = attempt(lambda: _write_shards(partial, save_id, peers.rank, tensors))
    reports = peers.gather({"failure": written.failure, "report": written.value})

    def complete() -> str:
        try:
            failures = describe_failures([entry["failure"] for entry in reports])
            if failures is not None:
                raise CheckpointError(failures)
            manifest = _assemble(partial, save_id, iteration, [entry["report"] for entry in reports], state)
            write_manifest(partial, manifest)
            return str(publish(root, iteration, save_id))
        except Exception:
            discard(partial)
            raise

    try:
        return Path(peers.on_first(complete, doing))
    except CheckpointError as error:
        raise error from (written.error or error.__cause__)


def open_checkpoint(
    root: Path, group: ProcessGroup, device: torch.device, step: int | None = None
) -> Checkpoint:
    """Find a checkpoint and check that it is whole; all ranks of ``group`` call this together.

    Rank 0 alone looks for it and reads the manifest; the ranks check existence, size and identity of the
    files between them.

    Args:
        root: folder of all checkpoints of a run.
        group: the ranks that will load.
        device: device of the group's collectives.
        step: iteration to take; None takes what the tracker file names.

    Raises:
        CheckpointNotFoundError: on every rank, if there is none such; the message lists what is there.
        CheckpointError: on every rank, if a file of it is missing, short, or of another save.
    """
    peers = Peers(group, device)

    def locate() -> list[str]:
        found = find(root, step)
        return [str(found), read_manifest_text(found)]

    name, text = peers.on_first(locate, "no checkpoint loaded")
    folder = Path(name)

    def check() -> Manifest:
        manifest = decode_manifest(text, f"manifest of {folder}")
        _check_files(folder, manifest, sorted(manifest.files)[peers.rank :: peers.size])
        return manifest

    checked = attempt(check)
    peers.agree(checked, f"checkpoint {folder} not loaded")
    return Checkpoint(folder, checked.get())


def verify(folder: Path) -> Checkpoint:
    """Read a checkpoint folder's manifest and check every file that it names; for a single process.

    Raises:
        CheckpointError: if a file of it is missing, short, or of another save.
    """
    manifest = read_manifest(folder)
    _check_files(folder, manifest, sorted(manifest.files))
    return Checkpoint(folder, manifest)


def load(
    checkpoint: Checkpoint,
    tensors: Iterable[ShardedTensor],
    group: ProcessGroup,
    device: torch.device,
    *,
    cast: bool = False,
) -> None:
    """Fill this rank's rectangles in place; all ranks of ``group`` call this together.

    Args:
        checkpoint: what :func:`open_checkpoint` found.
        tensors: what this rank wants filled, in any layout (``sharded_parameter(primary_only=False)``).
            Memory outside the rectangles, such as rows of vocabulary padding, is left as it is.
        group: the ranks that load.
        device: device of the group's collectives.
        cast: whether a tensor may be stored in another number format than its target's. Not for optimizer
            state: moments that were stored narrower have lost what widening does not bring back.

    Raises:
        CheckpointError: on every rank, if on any a tensor is missing, has another shape or (without ``cast``)
            another number format, or a file cannot be read. Targets are then undefined.
    """
    tried = attempt(lambda: _read_tensors(checkpoint, list(tensors), cast))
    Peers(group, device).agree(tried, f"checkpoint {checkpoint.folder} not loaded")


def _write_shards(partial: Path, save_id: str, rank: int, tensors: Iterable[ShardedTensor]) -> dict[str, Any]:
    """Write this rank's rectangles; return what rank 0 must know of them, as JSON."""
    if not partial.is_dir():
        raise CheckpointError(
            f"rank 0 has made {partial}, which is not there for this rank: --save must name a folder on a "
            "file system that all nodes share"
        )
    entries: dict[str, list[Any]] = {}
    data = []
    for tensor in tensors:
        if tensor.name in entries:
            raise CheckpointError(f"tensor {tensor.name} is given twice")
        keyed = [
            (f"{tensor.name}#{index}", *shard) for index, shard in enumerate(tensor.shards) if shard[0].size
        ]
        data += [(key, local) for key, _, local in keyed]
        places = [[key, rectangle.offset, rectangle.shape] for key, rectangle, _ in keyed]
        entries[tensor.name] = [tensor.global_shape, dtype_code(tensor.name, tensor.dtype), places]
    path = partial / f"rank_{rank:05d}.safetensors"
    # A rank that holds nothing (a data-parallel replica) leaves no file.
    size = write_shard_file(path, save_id, data) if data else 0
    return {"file": path.name, "size": size, "tensors": entries}


def _assemble(
    partial: Path,
    save_id: str,
    iteration: int,
    reports: Sequence[dict[str, Any]],
    state: Mapping[str, Any],
) -> Manifest:
    """Put the ranks' reports together and check them against one another and against the files."""
    files = {report["file"]: report["size"] for report in reports if report["size"]}
    _check_files(partial, Manifest(save_id, iteration, files, {}, {}), sorted(files))
    heads: dict[str, tuple[tuple[int, ...], str]] = {}
    owners: dict[str, int] = {}
    shards: dict[str, list[StoredShard]] = defaultdict(list)
    for rank, report in enumerate(reports):
        for name, (shape, code, places) in report["tensors"].items():
            head = (tuple(shape), code)
            if heads.setdefault(name, head) != head:
                raise CheckpointError(
                    f"tensor {name} is {heads[name][1]} of shape {heads[name][0]} on rank {owners[name]}, "
                    f"and {code} of shape {head[0]} on rank {rank}"
                )
            owners.setdefault(name, rank)
            shards[name] += [
                StoredShard(Rectangle(tuple(offset), tuple(extent)), report["file"], key)
                for key, offset, extent in places
            ]
    for name, (shape, _) in heads.items():
        check_tiling(name, shape, [shard.rectangle for shard in shards[name]])
    stored = {name: StoredTensor(shape, code, tuple(shards[name])) for name, (shape, code) in heads.items()}
    return Manifest(save_id, iteration, files, stored, state)


def _check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    for name in names:
        check_shard_file(folder / name, manifest.save_id, manifest.files[name])


def _read_tensors(checkpoint: Checkpoint, tensors: Sequence[ShardedTensor], cast: bool) -> None:
    manifest = checkpoint.manifest
    _check_wanted(manifest, tensors, cast)
    reads: dict[str, list[SliceRead]] = defaultdict(list)
    for tensor in tensors:
        stored = manifest.tensors[tensor.name]
        for wanted, target in tensor.shards:
            filled = 0
            for shard in stored.shards:
                part = shard.rectangle.intersection(wanted)
                if part is not None:
                    view = target.detach()[part.inside(wanted)]
                    reads[shard.file].append(SliceRead(shard.key, shard.rectangle, stored.dtype, part, view))
                    filled += part.size
            assert filled == math.prod(wanted.shape), f"{tensor.name}: {wanted} is not covered"
    # One file at a time: the number of files open at once does not grow with the layout that saved.
    for file, slices in sorted(reads.items()):
        read_slices(checkpoint.folder / file, manifest.save_id, manifest.files[file], slices)


def _check_wanted(manifest: Manifest, tensors: Sequence[ShardedTensor], cast: bool) -> None:
    """Check names, shapes and number formats of everything before anything is read."""
    missing = [tensor.name for tensor in tensors if tensor.name not in manifest.tensors]
    if missing:
        raise CheckpointError(f"not in the checkpoint: {_first_names(missing)}")
    shapes, formats = [], []
    for tensor in tensors:
        stored = manifest.tensors[tensor.name]
        if stored.shape != tensor.global_shape:
            shapes.append(f"{tensor.name} (checkpoint {stored.shape}, model {tensor.global_shape})")
        code = dtype_code(tensor.name, tensor.dtype)
        if stored.dtype != code and not cast:
            formats.append(f"{tensor.name} (checkpoint {stored.dtype}, wanted {code})")
    if shapes:
        raise CheckpointError(f"shapes differ: {_first_names(shapes)}")
    if formats:
        raise CheckpointError(
            f"number formats differ, and casting was not asked for: {_first_names(formats)}"
        )


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_IN_MESSAGE} more" if len(names) > _NAMES_IN_MESSAGE else ""
    return ", ".join(names[:_NAMES_IN_MESSAGE]) + more
