"""Says how the conversion goes, and what came of it.

    with Progress(num_bytes=10**9, num_shards=8) as progress:
        progress.add(num_bytes)      # once for each shard written
    print(summary(plan, results, seconds=12.3))

Nothing here decides what is written.
"""

import sys
import time
from collections.abc import Sequence
from typing import Self

import tqdm
from absl import logging

from coyo11m_tfds.plan import Plan
from coyo11m_tfds.shard_writer import ShardResult

SECONDS_BETWEEN_LINES = 10


class Progress:
    """A bar on a terminal; elsewhere a line in the log every ten seconds."""

    def __init__(self, num_bytes: int, num_shards: int):
        self._num_bytes = num_bytes
        self._num_shards = num_shards
        self._done_shards = 0
        self._done_bytes = 0
        self._start = self._last_line = time.monotonic()
        self._bar = tqdm.tqdm(
            total=num_bytes,
            desc='Writing shards',
            unit='B',
            unit_scale=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def add(self, num_bytes: int) -> None:
        """Counts one further shard of this size."""
        self._bar.update(num_bytes)
        self._done_shards += 1
        self._done_bytes += num_bytes
        now = time.monotonic()
        is_last = self._done_shards == self._num_shards
        if self._bar.disable and (is_last or now - self._last_line > SECONDS_BETWEEN_LINES):
            self._last_line = now
            logging.info(
                'Wrote %d of %d shards (%.0f%%), %.0f MB/s',
                self._done_shards,
                self._num_shards,
                100 * self._done_bytes / self._num_bytes,
                self._done_bytes / 1e6 / (now - self._start),
            )


def summary(plan: Plan, results: Sequence[ShardResult], seconds: float) -> str:
    """Tells in a few lines what was written, what was dropped and why, and how fast."""
    lines = ['']
    for split in dict.fromkeys(result.split for result in results):
        of_split = [result for result in results if result.split == split]
        lines.append(_line(split, of_split))
    lines.append(_line('total', results))
    dropped = ', '.join(f'{name}: {count:,}' for name, count in plan.dropped.items())
    lines.append(f'dropped     {sum(plan.dropped.values()):,} rows ({dropped})')
    num_records = sum(result.num_records for result in results)
    num_bytes = sum(result.num_bytes for result in results)
    lines.append(
        f'time        {seconds:,.1f} s, {num_records / seconds:,.0f} records/s, '
        f'{num_bytes / 1e6 / seconds:,.0f} MB/s'
    )
    return '\n'.join(lines)


def _line(name: str, results: Sequence[ShardResult]) -> str:
    num_records = sum(result.num_records for result in results)
    num_bytes = sum(result.num_bytes for result in results)
    shards = f'{len(results):,} shard{"" if len(results) == 1 else "s"}'
    return f'{name:10}  {num_records:,} records in {shards}, {num_bytes / 1e6:,.1f} MB'
