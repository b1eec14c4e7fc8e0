from types import SimpleNamespace

import pytest
import torch

from megatron.training.data import DataExhaustedError, MicrobatchReader


class Numbers(torch.utils.data.Dataset):
    """Sample n is n, twice."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        if number >= self.size:
            raise IndexError
        return {"tokens": torch.tensor([number, number])}


def reader(*, rank=0, replicas=1, micro_batch=1, workers=0, consumed=0, size=24, kind="single"):
    config = SimpleNamespace(
        data=SimpleNamespace(dataloader_type=kind, num_workers=workers),
        training=SimpleNamespace(micro_batch_size=micro_batch, exit_signal_handler=True),
    )
    state = SimpleNamespace(rank=lambda axis: rank, size=lambda axis: replicas)
    return MicrobatchReader(Numbers(size), config, state, torch.device("cpu"), consumed)


def numbers(batches):
    assert all(batch["tokens"].shape[1] == 2 for batch in batches)
    return [batch["tokens"][:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_of_all_replicas_make_up_the_global_batch(workers):
    ranks = [reader(rank=rank, replicas=2, micro_batch=2, workers=workers, consumed=8) for rank in range(2)]
    assert [numbers(one.take(2)) for one in ranks] == [[[8, 9], [12, 13]], [[10, 11], [14, 15]]]
    # The next step begins where the last one ended.
    assert [numbers(one.take(2)) for one in ranks] == [[[16, 17], [20, 21]], [[18, 19], [22, 23]]]


def test_a_dataset_that_is_too_short_is_named():
    short = reader(size=5, micro_batch=2)
    assert numbers(short.take(2)) == [[0, 1], [2, 3]]
    with pytest.raises(DataExhaustedError, match=r"only 5 samples, fewer than .*--dataloader-type cyclic"):
        short.take(1)


def test_cyclic_data_does_not_end():
    endless = reader(size=5, micro_batch=2, kind="cyclic")
    first = [number for batch in numbers(endless.take(2)) for number in batch]
    assert len(set(first)) == 4
    assert len(numbers(endless.take(20))) == 20
