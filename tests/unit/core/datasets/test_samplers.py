"""Samplers: what all ranks together consume, and where a resumed run goes on."""

import itertools

import pytest
import torch

from megatron.core.datasets.samplers import CyclicSampler, SequentialSampler, WholeSampler

GOLDEN_EPOCH_0 = [8, 0, 5, 9, 7, 4, 2, 10, 3, 1, 11, 6]


def steps(kind, total, consumed, *, micro_batch, ranks, global_batch, count):
    """The samples of each global batch, in order of rank inside each micro-step."""
    samplers = [
        iter(
            kind(
                total,
                consumed,
                micro_batch_size=micro_batch,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
            )
        )
        for rank in range(ranks)
    ]
    rows = []
    for _ in range(count):
        row = []
        for _ in range(global_batch // (micro_batch * ranks)):
            for sampler in samplers:
                row += next(sampler)
        rows.append(row)
    return rows


@pytest.mark.parametrize(("micro_batch", "ranks"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (1, 8)])
@pytest.mark.parametrize("kind", [SequentialSampler, CyclicSampler])
def test_a_step_depends_on_the_global_batch_alone(kind, micro_batch, ranks):
    alone = steps(kind, 42, 0, micro_batch=1, ranks=1, global_batch=8, count=5)
    assert steps(kind, 42, 0, micro_batch=micro_batch, ranks=ranks, global_batch=8, count=5) == alone


def test_single_goes_through_the_samples_in_order():
    rows = steps(SequentialSampler, 40, 16, micro_batch=2, ranks=2, global_batch=8, count=3)
    assert rows == [list(range(16, 24)), list(range(24, 32)), list(range(32, 40))]


def test_ranks_take_neighbouring_samples():
    def rank(number):
        return list(
            SequentialSampler(12, 0, micro_batch_size=2, data_parallel_rank=number, data_parallel_size=3)
        )

    assert [rank(0), rank(1), rank(2)] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]


def test_single_leaves_out_what_does_not_fill_all_ranks():
    sampler = SequentialSampler(11, 0, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=2)
    assert list(sampler) == [[0, 1], [4, 5]]
    assert len(sampler) == 2


def test_all_consumed_gives_no_batch_and_no_error():
    sampler = SequentialSampler(8, 8, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1)
    assert (list(sampler), len(sampler)) == ([], 0)


def test_cyclic_golden_and_every_epoch_anew():
    rows = steps(CyclicSampler, 12, 0, micro_batch=3, ranks=2, global_batch=12, count=3)
    assert rows[0] == GOLDEN_EPOCH_0
    assert rows[1] == torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    assert all(sorted(row) == list(range(12)) for row in rows)


@pytest.mark.parametrize("kind", [SequentialSampler, CyclicSampler])
@pytest.mark.parametrize(("micro_batch", "ranks"), [(1, 1), (1, 4), (2, 2)])
def test_resumed_run_goes_on_where_it_stopped(kind, micro_batch, ranks):
    straight = steps(kind, 170, 0, micro_batch=1, ranks=1, global_batch=8, count=20)
    resumed = steps(kind, 170, 80, micro_batch=micro_batch, ranks=ranks, global_batch=8, count=10)
    assert straight[10:] == resumed


def test_cyclic_batches_span_epochs_without_losing_a_sample():
    sampler = CyclicSampler(5, 0, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1)
    seen = list(itertools.chain.from_iterable(itertools.islice(sampler, 5)))
    assert sorted(seen) == sorted([*range(5), *range(5)])


def test_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="a dataset of 0 samples gives no batch"):
        SequentialSampler(0, 0, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1)


def test_a_whole_pass_has_every_sample_once_and_full_global_batches():
    samplers = [
        WholeSampler(21, 8, micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=2)
        for rank in (0, 1)
    ]
    first, second = (list(sampler) for sampler in samplers)
    assert len(first) == len(second) == len(samplers[0]) == 6
    assert first[:2] == [[0, 1], [4, 5]]
    assert first[-2:] == [[16, 17], [20, -1]]
    assert second[-2:] == [[18, 19], [-1, -1]]
    assert list(samplers[0]) == first
