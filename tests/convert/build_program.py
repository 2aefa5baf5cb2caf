"""Builds in a process of their own, for tests that kill it: seconds lighter than `tfds build`.

    python -m tests.convert.build_program SOURCE FINAL '{"num_workers": 2}' '{"shard_bytes": 30000}'
    python -m tests.convert.build_program     # builds one after the other, each a line of JSON

TensorFlow takes 5 s to start, so that many builds to gs:// share one process.
"""

import json
import pathlib
import sys

from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.convert import driver
from coyo11m_tfds.convert.settings import BuildSettings


def build(source: str, final: str, options: str = '{}', settings: str = '{}') -> str:
    """Builds `source` into the folder `final`; options and settings are JSON objects."""
    fields = json.loads(options) | json.loads(settings)
    overwrite = fields.pop('overwrite', False)
    made = BuildSettings(**fields)
    with driver.build(source=source, final=final, settings=made, overwrite=overwrite) as built:
        if built:
            write_info(built)
    return 'built here' if built else 'built elsewhere'


def write_info(built: driver.Built) -> None:
    """Stands for TFDS' own files."""
    folder = pathlib.Path(built.folder)
    template = schema.of_build('{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}', built.plan.build)
    splits = [{'name': split, 'filepathTemplate': template} for split in built.splits]
    (folder / schema.INFO_FILE).write_text(json.dumps({'splits': splits}))
    (folder / schema.FEATURES_FILE).write_text('{}')
    (folder / schema.METADATA_FILE).write_text(json.dumps(built.metadata, sort_keys=True))


def main(*arguments: str) -> None:
    """Does one build, or as many as there are lines on stdin; errors end only the first."""
    logging.set_verbosity(logging.INFO)
    logging.use_absl_handler()
    if arguments:
        print(build(*arguments))
        return
    for line in sys.stdin:
        try:
            outcome = build(*json.loads(line))
        except Exception as error:
            outcome = f'{type(error).__name__}: {error}'
        print(json.dumps(outcome), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
