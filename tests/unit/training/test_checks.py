import pytest

from megatron.training.arguments import parse_arguments
from megatron.training.checks import divisors, validate
from tests.unit.training.test_arguments import BASE, settled

REFUSED = [
    # flags; world size; what the message names, divided by |
    (
        "--num-attention-heads 6 --hidden-size 96 --tensor-model-parallel-size 4",
        4,
        "--num-attention-heads 6|--tensor-model-parallel-size 4|1, 2, 3, 6",
    ),
    ("--tensor-model-parallel-size 2", 3, "world size 3|= 2|2 or 4 ranks|1, 3"),
    (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        3,
        "world size 3|= 4|start 4 ranks",
    ),
    (
        "--global-batch-size 6 --micro-batch-size 4",
        1,
        "--global-batch-size 6|--micro-batch-size 4|--global-batch-size 4 or 8|--micro-batch-size 1, 2, 3, 6",
    ),
    ("--global-batch-size 9", 4, "x data-parallel size 4 = 8|--global-batch-size 8 or 16"),
    ("--ffn-hidden-size 90 --tensor-model-parallel-size 4", 4, "--ffn-hidden-size 90|such as 92"),
    (
        "--num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups 4 "
        "--tensor-model-parallel-size 6",
        6,
        "--num-query-groups 4|--tensor-model-parallel-size 6|1, 2, 4, 12",
    ),
    (
        "--recompute-granularity full --distribute-saved-activations --hidden-size 65 --kv-channels 16 "
        "--tensor-model-parallel-size 2 --vocab-size 9",
        2,
        "--distribute-saved-activations|--hidden-size 65|--tensor-model-parallel-size 2|multiple of 2",
    ),
    ("--pipeline-model-parallel-size 5", 5, "--pipeline-model-parallel-size 5|--num-layers 4|at most 4"),
    (
        "--context-parallel-size 2 --seq-length 30",
        2,
        "--seq-length 30|2 x --context-parallel-size 2|multiple of 4, such as 28 or 32",
    ),
    (
        "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 63",
        2,
        "--seq-length 63|--tensor-model-parallel-size 2 (--sequence-parallel)|62 or 64",
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a --tensor-model-parallel-size 2",
        8,
        "--cp-comm-type a2a|2 heads|--num-attention-heads 4|--context-parallel-size 4|1, 2|--cp-comm-type",
    ),
    (
        "--num-layers 10 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        2,
        "--num-layers 10|--pipeline-model-parallel-size 2|--num-layers-per-virtual-pipeline-stage 2",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 3 "
        "--micro-batch-size 1 --microbatch-group-size-per-vp-stage 2",
        2,
        "3 micro-batches|in groups of 2|--pipeline-model-parallel-size 2|2, 4, 6|--global-batch-size",
    ),
    (
        "--num-layers 20 --decoder-last-pipeline-num-layers 1",
        1,
        "--decoder-last-pipeline-num-layers 1|--num-layers 20|--pipeline-model-parallel-size 1",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule gpipe",
        2,
        "--pipeline-schedule gpipe|--num-virtual-stages-per-pipeline-rank",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved",
        2,
        "--pipeline-schedule interleaved|--num-virtual-stages-per-pipeline-rank",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|ttL",
        2,
        "--pipeline-model-parallel-layout 'Ettt|ttL'|--num-layers is 4",
    ),
    (
        "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ett||ttL",
        3,
        "--pipeline-model-parallel-layout 'Ett||ttL'|stage 1 of --pipeline-model-parallel-size 3",
    ),
    (
        "--pipeline-model-parallel-size 7 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
        7,
        "--pipeline-model-parallel-size 7|--num-layers 4 and 2 more that are counted|at most 6 stages",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --data-parallel-sharding-strategy "
        "optim_grads_params",
        4,
        "--data-parallel-sharding-strategy optim_grads_params|--pipeline-schedule zb-h1|optim_grads",
    ),
    ("--train-samples 100", 1, "either --train-iters or --train-samples|both are given"),
    ("--lr-warmup-samples 3", 1, "--lr-warmup-samples 3|--train-iters|--lr-warmup-iters"),
    ("--lr-decay-samples 3", 1, "--lr-decay-samples 3|--lr-decay-iters"),
    ("--lr-wsd-decay-samples 3", 1, "--lr-wsd-decay-samples 3"),
    ("--split 90,x,5", 1, "--split '90,x,5'"),
    ("--multiple-validation-sets", 1, "--multiple-validation-sets|--valid-data-path"),
]


@pytest.mark.parametrize(("flags", "world", "named"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_does_not_fit_is_refused_with_numbers_and_choices(flags, world, named):
    config = parse_arguments(f"{BASE} {flags}".split(), "test")
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the parts are compared below
        validate(config, world)
    for part in named.split("|"):
        assert part in str(refusal.value)


WRONG = [
    ("--max-position-embeddings 16", ["--seq-length 32", "--max-position-embeddings 16", "at least 32"]),
    ("--hidden-size 66", ["--hidden-size 66", "--num-attention-heads 4", "--kv-channels"]),
    ("--num-query-groups 2", ["--num-query-groups 2", "--group-query-attention"]),
    ("--group-query-attention --num-query-groups 3", ["--num-attention-heads 4", "--num-query-groups 3"]),
    ("--fp16 --bf16", ["--fp16", "--bf16"]),
    ("--recompute-method block", ["--recompute-method", "--recompute-granularity full"]),
    ("--save-interval 5", ["--save-interval 5", "--save FOLDER"]),
    ("--ckpt-step 5", ["--ckpt-step", "--load FOLDER"]),
    ("--finetune", ["--finetune", "--load FOLDER", "--pretrained-checkpoint FOLDER"]),
    ("--min-lr 1", ["--min-lr 1", "--lr 0.001"]),
    ("--eval-iters -1", ["--eval-iters -1", "at least 0"]),
    ("--train-iters 0", ["--train-iters 0", "at least 1"]),
    ("--ddp-bucket-size 0", ["--ddp-bucket-size 0", "at least 1"]),
    ("--seed 0", ["--seed 0", "at least 1"]),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 3", ["--lr-warmup-fraction", "--lr-warmup-iters"]),
    ("--train-data-path a --data-path b", ["--data-path"]),
    ("--data-args-path a", ["--data-args-path", "--mock-data", "exclude each other"]),
    ("--fim-rate 2", ["--fim-rate 2.0", "from 0 to 1"]),
    (
        "--use-distributed-optimizer --data-parallel-sharding-strategy no_shard",
        ["--use-distributed-optimizer and --data-parallel-sharding-strategy no_shard contradict"],
    ),
]


@pytest.mark.parametrize(("flags", "named"), WRONG, ids=[row[0] for row in WRONG])
def test_a_section_that_is_wrong_in_itself_ends_the_program_in_one_line(flags, named, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_arguments(f"{BASE} {flags}".split(), "test")
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in named:
        assert part in error


def test_lengths_that_make_no_schedule_are_found_while_resolving():
    with pytest.raises(ValueError, match="warm-up"):
        settled("--lr-warmup-iters 20")
    with pytest.raises(ValueError, match="WSD needs"):
        settled("--lr-decay-style WSD")
    with pytest.raises(ValueError, match="--weight-decay-incr-style"):
        settled("--weight-decay-incr-style linear")
    settled("--lr-warmup-iters 10")  # as long as the decay: a ramp and nothing else


def test_nothing_to_train_on():
    config = parse_arguments(BASE.replace("--mock-data", "").split(), "test")
    with pytest.raises(ValueError, match="give --data-path, --train-data-path or --mock-data"):
        validate(config, 1)


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        ("--tensor-model-parallel-size 4", 4),
        ("--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4", 8),
        ("--num-layers 3 --pipeline-model-parallel-size 2", 2),  # layers need not divide
        (
            "--num-layers 5 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--global-batch-size 8",
            2,
        ),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-layers 5", 2),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|tt|tt|L "
            "--global-batch-size 4",
            2,
        ),
        (
            "--pipeline-model-parallel-size 6 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            6,
        ),
        ("--num-layers 10 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1", 4),
        ("--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --seq-length 8", 4),
        ("--vocab-size 101 --tensor-model-parallel-size 2", 2),
        (
            "--recompute-granularity full --distribute-saved-activations --hidden-size 65 --kv-channels 16 "
            "--tensor-model-parallel-size 2 --sequence-parallel",
            2,
        ),
        ("--lr-warmup-samples 0", 1),
    ],
)
def test_what_fits(flags, world):
    validate(parse_arguments(f"{BASE} {flags}".split(), "test"), world)


def test_divisors():
    assert divisors(12) == "1, 2, 3, 4, 6, 12"
