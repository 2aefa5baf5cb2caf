"""Latents that stay in a bucket: the same batches as from records; objects that are replaced."""

import itertools
import json
import pathlib
import re

import pytest

import input_pipeline
from coyo11m_tfds import add_column, schema, verify
from coyo11m_tfds.convert import driver
from coyo11m_tfds.convert.build_settings import BuildSettings
from coyo11m_tfds.dataset import columns
from tests import built
from tests.built import files_of
from tests.convert import build_kills, build_program
from tests.fakes.cloud import Gcs, fake_gcs
from tests.reading.batches import assert_same, check_memory, wait_until_idle
from tests.test_in_place import ORDER, read

SOURCE, DATA = 'gs://source/coyo', 'gs://data/coyo11m_tfds/here/1.0.0'
LATENTS = f'coyo/{schema.LATENTS_FOLDER}'


@pytest.fixture(scope='module')
def described(sample_source, hash_sidecar, tmp_path_factory) -> pathlib.Path:
    """A local data set in place whose source lies in a bucket."""
    with pytest.MonkeyPatch.context() as patch, fake_gcs(tmp_path_factory.mktemp('gcs')) as server:
        for name, value in server.env.items():
            patch.setenv(name, value)
        server.upload_folder(sample_source, SOURCE)
        out = tmp_path_factory.mktemp('described')
        return built.build(SOURCE, hash_sidecar, out, name='here', latents='in_place')


@pytest.fixture
def storage(bucket: Gcs, sample_source, described) -> Gcs:
    bucket.upload_folder(sample_source, SOURCE)
    bucket.upload_folder(described, DATA)
    return bucket


def replace_object(storage: Gcs, change) -> str:
    """Changes the second `.pt` file of the source; returns its URL."""
    name = sorted(name for name in storage.objects('source') if name.endswith('.pt'))[1]
    storage.put('source', name, change(storage.objects('source')[name]))
    return f'gs://source/{name}'


def test_a_chunk_is_a_request_for_records_and_one_for_latents(storage, described):
    lengths = input_pipeline.open_data(described).splits[schema.TRAIN].shard_lengths
    storage.clear()
    counter = input_pipeline.ReadCounter()
    batches = input_pipeline.train_batches(DATA, **ORDER, counter=counter)
    assert len(list(itertools.islice(batches, 60))) == 60
    wait_until_idle(counter)
    reads = [request for request in storage.requests if request.action == 'read']
    shards = [request for request in reads if '.tfrecord' in request.path]
    latents = [request for request in reads if request.path.endswith('.pt')]
    # Where one file of the source ends and the next begins a chunk takes both; what is read ahead
    # may end between the two.
    assert len(shards) - 1 <= len(latents) <= 1.1 * len(shards)
    asked = sum(request.range[1] + 1 - request.range[0] for request in latents)
    records_a_chunk = sum(lengths) / sum(-(-length // ORDER['chunk']) for length in lengths)
    # A tenth of the rows between them are of the other split.
    assert asked <= 1.2 * len(shards) * records_a_chunk * 24_576
    counts = counter.read()
    assert (counts.num_chunks, counts.chunks_in_flight) == (len(shards), 0)
    assert counts.num_bytes == asked + sum(r.range[1] + 1 - r.range[0] for r in shards)


def test_an_object_that_was_replaced_is_named_before_anything_is_read(storage):
    url = replace_object(storage, lambda data: data[:-1] + b'x')
    with pytest.raises(ValueError, match=f'{url}: has changed since the data set was built'):
        input_pipeline.train_batches(DATA, **ORDER)
    storage.remove('source', url.removeprefix('gs://source/'))
    with pytest.raises(ValueError, match=f'{url}: is missing, but holds latents'):
        input_pipeline.train_batches(DATA, **ORDER)


def test_an_object_that_is_replaced_while_it_is_read_is_named(storage):
    batches = input_pipeline.train_batches(DATA, **ORDER)
    next(batches)
    url = replace_object(storage, lambda data: data[:-1] + b'x')
    with pytest.raises(OSError, match=f'{url} has changed since it was listed'):
        for _ in range(200):
            next(batches)


def test_a_source_that_was_moved_is_found_again(storage, sample_source, mini_dataset, tmp_path):
    storage.upload_folder(sample_source, 'gs://source/moved')
    with pytest.raises(ValueError, match=r'in training, so it must be a file on gs://'):
        add_column.move_latents(DATA, sample_source)
    add_column.move_latents(DATA, 'gs://source/moved')
    for name in [name for name in storage.objects('source') if name.startswith('coyo/')]:
        storage.remove('source', name)
    assert_same(read(DATA, 20), read(mini_dataset, 20))
    assert not verify.verify(DATA).faults


def test_verify_compares_the_bucket(storage):
    for fast in (False, True):
        assert verify.verify(DATA, fast=fast).faults == []
    url = replace_object(storage, lambda data: data[:-1] + b'x')
    for fast in (False, True):
        [fault] = verify.verify(DATA, fast=fast).faults
        assert fault.startswith(f'{url}: has changed since the data set was built')


def test_rows_are_refused_where_latents_are_fetched(storage, described):
    for path in (DATA, described):
        with pytest.raises(ValueError, match=f'{path}: .* set engine='):
            input_pipeline.train_batches(path, engine='rows', **ORDER)


def test_memory_counts_the_latents_that_are_fetched(storage, mini_dataset):
    settings = {name: x for name, x in ORDER.items() if name != 'seed'}
    needs = []
    for path in (DATA, mini_dataset):
        with pytest.raises(ValueError, match=r'takes [\d.]+ GB') as error:
            check_memory(path, **settings, parallel_reads=1000, ram_budget_gb=1e-9)
        needs.append(float(re.search(r'takes ([\d.]+) GB', str(error.value))[1]))
    assert needs[0] == pytest.approx(needs[1], rel=0.05)


def test_a_bucket_is_built_into_as_a_disk_is(bucket, sample_source, tmp_path):
    """Stub metadata stand for TFDS' own, which needs TensorFlow to write to a bucket."""
    bucket.upload_folder(sample_source, SOURCE)
    options = json.dumps({'scratch_dir': str(tmp_path / 'scratch'), 'num_workers': 1})
    settings = json.dumps(build_kills.SETTINGS | {'latents': 'in_place'})
    final = tmp_path / 'coyo11m_tfds' / 'here' / '1.0.0'
    for place in (DATA, final):
        assert build_program.build(SOURCE, str(place), options, settings) == 'built here'
    bucket.download_folder(DATA, tmp_path / 'copy')
    assert files_of(tmp_path / 'copy') == files_of(final)
    paths = [
        file.path
        for file in columns.read_columns(
            final, schema.build_of(next(final.glob('columns-*')).name)
        )[schema.LATENTS].files
    ]
    assert paths == [f'gs://source/{n}' for n in bucket.objects('source') if n.endswith('.pt')]


def test_a_source_that_readers_cannot_reach_is_refused(sample_source, gcs, tmp_path):
    settings = BuildSettings(latents='in_place', scratch_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"latents='in_place' .* as the data set is not local\."):
        driver.build(DATA, str(sample_source), settings, build_program.write_info)
