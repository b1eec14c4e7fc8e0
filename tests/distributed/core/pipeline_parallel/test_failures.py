import re
import time

import pytest
import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.actions import Finish
from tests.distributed.core.pipeline_parallel.toy import Case, Stage, programs_of, schedule_of
from tests.harness import make_state, run_ranks


def _fail_on(failing_rank, case):
    stage = Stage(make_state(pp=2), case)

    def forward(chunk, microbatch, hidden):
        if dist.get_rank() == failing_rank and microbatch == 1:
            raise ArithmeticError(f"rank {failing_rank} is unwell")
        return stage.forward(chunk, microbatch, hidden)

    stage.step(forward=forward)


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("case", [Case("1f1b", 1, 4), Case("interleaved", 2, 4)], ids=lambda case: case.name)
def test_a_failure_on_one_stage_ends_all(failing_rank, case):
    started = time.monotonic()
    with pytest.raises(Exception, match=r"is unwell|onnection (closed|reset)"):
        run_ranks(2, _fail_on, failing_rank, case)
    assert time.monotonic() - started < 30


def _misuse():
    state = make_state()
    weight = torch.ones(3, requires_grad=True)
    single, split, v = Case("1f1b", 1, 2), Case("zb-h1", 1, 2), Case("zb-v", 2, 2)

    def attempt(message, case, output, **kwargs):
        stage = Stage(state, case)
        with pytest.raises(ValueError, match=message):
            stage.step(forward=lambda chunk, microbatch, hidden: output, **kwargs)

    attempt(r"loss must be a scalar, but the last stage gave \(3,\)", single, weight * 2)
    attempt("nothing to train: the output of chunk 0 of stage 0", single, torch.tensor(1.0))
    attempt("2 backwards", single, weight.sum(), forward_only=True, program=programs_of(single, 1)[0])
    attempt("but 0 backwards", single, weight.sum(), program=programs_of(single, 1, True)[0])
    attempt("one DeferredGradients for each of the 1 chunks .*, not 0", split, weight.sum(), deferred=None)
    attempt("one DeferredGradients for each of the 2 chunks .*, not 1", v, weight.sum(), deferred=[None])
    stage = Stage(state, single)
    with pytest.raises(ValueError, match="a schedule of 2 stages, but the pipeline group has 1 ranks"):
        stage.step(schedule=schedule_of(single, 2))


def test_misuse_is_named():
    run_ranks(1, _misuse)


def _cut_off():
    stage = Stage(make_state(pp=2), Case("1f1b", 1, 1))

    def forward(chunk, microbatch, hidden):
        output = stage.forward(chunk, microbatch, hidden)
        return output if hidden is None else stage.layers[8].weight.sum()

    expected = {
        0: (RuntimeError, "onnection (closed|reset)"),
        1: (ValueError, "output of chunk 0 of stage 1 does not depend on its input"),
    }
    kind, message = expected[stage.number]
    with pytest.raises(kind, match=message):
        stage.step(forward=forward)


def test_a_stage_that_ignores_its_input_is_named():
    run_ranks(2, _cut_off)


def _wrong_activation(shape, dtype):
    stage = Stage(make_state(pp=2), Case("1f1b", 1, 1))
    if stage.number == 1:
        return
    made = torch.ones(shape, dtype=dtype, requires_grad=True)
    message = (
        rf"made an activation {re.escape(str(shape))} of {dtype}, .* expects \(3, 2, 4\) of torch.float64"
    )
    with pytest.raises(ValueError, match=message):
        stage.step(forward=lambda chunk, microbatch, hidden: made)


@pytest.mark.parametrize(("shape", "dtype"), [((3, 2, 5), torch.float64), ((3, 2, 4), torch.float32)])
def test_an_activation_that_the_next_stage_does_not_expect_is_refused(shape, dtype):
    run_ranks(2, _wrong_activation, shape, dtype)


def _forget_to_finish():
    stage = Stage(make_state(pp=2), Case("1f1b", 1, 1))
    program = list(programs_of(stage.case, 2)[stage.number])
    last = max(index for index, operation in enumerate(program) if isinstance(operation, Finish))
    if stage.number == 1:  # its last Finish is that of a send
        del program[last]
        with pytest.raises(AssertionError, match=r"the program leaves tensors behind: .*backward"):
            stage.step(program=program)
    else:
        stage.step(program=program)


def test_a_transfer_that_is_never_finished_is_found():
    run_ranks(2, _forget_to_finish)


def _failing_backward():
    stage = Stage(make_state(), Case("zb-h1", 1, 1))

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("no gradient today")

    with pytest.raises(ArithmeticError, match="no gradient today"):
        stage.step(forward=lambda *args: Broken.apply(stage.forward(*args)))
    assert not stage.deferred[0].deferring


def test_after_a_backward_that_failed_gradients_are_no_longer_deferred():
    run_ranks(1, _failing_backward)
