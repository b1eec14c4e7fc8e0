"""How the processes of a job find each other, and what is said when some never come."""

import datetime
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from megatron.training.launcher import World

T = TypeVar("T")

_POLL_SECONDS = 0.1
_SECONDS_FOR_PEERS = 1.0
_SECONDS_FOR_LATECOMERS = 30.0
_ALL_HERE = "all have come"


class RendezvousError(RuntimeError):
    """The processes of a job did not all meet."""

    def __init__(self, problem: str, *, known_to_rank_zero: bool = False) -> None:
        """Say ``problem``, and whether rank 0 is there and says it too."""
        super().__init__(problem)
        self.known_to_rank_zero = known_to_rank_zero


def meet(world: World, seconds: float) -> Store:
    """Wait until every rank has come; return the store that they share.

    Args:
        world: this process's place.
        seconds: how long to wait.

    Raises:
        RendezvousError: after that time, saying how many of how many came and which are missing; at once
            where the port is taken or two processes have the same rank.
    """
    if world.world_size == 1:
        return HashStore()
    deadline = time.monotonic() + seconds
    store = _connect(world, seconds)
    try:
        _arrive(store, world, seconds, deadline)
    except dist.DistError as error:
        raise RendezvousError(
            f"rank {world.rank} lost the process at {world.address}:{world.port} while waiting for others: "
            f"{_first_line(error)}"
        ) from None
    return PrefixStore("groups", store)


def withdraw(world: World, problem: str) -> None:
    """Let the ranks that wait in :func:`meet`, or come to it yet, know that this one has failed before it.

    Where this process is to open the port, it does so and stays until all ranks have heard, for half a minute
    at most: the others would look for it in vain until their time is up.

    Args:
        world: this process's place.
        problem: what went wrong, in words.

    Raises:
        RendezvousError: if nobody can be told.
    """
    if world.world_size == 1:
        return
    deadline = time.monotonic() + _SECONDS_FOR_LATECOMERS
    store = _connect(world, _SECONDS_FOR_LATECOMERS)
    try:
        if not store.check(["settled"]):
            store.set("settled", f"rank {world.rank} failed at the start: {problem}")
        store.add(f"rank_{world.rank}", 1)
        store.add("withdrawn", 1)
        if not world.hosts_store:
            return
        while store.add("withdrawn", 0) + store.add("arrived", 0) < world.world_size:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)
        time.sleep(_SECONDS_FOR_PEERS)
    except dist.DistError as error:
        raise RendezvousError(f"{_nowhere_to_meet(world)}: {_first_line(error)}") from None


def _connect(world: World, seconds: float) -> Store:
    """The store of the job: opened here, or at the address where another process opens it."""
    assert world.address is not None
    _resolve(world)
    if not world.hosts_store:
        _await_port(world, seconds)
    try:
        store = _within(seconds, world, lambda: _open_store(world, seconds))
    except dist.DistNetworkError as error:
        if world.hosts_store and "in use" in str(error).lower():
            raise RendezvousError(
                f"rank {world.rank} cannot open port {world.port}: another process has it. Either two "
                f"processes have rank {world.rank}, or another job runs here; then set MASTER_PORT to a free "
                "port"
            ) from None
        raise RendezvousError(f"{_nowhere_to_meet(world)}: {_first_line(error)}") from None
    return PrefixStore(f"megatron/attempt_{world.attempt}", store)


def _open_store(world: World, seconds: float) -> TCPStore:
    assert world.address is not None
    return TCPStore(
        world.address,
        world.port,
        is_master=world.hosts_store,
        timeout=datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
    )


def _within(seconds: float, world: World, action: Callable[[], T]) -> T:
    """What ``action`` gives, in a limited time: the library's client waits forever for an answer."""
    outcome: Future[T] = Future()

    def settle() -> None:
        try:
            outcome.set_result(action())
        except Exception as error:  # noqa: BLE001 - raised again below
            outcome.set_exception(error)

    threading.Thread(target=settle, daemon=True).start()
    try:
        # The client keeps its own limit where there is one, and says more.
        return outcome.result(seconds + _SECONDS_FOR_PEERS)
    except TimeoutError:
        raise RendezvousError(
            f"rank {world.rank} gets no answer from {world.address}:{world.port} within {seconds:g} s: "
            "another program has that port, or the first rank hangs there; set MASTER_PORT to a free port"
        ) from None


def _resolve(world: World) -> None:
    """Look the host up at once: the library's own client would try for the whole time limit."""
    try:
        socket.getaddrinfo(world.address, world.port)
    except OSError as error:
        raise RendezvousError(f"{_nowhere_to_meet(world)}: {error.strerror}") from None


def _await_port(world: World, seconds: float) -> None:
    """Wait until the meeting point answers, so that the library's own client finds it at once."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((world.address, world.port), timeout=max(1.0, seconds / 10)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"{_nowhere_to_meet(world)} within {seconds:g} s ({error.strerror or error}): is the "
                    f"first rank of {world.world_size} running there?"
                ) from None
            time.sleep(_POLL_SECONDS)
        else:
            return


def _nowhere_to_meet(world: World) -> str:
    return (
        f"rank {world.rank} finds nobody at {world.address}:{world.port} (from MASTER_ADDR and MASTER_PORT, "
        "or SLURM's node list and job number)"
    )


def _arrive(store: Store, world: World, seconds: float, deadline: float) -> None:
    """Count this rank in and wait for the rest; the last to come, or whoever sees a problem, wakes all."""
    if store.add(f"rank_{world.rank}", 1) > 1:
        _give_up(store, world, f"two processes say that they are rank {world.rank} of {world.world_size}")
    if store.add("arrived", 1) == world.world_size:
        store.set("settled", _ALL_HERE)
    pause = _POLL_SECONDS * (1 + world.world_size / 512)  # spares the one process that answers all
    while not store.check(["settled"]):
        if time.monotonic() > deadline:
            missing = [rank for rank in range(world.world_size) if not store.check([f"rank_{rank}"])]
            came = world.world_size - len(missing)
            shown = ", ".join(map(str, missing[:16])) + (" and more" if len(missing) > 16 else "")
            _give_up(
                store,
                world,
                f"only {came} of {world.world_size} ranks came within {seconds:g} s "
                f"(--distributed-timeout-minutes): missing {shown}",
            )
        time.sleep(pause)
    verdict = store.get("settled").decode()
    if verdict != _ALL_HERE:
        _give_up(store, world, verdict)


def _give_up(store: Store, world: World, problem: str) -> None:
    """Tell the ranks that wait, then fail."""
    if not store.check(["settled"]):
        store.set("settled", problem)
    if world.hosts_store:
        time.sleep(_SECONDS_FOR_PEERS)  # the store ends with this process, and others have yet to read it
    raise RendezvousError(problem, known_to_rank_zero=store.check(["rank_0"]))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
