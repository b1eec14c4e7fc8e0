"""How the samples of a run are counted: batches, micro-batches, and the lengths of its schedules."""

from dataclasses import dataclass

from megatron.core.config import ScheduleConfig
from megatron.core.optimizer import ParameterSchedule, ScheduleLengths, build_schedule, resume_schedule
from megatron.training.config import RunConfig, TrainingConfig
from megatron.training.flags import flag_text
from megatron.training.progress import Progress


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is divided."""

    global_batch_size: int
    """Samples of one update."""
    micro_batch_size: int
    """Samples of one forward pass of one replica."""
    data_parallel_size: int
    """Replicas of the model."""

    @property
    def num_microbatches(self) -> int:
        """Forward passes of one replica for one update."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)


def batch_plans(config: RunConfig, world_size: int) -> dict[int, BatchPlan]:
    """The division of each global batch size of a resolved config, that of evaluations included."""
    replicas = world_size // config.parallel.model_parallel_size
    sizes = dict.fromkeys((*config.batch_sizes.sizes, config.eval_global_batch_size))
    return {size: BatchPlan(size, config.training.micro_batch_size, replicas) for size in sizes}


def last_iteration(config: RunConfig, progress: Progress) -> int:
    """Number of the last iteration of a run with a resolved config; a last partial global batch is left out.

    Of a run that is counted in samples, those that are left count, since they may have been consumed with
    another global batch size.
    """
    training = config.training
    if training.train_iters is not None:
        return training.train_iters
    assert training.train_samples is not None, "a validated config has one of the two"
    consumed = progress.consumed_samples
    return progress.iteration + config.batch_sizes.iterations_within(consumed, training.train_samples)


def samples_asked_for(config: RunConfig, progress: Progress) -> tuple[int, int | None, int]:
    """Samples of training, validation and test that a run will have read at its end, at most.

    None for validation stands for every sample once.

    Args:
        config: the resolved settings.
        progress: how far the run has come when its datasets are built.
    """
    last, evaluation = last_iteration(config, progress), config.evaluation
    training = config.training.train_samples
    if training is None:
        to_come = max(last - progress.iteration, 0)
        training = config.batch_sizes.advance(progress.consumed_samples, to_come)
    evaluations = last // evaluation.eval_interval + 1 if evaluation.eval_interval else 1
    per_evaluation = evaluation.eval_iters * config.eval_global_batch_size
    if evaluation.full_validation and evaluation.eval_iters:
        return training, None, per_evaluation
    return training, evaluations * per_evaluation, per_evaluation


def schedule_lengths(config: RunConfig) -> ScheduleLengths:
    """The lengths of the schedules of a resolved config, in samples.

    A length given in iterations is the samples of the run's first so many iterations; that of the final
    annealing, of so many full global batches. Where nothing else is asked for, the learning rate decays over
    the whole run; weight decay always goes over the whole run.
    """
    schedule, training = config.schedule, config.training
    decay: float
    wsd: float | None
    if training.train_iters is not None:
        batch, sizes = config.global_batch_size, config.batch_sizes
        run = sizes.advance(0, training.train_iters)
        decay = run if schedule.lr_decay_iters is None else sizes.advance(0, schedule.lr_decay_iters)
        warmup: float = sizes.advance(0, schedule.lr_warmup_iters)
        wsd = None if schedule.lr_wsd_decay_iters is None else schedule.lr_wsd_decay_iters * batch
    else:
        assert training.train_samples is not None, "a validated config has one of the two"
        run = training.train_samples
        decay = run if schedule.lr_decay_samples is None else schedule.lr_decay_samples
        warmup = schedule.lr_warmup_samples
        wsd = schedule.lr_wsd_decay_samples
    if schedule.lr_warmup_fraction is not None:
        warmup = schedule.lr_warmup_fraction * decay
    return ScheduleLengths(warmup=warmup, decay=decay, wsd=wsd, weight_decay=run)


def run_schedule(config: RunConfig, saved: RunConfig | None) -> ParameterSchedule:
    """The schedules of a run: its own flags', and when it resumes, in agreement with the checkpoint's.

    Args:
        config: the resolved settings of this run.
        saved: those of the run that is resumed, or None for a run of its own.

    Raises:
        ValueError: if the flags make no schedule, or one that differs from the checkpoint's while no flag
            says which counts.
    """
    own = build_schedule(config.schedule, schedule_lengths(config))
    if saved is None:
        return own
    before = build_schedule(saved.schedule, schedule_lengths(saved))
    return resume_schedule(
        own, before.state_dict(), config.schedule, lambda name: _difference(name, saved, config)
    )


def _difference(name: str, saved: RunConfig, config: RunConfig) -> str:
    """A value of the schedule in the words of the flags that set it, for the checkpoint and for this run."""
    there, here = (_setting(name, one) for one in (saved, config))
    purpose = _PURPOSES.get(name)
    return (f"{purpose}: " if purpose else "") + f"{there} in the checkpoint, {here} now"


_PURPOSES = {
    "lr_warmup_samples": "length of the warm-up",
    "lr_decay_samples": "length of the learning rate's decay",
    "lr_wsd_decay_samples": "length of the final annealing",
    "weight_decay_incr_samples": "length of the weight decay's way",
}


def _setting(name: str, config: RunConfig) -> str:
    """The flag that a value of :class:`ParameterSchedule` comes from, and the samples of a length."""
    schedule, lengths = config.schedule, schedule_lengths(config)
    unit = "iters" if config.training.train_iters is not None else "samples"
    whole_run = flag_text(TrainingConfig, f"train_{unit}", getattr(config.training, f"train_{unit}"))
    constant = schedule.weight_decay_incr_style == "constant"
    match name:
        case "weight_decay_incr_samples":
            return f"{whole_run} ({lengths.weight_decay:g} samples)"
        case "lr_decay_samples":
            return f"{_given(schedule, f'lr_decay_{unit}') or whole_run} ({lengths.decay:g} samples)"
        case "lr_warmup_samples":
            text = _given(schedule, "lr_warmup_fraction") or _given(schedule, f"lr_warmup_{unit}")
            return f"{text} ({lengths.warmup:g} samples)"
        case "lr_wsd_decay_samples":
            text = _given(schedule, f"lr_wsd_decay_{unit}")
            return "none" if text is None else f"{text} ({lengths.wsd:g} samples)"
        case "start_weight_decay" | "end_weight_decay" if constant:
            name = "weight_decay"
        case "max_lr":
            name = "lr"
    return flag_text(ScheduleConfig, name, getattr(schedule, name))


def _given(schedule: ScheduleConfig, name: str) -> str | None:
    value = getattr(schedule, name)
    return None if value is None else flag_text(ScheduleConfig, name, value)
