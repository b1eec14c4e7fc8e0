"""Ranks that build datasets at once, alone, slowly, or with different disks, come to the same samples."""

import hashlib
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.config import DataConfig
from megatron.core.datasets import gpt_builder
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.harness import make_state, run_ranks


def write(folder):
    """Two datasets whose contents differ; gives weights and prefixes."""
    paths = []
    for weight, (name, length) in zip(("0.3", "0.7"), (("a", 37), ("b", 53)), strict=True):
        with IndexedDatasetBuilder(folder / name, np.uint16) as data:
            for document in range(40):
                data.add_document(np.arange(length) + document)
        paths += [weight, str(folder / name)]
    return tuple(paths)


def build(paths, cache):
    config = DataConfig(data_path=paths, split="80,20,0", data_cache_path=str(cache))
    return gpt_builder.build_datasets(
        config, seq_length=16, seed=7, sizes=(200, 50, 0), eod=None, vocab_size=1000
    )


def digest(splits):
    """Hash of every sample of every split."""
    found = hashlib.sha256()
    for dataset in (splits.train, splits.valid):
        for i in range(len(dataset)):
            found.update(dataset[i]["tokens"].tobytes())
    return found.hexdigest()


def build_at_once(paths, folder, rounds):
    digests = []
    for number in range(rounds):
        dist.barrier()
        digests.append(digest(build(paths, Path(folder, f"cold-{number}"))))
    return digests


@pytest.mark.parametrize("rounds", [5, pytest.param(20, marks=pytest.mark.nightly)])
def test_four_ranks_with_a_cold_cache(tmp_path, rounds):
    by_rank = run_ranks(4, build_at_once, write(tmp_path), str(tmp_path), rounds)
    assert {value for digests in by_rank for value in digests} == {by_rank[0][0]}
    left = [path.name for path in tmp_path.glob("cold-*/*") if path.suffix in (".partial", ".lock")]
    assert left == []


def build_on_own_disk(paths, folder):
    node = dist.get_rank() // 2
    return digest(build(paths, Path(folder, f"node-{node}")))


def test_two_nodes_without_a_shared_disk(tmp_path):
    digests = run_ranks(4, build_on_own_disk, write(tmp_path), str(tmp_path))
    assert len(set(digests)) == 1
    assert len(list(tmp_path.glob("node-0/*"))) == len(list(tmp_path.glob("node-1/*"))) > 0


def build_on_some_ranks_only(paths, folder):
    group = make_state(tp=2).group("tp")
    if dist.get_rank() == 0:
        digest(build(paths, Path(folder, "cache")))
    total = torch.ones(1)
    dist.all_reduce(total, group=group)  # would hang, or pair with the wrong call, were there a collective
    return total.item()


def test_only_one_rank_of_a_tensor_parallel_group_reads(tmp_path):
    totals = run_ranks(2, build_on_some_ranks_only, write(tmp_path), str(tmp_path), timeout_seconds=30)
    assert totals == [2.0, 2.0]


def build_slowly(paths, folder):
    quick = gpt_builder.build_gpt_indices

    def slow(*args, **kwargs):
        time.sleep(1.5)
        return quick(*args, **kwargs)

    gpt_builder.build_gpt_indices = slow
    started = time.monotonic()
    splits = build(paths, Path(folder, "cache"))
    waited = time.monotonic() - started
    dist.barrier()
    return waited, digest(splits)


def test_building_may_outlast_the_timeout_of_collectives(tmp_path):
    results = run_ranks(2, build_slowly, write(tmp_path), str(tmp_path), timeout_seconds=4)
    assert min(waited for waited, _ in results) > 5.9  # four indices, one after another
    assert results[0][1] == results[1][1]
