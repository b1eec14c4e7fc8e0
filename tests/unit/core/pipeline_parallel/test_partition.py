import pytest

from megatron.core.pipeline_parallel.partition import layer_ranges


def test_layers_are_dealt_evenly_in_order_and_none_is_lost():
    for stages in range(1, 9):
        for num_layers in range(stages, 40):
            ranges = layer_ranges(num_layers, stages)
            assert [layer for part in ranges for layer in part] == list(range(num_layers))
            sizes = [len(part) for part in ranges]
            assert len(sizes) == stages
            assert max(sizes) - min(sizes) <= 1


def test_extra_layers_go_to_the_middle():
    assert [len(part) for part in layer_ranges(10, 4)] == [2, 3, 3, 2]
    assert [len(part) for part in layer_ranges(9, 4)] == [2, 3, 2, 2]
    assert [len(part) for part in layer_ranges(11, 4)] == [3, 3, 3, 2]


def test_a_stage_without_a_layer_is_refused():
    with pytest.raises(ValueError, match=r"--num-layers 3 .*--pipeline-model-parallel-size 4 .*at most 3"):
        layer_ranges(3, 4)
    with pytest.raises(ValueError, match="must be at least 1"):
        layer_ranges(3, 0)
