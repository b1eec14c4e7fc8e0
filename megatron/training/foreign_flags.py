"""Flags of other systems' launch scripts: one table of what becomes of each.

A flag is accepted without effect only where ignoring it can neither change the numbers of a run nor lose
something that the user counts on. Any other is refused, with what to use instead.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_GIVEN = "foreign_flags_given"


@dataclass(frozen=True)
class ForeignFlag:
    """One flag that is not ours."""

    spelling: str
    """The flag as people type it."""
    nargs: str | int | None
    """argparse's ``nargs``; 0 for a switch."""
    accepted: bool
    """Whether a run starts with it."""
    reason: str
    """Why it has no meaning here, or what to use instead."""
    harmless_values: tuple[str, ...] = ()
    """Values with which a refused flag asks for nothing, so that it is accepted after all."""

    def accepts(self, values: Sequence[str]) -> bool:
        """Whether a run starts with the flag given these values."""
        return self.accepted or (bool(values) and all(value in self.harmless_values for value in values))


def _group(
    accepted: bool, reason: str, *, switches: str = "", valued: str = "", listed: str = "", harmless: str = ""
) -> Iterator[ForeignFlag]:
    """Flags that share a reason: those without, with one and with several values, separated by spaces."""
    kinds: tuple[tuple[str, str | int | None], ...] = ((switches, 0), (valued, None), (listed, "*"))
    for spellings, nargs in kinds:
        for spelling in spellings.split():
            yield ForeignFlag(spelling, nargs, accepted, reason, tuple(harmless.split()))


def _accepted(
    reason: str, *, switches: str = "", valued: str = "", listed: str = ""
) -> Iterator[ForeignFlag]:
    return _group(True, reason, switches=switches, valued=valued, listed=listed)


def _refused(
    reason: str, *, switches: str = "", valued: str = "", listed: str = "", harmless: str = ""
) -> Iterator[ForeignFlag]:
    return _group(False, reason, switches=switches, valued=valued, listed=listed, harmless=harmless)


_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

_ACCEPTED = (
    *_accepted(
        "kernels are chosen by what the machine has; all give the same function",
        switches="--use-flash-attn --use-flash-attn-v2 --no-masked-softmax-fusion --no-bias-dropout-fusion "
        "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-gradient-accumulation-fusion "
        "--cross-entropy-loss-fusion --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb "
        "--abort-on-unmet-fused-kernel-constraints",
        valued="--transformer-impl --attention-backend --cross-entropy-fusion-impl",
    ),
    *_accepted(
        "there is one implementation of the model", switches="--use-mcore-models --enable-experimental"
    ),
    *_accepted(
        "the softmax of attention is always accumulated in float32", switches="--attention-softmax-in-fp32"
    ),
    *_accepted(
        "attention scores are never scaled by the layer number", switches="--no-query-key-layer-scaling"
    ),
    *_accepted(
        "gradients are always accumulated and reduced in float32",
        switches="--accumulate-allreduce-grads-in-fp32",
    ),
    *_accepted(
        "the loss of an update is always the sum over its counted tokens divided by their number",
        switches="--calculate-per-token-loss --ddp-average-in-collective",
    ),
    *_accepted("there is one data-parallel implementation", valued="--DDP-impl"),
    *_accepted(
        "communication is overlapped with computation wherever that is possible",
        switches="--tp-comm-overlap --no-async-tensor-model-parallel-allreduce",
    ),
    *_accepted(
        "every rank holds its whole parameters, so none are gathered", switches="--overlap-param-gather"
    ),
    *_accepted("there is one pipeline, of one stage too", switches="--no-pipeline-parallel"),
    *_accepted(
        "layers are always dealt over the stages as evenly as they go", valued="--pp-partition-method"
    ),
    *_accepted("sequences are never divided over ranks", valued="--context-parallel-algo"),
    *_accepted("the launcher's environment variables say the rank", valued="--local-rank --local_rank"),
    *_accepted("it is only a label", valued="--jobid"),
    *_accepted(
        "padded vocabulary rows take no probability, so their number changes nothing",
        valued="--padded-vocab-size --pad-vocab-size-to",
    ),
    *_accepted(
        "no attention mask is built where plain causal order needs none",
        switches="--no-create-attention-mask-in-dataloader",
    ),
    *_accepted("data files are always memory-mapped", switches="--no-mmap-bin-files"),
    *_accepted(
        "checkpoints are always safetensors files with a manifest, which any layout can load",
        switches="--auto-detect-ckpt-format --universal-checkpoint",
        valued="--ckpt-format",
    ),
    *_accepted("a checkpoint must always hold every tensor that is loaded", valued="--dist-ckpt-strictness"),
    *_accepted("a checkpoint is complete before training goes on", switches="--async-save"),
    *_accepted("the batch size is always written", switches="--log-batch-size-to-tensorboard"),
    *_accepted("what is logged does not depend on a level", valued="--logging-level"),
    *_accepted(
        "metrics go to --tensorboard-dir and --metrics-file",
        valued="--wandb-project --wandb-exp-name --wandb-entity",
    ),
    *_accepted(
        "it tunes --profile, which is not given",
        switches="--use-pytorch-profiler --pytorch-profiler-collect-callstack",
        valued="--profile-step-start --profile-step-end",
        listed="--profile-ranks",
    ),
)

_REFUSED_MODEL = (
    *_refused(
        "mixture of experts is not built; leave it out for a dense model",
        switches="--moe-grouped-gemm --moe-permute-fusion --moe-router-enable-expert-bias "
        "--moe-router-pre-softmax --moe-router-fusion --moe-per-layer-logging "
        "--moe-pad-expert-input-to-capacity --moe-router-force-load-balancing --moe-shared-expert-overlap "
        "--create-moe-param-group --disable-moe-token-dropping",
        valued="--moe-router-topk --moe-token-dispatcher-type --moe-ffn-hidden-size --moe-layer-freq "
        "--moe-router-dtype --moe-router-score-function --moe-router-topk-scaling-factor "
        "--moe-router-num-groups --moe-router-group-topk --moe-shared-expert-intermediate-size "
        "--moe-z-loss-coeff --moe-router-bias-update-rate --moe-expert-capacity-factor "
        "--moe-eval-capacity-factor --moe-loss-coeff --moe-min-capacity --moe-train-capacity-factor "
        "--moe-token-drop-policy",
        listed="--num-experts --moe-router-load-balancing-type --moe-aux-loss-coeff",
    ),
    *_refused(
        "mixture of experts is not built; leave it out, or give 1",
        valued="--expert-model-parallel-size --expert-tensor-parallel-size --moe-expert-parallel-size",
        harmless="1",
    ),
    *_refused(
        "multi-latent attention is not built; use --group-query-attention --num-query-groups N",
        switches="--multi-latent-attention",
        valued="--q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim "
        "--rotary-scaling-factor --mscale --mscale-all-dim",
    ),
    *_refused("use --group-query-attention --num-query-groups N", valued="--num-key-value-heads"),
    *_refused(
        "use --group-query-attention --num-query-groups 1",
        valued="--attention-head-type",
        harmless="multihead",
    ),
    *_refused(
        "multi-token prediction is not built; leave it out",
        valued="--mtp-num-layers --mtp-loss-scaling-factor",
    ),
    *_refused(
        "stretched rotary positions are not built; leave it out, and set --rotary-base",
        valued="--rope-scaling-factor --rotary-seq-len-interpolation-factor",
        listed="--mrope-section",
        harmless="1 1.0",
    ),
    *_refused("it cancels out but for rounding; leave it out", switches="--apply-query-key-layer-scaling"),
    *_refused("norm weights are stored as they are; leave it out", switches="--apply-layernorm-1p"),
    *_refused("a norm after the embedding is not built; leave it out", switches="--embed-layernorm"),
    *_refused("z-loss is not built; leave it out", switches="--use-z-loss"),
    *_refused("the flags alone describe the model; leave it out", valued="--model-type-hf", listed="--spec"),
    *_refused("use --seq-length", valued="--encoder-seq-length --max-padding-length"),
    *_refused("encoder-decoder models are not built; leave it out", valued="--decoder-seq-length"),
    *_refused(
        "extra tokens belong into the tokenizer's file; leave it out",
        valued="--vocab-extra-ids --extra-vocab-size",
        harmless="0",
    ),
    *_refused(
        "8-bit floats are not built; use --bf16",
        switches="--fp8-hybrid",
        valued="--fp8-format --fp8-amax-compute-algo --fp8-amax-history-len",
    ),
)

_REFUSED_LAYOUT = (
    *_refused(
        "sequence parallelism is not built yet; leave it out (the numbers are the same), and to save memory "
        f"use {_RECOMPUTE}",
        switches="--sequence-parallel",
    ),
    *_refused(
        "the sharded optimizer is not built yet; leave it out (the numbers are the same), and to save memory "
        "raise --tensor-model-parallel-size or --pipeline-model-parallel-size",
        switches="--use-distributed-optimizer",
    ),
    *_refused(
        "sharding by DeepSpeed is not used; leave it out or give 0, and to save memory raise "
        "--tensor-model-parallel-size or --pipeline-model-parallel-size",
        valued="--zero-stage",
        harmless="0",
    ),
    *_refused(
        "interleaved stages are not built yet; leave it out (the numbers are the same)",
        valued="--num-layers-per-virtual-pipeline-stage",
    ),
    *_refused(
        "layers are dealt over the stages as evenly as they go; leave it out (the numbers are the same)",
        valued="--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers",
    ),
    *_refused(
        "sequences are not divided over ranks yet; leave it out or give 1, and to save memory use "
        + _RECOMPUTE,
        valued="--ds-sequence-parallel-size",
        harmless="1",
    ),
    *_refused(f"use {_RECOMPUTE}", switches="--checkpoint-activations --deepspeed-activation-checkpointing"),
    *_refused(
        f"selective recomputation is not built; use {_RECOMPUTE}",
        switches="--recompute-activations",
        listed="--recompute-modules",
    ),
    *_refused(
        "nothing is kept in the host's memory; leave it out, and to save memory use " + _RECOMPUTE,
        switches="--optimizer-cpu-offload --cpu-optimizer",
        valued="--cpu-offloading-num-layers --optimizer-offload-fraction",
        harmless="0 0.0",
    ),
    *_refused(
        "optimizer state is always float32; leave it out",
        switches="--use-precision-aware-optimizer",
        valued="--main-grads-dtype",
        harmless="fp32",
    ),
    *_refused(
        "DeepSpeed is not used; leave it out and start the script with torchrun",
        switches="--deepspeed",
        valued="--deepspeed_config --deepspeed-config",
    ),
    *_refused("start the script with torchrun or srun, and leave it out", switches="--use-mpi"),
    *_refused(
        "it is a flag of torchrun: put it before the name of the script",
        valued="--node_rank --nnodes --nproc_per_node --master_port --master_addr --rdzv_backend "
        "--rdzv_endpoint --max_restarts --tee --log_dir",
    ),
    *_refused("use --tensor-model-parallel-size", valued="--model-parallel-size"),
)

_REFUSED_RUN = (
    *_refused("use --micro-batch-size", valued="--batch-size"),
    *_refused("use --lr-warmup-fraction", valued="--warmup"),
    *_refused(
        "lengths are counted in iterations or samples: divide by --seq-length and use --train-samples, "
        "--lr-decay-samples and --lr-warmup-samples",
        valued="--train-tokens --lr-decay-tokens --lr-warmup-tokens",
    ),
    *_refused("the batch size does not grow; leave it out, or train in stages", listed="--rampup-batch-size"),
    *_refused(
        "datasets are always .bin and .idx files; leave it out", valued="--data-impl", harmless="mmap infer"
    ),
    *_refused(
        "use --train-data-path, --valid-data-path and --test-data-path, each with weights and prefixes",
        valued="--train-weighted-split-paths-path --valid-weighted-split-paths-path "
        "--test-weighted-split-paths-path",
    ),
    *_refused(
        "fill-in-the-middle samples are not built; leave it out", valued="--fim-rate", harmless="0 0.0"
    ),
    *_refused(
        "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH",
        valued="--tokenizer-name-or-path --patch-tokenizer-type",
    ),
    *_refused(
        "weights of Hugging Face are not converted on the way; leave it out",
        switches="--enable-hf2mg-convert",
    ),
    *_refused(
        "optimizer states are not written to TensorBoard; leave it out, or use --log-params-norm",
        switches="--log-optimizer-states-to-tensorboard",
    ),
    *_refused(
        "profiling is not built; leave it out, or use --log-timers-to-tensorboard", switches="--profile"
    ),
    *_refused("use --exit-signal-handler and send SIGTERM", valued="--kill-switch-path"),
)

FOREIGN_FLAGS: Mapping[str, ForeignFlag] = {
    foreign.spelling: foreign for foreign in (*_ACCEPTED, *_REFUSED_MODEL, *_REFUSED_LAYOUT, *_REFUSED_RUN)
}
"""Every flag that is known and not ours, by its spelling."""

FOREIGN_VALUES: Mapping[str, Mapping[str, str]] = {
    "recompute_granularity": {"selective": f"selective recomputation is not built; use {_RECOMPUTE}"},
    "position_embedding_type": dict.fromkeys(("alibi", "relative", "yarn", "mrope"), "not built; use rope"),
    "tokenizer_type": {
        "PretrainedFromHF": "use HuggingFaceTokenizer with --tokenizer-model PATH",
        "TikTokenizer": "not built; use HuggingFaceTokenizer with the tokenizer.json of the same vocabulary",
    },
    "dataloader_type": {"external": "data is always read by this program; use single or cyclic"},
    "optimizer": dict.fromkeys(("muon", "dist_muon", "adaptive_muon", "lion", "soap"), "not built; use adam"),
}
"""Values of our own flags that other systems know, by the field's name: what to use instead."""


class _Note(argparse.Action):
    """Remember that a foreign flag was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, _GIVEN, [])
        listed = values if isinstance(values, list) else [values]
        setattr(namespace, _GIVEN, [*given, (option_string, listed)])


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Let a parser recognise every foreign flag and its values; ``--help`` leaves them out."""
    for foreign in FOREIGN_FLAGS.values():
        parser.add_argument(
            foreign.spelling,
            dest=_GIVEN,
            nargs=foreign.nargs,
            action=_Note,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def judge_foreign_flags(namespace: argparse.Namespace) -> list[str]:
    """One line for each foreign flag on the command line that has no effect.

    Raises:
        ValueError: if flags are refused; the message names them all, with what to use instead.
    """
    refused: dict[str, list[str]] = {}
    notes: dict[str, str] = {}
    for spelling, values in getattr(namespace, _GIVEN, []):
        foreign = FOREIGN_FLAGS[spelling]
        if foreign.accepts(values):
            notes[spelling] = _note(foreign, values)
        elif spelling not in refused.setdefault(foreign.reason, []):
            refused[foreign.reason].append(spelling)
    if refused:
        raise ValueError("; ".join(f"{', '.join(flags)}: {reason}" for reason, flags in refused.items()))
    return list(notes.values())


def _note(foreign: ForeignFlag, values: Sequence[str]) -> str:
    if foreign.accepted:
        return f"{foreign.spelling} has no meaning here: {foreign.reason}"
    return f"{foreign.spelling} {' '.join(values)} has no meaning here: it asks for what is always so"
