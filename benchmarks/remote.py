"""Reads training batches from a storage server on this machine, with and without a long way to it.

    python -m benchmarks.remote --dir /tmp/bench        # 400 MB, three repeats, two minutes

The server and the way to it, through a proxy that adds TLS, are those of the tests. Each run is a
fresh process with the default settings of training but for a smaller window. Runs with and without
the added latency take turns.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks import measure, report, source, tf_readers
from benchmarks.writers import WRITERS
from coyo11m_tfds import schema
from tests.fakes.cloud import Gcs, fake_gcs, through_proxy

_URL = 'gs://bucket/data/1.0.0'
_SETTINGS = {
    'batch_size': 256,
    'seed': 0,
    'features': ['key', 'latents'],
    'chunk': 64,
    'lanes': 16,
    'window': 256,
    'parallel_reads': 4,
}
_COLUMNS = (
    'added to a request',
    'samples/s',
    'all runs',
    'CPU us a sample',
    'requests per chunk',
    'bytes asked for, to bytes of the chunks',
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--dir', type=pathlib.Path, required=True, help='folder to work in')
    parser.add_argument('--samples', type=int, default=16_000)
    parser.add_argument('--steps', type=int, default=180, help='batches of 256 in each run')
    parser.add_argument('--latency', type=float, default=0.1, help='seconds added to a request')
    parser.add_argument('--repeats', type=int, default=3)
    flags = parser.parse_args(arguments)
    data = _make_data(flags.dir, flags.samples)
    print(measure.describe_machine(flags.dir, ['tensorflow-cpu', 'coyo11m_tfds']), end='\n\n')
    runs: dict[float, list] = {added: [] for added in (0.0, flags.latency)}
    with (
        tempfile.TemporaryDirectory(dir=flags.dir) as folder,
        fake_gcs(pathlib.Path(folder)) as server,
    ):
        server.upload_folder(data, _URL)
        for _ in range(flags.repeats):
            for latency, found in runs.items():
                found.append(_run(server, latency, flags.steps))
    print(report.markdown_table(_COLUMNS, [_row(*side) for side in runs.items()]))
    rates = {
        latency: statistics.median(run['rate'] for run in found) for latency, found in runs.items()
    }
    print(f'\nWith the latency: {rates[flags.latency] / rates[0.0]:.0%} (80% is wanted)')


def _row(latency: float, runs: list[dict[str, float]]) -> list[str]:
    rates = sorted(run['rate'] for run in runs)
    return [
        f'{1000 * latency:.0f} ms',
        f'{statistics.median(rates):,.0f}',
        f'{rates[0]:,.0f} to {rates[-1]:,.0f}',
        f'{statistics.median(run["cpu"] for run in runs):.1f}',
        f'{max(run["requests"] for run in runs):.3f}',
        f'{max(run["bytes"] for run in runs):.3f}',
    ]


def _make_data(folder: pathlib.Path, num_samples: int) -> pathlib.Path:
    """Builds a data set of so many samples, once."""
    made = source.make(folder / 'remote-source', num_samples, num_files=3)
    data = folder / f'remote{num_samples}'
    if not any(data.rglob(schema.INFO_FILE)):
        data.mkdir(exist_ok=True)
        WRITERS['builder'].write(made, data, measure.Marks(folder / 'marks'))
    return tf_readers.data_dir(data)


def _run(server: Gcs, latency: float, steps: int) -> dict[str, float]:
    server.clear()
    server.latency = latency
    # What is under way at the end is waited for: server and counter then count the same.
    asked = {'path': _URL, 'steps': steps, 'settle': True, 'settings': _SETTINGS}
    ended = subprocess.run(
        [sys.executable, '-m', 'tests.reading.read_program'],
        input=json.dumps(asked),
        env={**os.environ, **through_proxy(server.env), 'TF_CPP_MIN_LOG_LEVEL': '2'},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(ended.stdout)
    num_bytes, num_chunks, _, _ = found['counts']
    reads = [r for r in server.requests if r.action == 'read' and '.tfrecord' in r.path]
    timed = steps - steps // 2
    return {
        'rate': timed * _SETTINGS['batch_size'] / found['seconds'],
        'cpu': 1e6 * found['cpu_seconds'] / (timed * _SETTINGS['batch_size']),
        'requests': len(reads) / num_chunks,
        'bytes': sum(r.nbytes for r in reads) / num_bytes,
    }


if __name__ == '__main__':
    main()
