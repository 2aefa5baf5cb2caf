"""Trains a model. Start it on every host with the same arguments.

    python -m train_lib.main --config=configs/demo.py --workdir=W

The hosts of a TPU pod, and those of a Slurm or Open MPI job, find each other
by themselves. On other hosts add `--coordinator_address=HOST:PORT
--process_count=P --process_index=I`, with another I on each host. `--verbose`
shows the configuration, the parameters and the messages of libraries.

The exit status is 0 if the run is complete, `config.requeue_status` if Ctrl-C,
SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU ended it earlier, and 1 for an
error.
"""

# Intentionally kept short; the training loop is in `train.py`.

import shlex
import sys

from absl import flags, logging
from ml_collections import config_flags

import input_pipeline
from coyo11m_tfds.process import jax_environment
from train_lib import run
from train_lib.lifecycle import hosts, signals

FLAGS = flags.FLAGS

flags.DEFINE_string('workdir', None, 'Folder for checkpoints, logs and previews; local or gs://.')
flags.DEFINE_list('accept_changes', [], 'Fields that may differ from those in the checkpoint.')
flags.DEFINE_string('coordinator_address', None, 'HOST:PORT of process 0, with a free port.')
flags.DEFINE_integer('process_count', None, 'Number of processes that train together.')
flags.DEFINE_integer('process_index', None, 'Number of this process, from 0.')
config_flags.DEFINE_config_file('config', None, run.CONFIG_HELP, lock_config=True)


@flags.multi_flags_validator(
    ['coordinator_address', 'process_count', 'process_index'],
    message='--coordinator_address, --process_count and --process_index go together.',
)
def _all_or_none(values: dict[str, str | int | None]) -> bool:
    return len({value is None for value in values.values()}) == 1


def main() -> None:
    """Trains up to the last step, or until a signal comes."""
    # Again, now that the configuration says with which status.
    signals.install(FLAGS.config.requeue_status)
    input_pipeline.prepare_process()
    with run.errors_in_one_line():
        run.prepare()
        # Only now, because it takes seconds.
        from train_lib import train

    with run.errors_in_one_line():
        if FLAGS.config.distributed or FLAGS.coordinator_address:
            hosts.join_hosts(FLAGS.coordinator_address, FLAGS.process_count, FLAGS.process_index)
        jax_environment.check()
    if FLAGS.verbose:
        # A message for each line: one of several lines would be written in one.
        logging.info('Configuration:')
        for line in str(FLAGS.config).splitlines():
            logging.info('%s', line)
    with hosts.share_failures():
        with run.errors_in_one_line():
            setup = train.set_up(FLAGS.config, FLAGS.workdir, FLAGS.accept_changes)
        with run.errors_in_one_line((FloatingPointError, MemoryError, OSError)):
            state, finished = train.train(setup, verbose=FLAGS.verbose)
    if not finished:
        command = shlex.join([sys.executable, '-m', 'train_lib.main', *sys.argv[1:]])
        logging.info('Stopped at step %d. To resume: %s', state.step, command)
        sys.exit(FLAGS.config.requeue_status)


if __name__ == '__main__':
    # Before the flags are parsed, for which the file of the configuration runs.
    signals.install()
    # Errors of the steps keep their traceback, except for those that `main` names.
    run.start(main, required=['config', 'workdir'], fixable=())
