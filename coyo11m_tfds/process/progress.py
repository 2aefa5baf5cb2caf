"""Shows the progress of long work: a line in the log every ten seconds.

    with Progress('Writing shards', total=10**9, unit='B', goals={'shards': 8}) as progress:
        progress.skip(2 * 10**8, shards=2)                       # found finished
        progress.add(128 * 10**6, shards=1, records=5007, dropped=3)

    Writing shards: 33%, 3 of 8 shards, 25,000 records/s, 640 MB/s, 3 dropped, 0:00:01 left

Lines go to absl's log as INFO. `tfds build` shows them; in other programs use `shown`, or call
`absl.logging.set_verbosity(absl.logging.INFO)` first.
"""

import collections
import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Self

from absl import logging

_SECONDS_BETWEEN_LINES = 10
_SECONDS_BETWEEN_MARKS = 1
# Speed is that of the last minute: long enough for shards that take many seconds each, short
# enough to show that a network has become slow.
_WINDOW_SECONDS = 60

_RATED = 'records', 'tokens'  # the counts that are shown as speeds
_BYTES = 'B'
_AMOUNT = ''  # the work in its unit, among the counts

_Moment = tuple[float, collections.Counter[str]]  # seconds, and all that was done until then


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Shows absl's log from INFO on until the block ends, unless the program chose a verbosity."""
    logger = logging.get_absl_logger()
    level = logger.level
    if logging.get_verbosity() == logging.WARNING:  # absl's default
        logger.setLevel('INFO')
    try:
        yield
    finally:
        logger.setLevel(level)


class Progress:
    """Counts finished work; a context manager, which several threads may share."""

    def __init__(
        self,
        what: str,
        total: int,
        unit: str,
        goals: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begins to count.

        Args:
            what: Name of the work, with which each line begins.
            total: Amount of the whole work in `unit`, at least an estimate; 0 for no work.
            unit: 'B' for bytes, shown as MB/s; otherwise a plural noun such as 'captions'.
            goals: Final values of some of the counts.
            clock: Function that returns the time in seconds.
        """
        self._what = what
        self._total = total
        self._unit = unit
        self._goals = dict(goals or {})
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = collections.Counter(dict.fromkeys(self._goals, 0))
        self._last_line = clock()
        self._beginning = self._latest = self._last_line, collections.Counter[str]()
        self._marks: collections.deque[_Moment] = collections.deque([self._beginning])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type | None, *_) -> None:
        """Logs the average speed of the whole run, also when it ends by an exception."""
        ended = 'in' if error_type is None else 'ended after'
        if error_type is None and self._unit == _BYTES:
            self._counts[_AMOUNT] = self._total  # which may have been an estimate
        self._log(self._beginning, f'{ended} {_duration(self._clock() - self._beginning[0])}')

    def add(self, amount: int, **counts: int) -> None:
        """Counts work that is done now, in the unit of the total, and increments of counts.

        `records` and `tokens` are shown as speeds, a count with a goal as 'n of m', others as
        numbers.
        """
        with self._lock:
            now, work = self._clock(), self._latest[1].copy()
            work.update({_AMOUNT: amount, **counts})
            self._latest = now, work
            if now - self._marks[-1][0] >= _SECONDS_BETWEEN_MARKS:
                self._marks.append(self._latest)
            while len(self._marks) > 1 and now - self._marks[1][0] >= _WINDOW_SECONDS:
                self._marks.popleft()
            self._count(now, amount, counts)

    def skip(self, amount: int, **counts: int) -> None:
        """Counts work of an earlier run, which does not enter the speed."""
        with self._lock:
            self._count(self._clock(), amount, counts)

    def _count(self, now: float, amount: int, counts: Mapping[str, int]) -> None:
        self._counts.update({_AMOUNT: amount, **counts})
        if now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        speed = self._speed(_AMOUNT, self._marks[0])
        left = max(self._total - self._counts[_AMOUNT], 0)
        self._log(self._marks[0], f'{_duration(left / speed)} left' if speed > 0 else '')

    def _log(self, since: _Moment, last: str) -> None:
        """Logs goals, speeds since that moment, and other counts."""
        counts, amount = self._counts, self._counts[_AMOUNT]
        facts = [f'{min(amount / self._total, 1):.0%}'] if self._total else []
        if self._unit != _BYTES:
            facts.append(f'{amount:,} of {self._total:,} {self._unit}')
        facts += [f'{counts[name]:,} of {goal:,} {name}' for name, goal in self._goals.items()]
        rated = [name for name in _RATED if name in counts]
        facts += [f'{self._speed(name, since):,.0f} {name}/s' for name in rated]
        speed = self._speed(_AMOUNT, since)
        if self._unit != _BYTES:
            facts.append(f'{_round(speed)} {self._unit}/s')
        elif self._total:
            facts.append(f'{_round(speed / 1e6)} MB/s')
        shown = {*self._goals, *_RATED, _AMOUNT}
        facts += [f'{count:,} {name}' for name, count in counts.items() if name not in shown]
        logging.info('%s: %s', self._what, ', '.join(filter(None, [*facts, last])))

    def _speed(self, name: str, since: _Moment) -> float:
        """A count per second; 0 as long as no time has passed."""
        seconds = self._latest[0] - since[0]
        return (self._latest[1][name] - since[1][name]) / seconds if seconds > 0 else 0.0


def _round(speed: float) -> str:
    decimals = 0 if speed >= 10 or speed == 0 else 1 if speed >= 1 else 2
    return f'{speed:,.{decimals}f}'


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(min(seconds, 1e9))))  # more may not fit in
