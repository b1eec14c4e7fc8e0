"""Foreign flags that are accepted: ignoring them changes no numbers and loses nothing that counts."""

from typing import Final

from megatron.training.foreign_flags.entries import ForeignFlag, accepted

_COMPUTING: Final = (
    *accepted(
        "kernels are chosen by what the machine has; all give the same function",
        switches="--use-flash-attn --use-flash-attn-v2 --no-masked-softmax-fusion --no-bias-dropout-fusion "
        "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-gradient-accumulation-fusion "
        "--cross-entropy-loss-fusion --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb "
        "--abort-on-unmet-fused-kernel-constraints --no-persist-layer-norm --use-te-activation-func",
        valued="--transformer-impl --cross-entropy-fusion-impl",
    ),
    *accepted(
        "kernels are started one by one, which changes no numbers",
        switches="--enable-cuda-graph --external-cuda-graph",
        valued="--cuda-graph-impl --cuda-graph-warmup-steps",
        listed="--cuda-graph-scope",
    ),
    *accepted(
        "there is one implementation of the model",
        switches="--use-mcore-models --use-legacy-models --enable-experimental",
    ),
    *accepted("each tokenizer has one implementation", switches="--legacy-tokenizer"),
    *accepted("nothing is exported while training", valued="--onnx-safe"),
    *accepted(
        "the softmax of attention is always accumulated in float32", switches="--attention-softmax-in-fp32"
    ),
    *accepted(
        "attention scores are never scaled by the layer number", switches="--no-query-key-layer-scaling"
    ),
    *accepted(
        "gradients are always accumulated and reduced in float32",
        switches="--accumulate-allreduce-grads-in-fp32 --ddp-reduce-scatter-with-fp32-accumulation",
    ),
    *accepted(
        "the loss of an update is always the sum over its counted tokens divided by their number",
        switches="--calculate-per-token-loss --no-gradient-reduce-div-fusion",
    ),
    *accepted(
        "initial weights are always drawn on the CPU, the same ones in any layout",
        switches="--use-cpu-initialization",
    ),
    *accepted(
        "what is loaded from a checkpoint takes the place of the initial weights",
        switches="--no-initialization",
    ),
    *accepted(
        "random numbers are derived from the seed, so no generator is kept", switches="--te-rng-tracker"
    ),
    *accepted(
        "no part of the embeddings' output is kept beyond its use",
        switches="--no-clone-scatter-output-in-embedding",
    ),
    *accepted("freed GPU memory is kept for the next use", valued="--empty-unused-memory-level"),
    *accepted("when a rank waits for its GPU changes no numbers", valued="--train-sync-interval"),
    *accepted("when Python collects its garbage changes no numbers", switches="--no-manual-gc-eval"),
)

_COMMUNICATING: Final = (
    *accepted(
        "there is one data-parallel implementation",
        switches="--use-contiguous-buffers-in-local-ddp --no-contiguous-buffers-in-local-ddp",
        valued="--DDP-impl",
    ),
    *accepted(
        "communication is overlapped with computation wherever that is possible",
        switches="--tp-comm-overlap --no-async-tensor-model-parallel-allreduce --tp-comm-overlap-rs-dgrad "
        "--disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --disable-tp-comm-bulk-dgrad "
        "--disable-tp-comm-bulk-wgrad --disable-tp-comm-split-ag --disable-tp-comm-split-rs",
        valued="--tp-comm-overlap-cfg --tp-comm-bootstrap-backend",
    ),
    *accepted(
        "how transfers are cut and timed changes no numbers",
        switches="--overlap-p2p-communication --no-overlap-p2p-communication "
        "--overlap-p2p-communication-warmup-flush --use-ring-exchange-p2p --delay-grad-reduce "
        "--no-delay-grad-reduce --no-align-grad-reduce --ddp-pad-buckets-for-high-nccl-busbw "
        "--delay-wgrad-compute "
        "--defer-embedding-wgrad-compute",
        valued="--ddp-num-buckets --wgrad-deferral-limit --pipeline-model-parallel-comm-backend",
    ),
    *accepted(
        "NCCL is used as it is; its own environment variables tune it",
        switches="--use-nccl-ub --disable-symmetric-registration --use-sharp",
        valued="--sharp-enabled-group --nccl-communicator-config-path",
        listed="--high-priority-stream-groups",
    ),
    *accepted("process groups are of --distributed-backend alone", switches="--disable-gloo-process-groups"),
    *accepted(
        "when gathered parameters are waited for changes no numbers",
        switches="--overlap-param-gather-with-optimizer-step --no-align-param-gather --delay-param-gather",
    ),
    *accepted(
        "the place of a rank in the layout is fixed, and changes no numbers",
        switches="--use-tp-pp-dp-mapping",
    ),
    *accepted("there is one pipeline, of one stage too", switches="--no-pipeline-parallel"),
    *accepted("layers are always dealt over the stages as evenly as they go", valued="--pp-partition-method"),
    *accepted("--cp-comm-type says how ranks of a sequence communicate", valued="--context-parallel-algo"),
    *accepted("the launcher's environment variables say the rank", valued="--local-rank --local_rank"),
)

_DATA_AND_FILES: Final = (
    *accepted(
        "padded vocabulary rows take no probability, so their number changes nothing",
        valued="--padded-vocab-size --pad-vocab-size-to",
    ),
    *accepted(
        "no attention mask is built where plain causal order needs none",
        switches="--no-create-attention-mask-in-dataloader",
    ),
    *accepted("mapped files are read when they are needed", switches="--mmap-warmup"),
    *accepted("sample indices are built by one thread of a rank", valued="--num-dataset-builder-threads"),
    *accepted(
        "checkpoints are always safetensors files with a manifest, which any layout can load",
        switches="--auto-detect-ckpt-format --universal-checkpoint --use-dist-ckpt "
        "--ckpt-assume-constant-structure --dist-ckpt-save-pre-mcore-014 "
        "--dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient "
        "--no-strict-fsdp-dtensor-load --disable-msc",
        valued="--ckpt-format --dist-ckpt-format",
    ),
    *accepted(
        "each rank always saves and loads its own share",
        switches="--ckpt-fully-parallel-save --no-ckpt-fully-parallel-save --ckpt-fully-parallel-load",
    ),
    *accepted("a checkpoint must always hold every tensor that is loaded", valued="--dist-ckpt-strictness"),
    *accepted(
        "main weights are loaded wherever the checkpoint has them", switches="--load-main-params-from-ckpt"
    ),
    *accepted(
        "the tokenizer is always the command line's",
        switches="--no-use-tokenizer-model-from-checkpoint-args",
    ),
    *accepted(
        "a checkpoint is complete before training goes on",
        switches="--async-save --use-persistent-ckpt-worker",
    ),
)

_LOGGING: Final = (
    *accepted("it is only a label", valued="--jobid"),
    *accepted("the batch size is always written", switches="--log-batch-size-to-tensorboard"),
    *accepted("what is logged does not depend on a level", valued="--logging-level"),
    *accepted(
        "metrics go to --tensorboard-dir and --metrics-file",
        valued="--wandb-project --wandb-exp-name --wandb-entity --wandb-save-dir",
    ),
    *accepted(
        "NVIDIA's own logging service is never used",
        switches="--no-one-logger --enable-one-logger --one-logger-async",
        valued="--one-logger-project --one-logger-run-name --app-tag-run-name --app-tag-run-version",
    ),
    *accepted(
        "it tunes --timing-log-level, which is always 0",
        switches="--no-barrier-with-level-1-timing --barrier-with-L1-time",
        valued="--timing-log-option",
    ),
    *accepted(
        "it tunes --profile, which is not given",
        switches="--use-pytorch-profiler --pytorch-profiler-collect-callstack --nvtx-ranges",
        valued="--profile-step-start --profile-step-end",
        listed="--profile-ranks",
    ),
)

ACCEPTED: Final[tuple[ForeignFlag, ...]] = (*_COMPUTING, *_COMMUNICATING, *_DATA_AND_FILES, *_LOGGING)
