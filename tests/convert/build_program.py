"""Builds in a process of their own, for tests that kill it: seconds lighter than `tfds build`."""

import json
import pathlib

from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.convert import driver
from coyo11m_tfds.convert.build_settings import BuildSettings
from tests import children


def build(source: str, final: str, options: str = '{}', settings: str = '{}') -> str:
    """Builds `source` into the folder `final`; options and settings are JSON objects."""
    fields = json.loads(options) | json.loads(settings)
    overwrite = fields.pop('overwrite', False)
    is_built_here = driver.build(
        final, source, BuildSettings(**fields), write_info, overwrite=overwrite
    )
    return 'built here' if is_built_here else 'built elsewhere'


def write_info(dataset: driver.BuiltDataset) -> None:
    """Stands for TFDS' own files."""
    folder = pathlib.Path(dataset.folder)
    name = '{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}'
    template = schema.of_build(name, dataset.plan.build)
    splits = [{'name': split, 'filepathTemplate': template} for split in dataset.splits]
    (folder / schema.INFO_FILE).write_text(json.dumps({'splits': splits}))
    (folder / schema.FEATURES_FILE).write_text('{}')
    # Builds from several places are compared byte by byte.
    metadata = dataset.metadata | {schema.META_SOURCE: None}
    (folder / schema.METADATA_FILE).write_text(json.dumps(metadata, sort_keys=True))


def run(folder: str, env: dict[str, str], *arguments: str) -> None:
    """Does one build in a forked process whose output goes to files in a folder."""
    children.enter(env, f'{folder}/out', f'{folder}/err')
    logging.set_verbosity(logging.INFO)
    logging.use_absl_handler()
    print(build(*arguments), flush=True)
