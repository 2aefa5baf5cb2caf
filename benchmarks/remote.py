"""Reads training batches from a storage server on this machine, with and without a long way to it.

    python -m benchmarks.remote --dir /tmp/bench        # 400 MB, three repeats, a minute

The server and the way TensorFlow is led to it are those of the tests. Each run is a fresh process
with the default settings of training; runs with and without the added latency take turns.
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

import tensorflow_datasets as tfds

from benchmarks import measure, source
from coyo11m_tfds import schema
from tests.cloud import Gcs, fake_gcs

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
    runs = {0.0: [], flags.latency: []}
    with (
        tempfile.TemporaryDirectory(dir=flags.dir) as folder,
        fake_gcs(pathlib.Path(folder)) as server,
    ):
        server.upload_folder(data, _URL)
        for _ in range(flags.repeats):
            for latency, of_latency in runs.items():
                of_latency.append(_run(server, latency, flags.steps))
    rates = {latency: statistics.median(run['rate'] for run in r) for latency, r in runs.items()}
    print('| added to a request | samples/s | all runs | requests per chunk | bytes asked for, to '
          'bytes of the chunks |\n| ---: | ---: | ---: | ---: | ---: |')  # fmt: skip
    for latency, of_latency in runs.items():
        all_rates = sorted(run['rate'] for run in of_latency)
        print(
            f'| {1000 * latency:.0f} ms | {rates[latency]:,.0f} | {all_rates[0]:,.0f} to '
            f'{all_rates[-1]:,.0f} | {max(run["requests"] for run in of_latency):.3f} | '
            f'{max(run["bytes"] for run in of_latency):.3f} |'
        )
    print(f'\nWith the latency: {rates[flags.latency] / rates[0.0]:.0%} (80% is wanted)')


def _make_data(folder: pathlib.Path, num_samples: int) -> pathlib.Path:
    """Builds a data set of so many samples, once."""
    config = json.dumps({'name': f'remote{num_samples}', 'validation_fraction': 0.0})
    data_dir = folder / 'remote'
    final = data_dir / schema.NAME / f'remote{num_samples}' / schema.VERSION
    if not final.exists():
        made = source.make(folder / f'remote-source{num_samples}', num_samples, num_files=3)
        command = [sys.executable, '-m', 'tensorflow_datasets.scripts.cli.main', 'build']
        command += [schema.NAME, f'--manual_dir={made}', f'--data_dir={data_dir}']
        subprocess.run([*command, f'--config={config}'], check=True)
    tfds.builder_from_directory(final)  # complete, or an error
    return final


def _run(server: Gcs, latency: float, steps: int) -> dict[str, float]:
    server.clear()
    server.latency = latency
    ended = subprocess.run(
        [sys.executable, '-m', 'tests.read_program'],
        # What is under way at the end is waited for: server and counter then count the same.
        input=json.dumps({'path': _URL, 'steps': steps, 'settle': True, 'settings': _SETTINGS}),
        env={**os.environ, **server.env, 'TF_CPP_MIN_LOG_LEVEL': '2'},
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
        'requests': len(reads) / num_chunks,
        'bytes': sum(r.nbytes for r in reads) / num_bytes,
    }


if __name__ == '__main__':
    main()
