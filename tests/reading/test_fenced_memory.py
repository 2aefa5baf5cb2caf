"""Reads stay inside of open regions, whoever opens and closes them."""

import gc
import threading
import weakref

import numpy as np
import pytest

from coyo11m_tfds.reading.fenced_memory import FencedMemory


class Owner:
    """In a cycle, so that only the garbage collector ends it."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def eager_collector():
    """Collects garbage at nearly every allocation."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*thresholds)


def test_the_garbage_collector_may_close_a_region_at_any_moment(eager_collector):
    memory, values = FencedMemory(), np.arange(100, dtype=np.uint8)

    def read() -> None:
        for address in range(values.ctypes.data, values.ctypes.data + len(values)):
            memory.open([(address, 1)])
            weakref.finalize(Owner(), memory.close, [(address, 1)])
            memory.gather(np.array([memory.zeros]), 8)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    gc.collect()
    with pytest.raises(IndexError, match='no open region'):
        memory.gather(np.array([values.ctypes.data]), 1)
