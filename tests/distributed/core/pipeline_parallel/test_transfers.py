import itertools

import pytest
import torch

from megatron.core.communication import Meter
from megatron.core.config import ParallelConfig
from megatron.core.parallel_state import create_parallel_state
from megatron.core.pipeline_parallel.p2p import (
    PipelineChannels,
    TensorSpec,
    open_channels,
    start_receive,
    start_send,
)
from tests.distributed.core.pipeline_parallel.toy import BATCH, HIDDEN, SEQUENCE, Case, Stage
from tests.harness import make_state, run_ranks

ACTIVATION_BYTES = SEQUENCE * BATCH * HIDDEN * 8  # [s, b, h] in float64


def _metered_state(tp, pp):
    meter = Meter()
    config = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    return create_parallel_state(config, "cpu", meter), meter


def _traffic(tp, pp, cases):
    """By case and by whether slices travel: results of the step, and what this rank sent along each axis."""
    state, meter = _metered_state(tp, pp)
    results = []
    for case in cases:
        for scatter_gather in (False, True):
            stage = Stage(state, case, scatter_gather=scatter_gather)
            open_channels(stage.channels, torch.device("cpu"))
            meter.take()
            losses = stage.step()
            sent = {key: (entry.calls, entry.moved_bytes) for key, entry in meter.take().items()}
            results.append((losses, stage.gradients(), sent))
    return results


def _sent_by(case, pp, stage):
    """Tensors that a stage sends to others in a step, from where the parts of the model are."""
    loop = [*range(pp)] * case.chunks
    order = [*range(pp), *reversed(range(pp))] if case.name == "zb-v" else loop
    crossings = [(a, b) for a, b in itertools.pairwise(order) if a != b]
    forward = sum(a == stage for a, _ in crossings)
    backward = sum(b == stage for _, b in crossings)
    return case.count * (forward + backward)


def test_with_slices_each_rank_sends_a_tp_th_and_all_results_are_the_same():
    tp, pp = 2, 2
    cases = [Case("1f1b", 1, 3), Case("interleaved", 2, 4), Case("zb-h1", 1, 3), Case("zb-v", 2, 2)]
    ranks = run_ranks(tp * pp, _traffic, tp, pp, cases)
    for rank, results in enumerate(ranks):
        stage = rank // tp  # pp is the outer axis
        for index, case in enumerate(cases):
            (losses, gradients, whole), (sliced_losses, sliced_gradients, sliced) = results[
                2 * index : 2 * index + 2
            ]
            assert losses == sliced_losses
            assert all(all(map(torch.equal, gradients[i], sliced_gradients[i])) for i in gradients)
            sends = _sent_by(case, pp, stage)
            assert whole == {("pp", "send"): (sends, sends * ACTIVATION_BYTES)}
            # With two stages each receives as often as it sends, and gathers what is received over tp.
            share = ACTIVATION_BYTES / tp
            assert sliced == {
                ("pp", "send"): (sends, sends * share),
                ("tp", "all_gather"): (sends, sends * (tp - 1) * share),
            }


def _one_transfer(shape):
    """Send a tensor from stage 0 to stage 1, each way of two channels; what arrived and what was sent."""
    state, meter = _metered_state(tp=2, pp=2)
    channels = PipelineChannels(state.group("pp"), state.pp_gradients, state.group("tp"), scatter_gather=True)
    spec = TensorSpec(shape, torch.float32, torch.device("cpu"))
    tensor = torch.arange(spec_numel(shape), dtype=torch.float32).view(shape)
    meter.take()
    if state.rank("pp") == 0:
        start_send(channels, "activations", 1, tensor).finish()
        arrived = start_receive(channels, "gradients", 1, spec).finish()
    else:
        arrived = start_receive(channels, "activations", 0, spec).finish()
        # Every second column of a wider tensor: not contiguous.
        start_send(channels, "gradients", 0, torch.stack([-tensor, tensor], -1)[..., 0]).finish()
    return arrived, meter.take()["pp", "send"].moved_bytes


def spec_numel(shape):
    return torch.Size(shape).numel()


@pytest.mark.parametrize(("shape", "bytes_sent"), [((3, 1, 4), 3 * 4 * 4 / 2), ((3, 1, 5), 3 * 5 * 4)])
def test_tensors_that_do_not_divide_travel_whole(shape, bytes_sent):
    expected = torch.arange(spec_numel(shape), dtype=torch.float32).view(shape)
    for rank, (arrived, sent) in enumerate(run_ranks(4, _one_transfer, shape)):
        assert torch.equal(arrived, expected if rank >= 2 else -expected)
        assert sent == bytes_sent


def _slices():
    state = make_state()
    channels = PipelineChannels(state.group("pp"), state.pp_gradients, state.group("tp"), scatter_gather=True)
    assert channels.slices(12) == 1  # one tensor-parallel rank
    open_channels(channels, torch.device("cpu"))


def test_one_rank_opens_its_channels_and_cuts_no_slices():
    run_ranks(1, _slices)


def _opened():
    state, meter = _metered_state(tp=1, pp=2)
    channels = PipelineChannels(state.group("pp"), state.pp_gradients, state.group("tp"))
    open_channels(channels, torch.device("cpu"))
    return meter.take()


def test_opening_the_channels_counts_as_no_traffic():
    assert run_ranks(2, _opened) == [{}, {}]
