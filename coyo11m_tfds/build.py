"""Builds a data set, as `tfds build coyo11m_tfds` does, in any folder.

    python -m coyo11m_tfds.build --manual_dir=SOURCE --data_dir=OUT
    python -m coyo11m_tfds.build --manual_dir=SOURCE --data_dir=OUT \\
        --config='{"name": "qwen", "text_embeddings": "qwen"}'
    python -m coyo11m_tfds.build --manual_dir=SOURCE --data_dir=OUT \\
        --encoder=words

The last command embeds the captions before the build, as coyo11m_tfds.embed_captions does, into
OUT/text-NAME. NAME is the name of the config or, without a config, of the encoder. SOURCE is a
folder of latents with captions or labels (docs/sources.md). SOURCE and OUT may be local or on
gs://, SOURCE also on hf://. coyo11m_tfds/README.md describes the fields of --config, of which
--captions, --key_column and --caption_column are also flags.
"""

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import absl.app

from coyo11m_tfds import schema, storage
from coyo11m_tfds.convert.build_settings import CAPTION_FLAGS, READ_HEADS, add_caption_flags
from coyo11m_tfds.process import command_line, preparation, programs, tfds_command

# Packages of the extra `convert` that TFDS' command and a build import.
_PACKAGES = 'apache_beam', 'isal', 'mlcroissant', 'pandas', 'pyarrow', 'torch'


def main() -> None:
    """Checks the installation and the flags, embeds captions, and runs TFDS' command."""
    flags = _parse_flags()
    with command_line.ends_in_one_line('nothing was changed'):
        # Before the imports, which take seconds, and of which TFDS would show a traceback.
        for name in _PACKAGES:
            if not importlib.util.find_spec(name):
                raise ModuleNotFoundError(name=name)
        _check_places(flags.manual_dir, flags.data_dir)
    programs.announce_start()
    preparation.quiet_tensorflow()
    tfds_command.log_less()
    command_line.show_log()
    with tfds_command.ends_in_one_line():
        # Only those that were given: they replace the fields of --config.
        fields = {name: value for name, value in vars(flags).items() if name in CAPTION_FLAGS}
        if fields:
            flags.config = json.dumps(_parse_config(flags.config) | fields)
        # Before the captions are embedded, which may take hours.
        _check_config(flags.config)
    if flags.encoder:
        with command_line.ends_in_one_line('the same command resumes it', tfds_command.USER_ERRORS):
            flags.config = _embed_captions(flags)
    with tfds_command.ends_in_one_line():
        _run_tfds(flags)


def _parse_flags() -> argparse.Namespace:
    """Returns the flags of the command line; ends the program for flags that do not fit."""
    parser = command_line.Parser('coyo11m_tfds.build', __doc__)
    add = parser.add_argument
    add('--manual_dir', help='folder of the source')
    add('--data_dir', help='folder of data sets (~/tensorflow_datasets)')
    add('--config', default='', help='fields of the config, as JSON')
    add_caption_flags(parser)
    add('--encoder', help='embed the captions first: hash, words, hf:NAME or jax:NAME')
    add('--overwrite', action='store_true', help='replace an existing data set')
    add('--max_examples_per_split', type=int, help='first records of each split to keep (all)')
    add('--beam_pipeline_options', help='build with Beam and these, e.g. runner=FlinkRunner')
    flags = parser.parse_args()
    if flags.encoder and not (flags.manual_dir and flags.data_dir):
        parser.error('--encoder: expected --manual_dir and --data_dir too')
    limit = flags.max_examples_per_split
    if limit is not None and limit < 1:
        parser.error(f'--max_examples_per_split={limit}: expected at least 1')
    return flags


def _check_places(source: str | None, out: str | None) -> None:
    """Refuses folders of which TFDS would show a traceback, or that it would change."""
    if source:
        storage.open_folder(source)
        storage.check_single_slashes(source)
    if out:
        storage.check_single_slashes(out)
        # A request, if it is in a bucket: credentials that are refused show now.
        storage.open_writable_folder(out).exists()


def _parse_config(text: str) -> dict[str, Any]:
    """Returns the fields of a `--config` in JSON, {} for ''; ValueError if it is no object."""
    from coyo11m_tfds.coyo11m_tfds_dataset_builder import CONFIG_EXAMPLE

    try:
        fields = json.loads(text or '{}')
    except json.JSONDecodeError as error:
        raise ValueError(f'{text} is not JSON: {error}. Expected {CONFIG_EXAMPLE}') from error
    if not isinstance(fields, dict):
        raise ValueError(f'{text} is not a JSON object. Expected {CONFIG_EXAMPLE}')
    return fields


def _check_config(text: str) -> None:
    """Raises a ValueError for fields that no config has; a text without braces is a name."""
    from coyo11m_tfds.coyo11m_tfds_dataset_builder import Coyo11mConfig

    if text.startswith('{'):
        Coyo11mConfig(**_parse_config(text))


def _embed_captions(flags: argparse.Namespace) -> str:
    """Embeds the captions of the source; returns the config, JSON, that names the embeddings."""
    from coyo11m_tfds import embed_captions

    # The name becomes that of a folder; one in --config goes before that of the encoder.
    config = {'name': re.sub('[^A-Za-z0-9_.-]+', '-', flags.encoder)}
    config |= _parse_config(flags.config)
    fields: dict[str, Any] = {}
    for name in ('latents_from', *CAPTION_FLAGS):
        if name in config:
            fields[name] = config[name]
    data_dir = storage.expand_home(flags.data_dir).rstrip('/')
    out = f'{data_dir}/text-{config["name"]}'
    # The captions are read as the build will read them, so that the same rows have a text.
    settings = embed_captions.EmbedSettings(
        drop_duplicates=config.get('bad_data') != 'stop',
        by_columns=config.get('read_latents') == READ_HEADS,
        tokens_only=flags.encoder.partition(':')[0] == schema.WORDS,
        **fields,
    )
    report = embed_captions.embed(flags.manual_dir, flags.encoder, out, settings)
    command_line.print_lines(f'{report}: {out}')
    return json.dumps(config | {'text_embeddings': out})


def _run_tfds(flags: argparse.Namespace) -> None:
    """Runs `tfds build`, which ends the process."""
    from tensorflow_datasets.scripts.cli import cli_utils
    from tensorflow_datasets.scripts.cli import main as tfds

    # TFDS changes the log of programs without --logtostderr.
    words = ['tfds', 'build', '--logtostderr', schema.NAME, f'--imports={schema.NAME}']
    passed_on: Mapping[str, Any] = {
        'manual_dir': flags.manual_dir,
        'data_dir': flags.data_dir,
        'config': flags.config,
        'max_examples_per_split': flags.max_examples_per_split,
        'beam_pipeline_options': flags.beam_pipeline_options,
    }
    for name, value in passed_on.items():
        # TFDS has defaults for what was not given.
        if value:
            words.append(f'--{name}={value}')
    if flags.overwrite:
        words.append('--overwrite')
    parse = cli_utils.make_flags_parser(tfds.Args, description='TensorFlow Datasets')
    absl.app.run(tfds.main, argv=words, flags_parser=parse)


def prepare_tfds_command() -> None:
    """Makes the `tfds` command refuse flags in one line, and log less.

    TFDS imports the package of a data set after it has parsed the flags, and catches no errors.
    The builder ends its own errors in one line; what it never sees is checked here.
    """
    # Registers the data set.
    import coyo11m_tfds.coyo11m_tfds_dataset_builder  # noqa: F401

    tfds_command.log_less()
    # TFDS has parsed its flags, but gives them to nobody: these two are parsed once more.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('-c', '--config', default='')
    parser.add_argument('--num_processes', '--num-processes', type=int, default=1)
    flags, _ = parser.parse_known_args(sys.argv[1:])
    with tfds_command.ends_in_one_line():
        if flags.num_processes != 1:
            raise ValueError('leave out --num_processes; set num_workers in the config.')
        _check_config(flags.config)


if __name__ == '__main__':
    main()
