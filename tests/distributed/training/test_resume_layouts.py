"""Any layout takes up what any other saved: the same curve goes on, and not a bit of the state changes."""

from pathlib import Path

import pytest
import torch

from megatron.training.checkpointing import save_run
from megatron.training.setup import attach_metrics
from megatron.training.training import build_hooks, train
from tests.distributed.training.saved_runs import (
    assert_equal_bits,
    column,
    iterations,
    layout,
    manifest_of,
    read_checkpoint,
    resuming,
)
from tests.harness import run_ranks
from tests.training_harness import SHAPES, VOCAB, flags, start, write_corpus

TP2, TP4, PP2, PP4, TP2_PP2 = layout(2), layout(4), layout(1, 2), layout(1, 4), layout(2, 2)
SP, VPP2 = ["--sequence-parallel"], ["--num-virtual-stages-per-pipeline-rank=2"]
CP2, ZB_V = ["--context-parallel-size=2"], ["--pipeline-schedule=zb-v"]
ZERO1, ZERO2, ZERO3 = (
    [f"--data-parallel-sharding-strategy={name}"] for name in ("optim", "optim_grads", "optim_grads_params")
)
CHAIN = [
    # (layout, ranks, iterations of the whole run when this part ends, --make-vocab-size-divisible-by)
    ([*TP2_PP2, *SP], 4, 4, 8),
    (ZERO1, 4, 6, 8),
    ([*PP2, *VPP2], 4, 8, 128),
    ([*TP2, *ZERO3], 4, 10, 8),
    ([*TP2, *CP2], 4, 11, 128),
    ([], 1, 12, 128),
    ([*PP2, *ZB_V, *ZERO1], 4, 13, 8),
    (ZERO3, 4, 14, 128),
    ([*TP2, *SP, *ZERO2], 4, 15, 8),
    ([*PP2, *ZERO3], 4, 16, 8),
    ([*PP2, *CP2, *ZERO1], 4, 17, 128),
    (PP4, 4, 18, 128),
    (TP4, 4, 19, 8),
    (TP2_PP2, 4, 20, 128),
]
# A learning rate at which training is well-conditioned: at 1e-2, Adam's curve has a step that multiplies any
# difference, in float64 too, a thousandfold.
SCHEDULES = (
    "--lr 3e-3 --lr-decay-style cosine --lr-warmup-iters 4 --min-lr 1e-3 "
    "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.2"
).split()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


def run_parts(parts: list[tuple[list[str], str]]) -> None:
    """Runs that go on with what they find, each saving a copy of what it has loaded before it trains."""
    for argv, copies in parts:
        run = start(argv)
        if run.resumed_iteration:
            save_run(run, copies)
        attach_metrics(run)
        train(run, build_hooks(run))


def run_chain(tmp_path: Path, base: dict[str, list[str]], chain) -> None:
    """The parts of each run in turn, those next to each other that need as many ranks on the same ranks."""
    begun = 0
    while begun < len(chain):
        world = chain[begun][1]
        together = []
        for words, ranks, end, divisible in chain[begun:]:
            if ranks != world:
                break
            together += [
                (
                    [
                        *flags_of_run,
                        *words,
                        *resuming(tmp_path / name),
                        f"--metrics-file={tmp_path / name}.json",
                        f"--exit-interval={end}",
                        f"--make-vocab-size-divisible-by={divisible}",
                    ],
                    str(tmp_path / f"{name}_copies"),
                )
                for name, flags_of_run in base.items()
            ]
            begun += 1
        run_ranks(world, run_parts, together, timeout_seconds=240)


@pytest.mark.parametrize("shape", ["gpt2", pytest.param("llama", marks=pytest.mark.nightly)])
def test_the_curve_goes_on_in_every_layout(prefix, tmp_path, shape):
    base = {shape: flags(prefix, SHAPES[shape], *SCHEDULES)}
    straight = {f"{shape}_straight": args for shape, args in base.items()}
    run_chain(tmp_path, straight, [(TP2_PP2, 4, 20, 8)])
    run_chain(tmp_path, base, CHAIN)
    expected, found = (iterations(tmp_path / f"{shape}{end}.json") for end in ("_straight", ""))
    for name in (
        "iteration",
        "consumed_samples",
        "learning_rate",
        "weight_decay",
        "loss_scale",
        "skipped",
    ):
        assert column(found, name) == column(expected, name)
    assert len(found) == 20
    assert column(found, "lm_loss") == pytest.approx(column(expected, "lm_loss"), rel=2e-6), shape
    assert column(found, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=1e-5), shape
    for _, _, end, _ in CHAIN[:-1]:
        saved = read_checkpoint(tmp_path / shape, end)
        assert_equal_bits(read_checkpoint(tmp_path / f"{shape}_copies", end), saved)
        # The table has its true rows, whatever the padding; its moments too.
        for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
            table = saved[f"{kind}.embedding.word_embeddings.weight"]
            assert table.shape == (VOCAB, 64)
            assert bool((table.abs().sum(1) > 0).any())
        state = manifest_of(tmp_path / shape, end)["state"]
        assert state["config"]["model"]["vocab_size"] == VOCAB
        assert state["progress"]["iteration"] == state["optimizer"]["steps"] == end


UNEVEN = [
    (ZERO3, 4, 2, 1),
    (ZERO1, 4, 3, 1),
    ([*PP2, *ZERO3], 4, 4, 1),
    (ZERO3, 4, 5, 1),
    (ZERO2, 4, 6, 1),
]


def test_rows_that_no_number_of_ranks_divides_are_taken_up_by_every_strategy(prefix, tmp_path):
    # Of 6, 7, 18 and 101 rows four ranks hold 2 2 2 0, 2 2 2 1, 5 5 5 3 and 26 26 26 23.
    shape = "--num-layers 2 --hidden-size 6 --ffn-hidden-size 7 --num-attention-heads 3 --seq-length 32"
    base = flags(prefix, shape.split(), *SCHEDULES)
    run_chain(tmp_path, {"straight": base}, [([], 1, 6, 1)])
    run_chain(tmp_path, {"uneven": base}, UNEVEN)
    expected, found = (iterations(tmp_path / f"{name}.json") for name in ("straight", "uneven"))
    assert column(found, "iteration") == column(expected, "iteration") == [1, 2, 3, 4, 5, 6]
    assert column(found, "lm_loss") == pytest.approx(column(expected, "lm_loss"), rel=2e-6)
    assert column(found, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=1e-5)
    for _, _, end, _ in UNEVEN[:-1]:
        saved = read_checkpoint(tmp_path / "uneven", end)
        assert_equal_bits(read_checkpoint(tmp_path / "uneven_copies", end), saved)
        assert saved["model.decoder.layers.1.mlp.linear_fc1.weight"].shape == (7, 6)
        assert saved["optimizer.exp_avg.embedding.word_embeddings.weight"].shape == (VOCAB, 6)


def test_number_formats(prefix, tmp_path):
    """Loaded and saved again without training, in another layout and another format."""
    base = flags(prefix, [*SHAPES["llama"], "--num-layers", "2"], "--train-iters", "3")

    def again(load: str, save: str, *more: str) -> tuple[list[str], str]:
        at = [
            "--load",
            str(tmp_path / load),
            "--save",
            str(tmp_path / save),
            f"--metrics-file={tmp_path / save}.json",
        ]
        return [*base, *at, *more], str(tmp_path / f"{save}_copies")

    longer = ["--train-iters", "6"]
    parts = [
        again("bf16", "bf16", "--bf16", *layout(2, 1)),
        again("bf16", "bf16_again", "--bf16", *layout(1, 2)),
        again("bf16", "fp32", *layout(1, 1)),
        again("fp32", "bf16_at_last", "--bf16", *layout(2, 1)),
        again("bf16", "fp16", "--fp16", *layout(2, 1)),
        again("bf16", "bf16_longer", "--bf16", *longer),
        again("bf16", "fp32_longer", *longer),
    ]
    run_ranks(2, run_parts, parts, timeout_seconds=120)
    bf16 = read_checkpoint(tmp_path / "bf16", 3)
    names = [name.removeprefix("model.") for name in bf16 if name.startswith("model.")]
    kinds = ["optimizer.main", "optimizer.exp_avg", "optimizer.exp_avg_sq"]
    assert len(bf16) == 4 * len(names)
    for name in names:
        assert bf16[f"model.{name}"].dtype == torch.bfloat16
        assert torch.equal(bf16[f"optimizer.main.{name}"].bfloat16(), bf16[f"model.{name}"])
        assert {bf16[f"{kind}.{name}"].dtype for kind in kinds} == {torch.float32}
    # Main weights are more than the model's widened: what is loaded from has something to lose.
    assert any(
        bool((bf16[f"optimizer.main.{name}"] != bf16[f"model.{name}"].float()).any()) for name in names
    )
    assert_equal_bits(read_checkpoint(tmp_path / "bf16_again", 3), bf16)
    fp32 = read_checkpoint(tmp_path / "fp32", 3)
    for name in names:
        assert torch.equal(fp32[f"model.{name}"], bf16[f"optimizer.main.{name}"])
        assert f"optimizer.main.{name}" not in fp32
    assert_equal_bits(read_checkpoint(tmp_path / "bf16_at_last", 3), bf16)
    fp16 = read_checkpoint(tmp_path / "fp16", 3)
    assert_equal_bits(
        {name: tensor for name, tensor in fp16.items() if not name.startswith("model.")},
        {name: tensor for name, tensor in bf16.items() if not name.startswith("model.")},
    )
    assert {fp16[f"model.{name}"].dtype for name in names} == {torch.float16}
    assert manifest_of(tmp_path / "fp16", 3)["state"]["optimizer"]["scaler"]["scale"] == 2.0**32
    in_bf16, in_fp32 = (iterations(tmp_path / f"{name}_longer.json") for name in ("bf16", "fp32"))
    assert column(in_bf16, "iteration") == column(in_fp32, "iteration") == [4, 5, 6]
    assert column(in_bf16, "lm_loss") == pytest.approx(column(in_fp32, "lm_loss"), rel=5e-3)
