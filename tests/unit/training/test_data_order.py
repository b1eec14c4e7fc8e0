"""Going on from the data of a checkpoint."""

import json
import logging

import numpy as np
import pytest

from megatron.core.config import DataConfig
from megatron.core.datasets import IndexedDatasetBuilder, build_datasets
from megatron.training.data_order import DataOrder

SAVED = DataOrder({"--seed": 1, "dataset 1, content": "ab"}, {"dataset 1": "1 epochs"})


def test_the_same_data_is_nothing_to_speak_of(caplog):
    with caplog.at_level(logging.INFO, logger="megatron"):
        SAVED.follow(json.loads(json.dumps(SAVED.to_json())))
        SAVED.follow(None)
    assert caplog.messages == []


def test_other_data_is_refused_and_a_long_list_cut():
    other = DataOrder({"--seed": 1, "dataset 1, content": "cd"}, SAVED.laid_out)
    with pytest.raises(ValueError, match=r"\n  dataset 1, content: ab in the checkpoint, cd now\ngive it"):
        other.follow(SAVED.to_json())
    many = DataOrder({f"entry {number}": number for number in range(30)}, {})
    with pytest.raises(ValueError, match=r"entry 9: 9 in the checkpoint, nothing now\n  and 20 more\n"):
        DataOrder().follow(many.to_json())


def orders_of_lengths(folder, lengths):
    """(what is laid out, the documents of the first samples) of runs of so many samples."""
    found = []
    for length in lengths:
        splits = build_datasets(
            DataConfig(data_path=(str(folder / "a"),), split="1,0,0"),
            seq_length=10,
            seed=3,
            sizes=(length, 0, 0),
            eod=None,
            vocab_size=1000,
        )
        first = [splits.train[number]["tokens"].tolist() for number in range(30)]
        found.append((DataOrder(splits.fingerprint, splits.laid_out), first))
    return found


def test_it_is_said_exactly_where_samples_to_come_are_in_another_order(tmp_path, caplog):
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        for document in range(40):
            builder.add_document(np.full(10, document))
        builder.finalize()
    # One epoch has 39 samples: all of 35 and 39 are of the first epoch; 60 and 100 lay out more.
    for one, first_of_one in (found := orders_of_lengths(tmp_path, [35, 39, 60, 75, 100])):
        for other, first_of_other in found:
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="megatron"):
                other.follow(one.to_json())
            assert ("samples to come are in another order" in caplog.text) is (first_of_one != first_of_other)
    assert len({tuple(map(tuple, first)) for _, first in found}) == 4  # 35 and 39 alone are in one order
