import logging

import pytest

from megatron.training.resume import compare_configs
from tests.unit.training.test_arguments import BASE, settled

FILES = BASE.replace("--mock-data", "--data-path 0.3 /here/a 0.7 /here/b --split 90,5,5")


def refusal(saved, current, *, fresh=False):
    with pytest.raises(ValueError, match="settings differ from the checkpoint's") as error:
        compare_configs(saved, current, fresh=fresh)
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--num-layers 6", "--num-layers 4 in the checkpoint, --num-layers 6 now"),
        ("--hidden-size 128", "--hidden-size 64 in the checkpoint, --hidden-size 128 now"),
        ("--swiglu", "no --swiglu in the checkpoint, --swiglu now"),
        ("--disable-bias-linear", "no --disable-bias-linear in the checkpoint, --disable-bias-linear now"),
        (
            "--normalization RMSNorm",
            "--normalization LayerNorm in the checkpoint, --normalization RMSNorm now",
        ),
        ("--position-embedding-type rope", "--position-embedding-type learned_absolute in the checkpoint"),
        ("--max-position-embeddings 64", "--max-position-embeddings 32 in the checkpoint"),
        ("--group-query-attention --num-query-groups 2", "no --group-query-attention in the checkpoint"),
        (
            "--untie-embeddings-and-output-weights",
            "no --untie-embeddings-and-output-weights in the checkpoint",
        ),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_another_shape_is_always_refused(flags, line, fresh):
    text = refusal(settled(), settled(flags), fresh=fresh)
    assert f"\n  {line}" in text
    assert text.endswith("give the flags of the checkpoint, or --use-checkpoint-args")


def test_only_what_differs_is_listed():
    # Fewer heads are fewer key-value heads too, by the same flag.
    text = refusal(settled(), settled("--num-attention-heads 2"))
    assert text.count("--num-attention-heads") == 2
    assert "query" not in text


def test_another_vocabulary():
    assert "--vocab-size 101 in the checkpoint, --vocab-size 102 now" in refusal(
        settled(), settled(vocab=102)
    )


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--seed 5", "--seed 1234 in the checkpoint, --seed 5 now"),
        (
            "--seq-length 16 --max-position-embeddings 32",
            "--seq-length 32 in the checkpoint, --seq-length 16 now",
        ),
        ("--split 80,10,10", "--split 90,5,5 in the checkpoint, --split 80,10,10 now"),
        ("--data-path 0.3 /here/a 0.7 /here/c", "--data-path 0.3 /here/a 0.7 /here/b in the checkpoint"),
        ("--data-path 0.4 /here/a 0.6 /here/b", "--data-path 0.3 /here/a 0.7 /here/b in the checkpoint"),
        ("--eod-mask-loss", "no --eod-mask-loss in the checkpoint, --eod-mask-loss now"),
        (
            "--dataloader-type cyclic",
            "--dataloader-type single in the checkpoint, --dataloader-type cyclic now",
        ),
        ("--optimizer sgd", "--optimizer adam in the checkpoint, --optimizer sgd now"),
    ],
)
def test_what_would_falsify_a_resumed_run_is_refused_but_not_a_new_one(flags, line):
    saved, current = settled(base=FILES), settled(flags, base=FILES)
    text = refusal(saved, current)
    assert f"\n  {line}" in text
    assert text.endswith("or --finetune to begin a new run from its weights")
    compare_configs(saved, current, fresh=True)


def test_every_difference_is_listed():
    text = refusal(settled(), settled("--num-layers 6 --swiglu --seed 5"))
    assert text.count("in the checkpoint,") == 4  # the inner width of the MLP follows from --swiglu


@pytest.mark.parametrize(
    "flags",
    [
        "--micro-batch-size 1 --global-batch-size 2 --save elsewhere --log-interval 1 --num-workers 0",
        "--split 0.9,0.05,0.05 --data-path 0.3 /there/a 0.7 /there/b --data-cache-path cache",
        "--recompute-granularity full --rotary-base 5 --make-vocab-size-divisible-by 8 --init-method-std 0.1",
        "--data-path 3 /there/a 7 /there/b --no-mmap-bin-files --full-validation",
        "--no-load-optim --load x --optimizer sgd",
        "--bf16",
    ],
)
def test_what_may_change(flags):
    compare_configs(settled(base=FILES), settled(flags, base=FILES), fresh=False)


def test_another_layout():
    compare_configs(
        settled(world=4),
        settled("--tensor-model-parallel-size 2 --global-batch-size 8", world=4),
        fresh=False,
    )


def test_changes_that_are_the_users_to_make_are_said(caplog):
    with caplog.at_level(logging.INFO, logger="megatron"):
        compare_configs(settled(), settled("--clip-grad 0.5 --train-iters 20"), fresh=False)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "changed on resume: --train-iters 10 in the checkpoint, --train-iters 20 now",
        "changed on resume: --clip-grad 1.0 in the checkpoint, --clip-grad 0.5 now",
    ]
