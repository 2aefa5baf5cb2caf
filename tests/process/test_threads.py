"""Threads that nobody waits for end soon, although they wait for something themselves."""

import concurrent.futures

import pytest

from coyo11m_tfds.process import threads
from coyo11m_tfds.process.threads import ThreadPool
from tests import children

LONG = 600.0


def wait_until_running(future: concurrent.futures.Future) -> None:
    children.wait_until(future.running, seconds=60)


def test_an_error_in_the_block_ends_pauses_and_cancels_what_has_not_begun():
    with pytest.raises(KeyboardInterrupt), ThreadPool(1) as pool:
        begun = pool.submit(threads.pause, LONG)
        queued = pool.submit(int)
        wait_until_running(begun)
        raise KeyboardInterrupt
    assert isinstance(begun.exception(), concurrent.futures.CancelledError)
    assert queued.cancelled()


def test_without_an_error_everything_is_done():
    with ThreadPool(1) as pool:
        futures = [pool.submit(threads.pause, 0.01) for _ in range(3)]
    assert [future.result() for future in futures] == [None] * 3


def test_the_threads_of_an_inner_pool_end_with_the_outer_one():
    inner = concurrent.futures.Future[concurrent.futures.Future]()

    def wait_for_inner_pool() -> None:
        with ThreadPool(1) as pool:
            inner.set_result(pool.submit(threads.pause, LONG))

    with ThreadPool(1) as pool:
        outer = pool.submit(wait_for_inner_pool)
        wait_until_running(inner.result())
        pool.end_pauses()
    assert outer.result() is None
    assert isinstance(inner.result().exception(), concurrent.futures.CancelledError)


def test_an_error_of_an_inner_pool_does_not_end_the_outer_one():
    def fail_inside() -> None:
        with ThreadPool(1):
            raise ValueError

    with ThreadPool(1) as pool:
        assert isinstance(pool.submit(fail_inside).exception(), ValueError)
        assert pool.submit(threads.pause, 0.0).result() is None


_UNFINISHED = """
from coyo11m_tfds.process import threads

pool = threads.ThreadPool(1)
pool.submit(threads.pause, 600)
"""


def test_a_program_ends_although_a_thread_waits():
    with children.python(_UNFINISHED) as child:
        assert child.communicate(timeout=60) == ('', '')
    assert child.returncode == 0


def test_a_pool_that_nobody_holds_ends_its_threads():
    pool = ThreadPool(1, 'forgotten')
    pool.submit(int).result()
    [thread] = pool._threads
    del pool
    thread.join(60)
    assert not thread.is_alive()
