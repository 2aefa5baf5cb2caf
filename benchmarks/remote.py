"""Reads training batches from a storage server on this machine, with and without latency.

    python -m benchmarks.remote --dir /tmp/bench        # 400 MB, three repeats, two minutes

The server of the tests answers in TLS. A run reads batches with the default
settings of training, except for a smaller window, and times the second half.
"""

import dataclasses
import itertools
import pathlib
import sys
import tempfile

from benchmarks import convert, readers, runner, source
from benchmarks.runner import Figures, Side

FLAGS = {'gb': (0.4, 'size of the source'), 'steps': (180, 'batches of 256 in each run')}


def prepare(flags, folder: pathlib.Path, stack) -> runner.RunSide:
    """Starts the server, and builds a data set on it by each checkout that is measured."""
    from tests.fakes.cloud import fake_gcs, through_proxy

    server = stack.enter_context(fake_gcs(pathlib.Path(tempfile.mkdtemp(dir=folder))))
    source_dir = source.make(folder, source.num_samples_of(flags.gb))
    urls = {}
    for before in {side.before for side in flags.sides.values()}:
        out = tempfile.mkdtemp(dir=folder)
        urls[before] = f'gs://bucket/{len(urls)}/1.0.0'
        writer = dataclasses.replace(convert.SIDES['builder'], before=before)
        runner.run(writer, source_dir=source_dir, out=out)
        server.upload_folder(readers.data_dir(out), urls[before])

    def run_side(side: Side) -> Figures:
        server.latency = side.settings['latency']
        env = through_proxy(server.env)
        return runner.run(side, env, data=urls[side.before], steps=flags.steps)

    return run_side


def read(*, data: str, steps: int, latency: float) -> Figures:
    """Reads batches and times the second half; the server adds `latency`."""
    batches = iter(readers.ours(data, '', engine='chunks', window=256).epoch())
    warmup = sum(1 for _ in itertools.islice(batches, steps // 2))
    meter = runner.Meter()
    timed = sum(1 for _ in itertools.islice(batches, steps - warmup))
    return meter.rate(readers.BATCH_SIZE * timed)


SIDES = {
    'near': Side('`train_batches`', read, {'latency': 0}, ours=True),
    'far': Side('`train_batches`, 100 ms away', read, {'latency': 0.1}, ours=True),
}


if __name__ == '__main__':
    sys.exit(runner.main(__doc__, SIDES, runner.RATE, FLAGS, prepare))
