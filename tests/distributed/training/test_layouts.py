"""Any layout gives one curve: losses, gradient norms and weights against a single rank."""

import pytest
import torch

from tests.harness import run_ranks
from tests.training_harness import SHAPES, Record, flags, train_run, train_runs, write_corpus

SGD = ("--optimizer", "sgd")
LAYOUTS = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
"""(TP, PP, DP)."""


def _layout(tp: int, pp: int) -> list[str]:
    return [f"--tensor-model-parallel-size={tp}", f"--pipeline-model-parallel-size={pp}"]


def _recompute(method: str) -> list[str]:
    return f"--recompute-granularity full --recompute-method {method} --recompute-num-layers 1".split()


def _other_tie(shape: str) -> str:
    """Ties what the shape leaves untied, and the other way round."""
    return ("--no-" if shape == "llama" else "--") + "untie-embeddings-and-output-weights"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


@pytest.fixture(scope="module")
def reference(prefix):
    """Single-rank records by (shape, whether the tie is the shape's own)."""
    keys = [(shape, own) for shape in SHAPES for own in (True, False)]
    lines = [flags(prefix, SHAPES[shape], *SGD, *([] if own else [_other_tie(shape)])) for shape, own in keys]
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
    record = reference["gpt2", True]
    assert len(record.losses) == 20
    assert record.losses[-1] < record.losses[0] - 0.5


@pytest.mark.parametrize(("tp", "pp", "dp"), LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_layout_gives_the_single_rank_s_curve(prefix, reference, shape, tp, pp, dp):
    larger = ("--micro-batch-size", "2")
    variants = {True: (), False: (_other_tie(shape), *larger)}
    lines = [flags(prefix, SHAPES[shape], *SGD, *_layout(tp, pp), *more) for more in variants.values()]
    results = run_ranks(tp * pp * dp, train_runs, lines, timeout_seconds=120)
    for rank, records in enumerate(results):
        for own, record in zip(variants, records, strict=True):
            assert_same(record, reference[shape, own], f"own tie {own}, rank {rank}")


EXTRAS = [
    ("--pipeline-schedule", "gpipe", *_recompute("block")),
    ("--overlap-grad-reduce", "--ddp-bucket-size", "5000", *_recompute("uniform")),
]


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_schedule_recompute_and_overlap_change_nothing(prefix, reference, shape, tp, pp):
    lines = [flags(prefix, SHAPES[shape], *SGD, *_layout(tp, pp), *more) for more in EXTRAS]
    for records in run_ranks(4, train_runs, lines, timeout_seconds=120):
        for more, record in zip(EXTRAS, records, strict=True):
            assert_same(record, reference[shape, True], " ".join(more))


@pytest.mark.parametrize("shape", SHAPES)
def test_in_float64_only_rounding_is_left(prefix, shape):
    small = [*SHAPES[shape], "--num-layers", "2", *SGD]
    ((expected,),) = run_ranks(1, train_runs, [flags(prefix, small)], torch.float64)
    lines = [flags(prefix, small, *_layout(tp, pp)) for tp, pp in ((2, 2), (1, 2), (2, 1), (1, 1))]
    for records in run_ranks(4, train_runs, lines, torch.float64, timeout_seconds=120):
        for record in records:
            assert record.losses == pytest.approx(expected.losses, rel=1e-10)
            assert record.norms == pytest.approx(expected.norms, rel=1e-10)
            for name, weight in expected.weights.items():
                assert (record.weights[name] - weight).abs().max() <= 1e-10, name


def test_adam_keeps_the_curve_too(prefix):
    adam = ("--lr", "1e-3", "--micro-batch-size", "2")
    lines = [flags(prefix, shape, *adam) for shape in SHAPES.values()]
    (expected,) = run_ranks(1, train_runs, lines)
    split = [[*line, *_layout(2, 2)] for line in lines]
    for records in run_ranks(4, train_runs, split, timeout_seconds=120):
        for record, reference in zip(records, expected, strict=True):
            assert record.losses == pytest.approx(reference.losses, rel=2e-6)
            assert record.norms == pytest.approx(reference.norms, rel=1e-5)


DROPOUT = ("--hidden-dropout", "0.5", "--attention-dropout", "0.5")


def test_dropout_goes_by_the_place_in_the_global_batch_and_not_by_the_replica(prefix):
    # Equal masks on replicas, or masks drawn by a replica's own count of micro-batches, give other losses.
    line = flags(prefix, SHAPES["gpt2"], *SGD, *DROPOUT, "--train-iters", "5")
    (alone,) = run_ranks(1, train_run, line)
    (masked_otherwise,) = run_ranks(1, train_run, [*line, "--micro-batch-size", "2"])
    assert masked_otherwise.losses != pytest.approx(alone.losses, rel=1e-4)
    for replica in run_ranks(2, train_run, line):
        assert replica.losses == pytest.approx(alone.losses, rel=2e-6)
        assert replica.norms == pytest.approx(alone.norms, rel=1e-5)


def test_hidden_dropout_does_not_depend_on_tensor_or_pipeline_parallelism(prefix):
    line = flags(prefix, SHAPES["gpt2"], *SGD, *DROPOUT[:2], "--train-iters", "5")
    (alone,) = run_ranks(1, train_run, line)
    for rank in run_ranks(4, train_run, [*line, *_layout(2, 2)]):
        assert rank.losses == pytest.approx(alone.losses, rel=2e-6)
