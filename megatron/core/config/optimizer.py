"""Precision, optimizer, and the schedules of learning rate and weight decay."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.field import flag


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats and loss scaling."""

    fp16: bool = False
    """Compute in float16, with loss scaling and float32 main weights."""
    bf16: bool = False
    """Compute in bfloat16, with float32 main weights."""
    loss_scale: float | None = None
    """Constant loss scale, a power of 2; default dynamic with --fp16."""
    initial_loss_scale: float = 2.0**32
    """Dynamic loss scale to start with."""
    min_loss_scale: float = 1.0
    """Dynamic loss scale never falls below this."""
    loss_scale_window: int = 1000
    """Good steps in a row after which the dynamic loss scale doubles."""
    hysteresis: int = 2
    """Overflows that the dynamic loss scale tolerates before it halves."""
    max_consecutive_skips: int = 100
    """End the run when this many updates in a row were skipped with the loss scale at its minimum."""

    def __post_init__(self) -> None:
        if self.fp16 and self.bf16:
            raise ValueError("--fp16 and --bf16 exclude each other; give one of them, or neither for float32")
        for name in (
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            "max_consecutive_skips",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be above 0")
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"--min-loss-scale {self.min_loss_scale} is above --initial-loss-scale "
                f"{self.initial_loss_scale}"
            )
        if self.loss_scale is not None and self.loss_scale <= 0:
            raise ValueError(f"--loss-scale {self.loss_scale}: must be above 0")


@dataclass(frozen=True)
class OptimizerConfig:
    """The update rule."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is AdamW (decoupled weight decay); sgd has momentum."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    sgd_momentum: float = 0.9
    """Momentum of sgd."""
    clip_grad: float = 1.0
    """Global L2 norm that gradients are clipped to; 0 switches clipping off."""
    log_num_zeros_in_grad: bool = False
    """Count and log the zeros among the gradients."""
    skip_nan_iterations: bool = False
    """Skip an update whose loss or gradient is NaN or infinite, instead of ending the run."""

    def __post_init__(self) -> None:
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must lie in [0, 1)")
        if self.adam_eps <= 0:
            # 0 / 0 where a weight has had no gradient yet, such as the row of a token not seen so far.
            raise ValueError(f"--adam-eps {self.adam_eps}: must be above 0")
        if self.clip_grad < 0:
            raise ValueError(f"--clip-grad {self.clip_grad}: must be 0 (off) or above")


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate and weight decay over the run."""

    lr: float = flag()
    """Highest learning rate."""
    min_lr: float = 0.0
    """Lowest learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Law by which the learning rate falls after the warm-up."""
    lr_decay_iters: int | None = None
    """Iterations until the learning rate has fallen to --min-lr; default --train-iters."""
    lr_decay_samples: int | None = None
    """Samples until the learning rate has fallen to --min-lr; default --train-samples."""
    lr_warmup_iters: int = 0
    """Iterations over which the learning rate rises."""
    lr_warmup_samples: int = 0
    """Samples over which the learning rate rises."""
    lr_warmup_fraction: float | None = None
    """Share of the decay length over which the learning rate rises."""
    lr_warmup_init: float = 0.0
    """Learning rate that the warm-up starts from."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the final annealing of the WSD law."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the final annealing of the WSD law."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Law of the final annealing of WSD."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices and embeddings (not of biases and norms)."""
    start_weight_decay: float | None = None
    """Weight decay at the start, with --weight-decay-incr-style linear or cosine."""
    end_weight_decay: float | None = None
    """Weight decay at the end, with --weight-decay-incr-style linear or cosine."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start to end."""
    override_opt_param_scheduler: bool = flag(
        False, spelling="--override-opt_param-scheduler", aliases=("--override-opt-param-scheduler",)
    )
    """On resume take the schedule from the command line, even where it differs from the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        spelling="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )
    """On resume take the schedule from the checkpoint."""

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError(f"--lr {self.lr}: must be 0 or above")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"--min-lr {self.min_lr}: must lie between 0 and --lr {self.lr}")
        if not 0 <= self.lr_warmup_init <= self.lr:
            raise ValueError(f"--lr-warmup-init {self.lr_warmup_init}: must lie between 0 and --lr {self.lr}")
        self._check_lengths()
        for name in ("weight_decay", "start_weight_decay", "end_weight_decay"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be 0 or above")
        if self.lr_warmup_fraction is not None and (self.lr_warmup_iters or self.lr_warmup_samples):
            raise ValueError(
                "give the warm-up once: --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples"
            )
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ValueError(
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other"
            )

    def _check_lengths(self) -> None:
        for name, least in (
            ("lr_decay_iters", 1),
            ("lr_decay_samples", 1),
            ("lr_warmup_iters", 0),
            ("lr_warmup_samples", 0),
            ("lr_wsd_decay_iters", 0),
            ("lr_wsd_decay_samples", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
        if self.lr_warmup_fraction is not None and not 0 <= self.lr_warmup_fraction <= 1:
            raise ValueError(f"--lr-warmup-fraction {self.lr_warmup_fraction}: must lie in [0, 1]")
