"""Any layout gives one curve: losses, gradient norms and weights against a single rank."""

import pytest
import torch

from tests.harness import run_ranks
from tests.training_harness import SHAPES, Record, flags, train_runs, write_corpus

SGD = ("--optimizer", "sgd")
LAYOUTS = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
"""(TP, PP, DP)."""


def _layout(tp: int, pp: int) -> list[str]:
    return [f"--tensor-model-parallel-size={tp}", f"--pipeline-model-parallel-size={pp}"]


def _variants(shape: str) -> dict[str, tuple[str, ...]]:
    """What is compared in each layout; every variant has a single-rank run of its own."""
    tie = (
        "--no-untie-embeddings-and-output-weights"
        if shape == "llama"
        else "--untie-embeddings-and-output-weights"
    )
    return {"plain": (), "micro-batch 2": ("--micro-batch-size", "2"), "other tie": (tie,)}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


@pytest.fixture(scope="module")
def reference(prefix):
    """Single-rank records by (shape, variant)."""
    keys = [(shape, variant) for shape in SHAPES for variant in _variants(shape)]
    lines = [flags(prefix, SHAPES[shape], *SGD, *_variants(shape)[variant]) for shape, variant in keys]
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
    record = reference["gpt2", "plain"]
    assert len(record.losses) == 20
    assert record.losses[-1] < record.losses[0] - 0.5


@pytest.mark.parametrize(("tp", "pp", "dp"), LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_layout_gives_the_single_rank_s_curve(prefix, reference, shape, tp, pp, dp):
    variants = {
        name: more for name, more in _variants(shape).items() if name != "micro-batch 2" or 8 % (2 * dp) == 0
    }
    lines = [flags(prefix, SHAPES[shape], *SGD, *_layout(tp, pp), *more) for more in variants.values()]
    results = run_ranks(tp * pp * dp, train_runs, lines, timeout_seconds=120)
    for rank, records in enumerate(results):
        for variant, record in zip(variants, records, strict=True):
            assert_same(record, reference[shape, variant], f"{variant}, rank {rank}")


EXTRAS = [
    ("--pipeline-schedule", "gpipe"),
    ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1"),
    ("--overlap-grad-reduce", "--ddp-bucket-size", "5000"),
]


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 2), (2, 1)])
def test_schedule_recompute_and_overlap_change_nothing(prefix, reference, tp, pp):
    for shape in SHAPES:
        lines = [flags(prefix, SHAPES[shape], *SGD, *_layout(tp, pp), *more) for more in EXTRAS]
        for records in run_ranks(4, train_runs, lines, timeout_seconds=120):
            for more, record in zip(EXTRAS, records, strict=True):
                assert_same(record, reference[shape, "plain"], f"{shape} {' '.join(more)}")


def test_in_float64_only_rounding_is_left(prefix):
    for shape, args in SHAPES.items():
        small = [*args, "--num-layers", "2", *SGD]
        ((expected,),) = run_ranks(1, train_runs, [flags(prefix, small)], torch.float64)
        for tp, pp in ((2, 2), (4, 1), (1, 2), (2, 1), (1, 1)):
            for (record,) in run_ranks(
                4, train_runs, [flags(prefix, small, *_layout(tp, pp))], torch.float64
            ):
                assert record.losses == pytest.approx(expected.losses, rel=1e-10), shape
                assert record.norms == pytest.approx(expected.norms, rel=1e-10), shape
                for name, weight in expected.weights.items():
                    assert (record.weights[name] - weight).abs().max() <= 1e-10, (shape, name)
