"""Finds out whether the devices or the input is the limit of a run, and which setting to change.

    python -m train_lib.diagnose --config=tpu_v5e_16 --config.data.dir=DATA --hosts=4
    python -m train_lib.diagnose --config=default --config.data.dir=gs://BUCKET/DATA --step_ms=120

Times a step on one batch on the devices that are here (or takes `--step_ms` for it), the batches of
one host alone, read with the engine that the run would use, and both together as in training; then
applies the rules of `limits.py`. A step of a large model on a CPU takes minutes.
"""

from absl import flags
from ml_collections import config_flags

import input_pipeline
from train_lib import limits, process

FLAGS = flags.FLAGS

_MB = 10**6


def main() -> None:
    """Measures, and prints the facts and the verdicts."""
    config = FLAGS.config
    with process.errors_in_one_line():
        input_pipeline.prepare_process(config.data.dir, config.data.chunk)
        process.prepare()
        # Only now, because it imports TensorFlow, which looks at those settings.
        from train_lib import input_facts

        facts = input_facts.measure_facts(config, FLAGS.hosts, FLAGS.step_ms, FLAGS.seconds)
    print(describe(facts), *(f'- {line}' for line in limits.verdicts(facts)), sep='\n')


def describe(facts: limits.Facts) -> str:
    """Returns the facts as a list."""
    rate = facts.batch_size / facts.num_hosts / facts.batch_seconds
    lines = [
        f'a step alone: {1000 * facts.step_seconds:,.1f} ms',
        f'a batch alone, by {facts.engine}: {1000 * facts.batch_seconds:,.1f} ms ({rate:,.0f} '
        f'samples/s), {facts.num_cores} cores {facts.cpu_share:.0%} busy; the first after '
        f'{facts.first_batch_seconds:.1f} s',
        f'a step with both: {1000 * facts.together_seconds:,.1f} ms',
        f'one record at an offset: {1000 * facts.request_seconds:,.1f} ms, one chunk of '
        f'{facts.chunk_bytes / _MB:,.1f} MB: {1000 * facts.chunk_seconds:,.1f} ms; shards of '
        f'{facts.shard_bytes / _MB:,.0f} MB',
        f'memory: {facts.resident_bytes / _MB:,.0f} MB resident, of which windows about '
        f'{facts.window_bytes / _MB:,.0f} MB; {facts.available_bytes / _MB:,.0f} MB available',
    ]
    return '\n'.join(f'- {line}' for line in lines)


if __name__ == '__main__':
    config_flags.DEFINE_config_file('config', None, process.CONFIG_HELP, lock_config=True)
    flags.DEFINE_integer('hosts', 1, 'Hosts that share the batch; this is one.')
    flags.DEFINE_float('step_ms', None, 'Take this for the time of a step.')
    flags.DEFINE_float('seconds', 5, 'To read for and to step for, each alone and together.')
    process.run(main, required=['config'])
