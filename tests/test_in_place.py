"""Latents that stay in the files of the source: the same batches, and sources that change."""

import itertools
import os
import pathlib
import re
import shutil
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

import input_pipeline
from coyo11m_tfds import add_column, embed_captions, schema, verify
from coyo11m_tfds.convert.data_folder import FinishedShards
from coyo11m_tfds.dataset import stored_dataset
from coyo11m_tfds.source.pt_file import PtFile
from tests import built, children, damages, made_sources
from tests.reading.batches import assert_same, epoch_steps

ORDER = dict(batch_size=16, seed=0, lanes=4, chunk=32, window=64)


def build(source: pathlib.Path, sidecar: pathlib.Path, out: pathlib.Path, **fields) -> pathlib.Path:
    """As `mini_dataset`, with the latents in place."""
    return built.build(source, sidecar, out, **({'latents': 'in_place'} | fields))


@pytest.fixture(scope='module')
def in_place(sample_source, hash_sidecar, tmp_path_factory) -> pathlib.Path:
    return build(sample_source, hash_sidecar, tmp_path_factory.mktemp('in_place'))


@pytest.fixture(scope='module')
def small(tmp_path_factory) -> pathlib.Path:
    """A small source, and `hash.parquet` of its captions."""
    files = [range(80), range(80, 150), range(150, 200)]
    source = made_sources.write_source(tmp_path_factory.mktemp('small') / 'source', files)
    embed_captions.embed(source, 'hash', source.with_name('hash.parquet'))
    return source


@pytest.fixture
def movable(small, tmp_path) -> tuple[pathlib.Path, pathlib.Path]:
    """A data set in place and its source, which a test may damage."""
    source = shutil.copytree(small, tmp_path / 'source')
    return build(source, small.with_name('hash.parquet'), tmp_path / 'data'), source


def read(path: object, count: int, **changes) -> list[dict]:
    arguments = {**ORDER, 'features': stored_dataset.FEATURES, 'caption_dropout': 0.3, **changes}
    return list(itertools.islice(input_pipeline.train_batches(path, **arguments), count))


def test_a_data_set_describes_itself(in_place, mini_dataset):
    features = {'caption', 'key int64 ()', 'text_embedding float16 (640,)'}
    for path in (in_place, mini_dataset):
        first, splits, last, encoder = repr(input_pipeline.open_data(path)).splitlines()
        assert first == f'StoredDataset coyo11m_tfds/{path.parts[-2]}/1.0.0 in {path}'
        assert splits == '  splits: train (1,053 records), validation (120 records)'
        described = set(re.split(r', (?!\d)', last.removeprefix('  features: ')))
        assert described == features | {'latents float16 (3, 4, 32, 32)'}
        assert encoder == '  text encoder: hash, VAE: not recorded'


def test_it_holds_everything_but_the_latents(in_place, mini_dataset):
    size, converted = (
        sum(file.stat().st_size for file in path.glob('*.tfrecord-*'))
        for path in (in_place, mini_dataset)
    )
    assert size < converted / 10
    kinds = {path.name.replace(schema.build_of(path.name), 'ID') for path in in_place.glob('*-*')}
    assert {'columns-ID.json', 'column_latents-train-ID.npy'} < kinds
    there, before = (input_pipeline.open_data(path).stats() for path in (in_place, mini_dataset))
    for name in ('latent_mean', 'latent_std', 'text_mean', 'text_std'):
        np.testing.assert_array_equal(getattr(there, name), getattr(before, name))
    assert there.latent_dtype == before.latent_dtype
    assert not verify.verify(in_place).faults
    examples = tfds.as_numpy(tfds.builder_from_directory(in_place).as_dataset(split='train'))
    assert next(iter(examples)).keys() == {'key', 'caption', 'text_embedding'}
    for said in ('report-*.html', 'features.json'):
        assert 'tfds.load does not' in next(in_place.glob(said)).read_text()


def test_it_is_read_and_verified_without_what_only_builds_need(in_place):
    program = """
        class Missing:
            names = {'isal', 'tqdm', 'torch', 'pyarrow', 'huggingface_hub', 'tensorflow', 'jax'}

            def find_spec(self, name, *_):
                if name.split('.')[0] in self.names:
                    raise ImportError(name)

        sys.meta_path.insert(0, Missing())
        import input_pipeline
        order = dict(batch_size=16, seed=0, lanes=4, chunk=32)
        print(next(input_pipeline.train_batches(sys.argv[1], **order))['latents'].shape)
        Missing.names -= {'tqdm', 'pyarrow'}
        import runpy
        runpy.run_module('coyo11m_tfds.verify', run_name='__main__', alter_sys=True)
    """
    with children.python(program, in_place) as child:
        output, errors = child.communicate()
    assert child.returncode == 0, errors
    assert output.startswith(f'(16, 4, 32, 32)\n{in_place}: no faults in ')


def latents_file(source: pathlib.Path) -> pathlib.Path:
    return source / schema.LATENTS_FOLDER / '000010-000019.pt'


def test_a_copy_of_the_source_is_as_good(movable):
    """Of another time: what is in it decides."""
    path, source = movable
    expected = read(path, 20)
    file = latents_file(source)
    shutil.copy(file, f'{file}.copy')
    os.replace(f'{file}.copy', file)
    assert_same(read(path, 20), expected)
    assert not verify.verify(path).faults


def test_a_source_that_was_moved_is_found_again(movable, tmp_path, monkeypatch):
    path, source = movable
    expected = read(path, 20)
    moved = source.rename(tmp_path / 'moved')
    file = latents_file(moved)
    whole = file.read_bytes()
    with pytest.raises(ValueError, match='is missing, but holds latents') as error:
        read(path, 1)
    command = re.search(r'python -m coyo11m_tfds.add_column (.*SOURCE)', str(error.value))[1]
    file.unlink()
    with pytest.raises(ValueError, match=f'{moved}: {file.name} is missing, but holds latents'):
        add_column.move_latents(path, moved)
    shutil.copy(sorted(file.parent.glob('*.pt'))[0], file)
    with pytest.raises(ValueError, match=f'{file}: has changed since the data set was built'):
        add_column.move_latents(path, moved)
    # Of another name inside, so that all lies a little further on.
    torch = pytest.importorskip('torch')
    file.write_bytes(whole)
    torch.save(torch.load(file, weights_only=True), file.with_name(f'{"x" * 200}.pt'))
    os.replace(file.with_name(f'{"x" * 200}.pt'), file)
    arguments = command.replace('DATA', str(path)).replace('SOURCE', str(moved)).split()
    monkeypatch.setattr(sys, 'argv', ['add_column', *arguments])
    add_column.main()
    assert_same(read(path, 20), expected)
    assert not verify.verify(path).faults


def test_latents_of_records_are_in_no_source(mini_dataset, sample_source):
    with pytest.raises(ValueError, match=f'{mini_dataset}: its latents are in its records'):
        add_column.move_latents(mini_dataset, sample_source)


def test_a_build_that_goes_on_says_where_the_source_is_now(small, movable, tmp_path, monkeypatch):
    """Not where it was when the first shards were written."""
    _, source = movable
    sidecar, number = small.with_name('hash.parquet'), itertools.count()

    def save(*arguments, original=FinishedShards.save) -> None:
        original(*arguments)
        if next(number) == 1:
            raise OSError('stopped')

    with monkeypatch.context() as patch, pytest.raises(OSError, match='stopped'):
        patch.setattr(FinishedShards, 'save', save)
        build(source, sidecar, tmp_path / 'other')
    moved = source.rename(tmp_path / 'moved')
    path = build(moved, sidecar, tmp_path / 'other')
    assert not verify.verify(path).faults
    assert read(path, 1)


def test_verify_reads_the_source_too(movable):
    path, source = movable
    assert not verify.verify(path).faults
    file = latents_file(source)
    before = file.stat()
    with open(file, 'r+b') as opened:
        opened.seek(before.st_size // 2)
        opened.write(b'\xff\xff')
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not verify.verify(path, fast=True).faults
    [fault] = verify.verify(path).faults
    assert fault.startswith(f'{file}: row ') and ' has CRC-32C ' in fault
    shutil.copy(sorted(file.parent.glob('*.pt'))[0], file)
    [fault] = verify.verify(path, fast=True).faults
    assert fault.startswith(f'{file}: has changed since the data set was built')


@pytest.mark.parametrize(('engine', 'is_replaced'), [('rows', False), ('chunks', True)])
def test_a_source_that_changes_before_the_first_batch_is_named(movable, engine, is_replaced):
    """A step may be compiled for minutes between the two."""
    path, source = movable
    batches = input_pipeline.train_batches(path, engine=engine, **ORDER)
    file = latents_file(source)
    whole = file.read_bytes()
    if is_replaced:
        file.unlink()
    file.write_bytes(damages.flipped(whole, len(whole) // 2))
    with pytest.raises(OSError, match=f'{file}: has changed while it was read'):
        for _ in range(100):
            next(batches)


def test_bad_rows_of_the_source_are_left_out(small, movable, tmp_path):
    torch = pytest.importorskip('torch')
    _, source = movable
    content = torch.load(latents_file(source), weights_only=True)
    content['latents'][5, 1, 2] = float('nan')
    torch.save(content, latents_file(source))
    path = build(source, small.with_name('hash.parquet'), tmp_path / 'other')
    keys = PtFile(latents_file(source)).keys
    steps = epoch_steps(path, **ORDER)
    batches = read(path, steps, features=('key', 'latents'))
    assert keys[5] not in np.concatenate([batch['key'] for batch in batches])
    assert all(np.isfinite(batch['latents']).all() for batch in batches)
