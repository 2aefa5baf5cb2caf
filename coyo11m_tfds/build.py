"""Builds a data set, as `tfds build coyo11m_tfds` does, in any folder.

    python -m coyo11m_tfds.build --manual_dir=SOURCE --data_dir=OUT
    python -m coyo11m_tfds.build --manual_dir=SOURCE --data_dir=OUT \\
        --config='{"name": "qwen", "text_embeddings": "qwen"}'
    python -m coyo11m_tfds.build --manual_dir=SOURCE --data_dir=OUT \\
        --encoder=hash

The last command embeds the captions before the build, as coyo11m_tfds.embed_captions does, into
OUT/text-NAME. NAME is the name of the config or, without a config, of the encoder. SOURCE is a
folder of latents with captions or labels (docs/sources.md). SOURCE and OUT may be local or on
gs://, SOURCE also on hf://. coyo11m_tfds/README.md describes the fields of --config, of which
--captions, --key_column and --caption_column are also flags.
"""

import argparse
import functools
import importlib.util
import json
import logging
import re
import shlex
import sys
from collections.abc import Callable
from typing import Any

import absl.logging

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert.build_settings import CAPTION_FLAGS, add_caption_flags
from coyo11m_tfds.process import command_line, machine, programs
from coyo11m_tfds.reading import process_settings

# Packages of the extra `convert` that TFDS' command and a build import.
_PACKAGES = 'apache_beam', 'isal', 'mlcroissant', 'pandas', 'pyarrow', 'torch'

# What TFDS and Beam log in every build.
_NOISE = re.compile(
    'Variant folder .* has no dataset_info.json|Using custom data configuration'
    '|Dataset generation completed|apitools not found'
)

# Errors that a user can fix, and subclasses of these whose messages mean nothing to users.
_USER_ERRORS = (ValueError, OSError, RuntimeError, ModuleNotFoundError)
_BUGS = (NotImplementedError, RecursionError)

# Options that TFDS' command does not have, or without a value.
_NOT_PASSED_ON = 'encoder', 'overwrite', *CAPTION_FLAGS

_OUTLOOK = 'what is finished is kept, the same command resumes the build'


def main() -> None:
    """Checks the installation, prepares the process, and runs TFDS' command."""
    parser = command_line.Parser('coyo11m_tfds.build', __doc__)
    add = parser.add_argument
    add('--manual_dir', help='folder of the source')
    add('--data_dir', help='folder of data sets (~/tensorflow_datasets)')
    add('--config', help='fields of the config, as JSON')
    add_caption_flags(parser)
    add('--encoder', help='embed the captions first: hash, words, hf:NAME or jax:NAME')
    add('--overwrite', action='store_true', help='replace an existing data set')
    add('--max_examples_per_split', type=int, help='first records of each split to keep (all)')
    add('--beam_pipeline_options', help='build with Beam and these, e.g. runner=FlinkRunner')
    flags = parser.parse_args()
    if flags.encoder and not (flags.manual_dir and flags.data_dir):
        parser.error('--encoder: expected --manual_dir and --data_dir too')
    if (limit := flags.max_examples_per_split) is not None and limit < 1:
        parser.error(f'--max_examples_per_split={limit}: expected at least 1')
    with command_line.ends_in_one_line('nothing was changed'):
        # Before the imports, which take seconds.
        for name in _PACKAGES:
            if not importlib.util.find_spec(name):
                raise ModuleNotFoundError(name=name)
        _check_places(flags.manual_dir, flags.data_dir)
    programs.announce_start()
    process_settings.quiet_tensorflow()
    prepare_tfds_command()
    command_line.show_log()
    if fields := {x: value for x, value in vars(flags).items() if x in CAPTION_FLAGS}:
        flags.config = json.dumps(json.loads(flags.config or '{}') | fields)
    if flags.encoder:
        with command_line.ends_in_one_line('the same command resumes it', _USER_ERRORS):
            flags.config = _embed_captions(flags)
    from tensorflow_datasets.scripts.cli import main as tfds

    options = [
        f'--{x}={value}' for x, value in vars(flags).items() if x not in _NOT_PASSED_ON and value
    ]
    overwrite = ['--overwrite'] * flags.overwrite
    # TFDS changes the log of programs without --logtostderr.
    command = 'tfds', 'build', '--logtostderr', schema.NAME, f'--imports={schema.NAME}'
    sys.argv = [*command, *options, *overwrite]
    tfds.launch_cli()


def _check_places(source: str | None, out: str | None) -> None:
    """Refuses folders of which TFDS would show a traceback, or that it would change."""
    if source:
        storage.open_folder(source)
        storage.check_single_slashes(source)
    if out:
        storage.check_single_slashes(out)
        storage.open_writable_folder(out).exists()


def _embed_captions(flags: argparse.Namespace) -> str:
    """Embeds the captions of the source; returns the config, JSON, that names the embeddings."""
    from coyo11m_tfds import embed_captions

    config = {'name': re.sub('[^A-Za-z0-9_.-]+', '-', flags.encoder)}
    config |= json.loads(flags.config or '{}')
    names = 'latents_from', *CAPTION_FLAGS
    fields: dict[str, Any] = {x: config[x] for x in names if x in config}
    out = f'{flags.data_dir.rstrip("/")}/text-{config["name"]}'
    settings = embed_captions.EmbedSettings(
        drop_duplicates=config.get('bad_data') != 'stop',
        tokens_only=flags.encoder.partition(':')[0] == schema.WORDS,
        **fields,
    )
    report = embed_captions.embed(flags.manual_dir, flags.encoder, out, settings)
    command_line.print_lines(f'{report}: {out}')
    return json.dumps(config | {'text_embeddings': out})


def prepare_tfds_command() -> None:
    """Makes the `tfds` command end errors in one line, and log less.

    TFDS imports the package of a data set and catches no errors, so this hooks into the process.
    The package calls this only in the `tfds` command, so your own scripts do not change.
    """
    import tensorflow_datasets as tfds

    from coyo11m_tfds.coyo11m_tfds_dataset_builder import CONFIG_EXAMPLE  # registers the data set

    def how_to_open(info: tfds.core.DatasetInfo) -> str:
        has_text = not schema.TEXT_DTYPES.keys().isdisjoint(info.features)
        name = 'default' if has_text and machine.accelerators() else 'small'
        lines = [
            f'tfds.builder_from_directory({str(info.data_dir)!r})',
            f'python -m train_lib.main --config={name} --workdir=W '
            + shlex.quote(f'--config.data.dir={info.data_dir}'),
        ]
        if not has_text:
            flags = [x for x in sys.argv if x.startswith(('--manual_dir=', '--data_dir='))]
            configs = (json.loads(x[9:]) for x in sys.argv if x.startswith('--config={'))
            flags += [f'--{x}={y}' for x, y in next(configs, {}).items() if x in CAPTION_FLAGS]
            again = shlex.join(['python', '-m', 'coyo11m_tfds.build', *flags, '--encoder=hash'])
            lines[1:1] = [f'To train on captions, first build again: {again}', 'Without captions:']
        return '\n'.join(lines)

    for logger in (absl.logging.get_absl_logger(), logging.getLogger()):
        logger.addFilter(lambda record: not _NOISE.match(record.getMessage()))
    logging.getLogger('torch').setLevel(logging.WARNING)  # it logs statistics when it ends
    # The command prints it at the end of a build.
    tfds.core.DatasetInfo.__repr__ = how_to_open
    sys.excepthook = functools.partial(_print_user_error, sys.excepthook, CONFIG_EXAMPLE)
    command_line.unwind_on_signals()


def _print_user_error(
    show: Callable, example: str, kind: type, error: BaseException, traceback
) -> None:
    import tensorflow as tf

    # What TensorFlow says of a bucket is no OSError.
    user_errors = KeyboardInterrupt, tf.errors.OpError, *_USER_ERRORS
    is_message = isinstance(error, user_errors) and not isinstance(error, _BUGS)
    if command_line.wants_traceback() or not is_message:
        show(kind, error, traceback)
        return
    if isinstance(error, json.JSONDecodeError) and any(error.doc in word for word in sys.argv):
        error = ValueError(f'{error.doc} is not JSON: {error}. Expected {example}')
    if isinstance(error, tf.errors.OpError) and 'requester pays' in str(error):
        header = 'GCS_ADDITIONAL_REQUEST_HEADER=X-Goog-User-Project:PROJECT'
        error = OSError(f'{error} Set {header}, with the project of yours that pays.')
    command_line.print_error(error, _OUTLOOK)


if __name__ == '__main__':
    main()
