"""Trains a model; start it on every host with the same arguments.

    python -m train_lib.main --config=configs/demo.py --workdir=W

This file is intentionally kept short; the training loop is in `train.py`.
"""

import shlex
import sys

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from train_lib import checkpoint, process, train

FLAGS = flags.FLAGS

flags.DEFINE_string('workdir', None, 'Folder for checkpoints, logs and previews; local or gs://.')
config_flags.DEFINE_config_file('config', None, 'File of the configuration.', lock_config=True)
flags.mark_flags_as_required(['config', 'workdir'])


def main(argv: list[str]) -> None:
    """Prepares the process and trains."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {argv[1:]}')
    process.prepare()
    if FLAGS.config.distributed:
        jax.distributed.initialize()
    logging.info('Process %d of %d.', jax.process_index(), jax.process_count())
    logging.info('Devices: %s', jax.local_devices())
    logging.info('Configuration:\n%s', FLAGS.config)

    try:
        state = train.train_and_evaluate(FLAGS.config, FLAGS.workdir)
    except checkpoint.OtherRunError as error:
        sys.exit(f'ERROR: {error}')
    if int(state.step) < FLAGS.config.num_steps:
        command = shlex.join([sys.executable, '-m', 'train_lib.main', *sys.argv[1:]])
        logging.info('Stopped at step %d. To go on:\n%s', state.step, command)


if __name__ == '__main__':
    app.run(main)
