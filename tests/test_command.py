"""`tfds build` as users type it: from and to wherever, with the pool or with Beam."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import made_sources
from tests.build_kills import CHECKOUT, files_of, final_folder
from tests.cloud import fake_gcs, fake_hub

FILES = [range(40), range(40, 60)]
CONFIG = {'name': 'x', 'shard_bytes': 400_000, 'validation_fraction': 0.2}


def tfds_build(
    source: object, out: object, *flags: str, env: dict | None = None, status: int = 0, **fields
) -> str:
    """Builds the config `x`; returns what the command says."""
    command = [
        *(sys.executable, '-m', 'tensorflow_datasets.scripts.cli.main', 'build', 'coyo11m_tfds'),
        *(f'--manual_dir={source}', f'--data_dir={out}', *flags),
        f'--config={json.dumps(CONFIG | fields)}',
    ]
    ended = subprocess.run(
        command,
        cwd=CHECKOUT,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == status, ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return made_sources.write_source(tmp_path_factory.mktemp('source'), FILES)


@pytest.fixture(scope='module')
def plain(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """The files of a local build."""
    out = tmp_path_factory.mktemp('plain')
    said = tfds_build(source, out)
    assert 'total       60 records' in said
    assert sorted(path.name for path in out.iterdir()) == ['.coyo11m_tfds', 'coyo11m_tfds']
    return files_of(final_folder(out))


def test_from_a_bucket_to_a_bucket(source, plain, tmp_path):
    with fake_gcs(tmp_path) as gcs:
        gcs.upload_folder(source, 'gs://in/coyo')
        env = gcs.env | {'XDG_CACHE_HOME': str(tmp_path / 'cache')}
        tfds_build('gs://in/coyo', 'gs://out/data', env=env)
        gcs.download_folder('gs://out/data', tmp_path / 'copy')
        # What a kill after the last step but one leaves.
        gcs.put('out', 'data/coyo11m_tfds/x/1.0.0.building/finished/x.json', b'{}')
        gcs.put('out', 'data/coyo11m_tfds/x/1.0.0.lock', b'')
        gcs.remove('out', 'data/coyo11m_tfds/.config/metadata.json')
        program = f"""
import tensorflow_datasets as tfds
from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig
Builder(data_dir='gs://out/data', config=Coyo11mConfig(**{CONFIG})).download_and_prepare()
builder = tfds.builder_from_directory('gs://out/data/coyo11m_tfds/x/1.0.0')
print(sorted(int(e['key']) for s in builder.info.splits for e in builder.as_dataset(s)))
"""
        read = subprocess.run(
            [sys.executable, '-c', program],
            cwd=CHECKOUT,
            env=os.environ | env | {'COYO11M_LEASE_SECONDS': '1'},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not gcs.errors
        left = {name for name in gcs.objects('out') if '1.0.0/' not in name and name[-1] != '/'}
    assert read.stdout.splitlines()[-1] == f'{list(range(60))}', read.stderr
    assert left == {'data/coyo11m_tfds/.config/metadata.json'}
    assert files_of(final_folder(tmp_path / 'copy')) == plain
    beside = [path.name for path in final_folder(tmp_path / 'copy').parent.iterdir()]
    assert beside == ['1.0.0']


def test_overwrite_keeps_the_old_data_set_until_there_is_a_new_one(source, plain, tmp_path):
    final = final_folder(tmp_path)
    final.parent.mkdir(parents=True)
    final.mkdir()
    for name, data in plain.items():
        (final / name).write_bytes(data)

    said = tfds_build(tmp_path / 'missing', tmp_path, '--overwrite', status=1)
    assert 'missing' in said.splitlines()[-1]
    assert files_of(final) == plain
    assert [path.name for path in final.parent.iterdir()] == ['1.0.0']

    tfds_build(source, tmp_path, '--overwrite', caption_column='caption')
    assert [path.name for path in final.parent.iterdir()] == ['1.0.0']
    metadata = json.loads((final / 'metadata.json').read_bytes())
    assert metadata['caption_column'] == metadata['settings']['caption_column'] == 'caption'
    assert b'short 7' in b''.join(files_of(final).values())


def test_from_the_hub(source, plain, tmp_path):
    files = {str(p.relative_to(source)): p for p in source.rglob('*') if p.is_file()}
    with fake_hub(files) as hub:
        tfds_build('hf://datasets/owner/name', tmp_path, env=hub.env)
    assert files_of(final_folder(tmp_path)) == plain


@pytest.mark.slow
def test_with_beam_options(source, plain, tmp_path):
    options = 'runner=DirectRunner,direct_running_mode=multi_processing,direct_num_workers=2'
    said = tfds_build(source, tmp_path, f'--beam_pipeline_options={options}')
    assert 'Starting the pipeline with' in said
    assert files_of(final_folder(tmp_path)) == plain
