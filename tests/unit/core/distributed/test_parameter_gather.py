"""Which parameters a module waits for before it runs."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed import ParameterBuffers, parameter_gather
from megatron.core.parameter import Placement, make_parameter, named_parameters, replicated_facts
from tests.unit.core.distributed.toy import solo_group

PLACEMENT = Placement(torch.bfloat16, torch.device("cpu"))


class Scale(nn.Module):
    """A layer of one weight [64]."""

    def __init__(self, events: list[str], name: str) -> None:
        super().__init__()
        self.weight = make_parameter((64,), replicated_facts((64,), 0), PLACEMENT)
        self.events, self.name = events, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append(f"run {self.name}")
        return x * self.weight


class Matrix(nn.Module):
    """A weight that its parent reads; it never runs itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = make_parameter((64,), replicated_facts((64,), 0), PLACEMENT)


class Net(nn.Module):
    """Layers in a list, one of them nested, and an output matrix."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [Scale(events, "0"), nn.Sequential(Scale(events, "1")), Scale(events, "2")]
        )
        self.output = Matrix()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.output.weight


class Recorded:
    """A gather that tells when it is waited for."""

    def __init__(self, events: list[str], number: int) -> None:
        self.events, self.number = events, number

    def wait(self) -> None:
        self.events.append(f"wait {self.number}")


def test_modules_wait_for_what_they_read_right_before_they_run(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    net = Net(events)
    with solo_group() as group:
        buffers = ParameterBuffers(
            list(named_parameters(net)), bucket_size=1, strategy="optim", data_group=group
        )
        numbers = {bucket.weights.data_ptr(): number for number, bucket in enumerate(buffers.flat_buckets)}
        names = [bucket.slots[0].named.name for bucket in buffers.flat_buckets]
        assert names == ["output.weight", "layers.2.weight", "layers.1.0.weight", "layers.0.weight"]

        def start(whole: torch.Tensor, *_: Any) -> Recorded:
            number = numbers[whole.data_ptr()]
            events.append(f"start {number}")
            return Recorded(events, number)

        monkeypatch.setattr(parameter_gather, "start_all_gather", start)
        buffers.publish()
        assert events == [f"{what} {n}" for what in ("start", "wait") for n in range(4)]
        events.clear()
        buffers.gather_during_forward([net])
        buffers.publish()
        # The net itself reads the output matrix, and so needs it first; then come the layers as they run.
        assert events == ["start 0", "start 3", "start 2", "start 1"]
        events.clear()
        for _ in range(2):
            net(torch.ones(64))
        assert events == [
            "wait 0",
            "wait 3",
            "run 0",
            "wait 2",
            "run 1",
            "wait 1",
            "run 2",
            "run 0",
            "run 1",
            "run 2",
        ]
        events.clear()
        buffers.publish()
        buffers.wait_for_parameters()
        net(torch.ones(64))
        assert [event for event in events if "run" not in event][4:] == [
            "wait 0",
            "wait 3",
            "wait 2",
            "wait 1",
        ]


def test_nothing_is_gathered_where_nothing_is_divided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parameter_gather, "start_all_gather", None)
    net = Net([])
    buffers = ParameterBuffers(list(named_parameters(net)), bucket_size=None)
    buffers.gather_during_forward([net])
    buffers.publish()
    buffers.wait_for_parameters()
    assert not any(module._forward_pre_hooks for module in net.modules())
