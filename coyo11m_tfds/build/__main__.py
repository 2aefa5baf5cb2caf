"""Builds the data set: `tfds build coyo11m_tfds` from any folder, with errors in one line.

    python -m coyo11m_tfds.build --manual_dir=SOURCE --data_dir=OUT
    python -m coyo11m_tfds.build --manual_dir=SOURCE --data_dir=OUT \\
        --config='{"name": "gemma", "text_embeddings": "gemma"}'

SOURCE holds latents-3crop/*.pt and coyo11m-meta.parquet. SOURCE and OUT may be local or on gs://,
SOURCE also on hf://. coyo11m_tfds/README.md describes the fields of --config.
"""

import importlib.util
import sys

from coyo11m_tfds import schema
from coyo11m_tfds.process import command_line, ending
from coyo11m_tfds.reading import process_settings

# What TFDS' command and a build import, of the extra `convert`.
_NEEDED = 'apache_beam', 'isal', 'mlcroissant', 'pandas', 'pyarrow', 'torch'


def main() -> None:
    """Prepares the process and runs TFDS' command."""
    parser = command_line.Parser('coyo11m_tfds.build', __doc__)
    parser.add_argument('--manual_dir', help='folder of the source')
    parser.add_argument('--data_dir', help='folder of data sets (~/tensorflow_datasets)')
    parser.add_argument('--config', help='fields of the config, as JSON')
    parser.add_argument('--overwrite', action='store_true', help='replace the data set')
    parser.add_argument('--max_examples_per_split', type=int, help='records to keep of a split')
    parser.add_argument('--beam_pipeline_options', help='build with Beam, e.g. runner=FlinkRunner')
    parser.parse_args()
    with ending.in_one_line('nothing was changed'):
        for name in _NEEDED:
            if not importlib.util.find_spec(name):
                raise ModuleNotFoundError(name=name)
    process_settings.quiet_tensorflow()
    from coyo11m_tfds import tfds_command

    tfds_command.prepare()
    from tensorflow_datasets.scripts.cli import main as tfds

    sys.argv = ['tfds', 'build', schema.NAME, f'--imports={schema.NAME}', *sys.argv[1:]]
    tfds.launch_cli()


if __name__ == '__main__':
    main()
