import pytest

from megatron.training.layout import layer_text


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([range(4)], "layers 0 to 3"),
        ([range(2), range(8, 12)], "layers 0 to 1, 8 to 11"),
        ([range(1), range(4, 5)], "layers 0, 4"),
        ([range(2, 3)], "layer 2"),
        ([range(3, 3), range(5, 6)], "layer 5"),
        ([range(4, 4)], "no layer"),
    ],
)
def test_the_log_says_which_layers_a_stage_holds(chunks, text):
    assert layer_text(chunks) == text
