"""Shards written with Apache Beam: what its workers fetch, and where they put it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import made_sources
from tests.built import files_of
from tests.checkout import CHECKOUT
from tests.convert.build_kills import final_folder, run
from tests.fakes.cloud import Gcs, fake_gcs

SETTINGS = {'shard_bytes': 1_000_000, 'validation_fraction': 0.2}
ROWS = 200  # in a file, 5 MB: six shards, and little of it in the head that planning reads
FILES = 6
WORKERS = 3

PROGRAM = """
import json, sys
import apache_beam as beam
from coyo11m_tfds.convert import driver
from coyo11m_tfds.convert.settings import BuildSettings
from tests.convert import build_program
source, final, settings, workers = sys.argv[1:]
flags = ['--direct_running_mode=multi_processing', f'--direct_num_workers={workers}']
settings = BuildSettings(**json.loads(settings))
options = beam.options.pipeline_options.PipelineOptions(flags)
if __name__ == '__main__':
    beam = {'beam_options': options, 'beam_runner': 'DirectRunner'}
    with driver.build(final, source, settings, **beam) as built:
        if built:
            build_program.write_info(built)
"""


def run_with_beam(source: object, final: pathlib.Path, folder: pathlib.Path, gcs: Gcs) -> None:
    """Builds with several worker processes, whose cache is `folder / 'cache'`."""
    program = folder / 'program.py'
    program.write_text(PROGRAM)
    paths = {'PYTHONPATH': str(CHECKOUT), 'XDG_CACHE_HOME': str(folder / 'cache')}
    ended = subprocess.run(
        [
            *(sys.executable, str(program), str(source), str(final)),
            *(json.dumps(SETTINGS), str(WORKERS)),
        ],
        env=os.environ | gcs.env | paths,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_every_file_is_fetched_once(tmp_path):
    files = [range(ROWS * n, ROWS * (n + 1)) for n in range(FILES)]
    source = made_sources.write_source(tmp_path / 'source', files)
    sizes = [path.stat().st_size for path in source.rglob('*.pt')]
    run(source, final_folder(tmp_path / 'plain'), settings=SETTINGS)
    with fake_gcs(tmp_path) as gcs:
        gcs.upload_folder(source, 'gs://in/coyo')
        final = final_folder(tmp_path / 'out')
        run_with_beam('gs://in/coyo', final, tmp_path, gcs)
        reads = [r.range for r in gcs.requests if r.action == 'read' and r.path.endswith('.pt')]
    asked_for = sum(last - first + 1 for first, last in reads)
    assert asked_for <= 1.1 * sum(sizes)
    assert files_of(final) == files_of(final_folder(tmp_path / 'plain'))
    cache = tmp_path / 'cache' / 'coyo11m_tfds'
    assert cache.is_dir() and not [path for path in cache.rglob('*') if path.is_file()]
