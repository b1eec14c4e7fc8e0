import pytest
import torch

from megatron.training.arguments import parse_arguments
from megatron.training.task import Stage, parameter_dtype
from pretrain_gpt import GPTTask
from tests.training_harness import GPT2_SHAPE, flags


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [([], torch.float32), (["--bf16"], torch.bfloat16), (["--fp16"], torch.float16)],
)
def test_number_format(precision, dtype):
    assert parameter_dtype(parse_arguments(flags("data", GPT2_SHAPE, *precision), "")) == dtype


@pytest.mark.parametrize(
    ("more", "readers"),
    [
        ([], [True, False, True]),
        # Where attention or positions restart, every stage has to know where.
        (["--reset-attention-mask"], [True, True, True]),
        (["--reset-position-ids"], [True, True, True]),
    ],
)
def test_stages_that_look_at_the_batch(more, readers):
    config = parse_arguments(flags("data", GPT2_SHAPE, *more), "")
    stages = [Stage(range(1), first=number == 0, last=number == 2) for number in range(3)]
    assert [GPTTask().reads_data(config, stage) for stage in stages] == readers


def test_tokens_that_count():
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    counts = GPTTask().loss_counts({"loss_mask": mask})
    assert (counts.tolist(), counts.dtype) == ([3.0], torch.float64)
