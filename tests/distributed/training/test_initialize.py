import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "TORCHELASTIC_")


def start(variables, *, timeout_seconds=20):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    environ |= {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"} | variables
    command = [sys.executable, "-m", "tests.distributed.training.rank_program", str(timeout_seconds)]
    return subprocess.Popen(
        command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(processes):
    """(exit code, output) of each."""
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def torchrun_rank(rank, world, port):
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def slurm_rank(rank, world, port):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(world),
        "SLURM_LOCALID": str(rank),
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
        "MASTER_PORT": port,
    }


@pytest.mark.parametrize("variables", [torchrun_rank, slurm_rank])
def test_two_shells_form_one_world(variables):
    port = free_port()
    results = finish([start(variables(rank, 2, port)) for rank in range(2)])
    assert [code for code, _ in results] == [0, 0]
    assert [f"rank {rank} of 2 sums 1" in output for rank, (_, output) in enumerate(results)] == [True, True]
    announced = [output.count("world size 2, started by") for _, output in results]
    assert announced == [1, 0]
    assert f"meeting at 127.0.0.1:{port}" in results[0][1]


def test_rank_zero_need_not_live_where_the_port_is_opened():
    port = free_port()
    nodes = [{"SLURM_NODEID": "1", "SLURM_LOCALID": "0"}, {"SLURM_NODEID": "0", "SLURM_LOCALID": "0"}]
    results = finish([start(slurm_rank(rank, 2, port) | nodes[rank]) for rank in range(2)])
    assert [code for code, _ in results] == [0, 0]


def test_a_rank_that_never_comes():
    began = time.monotonic()
    [(code, output)] = finish([start(torchrun_rank(0, 2, free_port()), timeout_seconds=2)])
    assert code == 1
    assert "error: only 1 of 2 ranks came within 2 s (--distributed-timeout-minutes): missing 1" in output
    assert time.monotonic() - began < 30


def test_the_first_rank_never_comes():
    [(code, output)] = finish([start(torchrun_rank(1, 2, free_port()), timeout_seconds=1)])
    assert code == 1
    assert "error: rank 1 finds nobody at 127.0.0.1:" in output
    assert output.count("\n") == 1


def test_two_processes_with_one_rank():
    port = free_port()
    results = finish([start(torchrun_rank(rank, 3, port)) for rank in (0, 1, 1)])
    assert [code for code, _ in results] == [1, 1, 1]
    for _, output in results:
        assert output == "error: two processes say that they are rank 1 of 3\n"


def test_two_processes_with_rank_zero():
    port = free_port()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", int(port)))
        other.listen()
        [(code, output)] = finish([start(torchrun_rank(0, 2, port))])
    assert code == 1
    assert f"error: rank 0 cannot open port {port}: another process has it" in output


def test_an_unknown_host_is_named_at_once():
    began = time.monotonic()
    variables = slurm_rank(0, 2, free_port()) | {"SLURM_JOB_NODELIST": "no-such-host[1-2].invalid"}
    [(code, output)] = finish([start(variables, timeout_seconds=30)])
    assert code == 1
    assert "rank 0 finds nobody at no-such-host1.invalid" in output
    assert time.monotonic() - began < 25
