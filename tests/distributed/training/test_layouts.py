"""Any layout gives one curve: losses, gradient norms and weights against a single rank."""

import math

import pytest
import torch

from tests.harness import run_ranks
from tests.training_harness import SHAPES, Record, flags, train_run, train_runs, write_corpus

FULL_LENGTH = ("--num-layers", "8", "--optimizer", "sgd", "--lr", "5e-3")
"""At a higher learning rate one of these curves has a spike that multiplies rounding."""
SHORT = (*FULL_LENGTH, "--num-layers", "4", "--train-iters", "10")
TP, PP, CP, VPP = (
    "--tensor-model-parallel-size {} ",
    "--pipeline-model-parallel-size {} ",
    "--context-parallel-size {} ",
    "--num-virtual-stages-per-pipeline-rank {} ",
)
TP2, TP4, PP2, PP4, CP2, CP4, VPP2 = (
    TP.format(2),
    TP.format(4),
    PP.format(2),
    PP.format(4),
    CP.format(2),
    CP.format(4),
    VPP.format(2),
)
SP = "--sequence-parallel "
ZERO1, ZERO2, ZERO3 = (
    f"--data-parallel-sharding-strategy {name} " for name in ("optim", "optim_grads", "optim_grads_params")
)
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 5000 "
GATHER, ALL_TO_ALL = "--cp-comm-type all_gather ", "--cp-comm-type a2a "
ZB_H1, ZB_V, GPIPE = (f"--pipeline-schedule {name} " for name in ("zb-h1", "zb-v", "gpipe"))
FULL = "--recompute-granularity full --recompute-method {} --recompute-num-layers 1 "
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn mlp layernorm "
ACCOUNT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
"""Lets the ends of a model of two layers be parts of their own: stages, or chunks of stages."""

LAYOUTS = {
    # One axis.
    "TP4": (4, TP4),
    "TP2 SP": (2, TP2 + SP + SELECTIVE),
    "PP4": (4, PP4),
    "PP2 gpipe": (2, PP2 + GPIPE + FULL.format("block")),
    "PP2 VPP2": (2, PP2 + VPP2),
    "PP4 zb-h1": (4, PP4 + ZB_H1),
    "PP2 zb-v": (2, PP2 + ZB_V),
    "CP4": (4, CP4),
    "CP2 gathered": (2, CP2 + GATHER),
    "DP4": (4, OVERLAP),
    "DP4 ZeRO-1": (4, ZERO1 + OVERLAP + "--overlap-param-gather "),
    "DP2 ZeRO-2": (2, ZERO2 + OVERLAP),
    "DP2 ZeRO-3": (2, ZERO3),
    # Two axes, and more.
    "TP2 PP2": (4, TP2 + PP2 + FULL.format("uniform") + "--distribute-saved-activations "),
    "TP2 PP2 whole transfers": (4, TP2 + PP2 + "--no-scatter-gather-tensors-in-pipeline "),
    "TP2 PP2 SP": (4, TP2 + PP2 + SP),
    "TP2 CP2": (4, TP2 + CP2 + ALL_TO_ALL),
    "TP2 CP2 SP": (4, TP2 + CP2 + SP + FULL.format("uniform")),
    "TP2 DP2": (4, TP2 + OVERLAP + "--ddp-average-in-collective "),
    "TP2 SP ZeRO-1": (4, TP2 + SP + ZERO1),
    "TP2 SP ZeRO-2": (4, TP2 + SP + ZERO2 + OVERLAP),
    "TP2 ZeRO-3": (4, TP2 + ZERO3),
    "TP2 SP ZeRO-3": (4, TP2 + SP + ZERO3 + FULL.format("uniform")),
    "PP2 VPP2 DP2": (4, PP2 + VPP2 + OVERLAP),
    "PP2 VPP2 TP2 SP": (4, PP2 + VPP2 + TP2 + SP),
    "PP2 CP2 sharded": (4, PP2 + CP2 + ZERO1 + OVERLAP),
    "PP2 VPP2 CP2": (4, PP2 + VPP2 + CP2 + GATHER),
    "PP2 ZeRO-1": (4, PP2 + ZERO1 + OVERLAP),
    "PP2 ZeRO-2": (4, PP2 + ZERO2),
    "PP2 ZeRO-3": (4, PP2 + ZERO3),
    "CP2 ZeRO-1": (4, CP2 + ZERO1 + "--overlap-param-gather "),
    "CP2 ZeRO-3": (4, CP2 + ZERO3),
    "PP2 zb-h1 TP2 SP": (4, PP2 + ZB_H1 + TP2 + SP),
    "PP2 zb-v ZeRO-1": (4, PP2 + ZB_V + ZERO1 + OVERLAP),
    "PP2 zb-h1 CP2": (4, PP2 + ZB_H1 + CP2 + SELECTIVE),
    "PP2 VPP2 ZeRO-3": (4, PP2 + VPP2 + ZERO3),
    "PP2 zb-v CP2": (4, PP2 + ZB_V + CP2),
}
"""Ranks and flags by name; what is left of the ranks is data parallel."""

OTHER_PAIRS = {
    "CP2 DP2": (4, CP2 + OVERLAP),
    "CP2 ZeRO-2": (4, CP2 + ZERO2 + ALL_TO_ALL),
    "PP2 zb-h1 DP2": (4, PP2 + ZB_H1 + OVERLAP),
    "PP2 gpipe TP2": (4, PP2 + GPIPE + TP2),
}
"""Pairs whose parts are in others; nightly, for a short run."""

LARGE_LAYOUTS = {
    "TP2 PP2 ZeRO-1": (8, TP2 + PP2 + ZERO1 + OVERLAP),
    "TP2 PP2 CP2 SP": (8, TP2 + PP2 + CP2 + SP),
    "PP2 CP2 DP2 sharded": (8, PP2 + CP2 + ZERO1 + OVERLAP),
    "PP2 VPP2 TP2 SP DP2": (8, PP2 + VPP2 + TP2 + SP + ZERO1),
    "PP4 zb-v TP2": (8, PP4 + ZB_V + TP2),
    "TP2 CP2 ZeRO-3": (8, TP2 + CP2 + ZERO3),
    "TP2 PP2 ZeRO-2": (8, TP2 + PP2 + ZERO2),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


def _other_tie(shape: str) -> str:
    """Ties what the shape leaves untied, and the other way round."""
    return ("--no-" if shape == "llama" else "--") + "untie-embeddings-and-output-weights"


def _line(prefix, shape: str, own_tie: bool, *more: str) -> list[str]:
    return flags(prefix, SHAPES[shape], *more, *([] if own_tie else [_other_tie(shape)]))


VARIANTS = [("gpt2", True), ("llama", False)]
"""GPT-2's shape as it is, Llama's with its tie turned round."""
OTHER_VARIANTS = [("gpt2", False), ("llama", True)]


@pytest.fixture(scope="module")
def reference(prefix):
    """Single-rank records by (shape, whether the tie is the shape's own, length of the run)."""
    keys = [(*variant, length) for variant in VARIANTS + OTHER_VARIANTS for length in (FULL_LENGTH, SHORT)]
    lines = [_line(prefix, shape, own, *length, "--micro-batch-size", "8") for shape, own, length in keys]
    (records,) = run_ranks(1, train_runs, lines)
    return dict(zip(keys, records, strict=True))


def assert_same(record: Record, expected: Record, what: str) -> None:
    assert record.losses == pytest.approx(expected.losses, rel=2e-6), what
    assert record.norms == pytest.approx(expected.norms, rel=1e-5), what
    assert record.weights.keys() == expected.weights.keys(), what
    for name, weight in expected.weights.items():
        difference = (record.weights[name] - weight).abs().max().item()
        assert difference <= 1e-5, f"{what}: {name} differs by {difference}"


def test_the_single_rank_learns_and_masks(reference):
    record = reference["gpt2", True, FULL_LENGTH]
    assert len(record.losses) == 20
    assert record.losses[-1] < record.losses[0] - 0.5


NAMED = {
    "TP2 PP2 SP",
    "TP2 CP2 SP",
    "PP2 VPP2 DP2",
    "PP2 CP2 sharded",
    "TP2 ZeRO-3",
    "PP4 zb-h1",
    "PP2 zb-v",
    "PP2 VPP2 TP2 SP",
}
"""Layouts that every run of the tests tries at full length, with both shapes. Nightly the others are tried so
too, and else for a shorter run, with one of the shapes in turn."""


def _micro_batch_size(ranks: int, words: str) -> str:
    """Two micro-batches for each of several replicas, one for a lone one, four in a pipeline."""
    options = words.split()
    if PP.split()[0] in options:
        return "2"
    sizes = [
        int(options[at + 1]) for at, word in enumerate(options) if word in (TP.split()[0], CP.split()[0])
    ]
    replicas = ranks // math.prod(sizes)
    return "8" if replicas == 1 else str(4 // replicas)


def _assert_one_curve(prefix, reference, layout, variants, length=FULL_LENGTH):
    ranks, words = layout
    more = (*length, *words.split(), "--micro-batch-size", _micro_batch_size(ranks, words))
    lines = [_line(prefix, *variant, *more) for variant in variants]
    for rank, records in enumerate(run_ranks(ranks, train_runs, lines, timeout_seconds=240)):
        for variant, record in zip(variants, records, strict=True):
            assert_same(record, reference[*variant, length], f"{variant}, rank {rank}")


@pytest.mark.parametrize("name", sorted(NAMED))
def test_layout_gives_the_single_rank_s_curve(prefix, reference, name):
    _assert_one_curve(prefix, reference, LAYOUTS[name], VARIANTS)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in NAMED])
def test_layout_begins_the_single_rank_s_curve(prefix, reference, name):
    turn = list(LAYOUTS).index(name) % 2
    _assert_one_curve(prefix, reference, LAYOUTS[name], VARIANTS[turn : turn + 1], SHORT)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_single_rank_s_curve(prefix, reference, name):
    _assert_one_curve(prefix, reference, LAYOUTS[name], VARIANTS + OTHER_VARIANTS)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHER_PAIRS)
def test_other_pairs_begin_the_single_rank_s_curve(prefix, reference, name):
    _assert_one_curve(prefix, reference, OTHER_PAIRS[name], VARIANTS, SHORT)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LARGE_LAYOUTS)
def test_layout_of_eight_ranks_gives_the_single_rank_s_curve(prefix, reference, name):
    _assert_one_curve(prefix, reference, LARGE_LAYOUTS[name], VARIANTS)


@pytest.mark.parametrize("name", ["TP2 PP2", "PP2 VPP2 TP2 SP", "PP2 zb-v ZeRO-1", "TP2 ZeRO-3"])
def test_the_other_tie_of_each_shape_begins_the_same_curve(prefix, reference, name):
    _assert_one_curve(prefix, reference, LAYOUTS[name], OTHER_VARIANTS, SHORT)


FLOAT64_LAYOUTS = [
    TP2 + PP2 + SP,
    TP2 + CP2 + SP,
    PP2 + CP2 + ZERO1,
    PP2 + ZB_H1 + ZERO2,
    CP2 + ALL_TO_ALL,
    TP2 + ZERO3,
    PP2 + ZERO3,
    PP2 + "--pipeline-model-parallel-layout E|t|t|L " + OVERLAP,
    PP4 + ACCOUNT,
    PP2 + ZB_V + ACCOUNT,
    TP2 + SP + PP2 + VPP2 + ACCOUNT,
]


@pytest.mark.parametrize("shape", SHAPES)
def test_in_float64_only_rounding_is_left(prefix, shape):
    _assert_equal_to_rounding(prefix, shape, FLOAT64_LAYOUTS[list(SHAPES).index(shape) :: 2])


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
def test_in_float64_only_rounding_is_left_in_any_layout(prefix, shape):
    _assert_equal_to_rounding(prefix, shape, FLOAT64_LAYOUTS)


def _assert_equal_to_rounding(prefix, shape, layouts):
    small = [*SHAPES[shape], "--num-layers", "2", "--optimizer", "sgd"]
    ((expected,),) = run_ranks(1, train_runs, [flags(prefix, small)], torch.float64)
    lines = [
        flags(prefix, small, *words.split(), "--micro-batch-size", _micro_batch_size(4, words))
        for words in layouts
    ]
    for records in run_ranks(4, train_runs, lines, torch.float64, timeout_seconds=240):
        for words, record in zip(layouts, records, strict=True):
            assert record.losses == pytest.approx(expected.losses, rel=1e-10), words
            assert record.norms == pytest.approx(expected.norms, rel=1e-10), words
            for name, weight in expected.weights.items():
                assert (record.weights[name] - weight).abs().max() <= 1e-10, (words, name)


def test_adam_keeps_the_curve_too(prefix):
    adam = ("--lr", "1e-3", "--micro-batch-size", "2")
    lines = [flags(prefix, shape, *adam) for shape in SHAPES.values()]
    (expected,) = run_ranks(1, train_runs, lines)
    split = [
        [*line, *words.split()] for line, words in zip(lines, (TP2 + PP2, TP2 + SP + ZERO1), strict=True)
    ]
    for records in run_ranks(4, train_runs, split, timeout_seconds=120):
        for record, reference in zip(records, expected, strict=True):
            assert record.losses == pytest.approx(reference.losses, rel=2e-6)
            assert record.norms == pytest.approx(reference.norms, rel=1e-5)


DROPOUT = ("--hidden-dropout", "0.5", "--attention-dropout", "0.5")


def test_dropout_goes_by_the_place_in_the_global_batch_and_not_by_the_replica(prefix):
    # Equal masks on replicas, or masks drawn by a replica's own count of micro-batches, give other losses.
    line = flags(prefix, SHAPES["gpt2"], "--optimizer", "sgd", *DROPOUT, "--train-iters", "5")
    (alone,) = run_ranks(1, train_run, line)
    (masked_otherwise,) = run_ranks(1, train_run, [*line, "--micro-batch-size", "2"])
    assert masked_otherwise.losses != pytest.approx(alone.losses, rel=1e-4)
    for replica in run_ranks(2, train_run, line):
        assert replica.losses == pytest.approx(alone.losses, rel=2e-6)
        assert replica.norms == pytest.approx(alone.norms, rel=1e-5)


def test_hidden_dropout_does_not_depend_on_tensor_or_pipeline_parallelism(prefix):
    line = flags(prefix, SHAPES["gpt2"], "--optimizer", "sgd", *DROPOUT[:2], "--train-iters", "5")
    (alone,) = run_ranks(1, train_run, line)
    for words in (TP2 + PP2, PP2 + VPP2 + OVERLAP):
        for rank in run_ranks(4, train_run, [*line, *words.split()]):
            assert rank.losses == pytest.approx(alone.losses, rel=2e-6)


@pytest.mark.parametrize(
    "words", [TP2 + PP2, pytest.param(TP2 + CP2 + SP, marks=pytest.mark.nightly), PP2 + ZB_H1 + CP2]
)
def test_with_dropout_on_recomputation_changes_nothing(prefix, words):
    more = ("--optimizer", "sgd", "--train-iters", "5", "--micro-batch-size", "2")
    line = flags(prefix, SHAPES["gpt2"], *DROPOUT, *more, *words.split())
    kinds = ["", SELECTIVE, FULL.format("uniform"), FULL.format("block")]
    if "sequence" not in words:
        kinds.append(FULL.format("uniform") + "--distribute-saved-activations")
    lines = [[*line, *kind.split()] for kind in kinds]
    for plain, *recomputed in run_ranks(4, train_runs, lines, timeout_seconds=120):
        for kind, record in zip(kinds[1:], recomputed, strict=True):
            assert record.losses == pytest.approx(plain.losses, rel=1e-6), kind
            assert record.norms == pytest.approx(plain.norms, rel=1e-6), kind
