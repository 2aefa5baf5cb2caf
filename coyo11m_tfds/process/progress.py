"""Shows the progress of long work: a bar on a terminal or in a notebook, lines in a log.

    Writing shards: 33%, 3 of 8 shards, 25,000 records/s, 640 MB/s, 3 dropped, 0:00:01 left

A line comes every ten seconds, even while nothing arrives. A terminal that has no room for a bar
gets lines, too. Lines go to absl's log as INFO, and where that is not shown there is no bar either.
"""

import collections
import contextlib
import datetime
import logging as standard_logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import tqdm
import tqdm.auto
from absl import logging

from coyo11m_tfds.process.shown_text import escape_for_terminal
from coyo11m_tfds.process.sizes import format_count

_SECONDS_BETWEEN_LINES = 10
_SECONDS_BETWEEN_TICKS = 1.0
# Speed is that of the last minute: long enough for shards that take many seconds each, short
# enough to show that a network has become slow.
_WINDOW_SECONDS = 60

_RATED = ('records', 'tokens', 'images')  # the counts that are shown as speeds
_BYTES = 'B'
_AMOUNT = ''  # the work in its unit, among the counts

_LEAST_COLUMNS = 20
# As wide as the terminal: what does not fit is cut off, so that no line wraps.
_BAR_FORMAT = '{desc}: {percentage:.0f}%{postfix} |{bar}|'


@contextlib.contextmanager
def show_progress() -> Iterator[None]:
    """Shows absl's log from INFO on until the block ends, unless the program chose a verbosity."""
    logger = logging.get_absl_logger()
    level = logger.level
    if logging.get_verbosity() == logging.WARNING:  # absl's default
        logger.setLevel('INFO')
    try:
        yield
    finally:
        logger.setLevel(level)


class _Mark(NamedTuple):
    """A moment, and the work that was done until then."""

    time: float  # in seconds, by the clock
    work: collections.Counter[str]


class Progress:
    """Counts finished work; a context manager, which several threads may share."""

    def __init__(
        self,
        title: str,
        total: int,
        unit: str,
        goals: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begins to count up to `total`, at least an estimate, in `unit`: 'B', or a plural noun.

        `goals` are final values of some of the counts.
        """
        self._title = escape_for_terminal(title)
        self._total = total
        self._unit = unit
        self._goals = dict(goals or {})
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = collections.Counter(dict.fromkeys(self._goals, 0))
        self._work: collections.Counter[str] = collections.Counter()  # without an earlier run's
        self._start = _Mark(clock(), self._work.copy())
        self._last_line = self._start.time
        self._marks = collections.deque([self._start])  # of the last minute
        self._bar: Any = None
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name='progress', daemon=True)

    def __enter__(self) -> Self:
        if self._total and _is_watched():
            self._bar = tqdm.auto.tqdm(
                desc=self._title,
                total=self._total,
                bar_format=_BAR_FORMAT,
                dynamic_ncols=True,
                leave=False,
            )
            # Or the lines of a log would be written into the bar.
            for handler in standard_logging.getLogger().handlers:
                handler.addFilter(self._clear_bar)
        self._ticker.start()
        return self

    def __exit__(self, error_type: type | None, *_) -> None:
        """Logs the average speed of the whole run, also when it ends by an exception."""
        # First, so that the thread neither draws the bar again nor logs a line after the last.
        self._over.set()
        self._ticker.join()
        if self._bar is not None:
            for handler in standard_logging.getLogger().handlers:
                handler.removeFilter(self._clear_bar)
            self._bar.close()
        now = self._clock()
        duration = _format_duration(now - self._start.time)
        if error_type is not None:
            end = f'ended after {duration}'
        else:
            end = f'in {duration}'
            if self._unit == _BYTES:
                self._counts[_AMOUNT] = self._total  # which may have been an estimate
        clauses = self._summarize(now, self._start, end)
        logging.info('%s: %s', self._title, ', '.join(clauses))

    def add(self, amount: int, **counts: int) -> None:
        """Counts work that is done now, in the unit of the total, and increments of counts."""
        with self._lock:
            self._work.update({_AMOUNT: amount, **counts})
        self.skip(amount, **counts)

    def skip(self, amount: int, **counts: int) -> None:
        """Counts work of an earlier run, which does not enter the speed."""
        with self._lock:
            self._counts.update({_AMOUNT: amount, **counts})
            self._show()

    def _tick(self) -> None:
        """Shows that time passes, also while nothing arrives."""
        while not self._over.wait(_SECONDS_BETWEEN_TICKS):
            with self._lock:
                self._show(is_tick=True)

    def _show(self, is_tick: bool = False) -> None:
        """Updates the bar with each tick, or logs a line if the last one is old enough."""
        now = self._clock()
        self._move_window(now)
        if self._bar is None and now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        # A bar moves at its own pace, however often work is counted.
        if self._bar is not None and not is_tick:
            return
        self._last_line = now
        since = self._marks[0]
        speed = self._speed(_AMOUNT, now, since)
        end = ''
        if speed > 0:
            remaining = max(self._total - self._counts[_AMOUNT], 0)
            end = f'{_format_duration(remaining / speed)} left'
        clauses = self._summarize(now, since, end)
        if self._bar is None:
            logging.info('%s: %s', self._title, ', '.join(clauses))
        else:
            self._bar.n = min(self._counts[_AMOUNT], self._total)
            # The bar has a percentage of its own.
            self._bar.set_postfix_str(', '.join(clauses[1:]))

    def _move_window(self, now: float) -> None:
        """Keeps marks of the last minute, a second apart, and one from before it."""
        last = self._marks[-1]
        if now - last.time >= _SECONDS_BETWEEN_TICKS:
            self._marks.append(_Mark(now, self._work.copy()))
        # The second one, because the first is to lie before the window: the speed is since then.
        while len(self._marks) > 1 and now - self._marks[1].time >= _WINDOW_SECONDS:
            self._marks.popleft()

    def _clear_bar(self, record: standard_logging.LogRecord) -> bool:
        """A filter of a log's handler, called before a line is written; the bar comes again."""
        del record
        self._bar.clear()
        return True

    def _summarize(self, now: float, since: _Mark, end: str) -> list[str]:
        """Returns the percentage, goals, speeds since that moment, other counts, and the end."""
        amount = self._counts[_AMOUNT]
        clauses = []
        if self._total:
            clauses.append(f'{min(amount / self._total, 1):.0%}')
        if self._unit != _BYTES:
            clauses.append(_format_share(amount, self._total, self._unit))
        for name, goal in self._goals.items():
            clauses.append(_format_share(self._counts[name], goal, name))
        for name in _RATED:
            if name in self._counts:
                rate = _format_speed(self._speed(name, now, since))
                clauses.append(f'{rate} {name}/s')
        speed = self._speed(_AMOUNT, now, since)
        if self._unit != _BYTES:
            clauses.append(f'{_format_speed(speed)} {self._unit}/s')
        elif self._total:
            clauses.append(f'{_format_speed(speed / 1e6)} MB/s')
        shown_names = {*self._goals, *_RATED, _AMOUNT}
        for name, count in self._counts.items():
            if name not in shown_names:
                clauses.append(f'{count:,} {name}')
        if end:
            clauses.append(end)
        return clauses

    def _speed(self, name: str, now: float, since: _Mark) -> float:
        """Returns a count per second; 0 as long as no time has passed."""
        seconds = now - since.time
        if seconds <= 0:
            return 0.0
        return (self._work[name] - since.work[name]) / seconds


def _is_watched() -> bool:
    """Whether the log is shown on a terminal or in a notebook."""
    # tqdm has found out what runs this process, and chosen a class for it.
    is_notebook = tqdm.autonotebook.tqdm is not tqdm.tqdm
    return logging.vlog_is_on(0) and (is_notebook or _has_room_for_a_bar())


def _has_room_for_a_bar() -> bool:
    """Whether errors go to a terminal that is wide enough; some do not know their width."""
    if not sys.stderr.isatty():
        return False
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns >= _LEAST_COLUMNS
    except OSError:
        return False


def _format_share(count: int, total: int, unit: str) -> str:
    return f'{count:,} of {format_count(total, unit.removesuffix("s"))}'


def _format_speed(speed: float) -> str:
    # Two digits at least, of a speed that is not 0.
    decimals = 2
    if speed >= 10 or speed == 0:
        decimals = 0
    elif speed >= 1:
        decimals = 1
    return f'{speed:,.{decimals}f}'


def _format_duration(seconds: float) -> str:
    # A longer one may not fit into a timedelta.
    return str(datetime.timedelta(seconds=round(min(seconds, 1e9))))
