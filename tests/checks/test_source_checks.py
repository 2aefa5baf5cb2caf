"""Tests of the dry run: what it says of a source is what a build makes of it."""

import json
import os

import pytest

from coyo11m_tfds import schema
from coyo11m_tfds.checks import source_checks
from coyo11m_tfds.convert.settings import BuildSettings
from coyo11m_tfds.source import location
from tests import made_sources

SETTINGS = BuildSettings(validation_fraction=0.1, shard_bytes=2_500_000)


def built(mini_dataset) -> tuple[int, int, int]:
    """Records, shards and bytes of the data set that is made with these settings."""
    splits = json.loads((mini_dataset / schema.INFO_FILE).read_bytes())['splits']
    lengths = [int(length) for split in splits for length in split['shardLengths']]
    return sum(lengths), len(lengths), sum(int(split['numBytes']) for split in splits)


@pytest.fixture
def settings(hash_sidecar) -> BuildSettings:
    return BuildSettings(
        validation_fraction=0.1, shard_bytes=2_500_000, text_embeddings=str(hash_sidecar)
    )


def test_a_small_source_is_planned_to_the_row(sample_source, mini_dataset, settings):
    found = source_checks.estimate(location.find(sample_source), settings, 100e6)
    records, shards, num_bytes = built(mini_dataset)
    assert (found.exact, found.num_records, found.num_shards) == (True, records, shards)
    assert found.num_bytes == pytest.approx(num_bytes, rel=0.01)
    assert found.seconds >= num_bytes / 100e6
    (line,) = source_checks.check_build(found)
    assert line.status == 'pass'
    assert line.text.startswith('1,173 records in 15 shards of 30.6 MB')


def test_a_large_source_is_estimated(sample_source, mini_dataset, settings, monkeypatch):
    monkeypatch.setattr(source_checks, '_EXACT_BYTES', {False: 0, True: 0})
    found = source_checks.estimate(location.find(sample_source), settings, 100e6)
    records, shards, num_bytes = built(mini_dataset)
    assert not found.exact
    assert found.num_records == pytest.approx(records, rel=0.03)
    assert found.num_bytes == pytest.approx(num_bytes, rel=0.05)
    assert found.num_shards == pytest.approx(shards, abs=3)
    (line,) = source_checks.check_build(found)
    assert line.text.startswith('about 1,2')


def test_nothing_is_left_where_the_source_or_the_captions_lie(tmp_path):
    folder = made_sources.write_source(tmp_path / 's', [range(40)])
    before = sorted(str(path) for path in tmp_path.rglob('*'))
    source_checks.estimate(location.find(folder), SETTINGS, 1e9)
    assert sorted(str(path) for path in tmp_path.rglob('*')) == before


def test_a_remote_source_is_timed_by_its_storage(gcs, tmp_path, monkeypatch):
    folder = made_sources.write_source(tmp_path / 's', [range(40), range(40, 90)])
    gcs.upload_folder(folder, 'gs://bucket/s')
    source = location.find('gs://bucket/s')
    exact = source_checks.estimate(source, SETTINGS, 1e9)
    assert (exact.exact, exact.num_records) == (True, 90)
    files = (*source.latent_files, source.captions_file)
    assert exact.fetched_bytes == sum(file.size for file in files)
    monkeypatch.setattr(source_checks, '_EXACT_BYTES', {False: 0, True: 0})
    gcs.clear()
    found = source_checks.estimate(source, SETTINGS, 1e9)
    assert found.num_records == pytest.approx(90, rel=0.02)
    captions = sum(r.nbytes for r in gcs.requests if r.path.endswith(schema.CAPTIONS_FILE))
    assert 0 < captions < 2 * source.captions_file.size


def test_rows_that_are_left_out_are_counted_and_many_are_a_warning(tmp_path):
    folder = made_sources.write_source(tmp_path / 's', [range(40)])
    made_sources.write_captions(folder, {key: f'Caption {key}.' for key in range(30)})
    found = source_checks.estimate(location.find(folder), SETTINGS, 1e9)
    (line,) = source_checks.check_build(found)
    assert line.status == 'warn'
    assert 'left out: 10 no_row (25.0% of the rows)' in line.text


def test_heads_are_read(sample_source):
    (found,) = source_checks.check_files(location.find(sample_source))
    assert found.status == 'pass'
    assert '3 heads read, 1,200 rows of float16' in found.text


def test_a_damaged_head_is_named(tmp_path):
    folder = made_sources.write_source(tmp_path / 's', [range(40), range(40, 90)])
    file = made_sources.latents_file(folder, 1)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ValueError, match=file.name):
        source_checks.check_files(location.find(folder))


@pytest.mark.parametrize('exact', [True, False])
def test_a_column_that_is_not_there_is_named(tmp_path, monkeypatch, exact):
    folder = made_sources.write_source(tmp_path / 's', [range(40)])
    if not exact:
        monkeypatch.setattr(source_checks, '_EXACT_BYTES', {False: 0, True: 0})
    with pytest.raises(ValueError, match='nonesuch'):
        settings = BuildSettings(caption_column='nonesuch')
        source_checks.estimate(location.find(folder), settings, 1e9)
