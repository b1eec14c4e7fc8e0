"""A function applied to many items by several processes, the results in the order of the items."""

import contextlib
import gc
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_SECONDS_TO_DIE: Final = 5.0


class WorkerDiedError(RuntimeError):
    """A worker process ended before its work did."""


@dataclass
class _Worker:
    process: BaseProcess
    tasks: "Connection[Any, Any]"
    results: "Connection[Any, Any]"
    item: int = -1
    """Number of the item that it works on."""


class OrderedPool(Generic[Item, Result]):
    """Worker processes that apply ``function``, one item each at a time.

    Each worker has two pipes of its own, so the death of one, at whatever moment, closes a pipe that nobody
    else holds and is noticed at once; a queue shared by all workers could be left locked, or with half a
    message in it. Workers end when the process that made them does.

    Use it as a context manager; leaving it ends the workers.

    Args:
        function: what to do with an item. It reaches the workers by forking and need not be picklable; items
            and results must be.
        num_workers: processes.
    """

    def __init__(self, function: Callable[[Item], Result], num_workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self._workers: list[_Worker] = []
        for _ in range(num_workers):
            task_reader, task_writer = context.Pipe(duplex=False)
            result_reader, result_writer = context.Pipe(duplex=False)
            ours = [end for worker in self._workers for end in (worker.tasks, worker.results)]
            ours += [task_writer, result_reader]
            process = context.Process(
                target=_work, args=(function, task_reader, result_writer, ours), daemon=True
            )
            with _undisturbed_fork():
                process.start()
            # From here on each end is held by one process: workers forked later do not inherit this worker's
            # ends, and close the parent's.
            task_reader.close()
            result_writer.close()
            self._workers.append(_Worker(process, task_writer, result_reader))

    def __enter__(self) -> "OrderedPool[Item, Result]":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.tasks.close()
            worker.results.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(_SECONDS_TO_DIE)
            if worker.process.is_alive():
                worker.process.kill()

    def map(self, items: Iterable[Item], weight: Callable[[Item], int], max_weight: int) -> Iterator[Result]:
        """Results in the order of the items.

        Args:
            items: taken one by one, as room appears.
            weight: how much memory an item stands for.
            max_weight: the items under way, or done and waiting for an earlier one, weigh no more than this
                together, unless one alone does.

        Raises:
            WorkerDiedError: if a worker ends before its work does.
        """
        under_way: deque[tuple[int, int]] = (
            deque()
        )  # (number, weight) of each item not yet given out, in order
        done: dict[int, Result] = {}
        total = 0
        for number, item in enumerate(items):
            heaviness = weight(item)
            while under_way and total + heaviness > max_weight:
                total -= under_way[0][1]
                yield self._oldest(under_way, done)
            while under_way and under_way[0][0] in done:
                total -= under_way[0][1]
                yield self._oldest(under_way, done)
            self._give(self._idle_worker(done), number, item)
            under_way.append((number, heaviness))
            total += heaviness
        while under_way:
            yield self._oldest(under_way, done)

    def _oldest(self, under_way: deque[tuple[int, int]], done: dict[int, Result]) -> Result:
        number, _ = under_way.popleft()
        while number not in done:
            self._collect(done)
        return done.pop(number)

    def _idle_worker(self, done: dict[int, Result]) -> _Worker:
        while True:
            for worker in self._workers:
                if worker.item < 0:
                    return worker
            self._collect(done)

    def _give(self, worker: _Worker, number: int, item: Item) -> None:
        try:
            worker.tasks.send(item)  # it is waiting for this, so it never blocks for long
        except BrokenPipeError:
            raise self._death_of(worker) from None
        worker.item = number

    def _collect(self, done: dict[int, Result]) -> None:
        busy = {worker.results: worker for worker in self._workers if worker.item >= 0}
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            worker = busy[connection]
            try:
                done[worker.item] = connection.recv()
            except (EOFError, OSError):  # at the end of a message, or within one
                raise self._death_of(worker) from None
            worker.item = -1

    def _death_of(self, worker: _Worker) -> WorkerDiedError:
        worker.process.join(_SECONDS_TO_DIE)
        code = worker.process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            hint = (
                "; if nobody sent it, look for the out-of-memory killer in the kernel's log"
                if code == -9
                else ""
            )
        else:
            how, hint = f"ended with exit code {code}", "; its own message is above"
        return WorkerDiedError(f"worker process {worker.process.pid} {how}{hint}")


@contextlib.contextmanager
def _undisturbed_fork() -> Iterator[None]:
    """Fork without collecting garbage in the child.

    What lies there are copies of the parent's objects, some of which (of libraries with threads of their own)
    cannot be taken apart in another process. Frozen, they are left alone for good.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _work(
    function: Callable[[Any], Any],
    tasks: "Connection[Any, Any]",
    results: "Connection[Any, Any]",
    inherited: "list[Connection[Any, Any]]",
) -> None:
    gc.enable()
    for end in inherited:
        end.close()  # the parent's; while one is open here, the parent's death would go unnoticed
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        try:
            item = tasks.recv()
        except (EOFError, OSError):
            return
        try:
            results.send(function(item))
        except BrokenPipeError:
            return
