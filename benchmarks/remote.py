"""Reads training batches from a storage server on this machine, with and without latency.

    python -m benchmarks.remote --dir /tmp/bench        # 400 MB, three repeats, two minutes

The server of the tests answers in TLS. A run reads batches with the default
settings of training, except for a smaller window, and times the second half.
A cache is timed after an epoch has filled it, beside the same files on a disk.
"""

import dataclasses
import itertools
import math
import pathlib
import sys
import tempfile
from typing import Any

from benchmarks import convert, readers, runner, source
from benchmarks.runner import Figures, Side

# Steps by rows for one over the network, which takes as long.
_STEPS_BY_ROWS = 50

FLAGS = {'gb': (0.4, 'size of the source'), 'steps': (180, 'batches of 256 in each run')}


def prepare(flags, folder: pathlib.Path, stack) -> runner.RunSide:
    """Starts the server, and builds a data set on it by each checkout that is measured."""
    from tests.fakes.cloud import fake_gcs, through_proxy

    # Removed at the end: no later run uses them, which the flag `--keep` is for.
    bucket = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
    server = stack.enter_context(fake_gcs(pathlib.Path(bucket)))
    source_dir = source.make(folder, source.num_samples_of(flags.gb))
    urls = {}
    folders = {}
    # A checkout may write another format, so each reads what it has built itself.
    for before in {side.before for side in flags.sides.values()}:
        out = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        urls[before] = f'gs://bucket/{len(urls)}/1.0.0'
        writer = dataclasses.replace(convert.SIDES['builder'], before=before)
        runner.run(writer, source_dir=source_dir, out=out)
        folders[before] = str(readers.data_dir(out))
        server.upload_folder(folders[before], urls[before])

    def run_side(side: Side) -> Figures:
        """Reads once, with the latency of the side."""
        server.latency = side.settings['latency']
        env = through_proxy(server.env)
        # Only this side reads the files themselves; a cache is filled from the server.
        places = folders if side.function is read_by_rows else urls
        return runner.run(side, env, data=places[side.before], steps=flags.steps)

    return run_side


def read(*, data: str, steps: int, latency: float) -> Figures:
    """Reads batches and times the second half; the server adds `latency`."""
    batches = iter(readers.ours(data, '', engine='chunks', window=256).epoch())
    # The first half fills the buffers.
    warmup = readers.count_batches(itertools.islice(batches, steps // 2))
    meter = runner.Meter()
    timed = readers.count_batches(itertools.islice(batches, steps - warmup))
    return meter.rate(readers.BATCH_SIZE * timed)


def read_by_rows(*, data: str, steps: int, latency: float, **cache: Any) -> Figures:
    """Reads batches by rows and times them; from a cache in a new reader, after an epoch."""
    import input_pipeline

    del latency
    options = {
        'batch_size': readers.BATCH_SIZE,
        'seed': readers.SEED,
        'window': 256,
        'features': ('key', 'latents'),
        **cache,
    }
    with input_pipeline.train_batches(data, **options) as batches:
        steps_of_epoch = math.ceil(batches.steps_per_epoch)
        # An epoch, which fills the cache.
        readers.count_batches(itertools.islice(batches, steps_of_epoch))
    with input_pipeline.train_batches(data, **options) as batches:
        # These fill the buffers.
        readers.count_batches(itertools.islice(batches, steps))
        meter = runner.Meter()
        timed = readers.count_batches(itertools.islice(batches, _STEPS_BY_ROWS * steps))
        return meter.rate(readers.BATCH_SIZE * timed)


def read_kept(*, data: str, steps: int, latency: float) -> Figures:
    """Reads batches from a cache; see `read_by_rows`."""
    with tempfile.TemporaryDirectory() as folder:
        cache = {'cache_dir': folder, 'cache_gb': 100.0}
        return read_by_rows(data=data, steps=steps, latency=latency, **cache)


SIDES = {
    'near': Side('`train_batches`', read, {'latency': 0}, ours=True),
    'far': Side('`train_batches`, 100 ms away', read, {'latency': 0.1}, ours=True),
    'kept': Side('the same from `cache_dir`', read_kept, {'latency': 0}, ours=True),
    'local': Side('the same on a local disk', read_by_rows, {'latency': 0}, ours=True),
}


if __name__ == '__main__':
    sys.exit(runner.main(__doc__, SIDES, runner.RATE, FLAGS, prepare))
