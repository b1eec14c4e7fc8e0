import multiprocessing
import time

from megatron.training.hooks.exit import process_age_seconds


def age_after(seconds, answer):
    time.sleep(seconds)
    answer.put(process_age_seconds())


def test_the_age_of_a_process_counts_from_its_start():
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    began = time.monotonic()
    child = context.Process(target=age_after, args=(0.3, answer))
    child.start()
    age = answer.get()
    longest = time.monotonic() - began
    child.join()
    assert 0.29 < age < longest + 0.02  # the kernel notes starts in hundredths of a second
    assert process_age_seconds() > age
