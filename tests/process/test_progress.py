"""Progress: what it says in the log, and that it never breaks the work."""

import logging
import threading
import time
from collections.abc import Iterator

import pytest
from absl import logging as absl_logging
from hypothesis import given
from hypothesis import strategies as st

from coyo11m_tfds.process import progress


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Lines(logging.Handler):
    """Keeps the messages of the log instead of showing them, as a context manager."""

    def __enter__(self) -> list[str]:
        self.messages, self.logger = [], absl_logging.get_absl_logger()
        self.previous = self.logger.level, self.logger.propagate
        self.logger.addHandler(self)
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False
        return self.messages

    def __exit__(self, *_) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.previous[0])
        self.logger.propagate = self.previous[1]

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    with Lines() as messages:
        yield messages


def test_a_line_tells_goals_speeds_counts_and_the_time_left(lines):
    clock = Clock()
    with progress.Progress('Writing shards', 10**9, 'B', {'shards': 2400}, clock) as made:
        clock.now += 10
        made.add(10**8, shards=3, records=50_000, dropped=7)
        clock.now += 10
        made.add(3 * 10**8, shards=2, records=150_000, dropped=0)
        assert lines == [
            'Writing shards: 10%, 3 of 2,400 shards, 5,000 records/s, 10 MB/s, 7 dropped, '
            '0:01:30 left',
            'Writing shards: 40%, 5 of 2,400 shards, 10,000 records/s, 20 MB/s, 7 dropped, '
            '0:00:30 left',
        ]


def test_it_says_so_when_the_work_was_broken_off(lines):
    clock = Clock()
    with (
        pytest.raises(OSError, match='disk full'),
        progress.Progress('Copying', 10**8, 'B', clock=clock) as made,
    ):
        clock.now += 5
        made.add(10**7)
        raise OSError('disk full')
    assert lines == ['Copying: 10%, 2.0 MB/s, ended after 0:00:05']


def test_the_speed_is_that_of_the_last_minute(lines):
    clock = Clock()
    with progress.Progress('Copying', 10**10, 'B', clock=clock) as made:
        for megabytes in [100] * 100 + [1] * 62:
            clock.now += 1
            made.add(megabytes * 10**6)
    assert lines[0].startswith('Copying: 10%, 100 MB/s')
    assert len(lines) == 16 + 1  # ten seconds apart, and the last
    assert ', 1.0 MB/s, 0:00:00 left' in lines[-2]
    assert ', 62 MB/s, in 0:02:42' in lines[-1]


def test_what_an_earlier_run_did_counts_but_does_not_make_it_faster(lines):
    clock = Clock()
    with progress.Progress('Writing', 10**9, 'B', {'shards': 10}, clock) as made:
        made.skip(8 * 10**8, shards=8, records=4000)
        clock.now += 10
        made.add(10**8, shards=1, records=500)
        assert lines == ['Writing: 90%, 9 of 10 shards, 50 records/s, 10 MB/s, 0:00:10 left']


@given(
    st.integers(0, 10**13),
    st.sampled_from(['B', 'files']),
    st.lists(st.tuples(st.integers(0, 10**13), st.floats(0, 1e6), st.booleans()), max_size=20),
)
def test_no_course_of_events_makes_it_fail(total, unit, steps):
    """Hours of work must not end because of a line in the log; nor is more than all ever done."""
    clock = Clock()
    with (
        Lines() as lines,
        progress.Progress('Copying', total, unit, {'shards': total}, clock) as made,
    ):
        for amount, seconds, earlier in steps:
            clock.now += seconds
            (made.skip if earlier else made.add)(amount, shards=1, records=amount)
    assert lines
    for line in lines:
        assert '-' not in line
        shares = [int(word[:-2]) for word in line.split() if word.endswith('%,')]
        assert len(shares) == (total > 0)
        assert all(share <= 100 for share in shares)


class SlowOne(int):
    """1, but while it is being added other threads run."""

    def __new__(cls) -> 'SlowOne':
        return super().__new__(cls, 1)

    def __radd__(self, other: int) -> int:
        time.sleep(1e-6)
        return other + 1


def test_threads_may_share_one(lines):
    with progress.Progress('Copying', 400, 'B', {'files': 400}) as made:
        threads = [
            threading.Thread(target=lambda: [made.add(SlowOne(), files=1) for _ in range(50)])
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert '100%, 400 of 400 files' in lines[-1]
