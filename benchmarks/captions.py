"""Times the join of captions, in a Parquet file as large as the real one.

    python -m benchmarks.captions --dir=/tmp/captions    # takes 15 GB there and three minutes

It joins 11.4 million captions of 200 to 600 bytes, with random unsorted keys, to the same keys in
another order, and then reads the captions of some shards.
"""

import pathlib
import shutil
import sys
import tempfile

import numpy as np

from benchmarks import runner, source
from benchmarks.runner import Figures, Side
from coyo11m_tfds import schema
from coyo11m_tfds.dataset import keyed_random

FLAGS = {'rows': (11_400_000, 'captions'), 'shards': (50, 'shards that are read')}
_ROWS_OF_SHARD = 5300  # of 128 MB
_COLUMNS = {
    'seconds': runner.column('seconds', '.2f'),
    'all runs': runner.all_runs('seconds', '.2f'),
    'CPU s': runner.column('cpu', '.2f'),
}


def begin(flags, folder: pathlib.Path, stack) -> runner.Once:
    """Makes the Parquet file."""
    path = folder / f'captions-{flags.rows}.parquet'
    if not path.exists():
        source.write_captions(path, _keys(np.arange(flags.rows)), np.random.default_rng(0))
    cache = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
    settings = {'cache': cache, 'path': path, 'rows': flags.rows, 'shards': flags.shards}
    return lambda side: runner.run(side, **settings)


def _keys(numbers: np.ndarray) -> np.ndarray:
    """Keys in no order, another for every number."""
    return keyed_random.splitmix64(numbers).view(np.int64)


def join(*, cache: str, path: str, rows: int, shards: int) -> Figures:
    """Joins the captions to all keys, in another order than that of the file."""
    from coyo11m_tfds.source import captions

    shutil.rmtree(f'{cache}/joined', ignore_errors=True)
    wanted = _keys(np.random.default_rng(1).permutation(rows))
    meter = runner.Meter()
    captions.join(path, schema.DEFAULT_CAPTION_COLUMN, f'{cache}/joined', wanted)
    return meter.read()


def read(*, cache: str, path: str, rows: int, shards: int) -> Figures:
    """Opens the joined captions, and reads those of some shards."""
    from coyo11m_tfds.source.joined import Joined

    firsts = np.random.default_rng(2).integers(0, max(1, rows - _ROWS_OF_SHARD), shards)
    meter = runner.Meter()
    found = Joined(f'{cache}/joined')
    for first in firsts.tolist():
        found.read(found.places[first : first + _ROWS_OF_SHARD])
    return meter.read()


SIDES = {
    'join': Side('join', join, ours=True),
    'read': Side('open, read some shards', read, ours=True),
}


if __name__ == '__main__':
    sys.exit(runner.main(__doc__, SIDES, _COLUMNS, FLAGS, begin))
