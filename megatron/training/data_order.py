"""What the order of training samples depends on: kept in checkpoints, compared on resume."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

log = logging.getLogger(__name__)

_SHOWN_DIFFERENCES: Final = 10
"""Entries of the fingerprint that a refusal lists."""


@dataclass(frozen=True)
class DataOrder:
    """What the order of samples depends on, as plain values by name."""

    fingerprint: Mapping[str, str | int | float] = field(default_factory=dict)
    """The data and how it is mixed and shuffled; a run cannot go on with another one."""
    laid_out: Mapping[str, str] = field(default_factory=dict)
    """What is shuffled together, which the length of the run decides; a longer run may lay out more."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    def follow(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from the order in a checkpoint; say it where samples to come are in another one.

        Args:
            saved: what :meth:`to_json` wrote; None where the checkpoint says nothing, or a run begins.

        Raises:
            ValueError: if the data is other data, or mixed or shuffled in another way; listing what differs.
        """
        if saved is None:
            return
        lines = _differences(saved["fingerprint"], self.fingerprint)
        if lines:
            shown = "".join(f"\n  {line}" for line in lines[:_SHOWN_DIFFERENCES])
            if len(lines) > _SHOWN_DIFFERENCES:
                shown += f"\n  and {len(lines) - _SHOWN_DIFFERENCES} more"
            raise ValueError(
                f"the training data differs from what the checkpoint's run has read:{shown}\ngive it the "
                "same data, or --finetune to begin a new run from its weights"
            )
        lines = _differences(saved["laid_out"], self.laid_out)
        if lines:
            more = f"; and {len(lines) - 1} more" if len(lines) > 1 else ""
            log.info(
                "this run is of another length than the checkpoint's, which shuffles its data anew: samples "
                "to come are in another order, and some may have been seen (%s%s)",
                lines[0],
                more,
            )


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {saved.get(name, 'nothing')} in the checkpoint, {own.get(name, 'nothing')} now"
        for name in {**saved, **own}
        if saved.get(name) != own.get(name)
    ]
