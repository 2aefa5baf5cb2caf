"""Progress: what it shows in a log and on a terminal, and that it never breaks the work."""

import concurrent.futures
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coyo11m_tfds.process import progress
from tests import children
from tests.checkout import CHECKOUT


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log(caplog) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level('INFO', logger='absl'):
        yield caplog


def test_a_line_tells_goals_speeds_counts_and_the_time_left(log):
    clock = Clock()
    with progress.Progress('Writing shards', 10**9, 'B', {'shards': 2400}, clock) as made:
        clock.now += 10
        made.add(10**8, shards=3, records=50_000, dropped=7)
        clock.now += 10
        made.add(3 * 10**8, shards=2, records=150_000, dropped=0)
        assert log.messages == [
            'Writing shards: 10%, 3 of 2,400 shards, 5,000 records/s, 10 MB/s, 7 dropped, '
            '0:01:30 left',
            'Writing shards: 40%, 5 of 2,400 shards, 10,000 records/s, 20 MB/s, 7 dropped, '
            '0:00:30 left',
        ]


def test_slow_work_has_a_speed(log):
    clock = Clock()
    with progress.Progress('Encoding', 100, 'B', clock=clock) as made:
        for _ in range(2):
            clock.now += 10
            made.add(20, images=3)
    assert log.messages[:2] == [
        'Encoding: 20%, 0.30 images/s, 0.00 MB/s, 0:00:40 left',
        'Encoding: 40%, 0.30 images/s, 0.00 MB/s, 0:00:30 left',
    ]


def test_it_says_so_when_the_work_was_broken_off(log):
    clock = Clock()
    with (
        pytest.raises(OSError, match='disk full'),
        progress.Progress('Copying', 10**8, 'B', clock=clock) as made,
    ):
        clock.now += 5
        made.add(10**7)
        raise OSError('disk full')
    assert log.messages == ['Copying: 10%, 2.0 MB/s, ended after 0:00:05']


def test_the_name_of_a_folder_in_a_title_controls_no_terminal(log):
    with progress.Progress('Copying to a\x1b[2Jb', 1, 'B'):
        pass
    assert log.messages[0].startswith(r'Copying to a\x1b[2Jb: ')


def test_the_speed_is_that_of_the_last_minute(log):
    clock = Clock()
    with progress.Progress('Copying', 10**10, 'B', clock=clock) as made:
        for megabytes in [100] * 100 + [1] * 62:
            clock.now += 1
            made.add(megabytes * 10**6)
    assert log.messages[0].startswith('Copying: 10%, 100 MB/s')
    assert len(log.messages) == 16 + 1  # ten seconds apart, and the last
    assert ', 1.0 MB/s, 0:00:00 left' in log.messages[-2]
    assert ', 62 MB/s, in 0:02:42' in log.messages[-1]


def test_what_an_earlier_run_did_counts_but_does_not_make_it_faster(log):
    clock = Clock()
    with progress.Progress('Writing', 10**9, 'B', {'shards': 10}, clock) as made:
        made.skip(8 * 10**8, shards=8, records=4000)
        clock.now += 10
        made.add(10**8, shards=1, records=500)
        assert log.messages == ['Writing: 90%, 9 of 10 shards, 50 records/s, 10 MB/s, 0:00:10 left']


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 10**13),
    st.sampled_from(['B', 'files']),
    st.lists(st.tuples(st.integers(0, 10**13), st.floats(0, 1e6), st.booleans()), max_size=20),
)
def test_no_course_of_events_makes_it_fail(log, total, unit, steps):
    """Hours of work must not end because of a line in the log; nor is more than all ever done."""
    log.clear()
    clock = Clock()
    with progress.Progress('Copying', total, unit, {'shards': total}, clock) as made:
        for amount, seconds, earlier in steps:
            clock.now += seconds
            (made.skip if earlier else made.add)(amount, shards=1, records=amount)
    assert log.messages
    for line in log.messages:
        assert '-' not in line
        shares = [int(word[:-2]) for word in line.split() if word.endswith('%,')]
        assert len(shares) == (total > 0)
        assert all(share <= 100 for share in shares)


class SlowOne(int):
    """1, but while it is being added other threads run."""

    def __new__(cls) -> 'SlowOne':
        return super().__new__(cls, 1)

    def __add__(self, other: int) -> int:
        time.sleep(1e-6)
        return other + 1


def test_threads_may_share_one(log):
    with (
        progress.Progress('Copying', 400, 'B', {'files': 400}) as made,
        concurrent.futures.ThreadPoolExecutor(8) as threads,
    ):
        list(threads.map(lambda _: made.add(1, files=SlowOne()), range(400)))
    assert '100%, 400 of 400 files' in log.messages[-1]


def test_a_line_comes_every_ten_seconds_while_nothing_arrives(log, monkeypatch):
    monkeypatch.setattr(progress, '_SECONDS_BETWEEN_TICKS', 0.01)
    clock = Clock()
    with progress.Progress('Copying', 10**9, 'B', clock=clock) as made:
        clock.now += 5
        made.add(10**8)
        for seconds in (10, 100):
            clock.now += seconds
            children.wait_until(lambda: len(log.messages) == (1 if clock.now < 1100 else 2))
    assert log.messages[0] == 'Copying: 10%, 6.7 MB/s, 0:02:15 left'
    assert log.messages[1] == 'Copying: 10%, 0 MB/s'


_ON_A_TERMINAL = """
import time
from absl import logging
from coyo11m_tfds.process import command_line, progress

command_line.show_log()
progress._SECONDS_BETWEEN_TICKS = 0.05
progress._SECONDS_BETWEEN_LINES = 0.2
with progress.Progress('Writing shards', 10**9, 'B', {'shards': 8}) as made:
    made.skip(25 * 10**7, shards=2)
    time.sleep(0.3)
    logging.info('a line of the log')
    made.add(25 * 10**7, shards=2, records=1000, dropped=3)
    time.sleep(0.3)
"""


def show_on_a_terminal(columns: int) -> list[str]:
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack('HHHH', 24, columns, 0, 0))
    program = [sys.executable, '-c', _ON_A_TERMINAL]
    with subprocess.Popen(program, cwd=CHECKOUT, stderr=terminal) as child:
        assert child.wait(60) == 0
    os.close(terminal)
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    return [line for line in re.split('[\r\n]+', re.sub(r'\x1b\[\w', '', shown)) if line.strip()]


@pytest.mark.parametrize('columns', [40, 120])
def test_on_a_terminal_it_is_a_bar_that_no_line_of_the_log_breaks_and_that_never_wraps(columns):
    lines = show_on_a_terminal(columns)
    bars = [line for line in lines if line.startswith('Writing shards: ')]
    assert bars[-1].startswith('Writing shards: 50%, 4 of 8 shards, ')
    assert all(len(line) <= columns for line in bars)
    assert ('|' in bars[-1]) == (columns > 100)
    logged = [line[9:] for line in lines if re.match(r'\d\d:\d\d:\d\d ', line)]
    assert logged[0] == 'a line of the log'
    assert re.match('Writing shards: 100%, 4 of 8 shards, .* 3 dropped, in 0:00:0', logged[1])


@pytest.mark.parametrize('columns', [0, 10])
def test_a_terminal_without_room_for_a_bar_gets_lines(columns):
    lines = show_on_a_terminal(columns)
    assert not [line for line in lines if line.startswith('Writing shards: ')]
    logged = [line[9:] for line in lines if re.match(r'\d\d:\d\d:\d\d ', line)]
    assert any(line.startswith('Writing shards: 50%, 4 of 8 shards, ') for line in logged)
    assert logged[-1].startswith('Writing shards: 100%, ')
