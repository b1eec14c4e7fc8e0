from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.core.datasets.gpt_dataset import GPTDataset, SampleFormat
from megatron.training.data import DataExhaustedError, MicrobatchReader, UnusableSampleError


class Numbers(torch.utils.data.Dataset):
    """Sample n is n, twice."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        if number >= self.size:
            raise IndexError(f"no number {number}")
        return {"tokens": torch.tensor([number, number])}


def reader(
    *,
    rank=0,
    replicas=1,
    micro_batch=1,
    workers=0,
    consumed=0,
    size=24,
    kind="single",
    dataset=None,
    device="cpu",
    host_tensors=(),
):
    config = SimpleNamespace(
        data=SimpleNamespace(dataloader_type=kind, num_workers=workers),
        training=SimpleNamespace(micro_batch_size=micro_batch, exit_signal_handler=True),
    )
    state = SimpleNamespace(rank=lambda axis: rank, size=lambda axis: replicas)
    return MicrobatchReader(
        dataset or Numbers(size), config, state, torch.device(device), consumed, host_tensors=host_tensors
    )


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


def test_what_the_host_decides_by_stays_in_its_memory():
    """The meta device stands for a GPU: what is moved there loses its values."""
    (there,) = reader(device="meta").take(1)
    assert there["tokens"].device.type == "meta"
    (here,) = reader(device="meta", host_tensors=["tokens"]).take(1)
    assert here["tokens"].tolist() == [[0, 0]]


def test_cyclic_data_does_not_end():
    endless = reader(size=5, micro_batch=2, kind="cyclic")
    first = [number for batch in numbers(endless.take(2)) for number in batch]
    assert len(set(first)) == 4
    assert len(numbers(endless.take(20))) == 20


class Source:
    """One document of 9 tokens, of which the last is 70."""

    prefix = "corpus"
    sequence_lengths = np.array([9], np.int32)

    def get(self, index, offset=0, length=None):
        tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8, 70])[offset:]
        return tokens if length is None else tokens[:length]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_token_outside_the_vocabulary_is_said_alike_by_a_worker_and_without_one(workers):
    indices = {
        "shuffle_index": np.array([0, 1]),
        "document_index": np.array([0]),
        "sample_index": np.array([[0, 0], [0, 4], [0, 8]]),
    }
    data = GPTDataset(Source(), indices, SampleFormat(seq_length=4, vocab_size=50))
    some = reader(dataset=data, workers=workers)
    (batch,) = some.take(1)
    assert batch["tokens"].tolist() == [[1, 2, 3, 4]]
    with pytest.raises(UnusableSampleError) as failure:
        some.take(1)
    assert str(failure.value) == (
        "corpus: holds the token 70, but the vocabulary has 50; was the data made with this tokenizer?"
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_defect_in_a_dataset_keeps_its_own_error(workers):
    class Broken(Numbers):
        def __len__(self):
            return self.size + 1

    some = reader(dataset=Broken(1), workers=workers)
    assert numbers(some.take(1)) == [[0]]
    with pytest.raises(IndexError, match="no number 1"):
        some.take(1)
