"""From datasets to this rank's micro-batches on its device."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from megatron.core.datasets import CyclicSampler, SequentialSampler, WholeSampler
from megatron.core.datasets.samplers import MicroBatchSampler
from megatron.core.parallel_state import ParallelState
from megatron.training.config import RunConfig
from megatron.training.console import reason_for_user
from megatron.training.task import Batch


class DataExhaustedError(ValueError):
    """A dataset holds fewer samples than the run wants to read."""


class UnusableSampleError(ValueError):
    """A dataset holds something that the run cannot use."""


@dataclass(frozen=True)
class _Refusal:
    """Why a dataset gives no samples, on its way from a worker."""

    reason: str


class _CandidDataset(Dataset[Any]):
    """A dataset whose errors for the user come as values.

    Raised in a worker they would be raised again inside torch, with the worker's traceback as their message.
    """

    def __init__(self, dataset: Dataset[dict[str, Tensor]]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Tensor]] | _Refusal:
        try:
            return [self._dataset[number] if number >= 0 else self._blank() for number in numbers]
        except (ValueError, OSError) as error:
            reason = reason_for_user(error)
            if reason is None:
                raise
            return _Refusal(reason)

    def _blank(self) -> dict[str, Tensor]:
        """A sample that fills a place and counts nothing."""
        sample = dict(self._dataset[0])
        sample["loss_mask"] = sample["loss_mask"] * 0
        return sample


def _collate(samples: list[dict[str, Tensor]] | _Refusal) -> Any:
    return samples if isinstance(samples, _Refusal) else default_collate(samples)


class MicrobatchReader:
    """This rank's micro-batches of one dataset, from a given sample on.

    What a step consumes depends on the global batch alone: micro-batch m of a step is, over all data-parallel
    ranks together, samples [m x DP x b, (m + 1) x DP x b) of the global batch.
    """

    def __init__(
        self,
        dataset: Dataset[dict[str, Tensor]],
        config: RunConfig,
        state: ParallelState,
        device: torch.device,
        consumed_samples: int,
        own_tokens: Callable[[Batch], Batch] | None = None,
        host_tensors: Collection[str] = (),
        whole_batch: int | None = None,
    ) -> None:
        """Read ``dataset`` from a sample on.

        ``own_tokens`` takes this rank's part of a micro-batch; ``host_tensors`` stay in the host's memory.
        With ``whole_batch`` every sample comes once, whatever ``consumed_samples``, in global batches of that
        size, the last filled up with samples that count nothing.
        """
        sampler = _sampler(dataset, config, state, consumed_samples, whole_batch)
        workers = config.data.num_workers
        self._loader = DataLoader(
            _CandidDataset(dataset),
            collate_fn=_collate,
            batch_sampler=sampler,
            num_workers=workers,
            # Workers share the memory maps that are open already, and are this rank's own children.
            multiprocessing_context="fork" if workers else None,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            worker_init_fn=_outlive_sigterm if config.training.exit_signal_handler else None,
        )
        self._device = device
        self._own_tokens = own_tokens
        self._host_tensors = frozenset(host_tensors)
        self._batches: Iterator[dict[str, Tensor] | _Refusal] | None = None

    def rewind(self) -> None:
        """Begin anew at the first sample that this reader began with."""
        self._batches = None

    def take(self, count: int) -> list[Batch]:
        """The next ``count`` micro-batches.

        Raises:
            DataExhaustedError: if the dataset ends before.
            UnusableSampleError: if the dataset refuses one of the samples, in a worker or here.
        """
        if self._batches is None:
            self._batches = iter(self._loader)
        return [self._next() for _ in range(count)]

    def _next(self) -> Batch:
        assert self._batches is not None
        batch = next(self._batches, None)
        if batch is None:
            total = len(self._loader.dataset)  # type: ignore[arg-type]
            raise DataExhaustedError(
                f"the dataset has only {total} samples, fewer than the run wants to read; lower "
                "--train-iters (or --train-samples, --eval-iters), give more data, or use "
                "--dataloader-type cyclic"
            )
        if isinstance(batch, _Refusal):
            raise UnusableSampleError(batch.reason)
        own = batch if self._own_tokens is None else self._own_tokens(batch)
        return {
            name: value if name in self._host_tensors else value.to(self._device, non_blocking=True)
            for name, value in own.items()
        }


def _sampler(
    dataset: Dataset[dict[str, Tensor]],
    config: RunConfig,
    state: ParallelState,
    consumed_samples: int,
    whole_batch: int | None,
) -> MicroBatchSampler:
    place = {
        "micro_batch_size": config.training.micro_batch_size,
        "data_parallel_rank": state.rank("dp"),
        "data_parallel_size": state.size("dp"),
    }
    samples = len(dataset)  # type: ignore[arg-type]
    if whole_batch is not None:
        return WholeSampler(samples, whole_batch, **place)
    kind = CyclicSampler if config.data.dataloader_type == "cyclic" else SequentialSampler
    return kind(samples, consumed_samples, **place)


def _outlive_sigterm(worker: int) -> None:
    """Let a worker go on at a SIGTERM that a scheduler sends to every process: its rank has yet to save.

    A rank that ends sends one too, and that still counts.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_rank, args=(os.getppid(),), daemon=True).start()


def _end_with_rank(rank_pid: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_pid:
        pass
    os._exit(0)
