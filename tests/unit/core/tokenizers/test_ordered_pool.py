"""Order, bounds, and the death of a worker."""

import os
import signal
import time

import pytest

from megatron.core.tokenizers.ordered_pool import OrderedPool, WorkerDiedError


def slow_square(number):
    time.sleep(0.03 if number % 5 == 0 else 0.001)
    return number * number


@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_results_come_in_the_order_of_the_items(num_workers):
    with OrderedPool(slow_square, num_workers) as pool:
        results = list(pool.map(range(40), lambda _: 1, 10))
    assert results == [number * number for number in range(40)]


def test_what_is_under_way_is_bounded():
    taken, given = 0, 0

    def items():
        nonlocal taken
        for number in range(60):
            # The one that is being taken comes on top.
            assert taken - given <= 8
            taken += 1
            yield number

    with OrderedPool(slow_square, 3) as pool:
        for _ in pool.map(items(), lambda _: 10, 80):
            given += 1
    assert given == 60


def test_an_item_heavier_than_the_bound_still_goes_through():
    with OrderedPool(slow_square, 2) as pool:
        assert list(pool.map([1, 2, 3], lambda number: number * 100, 50)) == [1, 4, 9]


def test_large_items_and_results_do_not_block():
    with OrderedPool(lambda data: data + data, 2) as pool:
        items = [bytes([n]) * 3_000_000 for n in range(6)]
        assert [len(result) for result in pool.map(items, len, 1 << 30)] == [6_000_000] * 6


def die(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return bytes(1_000_000)


def leave(number):
    if number == 3:
        os._exit(7)
    return number


@pytest.mark.parametrize(("function", "how"), [(die, "was killed by SIGKILL"), (leave, "exit code 7")])
def test_a_worker_that_dies_ends_the_work(function, how):
    with OrderedPool(function, 3) as pool, pytest.raises(WorkerDiedError, match=how):
        list(pool.map(range(100), lambda _: 1, 50))


def test_a_worker_killed_while_it_sends_does_not_block_the_others():
    def stuck_sending(number):
        if number == 0:
            time.sleep(0.3)
        return bytes(50_000_000) if number == 0 else number

    with OrderedPool(stuck_sending, 2) as pool:
        results = pool.map(range(10), lambda _: 1, 100)
        victim = pool._workers[0].process.pid
        pool._workers[0].tasks.send(0)
        pool._workers[0].item = 0
        time.sleep(0.5)  # by now it has filled its pipe and waits for a reader
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            list(results)


def test_leaving_ends_the_workers():
    with OrderedPool(slow_square, 2) as pool:
        processes = [worker.process for worker in pool._workers]
        next(pool.map(range(100), lambda _: 1, 10))
    assert not any(process.is_alive() for process in processes)
