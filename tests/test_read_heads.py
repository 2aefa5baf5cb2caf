"""Builds that read only the heads of remote files, and the checksums that `verify` adds later."""

import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch

import input_pipeline
from coyo11m_tfds import embed_captions, schema, verify
from coyo11m_tfds.convert.build_settings import BuildSettings
from coyo11m_tfds.coyo11m_tfds_dataset_builder import Coyo11mConfig
from coyo11m_tfds.dataset.row_checksums import compute_row_checksums
from tests import built, damages, made_sources
from tests.fakes.cloud import Fault, Hub
from tests.reading.batches import assert_same
from tests.test_in_place import read
from tests.test_in_place_hub import REPO, files_below

SHAPE = 1, 4, 8, 8
HEADS = {'latents': 'in_place', 'read_latents': 'heads', 'name': 'heads'}


def write_source(folder: pathlib.Path, num_files: int, num_rows: int) -> pathlib.Path:
    """A source of small latents, of which a row has 512 bytes."""
    generator = torch.Generator().manual_seed(0)
    keys = np.random.default_rng(0).permutation(num_files * num_rows)
    for number in range(num_files):
        # Files differ, so that statistics of some files alone would be wrong.
        values = 3 * torch.randn(num_rows, *SHAPE, generator=generator) + number
        content = {
            schema.PT_KEYS: torch.from_numpy(keys[number::num_files].copy()),
            schema.PT_LATENTS: values.to(torch.float16),
        }
        path = made_sources.latents_file(folder, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    made_sources.write_captions(folder, {key: f'Caption of {key}.' for key in keys.tolist()})
    return folder


@pytest.fixture(scope='module')
def large(tmp_path_factory) -> pathlib.Path:
    return write_source(tmp_path_factory.mktemp('large') / 'source', 2, 8_000)


@pytest.fixture(scope='module')
def whole(large, tmp_path_factory) -> pathlib.Path:
    """The data set of which every row was read."""
    return built.build(large, '', tmp_path_factory.mktemp('whole'), latents='in_place')


def count_fetched(hub: Hub, suffix: str) -> int:
    return sum(x.nbytes for x in hub.requests if x.path.endswith(suffix) and x.action == 'read')


def places(path: pathlib.Path) -> dict[str, np.ndarray]:
    data = input_pipeline.open_data(path)
    column = data.columns[schema.LATENTS]
    return {
        name: column.locate(path, name, split.num_records) for name, split in data.splits.items()
    }


@pytest.fixture
def heads(hub, large, tmp_path) -> pathlib.Path:
    hub.commit(files_below(large))
    return built.build(REPO, '', tmp_path / 'heads', **HEADS)


def test_a_build_of_heads_reads_some_rows_of_all_files(hub, large, heads, whole):
    size = sum(path.stat().st_size for path in large.rglob('*.pt'))
    assert count_fetched(hub, '.pt') < 0.25 * size
    data, expected = input_pipeline.open_data(heads), input_pipeline.open_data(whole).stats()
    assert data.metadata['latent_rows'] == 2048
    assert data.metadata['settings']['read_latents'] == 'heads'
    stats = data.stats()
    # Half of the rows have 0 as mean, half 1: of 2,048 rows of 64 numbers it is known to 2%.
    np.testing.assert_allclose(stats.latent_mean, expected.latent_mean, atol=0.05)
    np.testing.assert_allclose(stats.latent_std, expected.latent_std, rtol=0.02)
    report = json.loads(next(heads.glob('report-*.json')).read_text())
    assert report['latent_rows'] == 2048
    assert '2,048 rows, spread over all files' in next(heads.glob('report-*.html')).read_text()


def test_batches_are_those_of_a_build_that_read_everything(heads, whole):
    features = {'features': ('key', 'latents', 'caption')}
    assert_same(read(heads, 20, **features), read(whole, 20, **features))


def test_rows_without_checksums_have_those_of_the_cache(hub, heads, whole, tmp_path):
    order = {'features': ('key', 'latents'), 'batch_size': 64, 'lanes': 4}
    cached = {**order, 'cache_dir': str(tmp_path / 'cache'), 'cache_gb': 1.0}
    steps = 14_000 * 3 // 2 // 64  # one epoch and a half
    expected = read(whole, steps, **order)
    assert_same(read(heads, steps, **cached), expected)
    for path in (tmp_path / 'cache').rglob('*'):
        if path.is_file() and path.stat().st_size > 1_000_000:
            damages.flip(path, 700_000)
    hub.requests.clear()
    assert_same(read(heads, steps, **cached), expected)
    assert 0 < count_fetched(hub, '.pt') < 1_000_000


def test_verify_adds_the_checksums(hub, large, heads, whole, command, caplog):
    opened = input_pipeline.open_data(heads)
    expected_batches = read(opened, 5, features=('key', 'latents'))
    assert caplog.text.count(f'{heads}: the rows of 2 files with latents have no checksums') == 1
    status, output, _ = command(verify, '--fast', heads)
    assert status == 0 and 'The rows of 2 files with latents have no checksums yet' in output
    before = set(heads.iterdir())
    status, output, _ = command(verify, heads)
    assert status == 0 and 'The rows of 2 files with latents have checksums now.' in output
    for split, expected in places(whole).items():
        np.testing.assert_array_equal(places(heads)[split], expected)
    # Each split has new places, and a run that began before goes on with the old ones.
    assert before < set(heads.iterdir()) and len(set(heads.iterdir()) - before) == 2
    assert_same(read(opened, 5, features=('key', 'latents')), expected_batches)
    hub.requests.clear()
    assert command(verify, heads)[0] == 0
    # What readers have read ahead may come later.
    size = sum(path.stat().st_size for path in large.rglob('*.pt'))
    assert size <= count_fetched(hub, '.pt') < 1.5 * size


def test_rows_are_compared_once_they_have_checksums(hub, heads):
    assert compute_row_checksums(heads) == []
    damaged = Fault('flip', None, match='.pt', action='read', after_bytes=100)
    hub.inject(damaged)
    with pytest.raises(ValueError, match=r'\.pt: row \d+ cannot be read: its checksum is wrong'):
        read(heads, 20, features=('key', 'latents'))


def test_an_interrupted_computation_goes_on(hub, tmp_path):
    source = write_source(tmp_path / 'source', 6, 100)
    # Of a file without rows nothing is read.
    content = {schema.PT_KEYS: torch.zeros(0, dtype=torch.int64)}
    content[schema.PT_LATENTS] = torch.zeros(0, *SHAPE, dtype=torch.float16)
    torch.save(content, made_sources.latents_file(source, 9))
    hub.commit(files_below(source))
    heads = built.build(REPO, '', tmp_path / 'heads', **HEADS)
    expected = places(built.build(source, '', tmp_path / 'whole', latents='in_place'))
    hub.inject(Fault('503', None, match='000050-000059.pt', action='read'))
    with pytest.raises(OSError, match=r'000050-000059\.pt: given up'):
        compute_row_checksums(heads)
    assert input_pipeline.open_data(heads).columns[schema.LATENTS].unchecked == (4, 5)
    assert verify.verify(heads).faults == []
    hub.faults.clear()
    hub.requests.clear()
    assert compute_row_checksums(heads) == []
    fetched = {x.path for x in hub.requests if x.action == 'read' and x.path.endswith('.pt')}
    assert len(fetched) == 2
    for split, array in places(heads).items():
        np.testing.assert_array_equal(array, expected[split])
    # Of each split the places of the build and the last ones.
    assert len(list(heads.glob('column_latents-*'))) == 4
    assert verify.verify(heads).faults == []
    assert verify.verify(heads).unused_files == []


def test_a_source_in_a_bucket_with_rows_in_pieces(gcs, tmp_path):
    """The two views of a row lie apart in a safetensors file."""
    source = tmp_path / 'source'
    source.mkdir()
    for number in range(2):
        views = np.random.default_rng(number).normal(size=(2, 3_000, 4, 8, 8)).astype(np.float16)
        tensors = {'latents': views[0], 'latents_flip': views[1]}
        tensors['labels'] = np.arange(3_000) % 7
        safetensors.numpy.save_file(tensors, source / f'shard{number}.safetensors')
    gcs.upload_folder(source, 'gs://bucket/source')
    heads = built.build('gs://bucket/source', '', tmp_path / 'heads', **HEADS)
    whole = built.build(source, '', tmp_path / 'whole', latents='in_place')
    assert input_pipeline.open_data(heads).metadata['latent_rows'] == 2048
    features = {'features': ('key', 'latents')}
    assert_same(read(heads, 20, **features), read(whole, 20, **features))
    assert compute_row_checksums(heads) == []
    for split, expected in places(whole).items():
        np.testing.assert_array_equal(places(heads)[split], expected)


def test_rows_that_are_not_finite_are_named_when_they_are_read(hub, tmp_path):
    source = write_source(tmp_path / 'source', 1, 5_000)
    path = made_sources.latents_file(source, 0)
    content = torch.load(path, weights_only=True)
    content['latents'][11, 0, 2, 3, 3] = float('nan')
    torch.save(content, path)
    hub.commit(files_below(source))
    heads = built.build(REPO, '', tmp_path / 'heads', **HEADS)
    [fault] = compute_row_checksums(heads)
    assert fault.startswith(f'{REPO}@') and '1 row is not finite, such as that of record' in fault


def test_captions_are_fetched_by_columns(hub, tmp_path):
    source = write_source(tmp_path / 'source', 1, 3_000)
    path = source / schema.CAPTIONS_FILE
    table = pq.read_table(path)
    noise = np.random.default_rng(0).bytes(4_000 * len(table))
    others = [noise[start : start + 4_000] for start in range(0, len(noise), 4_000)]
    table = table.add_column(1, 'page', pa.array(others))
    pq.write_table(table, path, row_group_size=1_000, compression='zstd')
    assert path.stat().st_size > 10_000_000
    hub.commit(files_below(source))
    heads = built.build(REPO, '', tmp_path / 'heads', **HEADS)
    assert count_fetched(hub, '.parquet') < 1_000_000
    whole = built.build(source, '', tmp_path / 'whole', latents='in_place')
    hub.requests.clear()
    settings = embed_captions.EmbedSettings(by_columns=True)
    embed_captions.embed(REPO, 'hash', tmp_path / 'text', settings)
    assert count_fetched(hub, '.parquet') < 1_000_000
    features = {'features': ('key', 'caption')}
    assert_same(read(heads, 20, **features), read(whole, 20, **features))


def test_sources_that_have_to_be_read_whole_are_refused(hub, tmp_path):
    source = write_source(tmp_path / 'source', 1, 100)
    with pytest.raises(
        ValueError, match='leaves latents unread, but its storage keeps no checksum'
    ):
        built.build(source, '', tmp_path / 'data', **HEADS)
    hub.commit({'a.tar': b'x', schema.CAPTIONS_FILE: source / schema.CAPTIONS_FILE})
    with pytest.raises(ValueError, match=r'a\.tar: .* its samples lie one after the other'):
        built.build(REPO, '', tmp_path / 'data', **HEADS)
    with pytest.raises(ValueError, match=r'set latents to .in_place. too'):
        BuildSettings(read_latents='heads')
    with pytest.raises(ValueError, match=r'text_embeddings=.pt.'):
        Coyo11mConfig(**HEADS | {'text_embeddings': 'pt'})
