import socket
import time

import pytest

from megatron.training.launcher import World, discover_world
from megatron.training.rendezvous import RendezvousError, meet


@pytest.fixture
def silent_port():
    """A port whose owner takes every connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def place(rank: int, port: int) -> World:
    names = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    return discover_world(names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


def test_a_program_that_never_answers_at_the_meeting_point(silent_port):
    began = time.monotonic()
    with pytest.raises(RendezvousError) as failure:
        meet(place(1, silent_port), 0.5)
    assert str(failure.value) == (
        f"rank 1 gets no answer from 127.0.0.1:{silent_port} within 0.5 s: another program has that port, or "
        "the first rank hangs there; set MASTER_PORT to a free port"
    )
    assert time.monotonic() - began < 10


def test_a_port_that_another_program_has(silent_port):
    with pytest.raises(RendezvousError, match=f"rank 0 cannot open port {silent_port}: another process has"):
        meet(place(0, silent_port), 0.5)
