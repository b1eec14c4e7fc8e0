"""Foreign flags that are refused: what to use instead."""

from collections.abc import Mapping
from typing import Final

from megatron.training.foreign_flags.entries import RECOMPUTE, ForeignFlag, refused

_MOE: Final = "mixture of experts is not built; leave it out for a dense model"
_FLOAT8: Final = "8-bit floats are not built; use --bf16"
_BERT: Final = "BERT, T5 and retrieval models are not built; leave it out"
_VISION: Final = "vision models are not built; leave it out"
_DEEPSPEED: Final = "DeepSpeed is not used; leave it out and start the script with torchrun"
_MEMORY: Final = "raise --tensor-model-parallel-size or --pipeline-model-parallel-size"

_MODEL: Final = (
    *refused(
        _MOE,
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
    *refused(
        "mixture of experts is not built; leave it out, or give 1",
        valued="--expert-model-parallel-size --expert-tensor-parallel-size --moe-expert-parallel-size",
        harmless="1",
    ),
    *refused(
        "multi-latent attention is not built; use --group-query-attention --num-query-groups N",
        switches="--multi-latent-attention --cache-mla-latents",
        valued="--q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim "
        "--rotary-scaling-factor --mscale --mscale-all-dim",
    ),
    *refused("use --group-query-attention --num-query-groups N", valued="--num-key-value-heads"),
    *refused(
        "use --group-query-attention --num-query-groups 1",
        valued="--attention-head-type",
        harmless="multihead",
    ),
    *refused(
        "attention always sees all that comes before; leave it out",
        valued="--window-size --window-attn-skip-freq",
    ),
    *refused("attention has the plain softmax; leave it out", valued="--softmax-type", harmless="vanilla"),
    *refused("use --qk-layernorm, or leave it out", switches="--qk-l2-norm"),
    *refused(
        "multi-token prediction is not built; leave it out",
        valued="--mtp-num-layers --mtp-loss-scaling-factor",
    ),
    *refused(
        "stretched rotary positions are not built; leave it out, and set --rotary-base",
        switches="--use-rope-scaling",
        valued="--rope-scaling-factor --rotary-seq-len-interpolation-factor",
        listed="--mrope-section",
        harmless="1 1.0",
    ),
    *refused(
        "rotary positions turn the two halves of a head against each other; leave it out",
        switches="--rotary-interleaved",
    ),
    *refused("positions are the same in every layer; leave it out", valued="--no-rope-freq"),
    *refused("rotary positions are the plain ones; leave it out", valued="--rope-type", harmless="rope"),
    *refused(
        "relative position biases are not built; use --position-embedding-type rope",
        valued="--relative-attention-num-buckets --relative-attention-max-distance",
    ),
    *refused(
        "the MLP has the exact GELU, or with --swiglu the gated SiLU; leave it out",
        switches="--openai-gelu --squared-relu --quick-geglu --use-fused-weighted-squared-relu",
        valued="--activation-func-clamp-value --glu-linear-offset",
        harmless="0 0.0",
    ),
    *refused("it cancels out but for rounding; leave it out", switches="--apply-query-key-layer-scaling"),
    *refused("norm weights are stored as they are; leave it out", switches="--apply-layernorm-1p"),
    *refused(
        "norms come before attention and MLP, and residuals before norms; leave it out",
        switches="--apply-residual-connection-post-layernorm",
    ),
    *refused("a norm after the embedding is not built; leave it out", switches="--embed-layernorm"),
    *refused(
        "weights are drawn from the normal distribution of --init-method-std; leave it out",
        switches="--init-method-xavier-uniform",
        valued="--embedding-init-method-std",
    ),
    *refused(
        "replicas start from the same weights, as they must; leave it out",
        switches="--data-parallel-random-init",
    ),
    *refused("z-loss is not built; leave it out", switches="--use-z-loss"),
    *refused("the flags alone describe the model; leave it out", valued="--model-type-hf", listed="--spec"),
    *refused("use --num-layers", valued="--encoder-num-layers --decoder-num-layers"),
    *refused("use --seq-length", valued="--encoder-seq-length --max-padding-length"),
    *refused(
        "encoder-decoder models are not built; leave it out",
        valued="--decoder-seq-length --pipeline-model-parallel-split-rank "
        "--encoder-tensor-model-parallel-size --encoder-pipeline-model-parallel-size",
        harmless="0",
    ),
    *refused(
        "extra tokens belong into the tokenizer's file; leave it out",
        valued="--extra-vocab-size",
        harmless="0",
    ),
)

_PRECISION: Final = (
    *refused(
        _FLOAT8,
        switches="--fp8-hybrid --fp8-e4m3",
        valued="--fp8-format --fp8-recipe --fp8-margin --fp8-interval --fp8-amax-compute-algo "
        "--fp8-amax-history-len",
    ),
    *refused(
        "the residual stream has the number format of the model; leave it out",
        switches="--fp32-residual-connection",
    ),
    *refused("losses are always computed in float32; leave it out", switches="--fp16-lm-cross-entropy"),
    *refused(
        "the GPU's library chooses how products accumulate; leave it out",
        switches="--disable-bf16-reduced-precision-matmul",
    ),
    *refused(
        "optimizer state is always float32; leave it out",
        switches="--use-precision-aware-optimizer",
        valued="--main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype",
        harmless="fp32",
    ),
)

_LAYOUT: Final = (
    *refused(
        "use --data-parallel-sharding-strategy optim_grads_params (ZeRO-3), or one of its other values",
        switches="--use-torch-fsdp2 --use-megatron-fsdp --use-custom-fsdp "
        "--torch-fsdp2-no-reshard-after-forward --fsdp-double-buffer --enable-full-sharding-in-hsdp "
        "--keep-fp8-transpose-cache",
        valued="--suggested-communication-unit-size",
    ),
    *refused(
        "state is divided over all data-parallel ranks, not over groups of them; leave it out, or give 1",
        valued="--num-distributed-optimizer-instances",
        harmless="1",
    ),
    *refused(
        "each rank makes its own parameters where they stay; leave it out",
        switches="--init-model-with-meta-device",
    ),
    *refused(
        "sharding by DeepSpeed is not used; use --data-parallel-sharding-strategy optim (stage 1), "
        "optim_grads (2) or optim_grads_params (3)",
        valued="--zero-stage",
        harmless="0",
    ),
    *refused(
        "use --account-for-embedding-in-pipeline-split, or --pipeline-model-parallel-layout",
        switches="--standalone-embedding-stage",
    ),
    *refused(
        "use --context-parallel-size, and --cp-comm-type a2a for the exchange of heads",
        valued="--ds-sequence-parallel-size",
        listed="--hierarchical-context-parallel-sizes",
        harmless="1",
    ),
    *refused(
        f"use {RECOMPUTE}",
        switches="--checkpoint-activations --deepspeed-activation-checkpointing",
        valued="--checkpoint-granularity --checkpoint-method --checkpoint-num-layers "
        "--activations-checkpoint-granularity --activations-checkpoint-method "
        "--activations-checkpoint-num-layers",
    ),
    *refused(
        "use --distribute-saved-activations",
        switches="--distribute-checkpointed-activations",
    ),
    *refused(
        "nothing is kept in the host's memory; leave it out, and to save memory use " + RECOMPUTE,
        switches="--optimizer-cpu-offload --cpu-optimizer --use-torch-optimizer-for-cpu-offload "
        "--overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params "
        "--fine-grained-activation-offloading",
        valued="--cpu-offloading-num-layers --optimizer-offload-fraction",
        listed="--offload-modules",
        harmless="0 0.0",
    ),
    *refused(_DEEPSPEED, switches="--deepspeed", valued="--deepspeed_config --deepspeed-config"),
    *refused(
        "start the script with torchrun or srun, and leave it out",
        switches="--use-mpi",
        valued="--rank --world-size --world_size --dist-url --dist_url --lazy-mpu-init",
    ),
    *refused(
        "it is a flag of torchrun: put it before the name of the script",
        switches="--standalone",
        valued="--node_rank --node-rank --nnodes --nproc_per_node --nproc-per-node --master_port "
        "--master-port --master_addr --master-addr --rdzv_backend --rdzv-backend --rdzv_endpoint "
        "--rdzv-endpoint --rdzv_id --rdzv-id --max_restarts --max-restarts --tee --log_dir --log-dir",
    ),
    *refused("use --tensor-model-parallel-size", valued="--model-parallel-size"),
    *refused("use --distributed-timeout-minutes", valued="--distributed-timeout-seconds-after-init"),
)

_TRAINING: Final = (
    *refused("use --micro-batch-size", valued="--batch-size"),
    *refused("use --lr-warmup-fraction", valued="--warmup"),
    *refused("all weights share one learning rate; leave it out", valued="--decoupled-lr --decoupled-min-lr"),
    *refused(
        "lengths are counted in iterations or samples: divide by --seq-length and use --train-samples, "
        "--lr-decay-samples and --lr-warmup-samples",
        valued="--train-tokens --lr-decay-tokens --lr-warmup-tokens",
    ),
    *refused(
        "a global batch is never cut to fit the layout; leave it out, and give one that fits",
        switches="--decrease-batch-size-if-needed",
    ),
    *refused("parameters have one rule; leave it out", valued="--dump-param-to-param-group-map"),
    *refused(
        "no iteration is left out or computed twice; leave it out",
        valued="--result-rejected-tracker-filename --error-injection-rate --error-injection-type "
        "--rerun-mode",
        listed="--iterations-to-skip",
        harmless="0 disabled",
    ),
    *refused(
        "a NaN or infinite loss or gradient ends the run, and --clip-grad limits a large one; leave it out",
        switches="--check-for-spiky-loss --check-for-large-grads",
    ),
    *refused(
        "replicas are compared once, at the start; leave it out",
        valued="--check-weight-hash-across-dp-replicas-interval",
    ),
    *refused(
        "use --exit-signal-handler, and start the script again with --load equal to --save",
        switches="--adlr-autoresume --enable-ft-package --calc-ft-timeouts",
        valued="--adlr-autoresume-interval",
    ),
    *refused("use --exit-signal-handler and send SIGTERM", valued="--kill-switch-path"),
    *refused("evaluation without training is not built; leave it out", switches="--skip-train"),
    *refused("it is for Megatron-LM's own tests; leave it out", switches="--test-mode"),
)

_DATA: Final = (
    *refused(
        "datasets are always .bin and .idx files; leave it out",
        valued="--data-impl --dataset-impl",
        harmless="mmap infer",
    ),
    *refused("put the flags in a file, as on a command line, and give @FILE", valued="--yaml-cfg"),
    *refused(
        "use --train-data-path, --valid-data-path and --test-data-path, each with weights and prefixes",
        valued="--train-weighted-split-paths-path --valid-weighted-split-paths-path "
        "--test-weighted-split-paths-path",
    ),
    *refused("data lies in local files; leave it out", valued="--object-storage-cache-path"),
    *refused("all of the data is read; leave it out", valued="--sample-rate", harmless="1 1.0"),
    *refused(
        "--dataloader-type cyclic shuffles all samples at once; leave it out", switches="--no-data-sharding"
    ),
    *refused("no token counts as padding; leave it out", switches="--allow-ambiguous-pad-tokens"),
    *refused(
        "tuning on conversations is not built; leave it out",
        switches="--sft",
        valued="--sft-tokenizer-prompt-format",
    ),
    *refused(
        "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH",
        valued="--tokenizer-name-or-path --patch-tokenizer-type --tokenizer-metadata",
    ),
    *refused("a tokenizer's own code is never run; leave it out", switches="--trust-remote-code"),
)

_CHECKPOINTS: Final = (
    *refused("use --save-interval", valued="--persistent-save-interval"),
    *refused(
        "checkpoints are never deleted; leave it out, and delete old ones yourself",
        valued="--save-retain-interval",
    ),
    *refused(
        "checkpoints are kept in one place; leave it out, and use --save and --save-interval",
        switches="--replication",
        valued="--non-persistent-save-interval --non-persistent-ckpt-type --non-persistent-global-ckpt-dir "
        "--non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo --replication-jump "
        "--replication-factor",
    ),
    *refused(
        "any layout loads any checkpoint; leave it out, and give the layout that you want",
        switches="--use-mp-args-from-checkpoint-args",
    ),
    *refused(
        "checkpoints of other systems are not converted; leave it out",
        switches="--enable-hf2mg-convert --ckpt-convert-update-legacy-dist-opt-format",
        valued="--ckpt-convert-format --ckpt-convert-save",
    ),
)

_LOGGING: Final = (
    *refused(
        "optimizer states are not written to TensorBoard; leave it out, or use --log-params-norm",
        switches="--log-optimizer-states-to-tensorboard",
    ),
    *refused("use --no-log-learning-rate-to-tensorboard", switches="--no-log-learnig-rate-to-tensorboard"),
    *refused("use --metrics-file FILE", switches="--log-progress"),
    *refused("each checkpoint holds the settings; leave it out", valued="--config-logger-dir"),
    *refused(
        "an iteration is timed as a whole; leave it out or give 0, and use --log-timers-to-tensorboard",
        valued="--timing-log-level",
        harmless="0",
    ),
    *refused(
        "neither energy nor slow ranks are measured; leave it out, or use --log-throughput",
        switches="--log-energy --log-straggler --disable-straggler-on-startup",
        valued="--straggler-ctrlr-port --straggler-minmax-count",
    ),
    *refused(
        "profiling is not built; leave it out, or use --log-timers-to-tensorboard",
        switches="--profile --record-memory-history --run-workload-inspector-server",
        valued="--memory-snapshot-path",
    ),
)

_OTHER_MODELS: Final = (
    *refused(
        _BERT,
        switches="--bert-no-binary-head --biencoder-shared-query-context-model --use-one-sent-docs "
        "--retriever-score-scaling",
        valued="--mask-prob --short-seq-prob --retriever-seq-length --ict-head-size --ict-load --bert-load "
        "--biencoder-projection-dim --titles-data-path --query-in-block-prob --evidence-data-path "
        "--block-data-path --embedding-path --indexer-batch-size --indexer-log-interval",
        listed="--retriever-report-topk-accuracies",
    ),
    *refused(
        _VISION,
        valued="--num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction "
        "--data-per-class-fraction --head-lr-mult --swin-backbone-type --mask-type --mask-factor "
        "--iter-per-epoch",
    ),
    *refused("state-space layers are not built; leave it out", switches="--is-hybrid-model"),
    *refused("reinforcement learning is not built; leave it out", switches="--perform-rl-step"),
)

REFUSED: Final[tuple[ForeignFlag, ...]] = (
    *_MODEL,
    *_PRECISION,
    *_LAYOUT,
    *_TRAINING,
    *_DATA,
    *_CHECKPOINTS,
    *_LOGGING,
    *_OTHER_MODELS,
)

FAMILIES: Final[Mapping[str, str]] = {
    "--moe-": _MOE,
    "--fp8-": _FLOAT8,
    "--fp4-": _FLOAT8,
    "--mtp-": "multi-token prediction is not built; leave it out",
    "--mamba-": "state-space layers are not built; leave it out",
    "--hybrid-": "state-space layers are not built; leave it out",
    "--heterogeneous-": "all layers have the same shape; leave it out",
    "--muon-": "muon is not built; use --optimizer adam, and leave it out",
    "--biencoder-": _BERT,
    "--retriever-": _BERT,
    "--indexer-": _BERT,
    "--ict-": _BERT,
    "--bert-": _BERT,
    "--retro-": _BERT,
    "--vision-": _VISION,
    "--dino-": _VISION,
    "--inference-": "it is for generating text, which tools/generate_text.py does; leave it out",
    "--rl-": "reinforcement learning is not built; leave it out",
    "--grpo-": "reinforcement learning is not built; leave it out",
    "--langrl-": "reinforcement learning is not built; leave it out",
    "--inprocess-": "a rank that fails ends the job, and its launcher starts it again; leave it out",
    "--curriculum-": "the sequence length does not change during a run; leave it out",
    "--data-efficiency-": "the sequence length does not change during a run; leave it out",
    "--random-ltd": "every layer sees every token; leave it out",
    "--deepspeed": _DEEPSPEED,
    "--zero-": _DEEPSPEED,
    "--ds-": _DEEPSPEED,
    "--export-": "nothing is exported while training; leave it out",
}
"""Beginnings of flags of whole families that are refused, whatever flags they come to have."""

FOREIGN_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "position_embedding_type": dict.fromkeys(("alibi", "relative", "yarn", "mrope"), "not built; use rope"),
    "tokenizer_type": {
        **dict.fromkeys(
            ("PretrainedFromHF", "HFTokenizer", "QwenTokenizer", "Llama3Tokenizer", "DeepSeekV2Tokenizer"),
            "use HuggingFaceTokenizer with --tokenizer-model PATH",
        ),
        "Llama2BPETokenizer": "use Llama2Tokenizer with --tokenizer-model PATH",
        "HFGPT2Tokenizer": "use GPT2BPETokenizer with --vocab-file and --merge-file",
        "CharLevelTokenizer": "use ByteLevelTokenizer",
        "SFTTokenizer": "tuning on conversations is not built; use HuggingFaceTokenizer for text",
        **dict.fromkeys(
            ("MultimodalTokenizer", "NullMultimodalTokenizer"),
            "models of images are not built; use one for text",
        ),
    },
    "cp_comm_type": {
        "allgather": "use all_gather",
        "a2a+p2p": "hierarchies of two types are not built; use p2p, or a2a where it divides the heads",
    },
    "dataloader_type": {"external": "data is always read by this program; use single or cyclic"},
    "optimizer": dict.fromkeys(("muon", "dist_muon", "adaptive_muon", "lion", "soap"), "not built; use adam"),
}
"""Values of our own flags that other systems know, by the field's name: what to use instead."""

FOREIGN_WORDS: Final[Mapping[str, str]] = dict.fromkeys(
    ("p2p", "all_gather", "allgather", "a2a", "a2a+p2p"),
    "--cp-comm-type takes one type, which all layers use, and hierarchies of two (a2a+p2p) are not built",
)
"""Further values that other systems take where a flag of ours takes one: what to say of the words."""
