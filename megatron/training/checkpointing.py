"""What of a run goes into a checkpoint, and how a run is taken up from one.

A checkpoint knows the whole model and no layout, so any layout takes up what any other saved. Dropout and
data order are derived from the seed and the counters, so there is no generator state: the "random state" is
the seed.
"""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.core.checkpoint import (
    Checkpoint,
    CheckpointError,
    Manifest,
    ShardedTensor,
    find,
    load,
    open_checkpoint,
    read_manifest,
    save,
    share_among_replicas,
    survey,
)
from megatron.core.checkpoint.agreement import Peers, attempt
from megatron.core.distributed.fully_sharded import FullyShardedStore
from megatron.core.optimizer import StatePart, sharded_states
from megatron.core.parameter import NamedParameter
from megatron.training.config import CheckpointConfig, RunConfig
from megatron.training.parameters import Store
from megatron.training.plan import run_schedule
from megatron.training.progress import Progress
from megatron.training.resume import compare_configs
from megatron.training.run import Run

log = logging.getLogger(__name__)

MODEL, OPTIMIZER = "model.", "optimizer."
MAIN = "main"


@dataclass(frozen=True)
class Source:
    """A complete checkpoint to take up."""

    root: Path
    folder: Path
    manifest: Manifest
    config: RunConfig
    """The settings of the run that saved it."""
    resumes: bool
    """Whether that run goes on, with its counters, schedule and data; else only its weights are taken."""


def find_source(config: CheckpointConfig) -> Source | None:
    """The checkpoint that ``--load`` (else ``--pretrained-checkpoint``) means; None for a fresh start.

    A fresh start is what the user asked for when nothing is named, or when ``--load`` is also where
    ``--save`` will write and nothing has been saved there yet: the first launch of a job that resumes itself.
    With ``--finetune`` it is not, since that asks for weights.

    Raises:
        ValueError: if there is nothing to load, or what there is is broken.
    """
    for named, may_be_missing in (
        (config.load, _resumes_itself(config)),
        (config.pretrained_checkpoint, False),
    ):
        if named is None:
            continue
        root = Path(named)
        if may_be_missing and survey(root).empty:
            if config.pretrained_checkpoint is None:
                log.info("no checkpoint in %s yet (--load equals --save): starting from random weights", root)
            continue
        folder = find(root, config.ckpt_step if named == config.load else None)
        manifest = read_manifest(folder)
        if "config" not in manifest.state or "progress" not in manifest.state:
            raise ValueError(f"the checkpoint {folder} was not saved by a training run: it holds no settings")
        resumes = named == config.load and not config.finetune
        return Source(root, folder, manifest, RunConfig.from_json(manifest.state["config"]), resumes)
    return None


def _resumes_itself(config: CheckpointConfig) -> bool:
    return (
        config.load is not None
        and config.save is not None
        and Path(config.load).resolve() == Path(config.save).resolve()
        and config.ckpt_step is None
        and not config.exit_on_missing_checkpoint
        and not (config.finetune and config.pretrained_checkpoint is None)
    )


def check_save_folder(config: CheckpointConfig) -> None:
    """Refuse a ``--save`` that cannot be written to: at the start, and not hours later at the first save.

    Say it, too, where checkpoints lie there that this run does not go on from: it may replace them.

    Raises:
        ValueError: if it is no folder, or may not be written to.
    """
    if config.save is None:
        return
    nearest = Path(config.save).resolve()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ValueError(f"--save {config.save}: {nearest} is a file; give a folder")
    try:
        with tempfile.TemporaryFile(dir=nearest):  # permissions alone do not tell
            pass
    except OSError as error:
        raise ValueError(
            f"--save {config.save}: {nearest} may not be written to ({error.strerror}); give another folder"
        ) from None
    if not _goes_on(config) and (there := survey(Path(config.save)).complete):
        log.info(
            "%s already holds checkpoints up to iteration %d, which this run does not go on from: it "
            "replaces those of the iterations that it saves; to go on, give --load the same folder",
            config.save,
            max(there),
        )


def _goes_on(config: CheckpointConfig) -> bool:
    """Whether the run takes up the latest checkpoint of the folder that it saves to."""
    assert config.save is not None
    same = config.load is not None and Path(config.load).resolve() == Path(config.save).resolve()
    return same and config.ckpt_step is None and not config.finetune


def check_source(source: Source, config: RunConfig) -> None:
    """Refuse a checkpoint that lacks a part that is asked for, or whose settings would falsify the run.

    Raises:
        ValueError: listing every setting that differs, or naming the part and the flag that goes without it.
    """
    compare_configs(source.config, config, fresh=not source.resumes)
    if not source.resumes:
        return
    state, options = source.manifest.state, config.checkpoint
    if options.load_optim and "optimizer" not in state:
        raise ValueError(
            f"the checkpoint {source.folder} holds no optimizer state (it was saved with --no-save-optim); "
            "pass --no-load-optim to go on with fresh moments, or --finetune to start anew from its weights"
        )
    if options.load_rng and "rng" not in state:
        raise ValueError(
            f"the checkpoint {source.folder} holds no random state (it was saved with --no-save-rng); pass "
            "--no-load-rng to go on with the random streams of --seed"
        )
    run_schedule(config, source.config)  # refuses a schedule that is not the checkpoint's


def agree_on_source(source: Source | None, group: ProcessGroup, device: torch.device) -> None:
    """Refuse to start where ranks have found different checkpoints, or some none; all ranks together.

    Each rank has looked for itself. On nodes that do not share the folder, one would start afresh by itself.

    Raises:
        CheckpointError: on every rank, naming those that differ from rank 0.
    """

    def describe(found: Source | None) -> list[str]:
        return ["no checkpoint", ""] if found is None else [str(found.folder), found.manifest.save_id]

    own = describe(source)
    peers = Peers(group, device)
    first = peers.broadcast(own)

    def compare() -> None:
        if own[1] != first[1]:
            raise CheckpointError(f"sees {own[0]} where rank 0 sees {first[0]}")

    peers.agree(attempt(compare), "not all ranks see the same checkpoint; give a folder that all nodes share")


def save_run(run: Run, root: str) -> None:
    """Save everything that a later run needs to go on as if nothing had happened; all ranks together."""
    config, iteration = run.config.checkpoint, run.progress.iteration
    log.info("saving checkpoint at iteration %7d to %s in safetensors format", iteration, root)
    state: dict[str, Any] = {
        "config": run.config.to_json(),
        "progress": run.progress.to_json(),
        "data": run.data_order.to_json(),
    }
    if config.save_optim:
        state["optimizer"] = run.optimizer.state_dict()
    if config.save_rng:
        state["rng"] = {"seed": run.config.training.seed}
    save(
        Path(root),
        iteration,
        _owned_tensors(run),
        state,
        group=run.state.world_group,
        device=run.device,
    )
    log.info("  successfully saved checkpoint from iteration %7d to %s %s", iteration, root, _layout(run))


def load_run(run: Run, source: Source) -> None:
    """Fill ``run`` from a checkpoint that :func:`check_source` has let pass; all ranks together.

    Raises:
        CheckpointError: on every rank, if any cannot read what it needs.
    """
    config = run.config.checkpoint
    step = source.manifest.iteration
    log.info(" loading checkpoint from %s at iteration %d", source.root, step)
    group, device = run.state.world_group, run.device
    checkpoint = open_checkpoint(source.root, group, device, step)
    states = run.optimizer.state_tensors()
    _load_weights(checkpoint, states.pop(MAIN, _weights(run.store)), group, device)
    if config.load_optim and source.resumes:
        load(checkpoint, sharded_states(states, OPTIMIZER, primary_only=False), group, device)
    run.optimizer.sync_model_weights()
    if source.resumes:
        run.progress = Progress.from_json(source.manifest.state["progress"])
        run.resumed_iteration = run.progress.iteration
        if config.load_optim:
            run.optimizer.load_state_dict(source.manifest.state["optimizer"])
    log.info("  successfully loaded checkpoint from %s %s at iteration %d", source.root, _layout(run), step)


def _owned_tensors(run: Run) -> list[ShardedTensor]:
    """What this rank saves: its primary rectangles, shared out among the ranks that hold the same ones."""
    store, replicas = run.store, run.state.data_group
    weights = owned_weights(store, prefix=MODEL)
    states: list[ShardedTensor] = []
    if run.config.checkpoint.save_optim:
        states = sharded_states(run.optimizer.state_tensors(), OPTIMIZER, primary_only=True)
    if not store.sharded:
        return share_among_replicas(weights + states, replicas.rank(), replicas.size())
    if not isinstance(store, FullyShardedStore):
        weights = share_among_replicas(weights, replicas.rank(), replicas.size())
    return weights + states


def load_weights(
    checkpoint: Checkpoint, parameters: Sequence[NamedParameter], group: ProcessGroup, device: torch.device
) -> None:
    """Fill a model's parameters from a checkpoint, at the best precision it holds; all ranks together."""
    _load_weights(checkpoint, _whole_weights(parameters), group, device)


def owned_weights(store: Store, prefix: str = "") -> list[ShardedTensor]:
    """The model's weights that this rank answers for, as they are now: primary rectangles.

    Data-parallel replicas that hold the same all give it.
    """
    store.wait_for_parameters()
    return [part.sharded(prefix + part.named.name, primary_only=True) for part in _weights(store)]


def _weights(store: Store) -> list[StatePart]:
    """What this rank holds of the model's weights, in the store's format."""
    if not isinstance(store, FullyShardedStore):
        return _whole_weights(store.parameters)
    return [
        StatePart(part.named, part.view(bucket.weights), part.start)
        for bucket in store.buckets
        for part in bucket.parts
    ]


def _whole_weights(parameters: Sequence[NamedParameter]) -> list[StatePart]:
    return [StatePart(named, named.parameter.data.view(-1), 0) for named in parameters]


def _load_weights(
    checkpoint: Checkpoint,
    targets: Sequence[StatePart],
    group: ProcessGroup,
    device: torch.device,
) -> None:
    """Fill weights: from the float32 main weights where they were saved, else from the model's own, widened.

    Main weights are never widened: they must be float32 in the file.
    """
    main, own = [], []
    for target in targets:
        key = f"{OPTIMIZER}{MAIN}.{target.named.name}"
        if key in checkpoint.manifest.tensors:
            main.append(target.sharded(key, primary_only=False))
        else:
            own.append(target.sharded(MODEL + target.named.name, primary_only=False))
    load(checkpoint, main, group, device)
    load(checkpoint, own, group, device, cast=True)


def _layout(run: Run) -> str:
    state = run.state
    return f"[ t {state.rank('tp') + 1}/{state.size('tp')}, p {state.rank('pp') + 1}/{state.size('pp')} ]"
