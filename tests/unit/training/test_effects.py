"""What a run says of flags that are given without effect."""

import pytest

from megatron.core.config import TokenizerConfig
from megatron.training.arguments import parse_arguments
from megatron.training.effects import flags_without_replicas, tokenizer_flags_without_effect
from tests.unit.training.test_arguments import BASE, CHECKPOINT_ARGS

GPT2 = "--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m"
WITHOUT = [
    (
        f"{GPT2} --tokenizer-model t",
        "--tokenizer-model has no effect with --tokenizer-type GPT2BPETokenizer, which reads --vocab-file",
    ),
    (
        "--tokenizer-type Llama2Tokenizer --tokenizer-model t --vocab-file v --merge-file m",
        "--vocab-file, --merge-file have no effect with --tokenizer-type Llama2Tokenizer, which reads --tok",
    ),
    (
        "--tokenizer-type BertWordPieceCase --vocab-file v --merge-file m --tiktoken-pattern v1",
        "--merge-file, --tiktoken-pattern have no effect with --tokenizer-type BertWordPieceCase, which",
    ),
    (
        "--tokenizer-model t --parse-special-tokens --vocab-size 9",
        "--tokenizer-model, --parse-special-tokens have no effect without --tokenizer-type",
    ),
    (
        "--rotary-base 500000 --rotary-percent 1.0",
        "--rotary-base, --rotary-percent have no effect without --position-embedding-type rope",
    ),
    (
        "--max-position-embeddings 64 --position-embedding-type rope",
        "--max-position-embeddings has no effect without --position-embedding-type learned_absolute, but",
    ),
    ("--num-query-groups 1", "--num-query-groups has no effect without --group-query-attention"),
    ("--add-qkv-bias", "--add-qkv-bias has no effect without --disable-bias-linear"),
    (
        "--reset-position-ids --position-embedding-type none",
        "--reset-position-ids has no effect with --position-embedding-type none",
    ),
    (
        "--initial-loss-scale 65536 --hysteresis 2 --bf16",
        "--initial-loss-scale, --hysteresis have no effect without --fp16",
    ),
    (
        "--loss-scale 64 --fp16 --loss-scale-window 500",
        "--loss-scale-window has no effect with --loss-scale, which is constant",
    ),
    ("--optimizer sgd --adam-beta1 0.9", "--adam-beta1 has no effect without --optimizer adam"),
    ("--sgd-momentum 0.9", "--sgd-momentum has no effect without --optimizer sgd"),
    (
        "--lr-wsd-decay-iters 2 --lr-wsd-decay-style cosine",
        "--lr-wsd-decay-iters, --lr-wsd-decay-style have no effect without --lr-decay-style WSD",
    ),
    (
        "--lr-decay-style constant --min-lr 1e-5",
        "--min-lr has no effect with --lr-decay-style constant",
    ),
    ("--lr-warmup-init 1e-6", "--lr-warmup-init has no effect without a warm-up"),
    (
        "--weight-decay 0.1 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
        "--weight-decay has no effect with --start-weight-decay and --end-weight-decay",
    ),
    ("--ddp-bucket-size 1000", "--ddp-bucket-size has no effect without --overlap-grad-reduce"),
    (
        "--overlap-grad-reduce --data-parallel-sharding-strategy optim_grads_params",
        "--overlap-grad-reduce has no effect with --data-parallel-sharding-strategy optim_grads_params",
    ),
    ("--overlap-param-gather", "--overlap-param-gather has no effect without --use-distributed-optimizer"),
    ("--sequence-parallel", "--sequence-parallel has no effect without --tensor-model-parallel-size above 1"),
    ("--cp-comm-type a2a", "--cp-comm-type has no effect without --context-parallel-size above 1"),
    (
        "--no-scatter-gather-tensors-in-pipeline --tensor-model-parallel-size 2",
        "--no-scatter-gather-tensors-in-pipeline has no effect without tensor and pipeline parallelism",
    ),
    (
        "--microbatch-group-size-per-vp-stage 4",
        "--microbatch-group-size-per-virtual-pipeline-stage has no effect without the interleaved schedule",
    ),
    (
        "--recompute-granularity full --distribute-saved-activations",
        "--distribute-saved-activations has no effect without tensor parallelism",
    ),
    (
        "--recompute-granularity selective --recompute-method uniform --recompute-num-layers 1",
        "--recompute-method, --recompute-num-layers have no effect with selective recomputation",
    ),
    (
        "--recompute-activations --recompute-num-layers 1",
        "--recompute-num-layers has no effect with selective recomputation",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        "--num-layers-per-virtual-pipeline-stage has no effect where it makes one chunk a stage",
    ),
    (
        "--account-for-embedding-in-pipeline-split",
        "--account-for-embedding-in-pipeline-split has no effect with one pipeline stage",
    ),
    ("--trace-iterations 5", "--trace-iterations has no effect without --trace-dir"),
    ("--log-communication", "--log-communication has no effect without --metrics-file or --tensorboard-dir"),
    ("--no-mmap-bin-files", "--no-mmap-bin-files has no effect with --mock-data, which reads no files"),
    ("--fim-rate 0.3 --fim-pad-token p", "--fim-rate, --fim-pad-token have no effect without --fim-data"),
    (
        "--eval-iters 0 --full-validation --eval-global-batch-size 4",
        "--eval-global-batch-size, --full-validation have no effect with --eval-iters 0",
    ),
    ("--no-save-optim", "--no-save-optim has no effect without --save"),
    ("--no-load-optim --no-load-rng", "--no-load-optim, --no-load-rng have no effect without --load"),
    ("--load x --finetune --no-load-rng", "--no-load-rng has no effect with --finetune, which takes"),
    (
        "--override-opt_param-scheduler",
        "--override-opt_param-scheduler has no effect without --load",
    ),
    ("--eval-iters 0 --eval-interval 9", "--eval-interval has no effect with --eval-iters 0"),
    ("--manual-gc-interval 5", "--manual-gc-interval has no effect without --manual-gc"),
    (
        "--log-timers-to-tensorboard --tensorboard-queue-size 1000",
        "--tensorboard-queue-size, --log-timers-to-tensorboard have no effect without --tensorboard-dir",
    ),
    ("--mid-level-dataset-surplus 0.1", "--mid-level-dataset-surplus has no effect without a blend"),
]
WITH = [
    GPT2,
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t --parse-special-tokens",
    "--tokenizer-type TikTokenizer --tokenizer-model t --tiktoken-pattern v2 --tiktoken-num-special-tokens 9 "
    "--tiktoken-special-tokens <unk> <s> </s> --vocab-extra-ids 100",
    "--tokenizer-type ByteLevelTokenizer --vocab-extra-ids 0 --no-parse-special-tokens",
    "--position-embedding-type rope --rotary-base 500000 --rotary-percent 0.5",
    "--rotary-base 500000 --use-rotary-position-embeddings",
    "--max-position-embeddings 64 --group-query-attention --num-query-groups 2 --reset-position-ids",
    "--disable-bias-linear --add-qkv-bias",
    "--fp16 --initial-loss-scale 65536 --min-loss-scale 1 --loss-scale-window 500 --hysteresis 2",
    "--bf16 --loss-scale 64 --max-consecutive-skips 7",
    "--lr-decay-style WSD --lr-wsd-decay-iters 2 --min-lr 1e-5 --lr-warmup-iters 1 --lr-warmup-init 1e-6",
    "--lr-decay-style constant --lr-decay-iters 5 --lr-warmup-fraction 0.2",
    "--optimizer sgd --sgd-momentum 0.8 --weight-decay 0.1",
    "--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-6",
    "--save x --load x --no-save-optim --no-load-optim --no-load-rng --override-opt_param-scheduler",
    "--tensorboard-dir x --log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard",
    "--eval-interval 5 --manual-gc --manual-gc-interval 5 --overlap-grad-reduce --ddp-bucket-size 1000",
    "--no-manual-gc --no-add-qkv-bias",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",  # is refused
    "--account-for-loss-in-pipeline-split --pipeline-model-parallel-size 2",
    "--account-for-loss-in-pipeline-split --num-virtual-stages-per-pipeline-rank 2",
]


def notes(flags, caplog, base=BASE):
    parse_arguments(f"{base} {flags}".split(), "test")
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(("flags", "line"), WITHOUT)
def test_a_flag_without_effect_costs_one_line(flags, line, caplog):
    (said,) = notes(flags, caplog)
    assert said.startswith(line)


@pytest.mark.parametrize("flags", WITH)
def test_a_flag_with_effect_costs_none(flags, caplog):
    assert notes(flags, caplog) == []


SHARING = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --grad-reduce-in-bf16"


@pytest.mark.parametrize(
    ("flags", "world", "named"),
    [
        (
            SHARING,
            1,
            "--overlap-grad-reduce, --use-distributed-optimizer, --overlap-param-gather, "
            "--grad-reduce-in-bf16 have no effect with one replica of the model on world size 1",
        ),
        (SHARING, 2, None),
        (f"{SHARING} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4, "--overlap-grad"),
        (f"{SHARING} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 8, None),
        (f"{SHARING} --context-parallel-size 2", 2, None),  # they share gradients and optimizer state
        ("--data-parallel-sharding-strategy optim_grads", 1, "--data-parallel-sharding-strategy has no"),
        ("--data-parallel-sharding-strategy optim_grads_params --grad-reduce-in-bf16", 1, None),
        ("--no-overlap-grad-reduce --data-parallel-sharding-strategy no_shard", 1, None),
    ],
)
def test_a_lone_replica_shares_nothing(flags, world, named):
    said = flags_without_replicas(parse_arguments(f"{BASE} {flags}".split(), "test"), world)
    assert len(said) == (named is not None)
    assert named is None or said[0].startswith(named)


def test_only_rank_zero_says_it(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert notes("--rotary-base 5", caplog) == []


def test_the_shape_of_a_model_that_the_checkpoint_holds_is_not_judged(caplog):
    words = "--rotary-base 500000 --manual-gc-interval 5 --num-layers-per-virtual-pipeline-stage 2"
    said = notes(words, caplog, CHECKPOINT_ARGS)
    assert said == ["--manual-gc-interval has no effect without --manual-gc"]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            TokenizerConfig("GPT2BPETokenizer", "v", "m", "t"),
            "--tokenizer-model has no effect with --tokenizer-type GPT2BPETokenizer, which reads "
            "--vocab-file and --merge-file",
        ),
        (
            TokenizerConfig("Llama2Tokenizer", "v", "m", "t"),
            "--vocab-file, --merge-file have no effect with --tokenizer-type Llama2Tokenizer, which reads "
            "--tokenizer-model",
        ),
        (
            TokenizerConfig("NullTokenizer", vocab_file="v"),
            "--vocab-file has no effect with --tokenizer-type NullTokenizer, which reads no file",
        ),
    ],
)
def test_a_tokenizer_s_flags_alone(config, line):
    assert tokenizer_flags_without_effect(config) == [line]


def test_a_tokenizer_that_reads_all_of_its_flags():
    assert tokenizer_flags_without_effect(TokenizerConfig("GPT2BPETokenizer", "v", "m")) == []
