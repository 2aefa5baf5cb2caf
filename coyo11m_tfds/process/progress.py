"""Shows the progress of long work: a bar on a terminal, elsewhere lines in the log.

    with Progress('Writing shards', total=10**9, unit='B', goals={'shards': 8}) as progress:
        progress.skip(2 * 10**8, shards=2)                       # found finished
        progress.add(128 * 10**6, shards=1, records=5007, dropped=3)

    Writing shards: 33%, 3 of 8 shards, 25,000 records/s, 640 MB/s, 3 dropped, 0:00:01 left

Lines go to absl's log as INFO. `tfds build` and `absl.app` programs that ask for it show them;
elsewhere call `absl.logging.set_verbosity(absl.logging.INFO)` first.
"""

import collections
import datetime
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self, TextIO

import tqdm
from absl import logging

SECONDS_BETWEEN_LINES = 10

# Speed is that of the last minute: long enough for shards that take many seconds each, short
# enough to show that a network has become slow.
WINDOW_SECONDS = 60
_SECONDS_BETWEEN_MARKS = 1

RATED = 'records', 'tokens'  # the counts that are shown as speeds

_BYTES = 'B'
# For a terminal that does not tell its size, such as that of a container.
_COLUMNS, _LINES = 80, 24

_BAR_FORMAT = '{desc}: {percentage:3.0f}%|{bar}| {n_fmt}{unit}{postfix}'


# Of what is shown: the time, and what was lost.
_LAST_TO_GO = re.compile('^in |^ended |left$|dropped$|skipped$')


class _Moment(NamedTuple):
    """The work done by some moment; speeds are differences between two of these."""

    seconds: float
    amount: int
    rated: tuple[int, ...]  # of `RATED`


class Progress:
    """Counts what is done; a context manager. Several threads may use one.

    Args:
        what: what is being done, e.g. 'Writing shards'.
        total: how much there is to do, in `unit`; 0 for nothing. An estimate will do.
        unit: 'B' for bytes, shown as MB/s; else the name of a thing in the plural.
        goals: how many there will be of some of the counts, e.g. `{'shards': 2400}`.
        clock: returns the time in seconds.

    Attributes:
        note: shown after the speeds; may be changed at any time.
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
        self._what, self._total, self._unit = what, total, unit
        self._goals = dict(goals or {})
        self._clock = clock
        self._lock = threading.Lock()
        self._done = 0
        self._counts = collections.Counter(dict.fromkeys(self._goals, 0))
        self._last_line = clock()
        self._beginning = self._latest = _Moment(self._last_line, 0, (0,) * len(RATED))
        self._marks = collections.deque([self._beginning])
        self._bar = make_bar(
            desc=_shortened(what, _terminal_size(sys.stderr)[0] // 2),
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
            self._done = self._total  # which may have been an estimate
            self._bar.update(self._total - self._bar.n)
        duration = _duration(self._clock() - self._beginning.seconds)
        facts = self._facts(self._beginning)
        if self._bar.disable:
            self._log([*facts, f'{ended} {duration}'])
        else:
            self._bar.set_postfix_str(self._fitting([f'{ended} {duration}', *facts]))
        self._bar.close()

    def add(self, amount: int, **counts: int) -> None:
        """Counts work that was just done.

        Args:
            amount: in the unit of the total.
            counts: how many more of each name; `records` and `tokens` become speeds, a name with a
                goal 'n of m', and any other is shown as a number.
        """
        with self._lock:
            self._latest = _Moment(
                self._clock(),
                self._latest.amount + amount,
                tuple(
                    done + counts.get(name, 0)
                    for done, name in zip(self._latest.rated, RATED, strict=True)
                ),
            )
            self._mark()
            self._count(amount, counts)
            self._show(self._latest.seconds)

    def skip(self, amount: int, **counts: int) -> None:
        """Counts what an earlier run did: it is done, but says nothing about the speed."""
        with self._lock:
            self._count(amount, counts)
            self._show(self._clock())

    def _mark(self) -> None:
        now = self._latest.seconds
        if now - self._marks[-1].seconds >= _SECONDS_BETWEEN_MARKS:
            self._marks.append(self._latest)
        while len(self._marks) > 1 and now - self._marks[1].seconds >= WINDOW_SECONDS:
            self._marks.popleft()

    def _count(self, amount: int, counts: Mapping[str, int]) -> None:
        self._done += amount
        self._counts.update(counts)

    def _show(self, now: float) -> None:
        if not self._bar.disable:
            facts = [*self._time_left(), *self._facts(self._marks[0])]
            self._bar.set_postfix_str(self._fitting(facts), refresh=False)
            # A bar beyond its total falls apart, but the total may be an estimate.
            self._bar.update(min(self._done, self._total) - self._bar.n)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._log([*self._facts(self._marks[0]), *self._time_left()])

    def _fitting(self, facts: list[str]) -> str:
        return fitting(facts, f'{self._bar.desc}: 100%|#| 99.9M{self._bar.unit}')

    def _log(self, facts: list[str]) -> None:
        done = [f'{min(self._done / self._total, 1):.0%}'] if self._total else []
        if self._unit != _BYTES:
            done.append(f'{self._done:,} of {self._total:,} {self._unit}')
        logging.info('%s: %s', self._what, ', '.join([*done, *facts]))

    def _time_left(self) -> list[str]:
        speed, *_ = self._speeds(self._marks[0])
        if speed <= 0:
            return []
        return [f'{_duration(max(self._total - self._done, 0) / speed)} left']

    def _facts(self, since: _Moment) -> list[str]:
        """Returns goals, speeds since that moment, and other counts."""
        speed, *of_rated = self._speeds(since)
        goals = [f'{self._counts[name]:,} of {goal:,} {name}' for name, goal in self._goals.items()]
        rates = dict(zip(RATED, of_rated, strict=True))
        speeds = [f'{rate:,.0f} {n}/s' for n, rate in rates.items() if n in self._counts]
        if self._unit != _BYTES:
            speeds.append(f'{_round(speed)} {self._unit}/s')
        elif self._total:
            speeds.append(f'{_round(speed / 1e6)} MB/s')
        others = [
            f'{count:,} {name}'
            for name, count in self._counts.items()
            if name not in self._goals and name not in RATED
        ]
        return [*goals, *speeds, *others, *([self.note] if self.note else [])]

    def _speeds(self, since: _Moment) -> list[float]:
        """Amount and what is rated per second; 0 as long as no time has passed."""
        seconds = self._latest.seconds - since.seconds
        now, then = ((moment.amount, *moment.rated) for moment in (self._latest, since))
        done = [after - before for after, before in zip(now, then, strict=True)]
        return [count / seconds if seconds > 0 else 0.0 for count in done]


def make_bar(is_shown: bool = True, **options) -> tqdm.tqdm:
    """A bar as wide as the terminal; disabled where standard error is no terminal.

    Args:
        is_shown: False disables it.
        **options: further ones of `tqdm`.
    """
    disable = not (is_shown and sys.stderr.isatty())
    bar = tqdm.tqdm(dynamic_ncols=True, disable=disable, **options)
    # tqdm itself takes a terminal of 0 columns for too narrow, one of 0 lines for full.
    bar.dynamic_ncols = _terminal_size
    bar.ncols, bar.nrows = _terminal_size(sys.stderr)
    return bar


def fitting(facts: Sequence[str], before: str) -> str:
    """The facts for which the terminal has room behind a text; speeds are left out first."""
    room = _terminal_size(sys.stderr)[0] - len(before)
    kept = sorted(facts, key=lambda fact: (fact.endswith('/s'), not _LAST_TO_GO.search(fact)))
    while kept and len(', '.join(['', *kept])) > room:
        kept.pop()
    return ', '.join(fact for fact in facts if fact in kept)


def _terminal_size(stream: TextIO) -> tuple[int, int]:
    """Columns and lines that a bar may use."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except OSError:  # no terminal, or closed while the program runs
        columns, lines = 0, 0
    return (columns or _COLUMNS) - 1, (lines or _LINES) - 1


def _shortened(text: str, length: int) -> str:
    half = (length - 3) // 2
    return text if len(text) <= length else f'{text[:half]}...{text[-half:]}'


def _round(speed: float) -> str:
    decimals = 0 if speed >= 10 or speed == 0 else 1 if speed >= 1 else 2
    return f'{speed:,.{decimals}f}'


def _duration(seconds: float) -> str:
    if seconds > datetime.timedelta(days=365).total_seconds():
        return 'over a year'  # at hardly any speed it may exceed what a timedelta holds
    return str(datetime.timedelta(seconds=round(seconds)))
