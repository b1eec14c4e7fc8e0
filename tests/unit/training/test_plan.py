"""How many samples a run asks for, against counts by hand."""

import pytest

from megatron.training.arguments import parse_arguments, resolve
from megatron.training.plan import last_iteration, samples_asked_for
from megatron.training.progress import Progress

RAMP = ["--rampup-batch-size", "4", "4", "16"]  # 4 samples until 16 are consumed, then 8


@pytest.mark.parametrize(
    ("flags", "done", "last", "samples"),
    [
        # 10 x 8; after iterations 3, 6, 9 and at the end, 2 x 8 each.
        (["--train-iters", "10"], (0, 0), 10, (80, 64, 16)),
        # 4 x 4 + 6 x 8, however much of it is done.
        (["--train-iters", "10", *RAMP], (0, 0), 10, (64, 64, 16)),
        (["--train-iters", "10", *RAMP], (3, 12), 10, (64, 64, 16)),
        # 10 iterations had 2 samples each before; 20 + 8.
        (["--train-iters", "11"], (10, 20), 11, (28, 64, 16)),
        # 60 = 4 x 4 + 5 x 8 + 4: the last 4 make no batch.
        (["--train-samples", "60", *RAMP], (0, 0), 9, (60, 64, 16)),
        (["--train-samples", "60"], (10, 20), 15, (60, 96, 16)),
        (["--train-iters", "10", "--eval-global-batch-size", "4"], (0, 0), 10, (80, 32, 8)),
        (["--train-iters", "10", "--full-validation"], (0, 0), 10, (80, None, 16)),
        # Done already.
        (["--train-iters", "2"], (10, 20), 2, (20, 16, 16)),
    ],
)
def test_samples_of_a_run_from_its_settings_and_where_it_stands(flags, done, last, samples):
    model = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 10 --mock-data"
    )
    recipe = "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --eval-interval 3 --eval-iters 2"
    config = resolve(parse_arguments([*model.split(), *recipe.split(), *flags], "test"), None, None, 1)
    progress = Progress(iteration=done[0], consumed_samples=done[1])
    assert last_iteration(config, progress) == last
    assert samples_asked_for(config, progress) == samples
