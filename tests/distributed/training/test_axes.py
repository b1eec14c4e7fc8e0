"""What new ways to split a model could get wrong while the loss looks right."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.datasets import IndexedDatasetBuilder
from megatron.training.training import build_hooks, train
from tests.harness import run_ranks
from tests.training_harness import SHAPES, VOCAB, flags, start, train_run, train_runs, write_corpus

EOD = VOCAB - 1
SGD = ("--optimizer", "sgd", "--num-layers", "2")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


# Masks that fall unevenly on the ranks of a sequence

CUTS = [
    "--context-parallel-size 2",
    "--context-parallel-size 4",
    "--context-parallel-size 2 --cp-comm-type a2a",
]


def _masked(path, counted: int) -> str:
    """A dataset whose samples of 32 tokens begin with ``counted`` tokens that count; the rest are EODs."""
    draws = np.random.default_rng(counted)
    with IndexedDatasetBuilder(path, np.uint16) as builder:
        for _ in range(200):
            document = np.full(32, EOD)
            document[:counted] = draws.integers(0, EOD, counted)
            builder.add_document(document)
        builder.finalize()
    return str(path)


@pytest.mark.parametrize("counted", [1, 16, 32])
def test_gradients_do_not_depend_on_which_rank_has_the_counted_tokens(tmp_path, counted):
    data = _masked(tmp_path / "masked", counted)
    line = flags(data, SHAPES["llama"], *SGD, "--train-iters", "3", "--split", "1,0,0", "--clip-grad", "0")
    (alone,) = run_ranks(1, train_run, line)
    assert all(norm > 0 for norm in alone.norms)
    for records in run_ranks(4, train_runs, [[*line, *cut.split()] for cut in CUTS]):
        for cut, record in zip(CUTS, records, strict=True):
            assert record.losses == pytest.approx(alone.losses, rel=1e-5), cut
            assert record.norms == pytest.approx(alone.norms, rel=1e-5), cut
            for name, weight in alone.weights.items():
                assert (record.weights[name] - weight).abs().max() <= 1e-5, (cut, name)


RESETS = "--reset-position-ids --reset-attention-mask"


@pytest.mark.parametrize("shape", SHAPES)
def test_documents_do_not_see_each_other_in_any_layout(prefix, shape):
    line = flags(prefix, SHAPES[shape], *SGD, "--train-iters", "4", *RESETS.split())
    (alone,) = run_ranks(1, train_run, line)
    (mixed,) = run_ranks(1, train_run, [word for word in line if word not in RESETS.split()])
    assert mixed.losses != pytest.approx(alone.losses, rel=1e-5)
    splits = [
        *CUTS,
        "--context-parallel-size 2 --cp-comm-type all_gather --tensor-model-parallel-size 2 "
        "--sequence-parallel",
        "--context-parallel-size 2 --pipeline-model-parallel-size 2",
    ]
    for records in run_ranks(4, train_runs, [[*line, *split.split()] for split in splits]):
        for split, record in zip(splits, records, strict=True):
            assert record.losses == pytest.approx(alone.losses, rel=2e-6), split
            assert record.norms == pytest.approx(alone.norms, rel=1e-5), split


# What tensor-parallel ranks hold alike stays alike


def _replicated(argv):
    run = start(argv)
    train(run, build_hooks(run))
    tp = run.state.group("tp")
    found = {}
    for named in run.parameters:
        if named.facts.split or named.parameter.shape != named.facts.global_shape:
            continue
        copies = [torch.empty_like(named.parameter) for _ in range(tp.size())]
        dist.all_gather(copies, named.parameter.detach().contiguous(), group=tp)
        found[named.name] = all(torch.equal(copies[0], copy) for copy in copies)
    return found


@pytest.mark.parametrize("more", ["", "--qk-layernorm --use-distributed-optimizer"])
def test_what_is_not_split_stays_equal_on_tensor_parallel_ranks(prefix, more):
    line = flags(prefix, SHAPES["gpt2"], "--num-layers", "2", "--train-iters", "10", "--sequence-parallel")
    layout = ["--tensor-model-parallel-size", "2", *more.split()]
    for found in run_ranks(4, _replicated, [*line, *layout]):
        assert "decoder.final_layernorm.weight" in found
        assert "decoder.layers.1.mlp.linear_fc2.bias" in found
        assert all(found.values()), [name for name, same in found.items() if not same]


# One norm, and one update


def test_norm_and_clipped_update_are_the_same_in_all_layouts(prefix):
    base = [*SGD, "--train-iters", "2", "--clip-grad", "0.1"]
    ties = {"tied": (), "untied": ("--untie-embeddings-and-output-weights",)}
    lines = {name: flags(prefix, SHAPES["gpt2"], *base, *tie) for name, tie in ties.items()}
    (alone,) = run_ranks(1, train_runs, list(lines.values()))
    splits = [
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--use-distributed-optimizer",
        "--data-parallel-sharding-strategy optim_grads_params",
    ]
    runs = [[*line, *split.split()] for split in splits for line in lines.values()]
    for records in run_ranks(2, train_runs, runs):
        for number, record in enumerate(records):
            expected, what = alone[number % 2], runs[number][-3:]
            assert record.norms == pytest.approx(expected.norms, rel=1e-4), what
            for name, weight in expected.weights.items():
                assert (record.weights[name] - weight).abs().max() <= 1e-6, (what, name)


# Dropout


def test_where_a_sequence_is_split_its_ranks_draw_masks_of_their_own(prefix):
    # One mask used by both halves of a sequence would give the loss of neither.
    line = flags(prefix, SHAPES["gpt2"], *SGD, "--train-iters", "3", "--hidden-dropout", "0.5")
    split = {
        "tp": "--tensor-model-parallel-size 2",
        "sp": "--tensor-model-parallel-size 2 --sequence-parallel",
        "cp": "--context-parallel-size 2",
    }
    ranks = run_ranks(2, train_runs, [line, *([*line, *words.split()] for words in split.values())])
    whole, tp, sp, cp = ranks[0]
    assert tp.losses == pytest.approx(whole.losses, rel=2e-6)
    for record in (sp, cp):
        assert record.losses != pytest.approx(whole.losses, rel=1e-4)
        assert record.losses == pytest.approx(whole.losses, rel=0.2)
