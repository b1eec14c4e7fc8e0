"""Learning rate and weight decay as pure functions of training's progress.

Progress n is the number of samples in successful (not skipped) updates, so a resumed run needs nothing but n
to go on exactly, and a skipped update moves neither.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megatron.core.config import ScheduleConfig


@dataclass(frozen=True)
class ScheduleLengths:
    """Lengths of a schedule's parts, in samples, whatever unit the flags gave them in."""

    warmup: float
    """While the learning rate rises (W)."""
    decay: float
    """Until it has fallen to its minimum, warm-up included (D)."""
    wsd: float | None
    """Final annealing of the WSD law (A)."""
    weight_decay: float
    """Until weight decay has gone from start to end."""


@dataclass(frozen=True)
class ParameterSchedule:
    """The schedule of a run. Build it with :func:`build_schedule`.

    What a law does not use is 0 or None, so that it makes no difference on resume.
    """

    max_lr: float
    min_lr: float
    lr_warmup_init: float
    lr_decay_style: str
    lr_warmup_samples: float
    lr_decay_samples: float
    lr_wsd_decay_style: str | None
    lr_wsd_decay_samples: float | None
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: str
    weight_decay_incr_samples: float

    def learning_rate(self, n: int) -> float:
        """Learning rate of the update that follows ``n`` samples of successful updates.

        The first update has n = 0, and so with a warm-up the rate that the warm-up starts from.
        """
        warmup, decay = self.lr_warmup_samples, self.lr_decay_samples
        if warmup > 0 and n <= warmup:
            return self.lr_warmup_init + (self.max_lr - self.lr_warmup_init) * n / warmup
        if self.lr_decay_style == "constant":
            return self.max_lr
        if n > decay:
            return self.min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(n, 1)))
        if self.lr_decay_style == "WSD":
            share = self._annealing(n)
        else:
            # n > warmup or warmup == 0 < decay here, so decay > warmup.
            share = _falling(self.lr_decay_style, (n - warmup) / (decay - warmup))
        return self.min_lr + (self.max_lr - self.min_lr) * share

    def weight_decay(self, n: int) -> float:
        """Weight decay of the update that follows ``n`` samples of successful updates."""
        if self.weight_decay_incr_style == "constant" or n >= self.weight_decay_incr_samples:
            return self.end_weight_decay
        ratio = n / self.weight_decay_incr_samples
        share = (
            ratio if self.weight_decay_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1)
        )
        return self.start_weight_decay + share * (self.end_weight_decay - self.start_weight_decay)

    def _annealing(self, n: int) -> float:
        assert self.lr_wsd_decay_samples is not None
        start = self.lr_decay_samples - self.lr_wsd_decay_samples
        if n <= start:
            return 1.0
        return _falling(self.lr_wsd_decay_style, (n - start) / self.lr_wsd_decay_samples)

    def state_dict(self) -> dict[str, Any]:
        """The schedule's numbers as plain JSON values."""
        return asdict(self)


def build_schedule(config: ScheduleConfig, lengths: ScheduleLengths) -> ParameterSchedule:
    """The schedule that the flags ask for.

    Raises:
        ValueError: on lengths or weight-decay flags that make no schedule.
    """
    _check_lengths(config, lengths)
    start, end = _weight_decay_ends(config)
    anneals = config.lr_decay_style == "WSD"
    return ParameterSchedule(
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_init=config.lr_warmup_init,
        lr_decay_style=config.lr_decay_style,
        lr_warmup_samples=lengths.warmup,
        lr_decay_samples=0 if config.lr_decay_style == "constant" else lengths.decay,
        lr_wsd_decay_style=config.lr_wsd_decay_style if anneals else None,
        lr_wsd_decay_samples=lengths.wsd if anneals else None,
        start_weight_decay=start,
        end_weight_decay=end,
        weight_decay_incr_style=config.weight_decay_incr_style,
        weight_decay_incr_samples=0 if config.weight_decay_incr_style == "constant" else lengths.weight_decay,
    )


def resume_schedule(
    current: ParameterSchedule,
    saved: dict[str, Any],
    config: ScheduleConfig,
    describe: Callable[[str], str] | None = None,
) -> ParameterSchedule:
    """The schedule to resume with: the command line's and the checkpoint's must agree, or a flag chooses.

    Args:
        current: the command line's.
        saved: the checkpoint's, from :meth:`ParameterSchedule.state_dict`.
        config: for --override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler.
        describe: says the difference in a value, by its name, in the words of who set it.

    Raises:
        ValueError: naming every value that differs, with both, and the way out.
    """
    if config.override_opt_param_scheduler:
        return current
    own = current.state_dict()
    missing = sorted(own.keys() - saved.keys())
    if missing:
        raise ValueError(
            f"the checkpoint's schedule lacks {', '.join(missing)}; give --override-opt_param-scheduler to "
            "take the command line's"
        )
    restored = ParameterSchedule(**{name: saved[name] for name in own})
    if config.use_checkpoint_opt_param_scheduler or restored == current:
        return restored
    say = describe or (lambda name: f"{name} {saved[name]} in the checkpoint, {own[name]} now")
    differences = dict.fromkeys(f"\n  {say(name)}" for name in own if own[name] != saved[name])
    raise ValueError(
        "the learning-rate and weight-decay schedule differs from the checkpoint's:"
        + "".join(differences)
        + "\ngive --override-opt_param-scheduler to take the command line's, or "
        "--use-checkpoint-opt_param-scheduler to take the checkpoint's"
    )


def _falling(style: str | None, ratio: float) -> float:
    """Share of the way from minimum to maximum that is left at ``ratio`` of the length: 1 at 0, 0 at 1."""
    match style:
        case "linear":
            return 1 - ratio
        case "cosine":
            return 0.5 * (math.cos(math.pi * ratio) + 1)
        case "exponential":
            return 2 * math.pow(0.5, ratio) - 1
        case "minus_sqrt":
            return 1 - math.sqrt(ratio)
    raise AssertionError(style)


def _check_lengths(config: ScheduleConfig, lengths: ScheduleLengths) -> None:
    if lengths.decay <= 0:
        raise ValueError(
            f"the learning rate's decay length is {lengths.decay} samples: give --lr-decay-iters or "
            "--lr-decay-samples, or train for at least one iteration"
        )
    if not 0 <= lengths.warmup <= lengths.decay:
        raise ValueError(
            f"the warm-up of {lengths.warmup} samples is longer than the decay length of {lengths.decay} "
            "samples, which includes it; shorten --lr-warmup-iters, -samples or -fraction, or lengthen "
            "--lr-decay-iters or -samples"
        )
    if config.lr_decay_style != "WSD":
        return
    if lengths.wsd is None:
        raise ValueError("--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples")
    if not 0 <= lengths.wsd <= lengths.decay:
        raise ValueError(
            f"the annealing of {lengths.wsd} samples is longer than the decay length of {lengths.decay} "
            "samples; shorten --lr-wsd-decay-iters or -samples"
        )


def _weight_decay_ends(config: ScheduleConfig) -> tuple[float, float]:
    start, end = config.start_weight_decay, config.end_weight_decay
    if config.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            raise ValueError(
                f"--start-weight-decay {start} and --end-weight-decay {end} need --weight-decay-incr-style "
                "linear or cosine; a constant one is --weight-decay"
            )
        return config.weight_decay, config.weight_decay
    if start is None or end is None:
        raise ValueError(
            f"--weight-decay-incr-style {config.weight_decay_incr_style} needs both --start-weight-decay and "
            f"--end-weight-decay (given: {start}, {end})"
        )
    if not 0 <= start <= end:
        raise ValueError(
            f"--start-weight-decay {start} must be at least 0 and at most --end-weight-decay {end}"
        )
    return start, end
