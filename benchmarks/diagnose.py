"""Finds out whether the device or the input is the limit, and which setting to change.

    python -m benchmarks.input --data_dir DATA --diagnose --config configs/tpu_v5e_16.py --hosts 4
    python -m benchmarks.input --data_dir gs://BUCKET/DATA --diagnose --step_ms 120
    python -m benchmarks.input --data_dir DATA --diagnose --step_ms 20 --set data.parallel_reads=8

Times a step on synthetic data on the devices that are here (or takes `--step_ms` for it), the
pipeline of one host alone, and both together as in training; then applies the rules of `limits.py`.
It needs neither peers nor an accelerator, but a step of a large model on a CPU takes minutes.
"""

import argparse
import json
import pathlib
import runpy

import ml_collections

from benchmarks import limits, measure

_MB = 10**6


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds those of `--diagnose`."""
    group = parser.add_argument_group('diagnose')
    group.add_argument('--diagnose', action='store_true', help='find the limit of a training run')
    group.add_argument('--data_dir', help='folder of a built data set; local or gs://')
    group.add_argument('--config', default='configs/default.py', help='of the run')
    group.add_argument('--set', action='append', default=[], metavar='FIELD=VALUE', dest='fields')
    group.add_argument('--hosts', type=int, default=1, help='that share the batch; this is one')
    group.add_argument('--step_ms', type=float, help='take this for the time of a step')


def main(flags: argparse.Namespace) -> None:
    """Measures, and prints the facts and the verdicts.

    Raises:
        ValueError: the data set has no chunk index, or the settings do not fit it or each other.
    """
    config = read_config(flags.config, flags.fields)
    # As `train_lib.main` begins; only then may TensorFlow start.
    from coyo11m_tfds.reading import process_settings

    process_settings.apply(flags.data_dir, config.data.chunk)
    from benchmarks import input_facts

    facts = input_facts.measure_facts(
        config, flags.data_dir, flags.hosts, flags.step_ms, flags.seconds
    )
    print(measure.describe_machine(pathlib.Path.cwd(), ['jax', 'tensorflow-datasets']), end='\n\n')
    print(describe(facts), end='\n\n')
    print('\n'.join(f'- {line}' for line in limits.verdicts(facts)))


def read_config(path: str, fields: list[str]) -> ml_collections.ConfigDict:
    """Runs a configuration file, and sets fields of it, given as `name.name=value`."""
    config = runpy.run_path(path)['get_config']()
    for field in fields:
        name, _, value = field.partition('=')
        try:
            config.update_from_flattened_dict({name: json.loads(value)})
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f'--set {field}: expected FIELD=VALUE of {path} ({error})') from None
    return config


def describe(facts: limits.Facts) -> str:
    """Returns the facts as a list."""
    rate = facts.batch_size / facts.num_hosts / facts.batch_seconds
    lines = (
        f'a step alone: {1000 * facts.step_seconds:,.1f} ms',
        f'a batch alone: {1000 * facts.batch_seconds:,.1f} ms ({rate:,.0f} samples/s), cores '
        f'{facts.cpu_share:.0%} busy; the first after {facts.first_batch_seconds:.1f} s',
        f'a step with both: {1000 * facts.together_seconds:,.1f} ms',
        f'one record at an offset: {1000 * facts.request_seconds:,.1f} ms, one chunk: '
        f'{1000 * facts.chunk_seconds:,.1f} ms; shards of {facts.shard_bytes / _MB:,.0f} MB',
        f'memory: {facts.resident_bytes / _MB:,.0f} MB resident, of which windows about '
        f'{facts.window_bytes / _MB:,.0f} MB; {facts.available_bytes / _MB:,.0f} MB available',
    )
    return '\n'.join(f'- {line}' for line in lines)
