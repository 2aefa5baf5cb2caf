"""Shows the progress of long work: a bar on a terminal, elsewhere lines in the log.

    with Progress('Writing shards', total=10**9, unit='B', goals={'shards': 8}) as progress:
        progress.skip(2 * 10**8, shards=2)                       # found finished
        progress.add(128 * 10**6, shards=1, records=5007, dropped=3)

    Writing shards: 33%, 3 of 8 shards, 25,000 records/s, 640 MB/s, 3 dropped, 0:00:01 left

Lines go to absl's log as INFO. `tfds build` shows them; in other programs call
`absl.logging.set_verbosity(absl.logging.INFO)` first.
"""

import collections
import datetime
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import tqdm
from absl import logging

SECONDS_BETWEEN_LINES = 10

# Speed is that of the last minute: long enough for shards that take many seconds each, short
# enough to show that a network has become slow.
WINDOW_SECONDS = 60
_SECONDS_BETWEEN_MARKS = 1

RATED = 'records', 'tokens'  # the counts that are shown as speeds

_BYTES = 'B'
_AMOUNT = ''  # the work in its unit, among the counts

_BAR_FORMAT = '{desc}: {percentage:3.0f}%|{bar}| {n_fmt}{unit}{postfix}'

# What is left out last for lack of room: the time, and what was lost.
_LAST_TO_GO = re.compile('^in |^ended |left$|dropped$|skipped$')

_Moment = tuple[float, collections.Counter[str]]  # seconds, and all that was done until then


class Progress:
    """Counts what is done; a context manager. Several threads may use one.

    Attributes:
        note: Text behind the speeds; may be changed at any time.
    """

    note = ''

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
            what: Name of the work, e.g. 'Writing shards'.
            total: How much there is to do, in `unit`; 0 for nothing. An estimate will do.
            unit: 'B' for bytes, shown as MB/s; else the name of a thing in the plural.
            goals: Final values of some of the counts, e.g. `{'shards': 2400}`.
            clock: Function that returns the time in seconds.
        """
        self._what, self._total, self._unit = what, total, unit
        self._goals, self._clock, self._lock = dict(goals or {}), clock, threading.Lock()
        self._counts = collections.Counter(dict.fromkeys(self._goals, 0))
        self._last_line = clock()
        self._beginning = self._latest = self._last_line, collections.Counter[str]()
        self._marks: collections.deque[_Moment] = collections.deque([self._beginning])
        length = _columns() // 2
        half = (length - 3) // 2
        self._bar = make_bar(
            desc=what if len(what) <= length else f'{what[:half]}...{what[-half:]}',
            total=total,
            unit=unit if unit == _BYTES else f' {unit}',
            unit_scale=True,
            bar_format=_BAR_FORMAT,
            miniters=1,  # redraw by time only; amounts vary too much to guess from
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type | None, *_) -> None:
        """Shows the average speed of the whole run, also when it ends by an exception."""
        ended = 'in' if error_type is None else 'ended after'
        if error_type is None and self._unit == _BYTES:
            self._counts[_AMOUNT] = self._total  # which may have been an estimate
            self._bar.update(self._total - self._bar.n)
        duration = f'{ended} {_duration(self._clock() - self._beginning[0])}'
        facts = self._facts(self._beginning)
        if self._bar.disable:
            self._log([*facts, duration])
        else:
            self._bar.set_postfix_str(self._fitting([duration, *facts]))
        self._bar.close()

    def add(self, amount: int, **counts: int) -> None:
        """Counts work that was just done.

        Args:
            amount: Work in the unit of the total.
            **counts: Increments; `records` and `tokens` become speeds, a name with a goal 'n of m',
                and any other is shown as a number.
        """
        with self._lock:
            now, work = self._clock(), self._latest[1].copy()
            work.update({_AMOUNT: amount, **counts})
            self._latest = now, work
            if now - self._marks[-1][0] >= _SECONDS_BETWEEN_MARKS:
                self._marks.append(self._latest)
            while len(self._marks) > 1 and now - self._marks[1][0] >= WINDOW_SECONDS:
                self._marks.popleft()
            self._show(now, amount, counts)

    def skip(self, amount: int, **counts: int) -> None:
        """Counts what an earlier run did: it is done, but says nothing about the speed."""
        with self._lock:
            self._show(self._clock(), amount, counts)

    def _show(self, now: float, amount: int, counts: Mapping[str, int]) -> None:
        self._counts.update({_AMOUNT: amount, **counts})
        facts, speed = self._facts(self._marks[0]), self._speed(_AMOUNT, self._marks[0])
        left = max(self._total - self._counts[_AMOUNT], 0)
        time_left = [f'{_duration(left / speed)} left'] if speed > 0 else []
        if not self._bar.disable:
            self._bar.set_postfix_str(self._fitting([*time_left, *facts]), refresh=False)
            # A bar beyond its total falls apart, but the total may be an estimate.
            self._bar.update(min(self._counts[_AMOUNT], self._total) - self._bar.n)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._log([*facts, *time_left])

    def _fitting(self, facts: list[str]) -> str:
        return fitting(facts, f'{self._bar.desc}: 100%|#| 99.9M{self._bar.unit}')

    def _log(self, facts: list[str]) -> None:
        amount = self._counts[_AMOUNT]
        done = [f'{min(amount / self._total, 1):.0%}'] if self._total else []
        if self._unit != _BYTES:
            done.append(f'{amount:,} of {self._total:,} {self._unit}')
        logging.info('%s: %s', self._what, ', '.join([*done, *facts]))

    def _facts(self, since: _Moment) -> list[str]:
        """Returns goals, speeds since that moment, and other counts."""
        goals = [f'{self._counts[name]:,} of {goal:,} {name}' for name, goal in self._goals.items()]
        rated = [name for name in RATED if name in self._counts]
        speeds = [f'{self._speed(name, since):,.0f} {name}/s' for name in rated]
        speed = self._speed(_AMOUNT, since)
        if self._unit != _BYTES:
            speeds.append(f'{_round(speed)} {self._unit}/s')
        elif self._total:
            speeds.append(f'{_round(speed / 1e6)} MB/s')
        shown = {*self._goals, *RATED, _AMOUNT}
        others = [f'{count:,} {name}' for name, count in self._counts.items() if name not in shown]
        return [*goals, *speeds, *others, *([self.note] if self.note else [])]

    def _speed(self, name: str, since: _Moment) -> float:
        """A count per second; 0 as long as no time has passed."""
        seconds = self._latest[0] - since[0]
        return (self._latest[1][name] - since[1][name]) / seconds if seconds > 0 else 0.0


def make_bar(is_shown: bool = True, **options) -> tqdm.tqdm:
    """A tqdm bar as wide as the terminal; disabled where standard error is none."""
    disable = not (is_shown and sys.stderr.isatty())
    bar = tqdm.tqdm(dynamic_ncols=True, disable=disable, **options)
    # tqdm itself takes a terminal that does not tell its size, as in a container, for too narrow.
    bar.dynamic_ncols = lambda stream: (_columns(), shutil.get_terminal_size().lines - 1)
    bar.ncols, bar.nrows = bar.dynamic_ncols(sys.stderr)
    return bar


def fitting(facts: Sequence[str], before: str) -> str:
    """The facts for which the terminal has room behind a text; speeds are left out first."""
    kept = sorted(facts, key=lambda fact: (fact.endswith('/s'), not _LAST_TO_GO.search(fact)))
    while kept and len(', '.join(['', *kept])) > _columns() - len(before):
        kept.pop()
    return ', '.join(fact for fact in facts if fact in kept)


def _columns() -> int:
    return shutil.get_terminal_size().columns - 1


def _round(speed: float) -> str:
    decimals = 0 if speed >= 10 or speed == 0 else 1 if speed >= 1 else 2
    return f'{speed:,.{decimals}f}'


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(min(seconds, 1e9))))  # more may not fit in
