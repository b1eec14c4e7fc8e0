"""Which samples each data-parallel rank reads in each micro-batch.

All ranks see the samples as one stream. A micro-step takes the next
``micro_batch_size * data_parallel_size`` of it, and each rank its own ``micro_batch_size`` of those, side by
side. So what a step consumes depends on the global batch alone: changing the micro-batch size or the number
of ranks moves samples between ranks, never between steps.

The place in the stream is the number of samples consumed, which is all that a resumed run needs to know.
"""

import abc
import itertools
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class MicroBatchSampler(Sampler[list[int]], abc.ABC):
    """This rank's micro-batches, each a list of sample numbers; a ``batch_sampler`` for a ``DataLoader``.

    Args:
        total_samples: samples in the dataset.
        consumed_samples: samples, of all ranks together, that earlier steps have taken.
        micro_batch_size: samples in a micro-batch.
        data_parallel_rank: this rank's place among those that read different data.
        data_parallel_size: number of ranks that read different data.

    Raises:
        ValueError: if there are no samples.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        *,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        assert 0 <= data_parallel_rank < data_parallel_size
        assert micro_batch_size > 0
        assert consumed_samples >= 0
        if total_samples <= 0:
            raise ValueError(f"a dataset of {total_samples} samples gives no batch")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.first = data_parallel_rank * micro_batch_size
        self.stride = micro_batch_size * data_parallel_size

    @abc.abstractmethod
    def stream(self) -> Iterator[int]:
        """Sample numbers in the order in which all ranks together consume them, from the next one on."""

    def __iter__(self) -> Iterator[list[int]]:
        chunk: list[int] = []
        for sample in self.stream():
            chunk.append(sample)
            if len(chunk) == self.stride:
                yield chunk[self.first : self.first + self.micro_batch_size]
                chunk = []


class SequentialSampler(MicroBatchSampler):
    """``--dataloader-type single``: every sample once, in the dataset's order.

    What does not fill a micro-step of all ranks is left out.
    """

    def stream(self) -> Iterator[int]:
        """The numbers from ``consumed_samples`` on."""
        return iter(range(self.consumed_samples, self.total_samples))

    def __len__(self) -> int:
        return max(0, self.total_samples - self.consumed_samples) // self.stride


class WholeSampler(MicroBatchSampler):
    """``--full-validation``: every sample once, and places without a sample, -1, that fill the last batch.

    Args:
        total_samples: samples in the dataset.
        global_batch_size: what the number of places is a multiple of.
        micro_batch_size: samples in a micro-batch.
        data_parallel_rank: this rank's place among those that read different data.
        data_parallel_size: number of ranks that read different data.
    """

    def __init__(
        self,
        total_samples: int,
        global_batch_size: int,
        *,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        super().__init__(
            total_samples,
            0,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
        assert global_batch_size % self.stride == 0
        self.places = -(-total_samples // global_batch_size) * global_batch_size

    def stream(self) -> Iterator[int]:
        """All samples, then -1 until the last global batch is full."""
        yield from range(self.total_samples)
        yield from itertools.repeat(-1, self.places - self.total_samples)

    def __len__(self) -> int:
        return self.places // self.stride


class CyclicSampler(MicroBatchSampler):
    """``--dataloader-type cyclic``: epoch after epoch without end, each shuffled by its own number."""

    def stream(self) -> Iterator[int]:
        """The rest of the epoch that ``consumed_samples`` lies in, then one epoch after another."""
        epoch, offset = divmod(self.consumed_samples, self.total_samples)
        while True:
            generator = torch.Generator()
            generator.manual_seed(epoch)
            order = torch.randperm(self.total_samples, generator=generator)
            yield from map(int, order[offset:].numpy())
            epoch, offset = epoch + 1, 0
