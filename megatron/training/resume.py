"""What may change between a run and its resumption, and what would falsify it."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.config import TransformerConfig
from megatron.core.datasets.blend import parse_blend
from megatron.core.datasets.split import parse_split
from megatron.training.config import RunConfig, config_sections
from megatron.training.flags import flag_text

log = logging.getLogger(__name__)

_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "position_embedding_type",
    "normalization",
    "norm_epsilon",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "vocab_size",
)
"""Fields of the model section that weights belong to: other values make another function of them."""

_ORDER = {
    "model": ("seq_length",),
    "training": ("seed",),
    "data": (
        "data_path",
        "train_data_path",
        "split",
        "mock_data",
        "dataloader_type",
        "eod_mask_loss",
        "reset_position_ids",
        "reset_attention_mask",
    ),
}
"""Settings that say which samples a run has seen and which come next, and what is counted of them."""

_NOTED = {
    "model": ("attention_dropout", "hidden_dropout", "label_smoothing"),
    "training": (
        "train_iters",
        "train_samples",
        "global_batch_size",
        "rampup_batch_size",
        "step_batch_size_schedule",
    ),
    "precision": ("bf16", "fp16"),
    "optimizer": ("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "clip_grad"),
    "tokenizer": ("tokenizer_type",),
}
"""Settings that change how training goes on, which is the user's to decide: said, not refused."""


@dataclass(frozen=True)
class Difference:
    """A setting that differs between a checkpoint and the command line."""

    saved: str
    """The checkpoint's, as a flag."""
    current: str
    """The command line's, as a flag."""

    def __str__(self) -> str:
        return f"{self.saved} in the checkpoint, {self.current} now"


def compare_configs(saved: RunConfig, current: RunConfig, *, fresh: bool) -> None:
    """Refuse to take up a checkpoint with settings that would falsify it; log what else has changed.

    Layout, micro-batch size, number formats, paths, logging and the length of the run may change. Data may
    have moved to another folder. The schedules have their own rule:
    :func:`~megatron.training.plan.run_schedule`.

    Args:
        saved: resolved settings in the checkpoint.
        current: resolved settings of this run.
        fresh: whether only weights are taken, so that the order of data and the optimizer may change.

    Raises:
        ValueError: listing every such setting with both values.
    """
    shape = shape_differences(saved.model, current.model)
    order = [] if fresh else _differences(saved, current, _ORDER)
    if not fresh and current.checkpoint.load_optim:
        order += _differences(saved, current, {"optimizer": ("optimizer",)})
    if shape or order:
        lines = "".join(f"\n  {one}" for one in (*shape, *order))
        ways = ["give the flags of the checkpoint"]
        if shape:
            ways.append("--use-checkpoint-args")
        else:
            ways.append("--finetune to begin a new run from its weights")
        raise ValueError(f"settings differ from the checkpoint's:{lines}\n{', or '.join(ways)}")
    if not fresh:
        for difference in _differences(saved, current, _NOTED):
            log.info("changed on resume: %s", difference)


def shape_differences(saved: TransformerConfig, current: TransformerConfig) -> list[Difference]:
    """What makes ``current`` another model than ``saved``, settings that are without effect left out."""
    names = [name for name in _SHAPE if getattr(saved, name) != getattr(current, name)]
    if saved.num_kv_groups != current.num_kv_groups:
        grouping = ("group_query_attention", "num_query_groups")
        names += [name for name in grouping if getattr(saved, name) != getattr(current, name)]
    kind = current.position_embedding_type
    used = {"rope": ("rotary_base", "rotary_percent"), "learned_absolute": ("max_position_embeddings",)}
    names += [name for name in used.get(kind, ()) if getattr(saved, name) != getattr(current, name)]
    if current.add_bias_linear:
        names = [name for name in names if name != "add_qkv_bias"]
    return [
        Difference(*(flag_text(TransformerConfig, name, getattr(one, name)) for one in (saved, current)))
        for name in names
    ]


def _differences(
    saved: RunConfig, current: RunConfig, fields: dict[str, tuple[str, ...]]
) -> list[Difference]:
    found = []
    for section, names in fields.items():
        kind = config_sections()[section]
        for name in names:
            before, now = (getattr(getattr(one, section), name) for one in (saved, current))
            if _essence(name, before) != _essence(name, now):
                found.append(Difference(flag_text(kind, name, before), flag_text(kind, name, now)))
    return found


def _essence(name: str, value: Any) -> Any:
    """What of a value matters: the ends of data prefixes, since data may move, and shares of any scale."""
    if value is None:
        return None
    if name in ("data_path", "train_data_path"):
        if not value:
            return None
        blend = parse_blend(value, name)
        return tuple(Path(prefix).name for prefix in blend.prefixes), blend.weights
    return parse_split(value) if name == "split" else value
