"""Where checkpoints lie under their root, and how one comes to be there: complete, or not at all.

::

    root/latest_checkpointed_iteration.txt    the number of the newest, written last
    root/iter_0000100/                        a complete checkpoint: it has a manifest
    root/iter_0000100.partial/                being written, or left by a run that died while writing
    root/iter_0000100.replaced/               the former iter_0000100, while a new one takes its place
    root/iter_0000100.foreign-…/              a folder without a manifest that was in the way; never deleted
"""

import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.core.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from megatron.core.checkpoint.files import replace_durably, sync_folder
from megatron.core.checkpoint.manifest import MANIFEST_NAME

TRACKER_NAME = "latest_checkpointed_iteration.txt"

_FOLDER = re.compile(r"iter_(\d{7,})(\.partial|\.replaced)?")

_STEPS_IN_MESSAGE = 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inventory:
    """What lies under a root."""

    root: Path
    complete: dict[int, Path]
    """Folder of each complete checkpoint by iteration, ascending."""
    unfinished: tuple[Path, ...]
    """Folders of saves that did not come to their end, and iteration folders without a manifest."""
    tracked: int | None
    """What the tracker file names; None if there is none."""

    @property
    def empty(self) -> bool:
        """Whether no save ever came to its end here, so that a run that saves here may begin afresh.

        A tracker file, or an iteration folder that lacks its manifest, says that something was here.
        """
        only_partial = all(path.suffix == ".partial" for path in self.unfinished)
        return not self.complete and self.tracked is None and only_partial

    def __str__(self) -> str:
        if not self.root.is_dir():
            return f"{self.root} does not exist"
        newest = [str(step) for step in self.complete][-_STEPS_IN_MESSAGE:]
        older = len(self.complete) - len(newest)
        steps = (f"{older} older, " if older else "") + ", ".join(newest) or "none"
        names = ", ".join(path.name for path in self.unfinished) or "none"
        tracked = "missing" if self.tracked is None else f"says {self.tracked}"
        return f"{self.root}: complete iterations: {steps}; unfinished: {names}; {TRACKER_NAME} {tracked}"


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where the complete checkpoint of an iteration lies."""
    return root / f"iter_{iteration:07d}"


def survey(root: Path) -> Inventory:
    """List what lies under ``root``; a root that does not exist holds nothing.

    Raises:
        CheckpointError: if the tracker file holds no number.
    """
    if not root.is_dir():
        return Inventory(root, {}, (), None)
    complete: dict[int, Path] = {}
    unfinished = []
    # Sorted, a folder comes before its .replaced, which counts only where the folder itself is not there.
    for path in sorted(root.iterdir()):
        match = _FOLDER.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        if match[2] != ".partial" and (path / MANIFEST_NAME).is_file():
            complete.setdefault(int(match[1]), path)
        else:
            unfinished.append(path)
    return Inventory(root, dict(sorted(complete.items())), tuple(unfinished), _read_tracker(root))


def find(root: Path, step: int | None = None) -> Path:
    """The folder of a complete checkpoint: of ``step`` if given, else the one that the tracker file names.

    Without a tracker file (the very first save died before it was written) it is the newest complete one. A
    tracker that names what is not there is an error and never leads to another checkpoint.

    Raises:
        CheckpointNotFoundError: if there is no such checkpoint; the message lists what is there.
        CheckpointError: if the tracker file holds no number.
    """
    if (root / MANIFEST_NAME).is_file():
        raise CheckpointNotFoundError(
            f"{root} is itself the folder of one checkpoint: give the folder above it (and --ckpt-step)"
        )
    inventory = survey(root)
    if step is None:
        # Every rank may look for itself: what they all see alike is said at a level at which one rank speaks.
        for path in inventory.unfinished:
            logger.info("unfinished checkpoint, left out: %s", path)
    wanted = step if step is not None else inventory.tracked
    if wanted is None and inventory.complete:
        wanted = max(inventory.complete)
        logger.info("no %s in %s: taking the newest complete iteration, %d", TRACKER_NAME, root, wanted)
    if wanted is None:
        raise CheckpointNotFoundError(f"no checkpoint found; {inventory}")
    if wanted not in inventory.complete:
        asked = "asked for" if step is not None else f"named by {TRACKER_NAME}"
        raise CheckpointNotFoundError(
            f"iteration {wanted} ({asked}) is not there as a complete checkpoint; {inventory}; "
            "--ckpt-step picks another iteration"
        )
    return inventory.complete[wanted]


def begin_partial(root: Path, iteration: int) -> Path:
    """Make the folder to write a checkpoint into, after clearing away what saves that died have left.

    Raises:
        OSError: if that is not possible.
    """
    root.mkdir(parents=True, exist_ok=True)
    for path in sorted(root.iterdir()):
        match = _FOLDER.fullmatch(path.name)
        if match is None or match[2] is None:
            continue
        final = iteration_folder(root, int(match[1]))
        if match[2] == ".partial" or (final / MANIFEST_NAME).is_file():
            logger.warning("removing %s, left by a save that did not finish", path)
            shutil.rmtree(path)
        elif not final.exists():
            logger.warning("putting back %s, whose replacement was never finished", path)
            os.rename(path, final)
    partial = _beside(iteration_folder(root, iteration), ".partial")
    partial.mkdir()
    return partial


def partial_folder(root: Path, iteration: int) -> Path:
    """Where a checkpoint is written before it is complete."""
    return _beside(iteration_folder(root, iteration), ".partial")


def publish(root: Path, iteration: int, save_id: str) -> Path:
    """Make a partial folder, whole and on disk, the checkpoint of its iteration; then write the tracker file.

    A complete checkpoint of the same iteration stays, beside, until the new one has taken its place.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError: if that is not possible.
    """
    partial, final = partial_folder(root, iteration), iteration_folder(root, iteration)
    replaced = _beside(final, ".replaced")
    sync_folder(partial)
    if (final / MANIFEST_NAME).is_file():
        os.rename(final, replaced)
    elif final.exists():
        aside = _beside(final, f".foreign-{save_id[:8]}")
        logger.warning("%s is no checkpoint of this program and in the way: moved to %s", final, aside)
        os.rename(final, aside)
    os.rename(partial, final)
    sync_folder(root)
    replace_durably(root / TRACKER_NAME, str(iteration).encode())
    discard(replaced)
    return final


def discard(folder: Path) -> None:
    """Remove a folder that is no longer needed; if that fails, a later save tries again."""
    if folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            logger.warning("could not remove %s: %s", folder, error)


def _beside(final: Path, suffix: str) -> Path:
    return final.with_name(final.name + suffix)


def _read_tracker(root: Path) -> int | None:
    path = root / TRACKER_NAME
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        raise CheckpointError(
            f"{path} holds {text[:40]!r} and not the number of an iteration: write one into "
            "it, or remove it and pick one with --ckpt-step"
        )
    return int(text)
