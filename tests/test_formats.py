"""Sources of other formats, shapes and dtypes: the same keys, latents and captions, anywhere."""

import hashlib
import io
import itertools
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

import input_pipeline
from coyo11m_tfds import add_column, dry_run, embed_captions, mirror, schema, verify
from coyo11m_tfds.convert.build_settings import BuildSettings
from coyo11m_tfds.dataset.keyed_random import splitmix64
from coyo11m_tfds.source import source_folder
from coyo11m_tfds.source.tar_file import TarFile
from coyo11m_tfds.storage.stored_file import FileChanged
from coyo11m_tfds.text.text_encoders import HashEncoder
from tests import built, children, made_sources
from tests.fakes import latent_files

COUNT = 90

# Crops and caption of each key.
Truth = dict[int, tuple[np.ndarray, bytes]]


def made_latents(shape: tuple[int, ...], dtype: str, count: int = COUNT) -> np.ndarray:
    """Different numbers in every row, `(count, *shape)`."""
    values = np.random.default_rng(0).standard_normal((count, *shape))
    return values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def records_of(data_set: object, engine: str) -> dict[int, tuple[dict[int, np.ndarray], bytes]]:
    """The crops of each key that ten epochs show, by what batches call them, and its caption."""
    found: dict[int, tuple[dict[int, np.ndarray], bytes]] = {}
    features = (schema.KEY, schema.LATENTS, input_pipeline.CROP, schema.CAPTION)
    training = input_pipeline.train_batches(
        data_set,
        engine=engine,
        verify='always',
        features=features,
        batch_size=10,
        lanes=2,
        chunk=32,
        window=32,
        seed=1,
    )
    validation = input_pipeline.eval_batches(
        data_set, batch_size=50, split=schema.VALIDATION, features=features
    )
    for batch in itertools.chain(itertools.islice(training, COUNT), validation):
        real = batch.get('mask', np.ones(len(batch['key']), bool))
        rows = zip(*(batch[name][real] for name in features), strict=True)
        for key, latents, crop, caption in rows:
            seen, _ = found.setdefault(int(key), ({}, caption))
            assert seen.setdefault(int(crop), latents).tobytes() == latents.tobytes()
    return found


def small_batches(data_set: object, *features: str) -> Iterator[dict]:
    return input_pipeline.train_batches(data_set, batch_size=8, seed=0, lanes=2, features=features)


def assert_holds(data_set: object, truth: Truth, engine: str) -> None:
    """Every key has its caption and its crops, bit for bit, but for those that no epoch chose."""
    found = records_of(data_set, engine)
    assert found.keys() == truth.keys()
    for key, (seen, caption) in found.items():
        crops, expected = truth[key]
        assert caption == expected
        middle = (len(crops) - 1) // 2
        for crop, x in seen.items():
            assert 0 <= crop + middle < len(crops)
            assert x.tobytes() == crops[crop + middle].tobytes()
            assert x.dtype == crops.dtype and x.shape == crops.shape[1:]
    shown = sum(len(seen) for seen, _ in found.values())
    assert shown >= 0.8 * sum(len(crops) for crops, _ in truth.values())


@pytest.mark.parametrize('in_place', [False, True])
@pytest.mark.parametrize(
    ('shape', 'dtype'),
    [((16, 8, 12), 'float32'), ((2, 4, 8, 8), 'bfloat16'), ((32, 36, 36), 'float16')],
)
def test_pt_files_of_any_shape(tmp_path: pathlib.Path, shape, dtype, in_place: bool):
    """The last has 83 KB a crop, more than is gathered at once."""
    values = made_latents(shape, dtype)
    latents = torch.from_numpy(values.view(np.uint8)).view(getattr(torch, dtype))
    source = made_sources.write_source(
        tmp_path / 'source', [range(COUNT)], replace={'latents': latents}
    )
    lie = {'latents': 'in_place' if in_place else 'records'}
    data_set = built.build(source, '', tmp_path / 'data', **lie)
    rows = values if len(shape) == 4 else values[:, None]
    truth = {key: (row, f'Caption of {key}.'.encode()) for key, row in enumerate(rows)}
    for engine in ('rows', 'chunks', 'tf_data'):
        assert_holds(data_set, truth, engine)
    stats = input_pipeline.open_data(data_set).stats()
    assert stats.latents_shape == rows.shape[1:] and stats.latent_dtype == dtype
    np.testing.assert_allclose(stats.latent_mean, 0, atol=0.2)
    assert stats.latent_std.shape == (rows.shape[2],)
    assert not verify.verify(data_set).faults


def test_rows_of_pt_files_with_captions_need_no_keys(tmp_path, bucket):
    truth, rows = {}, iter(make_source(tmp_path / 'source', 'pt').values())
    for path in sorted((tmp_path / 'source').iterdir()):
        content = torch.load(path, weights_only=True)
        content.pop('keys')
        torch.save(content, path)
        truth |= {hash_of(path.name, row): next(rows) for row in range(len(content['latents']))}
    data_set = built.build(tmp_path / 'source', '', tmp_path / 'data', latents='in_place')
    assert_holds(data_set, truth, 'rows')
    bucket.upload_folder(tmp_path / 'source', 'gs://source/latents')
    assert_holds(built.build('gs://source/latents', '', tmp_path / 'remote'), truth, 'rows')


FORMATS = ('pt', 'safetensors', 'mds', 'tar')
SHAPE = (4, 32, 32)
# The shards, their indexes, and the places of latents.
WRITTEN = 'coyo11m_tfds-', 'column'
# Of docs/sources.md.
LIKE = {
    'IMAGENET': 'safetensors',
    'MICRODIT': 'microdit',
    'SANA': 'tar',
    'HUB/data': 'parquet',
    'REPA/vae-sd': 'npy',
}


def make_source(folder: pathlib.Path, kind: str, count: int = COUNT) -> Truth:
    """Two files of latents with captions or labels in or beside them; what each key has."""
    folder.mkdir(parents=True)
    halves = np.array_split(np.arange(count), 2)
    crops = {'safetensors': 2, 'pt': 3}.get(kind, 1)
    values = made_latents((crops, *SHAPE), 'float16', count)
    captions = [f'Caption of {number}: a circle.' for number in range(count)]
    keys = list(range(count))
    if kind == 'pt':
        for number, half in enumerate(halves):
            content = {
                'keys': torch.from_numpy(half),
                'latents': torch.from_numpy(values[half]),
                'captions': [captions[row] for row in half],
            }
            torch.save(content, folder / f'{number}.pt')
    elif kind == 'safetensors':
        for number, half in enumerate(halves):
            name = f'latents_rank00_shard{number:03}.safetensors'
            latent_files.write_safetensors(folder / name, values[half], half % 7)
            keys[half[0] : half[-1] + 1] = [hash_of(name, row) for row in range(len(half))]
        captions = [str(number % 7) for number in range(count)]
    elif kind in ('mds', 'microdit'):
        shards = [
            [
                {'caption': captions[row], 'latents_256': values[row, 0], 'width': np.int32(row)}
                for row in half
            ]
            for half in halves
        ]
        columns = latent_files.MDS_COLUMNS
        if kind == 'microdit':
            columns = columns | {'latents_512': 'bytes', 'caption_latents': 'bytes'}
            for sample in itertools.chain.from_iterable(shards):
                sample['caption_latents'] = values[0, 0]
                sample['latents_512'] = np.tile(sample['latents_256'], (1, 2, 2))
        latent_files.write_mds(folder, shards, columns)
        names = [f'shard.{number:05}.mds' for number in (0, 1)]
        keys = [hash_of(names[n], row) for n in (0, 1) for row in range(len(halves[n]))]
    elif kind == 'parquet':
        keys = [3 * number for number in keys]
        for number, half in enumerate(halves):
            columns = {
                'key': [keys[row] for row in half],
                'latent': latent_files.nested_lists(values[half, 0]),
                'text': [captions[row] for row in half],
                'width': half,
            }
            path = folder / f'train-{number:05}-of-00002.parquet'
            pq.write_table(pa.table(columns), path, row_group_size=17)
    elif kind == 'npy':
        values = np.abs(made_latents((1, 2 * SHAPE[0], *SHAPE[1:]), 'float32', count))
        latent_files.write_moments(folder, values[:, 0], np.arange(count) % 7, count // 6)
        captions = [str(number % 7) for number in range(count)]
    else:
        for number, half in enumerate(halves):
            samples = {}
            for row in half:
                fields = {'caption': captions[row], 'width': row / 2}
                samples[f'{row:06}'] = {'npy': values[row, 0], 'json': fields}
            latent_files.write_tar(folder / f'{number:05}.tar', samples)
        keys = [
            blake(f'{number:05}.tar/{row:06}') >> 1 for number in (0, 1) for row in halves[number]
        ]
    return {key: (values[row], captions[row].encode()) for row, key in enumerate(keys)}


def blake(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), 'little')


def hash_of(name: str, row: int) -> int:
    return int(splitmix64((blake(name) + row) % 2**64)) >> 1


@pytest.fixture(scope='module', params=FORMATS)
def source(request, tmp_path_factory) -> tuple[pathlib.Path, Truth]:
    folder = tmp_path_factory.mktemp('source') / request.param
    return folder, make_source(folder, request.param)


@pytest.mark.parametrize('latents', ['records', 'in_place'])
def test_every_format_gives_its_keys_latents_and_captions(source, tmp_path, latents: str):
    folder, truth = source
    data_set = built.build(folder, '', tmp_path / 'data', latents=latents)
    for engine in ('rows', 'chunks'):
        assert_holds(data_set, truth, engine)
    assert not verify.verify(data_set).faults
    metadata = json.loads((data_set / schema.METADATA_FILE).read_text())
    assert metadata['caption_column'] == (
        'labels'
        if folder.name == 'safetensors'
        else 'captions'
        if folder.name == 'pt'
        else 'caption'
    )


@pytest.mark.parametrize('latents', ['records', 'in_place'])
def test_every_format_is_read_from_a_bucket(source, bucket, tmp_path, latents: str):
    folder, truth = source
    bucket.upload_folder(folder, 'gs://source/latents')
    data_set = built.build('gs://source/latents', '', tmp_path / 'data', latents=latents)
    assert_holds(data_set, truth, 'auto')
    bucket.upload_folder(data_set, 'gs://data/coyo11m_tfds/x/1.0.0')
    assert_holds('gs://data/coyo11m_tfds/x/1.0.0', truth, 'auto')
    assert not verify.verify(data_set).faults


def test_labels_become_tokens_beside_captions(tmp_path):
    columns = latent_files.MDS_COLUMNS | {'label': 'int32'}
    samples = [
        {
            'latents_256': x,
            'caption': f'Number {n}.',
            'width': np.int32(n),
            'label': np.int32(n % 5),
        }
        for n, x in enumerate(made_latents(SHAPE, 'float16'))
    ]
    latent_files.write_mds(tmp_path / 'source', [samples], columns)
    data_set = built.build(tmp_path / 'source', '', tmp_path / 'data', text_embeddings='labels')
    for batch in itertools.islice(small_batches(data_set, schema.TOKENS, schema.CAPTION), 5):
        for tokens, caption in zip(batch['tokens'], batch['caption'], strict=True):
            assert tokens.tolist() == [int(caption.decode().strip('Number .')) % 5]
    samples[3]['label'] = np.int32(-1)
    latent_files.write_mds(tmp_path / 'bad', [samples], columns)
    with pytest.raises(ValueError, match=r'00000\.mds: label are from -1 to 4, .* expected 0 to'):
        built.build(tmp_path / 'bad', '', tmp_path / 'x', text_embeddings='labels')


def test_rows_that_repeat_a_key_are_dropped_with_their_label(tmp_path):
    keys = np.arange(40)
    keys[20] = 3
    tensors = {'latents': made_latents(SHAPE, 'float16', 40), 'keys': keys, 'labels': keys % 4}
    save_file(tensors, tmp_path / 'x.safetensors')
    with pytest.raises(ValueError, match=r'x\.safetensors: row 20 has key 3, and so has .* row 3;'):
        built.build(tmp_path, '', tmp_path / 'a', bad_data='stop')
    data_set = built.build(tmp_path, '', tmp_path / 'b', max_bad_fraction=1 / 40)
    dropped = json.loads((data_set / schema.METADATA_FILE).read_text())[schema.META_DROPPED]
    assert {reason: count for reason, count in dropped.items() if count} == {'repeated_key': 1}
    found = records_of(data_set, 'rows')
    assert found.keys() == set(range(40)) - {20}
    assert all(caption == str(key % 4).encode() for key, (_, caption) in found.items())


@pytest.mark.parametrize('kind', ['safetensors', 'tar'])
def test_labels_become_tokens(tmp_path, kind: str):
    """In a tar they are the `.cls` of WebDataset."""
    if kind == 'safetensors':
        make_source(tmp_path / 'source', kind)
    else:
        (tmp_path / 'source').mkdir()
        rows = enumerate(made_latents(SHAPE, 'float16', 40))
        samples = {f'{n:04}': {'npy': x, 'cls': f'{n % 7}'} for n, x in rows}
        latent_files.write_tar(tmp_path / 'source' / 'x.tar', samples)
    data_set = built.build(tmp_path / 'source', '', tmp_path / 'data')
    batch = next(small_batches(data_set, schema.TOKENS, schema.CAPTION))
    assert batch['tokens'].dtype == np.int32 and batch['tokens'].shape == (8, 1)
    assert [str(x).encode() for x in batch['tokens'][:, 0]] == batch['caption'].tolist()
    stats = input_pipeline.open_data(data_set).stats()
    assert (stats.text_encoder, stats.vocabulary, stats.num_tokens) == ('labels', 7, 1)
    built.build(tmp_path / 'source', '', tmp_path / 'data')  # is the one that is there


def test_numbers_beside_latents_become_columns_for_conditions(source, tmp_path):
    folder, truth = source
    data_set = built.build(folder, '', tmp_path / 'data', latents='in_place')
    numbers = dict(zip(truth, range(COUNT), strict=True))
    if folder.name in ('pt', 'safetensors'):
        with pytest.raises(ValueError, match=r"\.(pt|safetensors): has no numbers 'width'; it has"):
            add_column.add(data_set, 'size', source=folder, column='width')
        return
    added = add_column.add(data_set, 'size', source=folder, column='width')
    assert added.dtype == {'mds': 'int32', 'tar': 'float32'}[folder.name]

    def rows_of(data) -> set[int]:
        asked = {'split': 'train', 'batch_size': COUNT, 'features': ('key',)}
        batch = next(input_pipeline.eval_batches(data, **asked))
        return {numbers[key] for key in batch['key'][batch['mask']].tolist()}

    wide = 20 if folder.name == 'mds' else 40
    rows = rows_of([{'dir': data_set, 'where': 'size > 20'}])
    assert rows == {row for row in rows_of(data_set) if row > wide} and rows


def test_the_name_of_the_vae_is_kept(tmp_path):
    make_source(tmp_path / 'source', 'tar')
    data_set = built.build(tmp_path / 'source', '', tmp_path / 'data', vae='sdxl <1>')
    assert input_pipeline.open_data(data_set).metadata['vae'] == 'sdxl <1>'
    assert 'sdxl &lt;1&gt;' in next(data_set.glob('report-*.html')).read_text()


def test_captions_are_embedded_before_a_build(tmp_path):
    make_source(tmp_path / 'source', 'tar')
    embed_captions.embed(tmp_path / 'source', 'hash', tmp_path / 'hash')
    data_set = built.build(tmp_path / 'source', tmp_path / 'hash', tmp_path / 'data')
    batch = next(small_batches(data_set, schema.TEXT_EMBEDDING, schema.CAPTION))
    expected = HashEncoder().encode([x.decode() for x in batch['caption']]).astype(np.float16)
    np.testing.assert_array_equal(batch['text_embedding'], expected)


@pytest.mark.parametrize('latents', [pytest.param('records', marks=pytest.mark.slow), 'in_place'])
def test_a_killed_build_of_each_format_goes_on(tmp_path, latents: str):
    truths = {kind: make_source(tmp_path / kind / 'source', kind) for kind in FORMATS}
    fields = {'shard_bytes': 100_000, 'latents': latents}
    program = """
        import itertools, json, os, pathlib, signal
        from coyo11m_tfds import coyo11m_tfds_dataset_builder
        from coyo11m_tfds.convert.data_folder import FinishedShards
        from tests import built

        def save(*arguments, original=FinishedShards.save, numbers=itertools.count()):
            original(*arguments)
            if next(numbers) == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        FinishedShards.save = save
        root, fields, *kinds = sys.argv[1:]
        for kind in kinds:
            folder = pathlib.Path(root, kind)
            if not os.fork():
                built.build(folder / 'source', '', folder / 'data', **json.loads(fields))
                os._exit(0)
            assert os.WTERMSIG(os.wait()[1]) == signal.SIGKILL
    """
    with children.python(program, tmp_path, json.dumps(fields), *FORMATS, forked=True) as child:
        _, errors = child.communicate()
    assert child.returncode == 0, errors
    for kind, truth in truths.items():
        source = tmp_path / kind / 'source'
        data_set, once = (
            built.build(source, '', tmp_path / kind / name, **fields) for name in ('data', 'once')
        )
        assert not verify.verify(data_set).faults
        assert_holds(data_set, truth, 'rows')
        records, again = (
            {name: data for name, data in built.files_of(path).items() if name.startswith(WRITTEN)}
            for path in (data_set, once)
        )
        assert records == again and len(records) > 3


def test_a_mirrored_source_gives_the_same_data_set_of_other_places(source, tmp_path):
    folder, truth = source
    mirror.mirror(folder, tmp_path / 'copy')
    data_set = built.build(tmp_path / 'copy', '', tmp_path / 'data', latents='in_place')
    assert_holds(data_set, truth, 'rows')
    add_column.move_latents(data_set, folder)
    shutil.rmtree(tmp_path / 'copy')
    assert_holds(data_set, truth, 'rows')
    assert not verify.verify(data_set).faults


def test_shards_of_one_name_are_told_apart_when_their_source_moves(tmp_path):
    source = tmp_path / 'source'
    shards = []
    halves = np.split(made_latents(SHAPE, 'float16', 40), 2)
    for folder, half in zip(['', 'more/'], halves, strict=True):
        samples = [{'caption': 'A row.', 'latents_256': x, 'width': np.int32(0)} for x in half]
        latent_files.write_mds(source / folder, [samples])
        [shard] = json.loads((source / folder / 'index.json').read_text())['shards']
        shard['raw_data']['basename'] = f'{folder}shard.00000.mds'
        shards.append(shard)
    (source / 'index.json').write_text(json.dumps({'shards': shards, 'version': 2}))
    data_set = built.build(source, '', tmp_path / 'data', latents='in_place')
    expected = records_of(data_set, 'rows')
    moved = source.rename(tmp_path / 'moved')
    add_column.move_latents(data_set, moved)
    found = records_of(data_set, 'rows')
    assert len(found) == 40
    np.testing.assert_equal(found, expected)


def test_the_doctor_plans_a_build_of_a_format(source):
    folder, truth = source
    found = dry_run.plan_or_estimate(str(folder), BuildSettings())
    assert found.num_shards and found.num_records == len(truth)
    assert found.source.startswith('2 .')


CHOSEN_BADLY = {
    'no choice between two columns': ('', r'00000\.mds: has latents in the columns .* choose it'),
    'a column of bytes alone': (
        'latents_512',
        r'not say the dtype and shape of latents_512 \(8,192',
    ),
    'a shape of fewer bytes': (
        'latents_512:float16:2,32,32',
        'has 8,192 bytes, expected 4,096 of',
    ),
    'a column that is not there': ('latents', "lacks 'latents'; it has"),
    'a dtype without a shape': ('x:float16', 'expected NAME or NAME:DTYPE:C,H,W'),
    'a dtype of no latents': ('x:float64:4,32,32', 'expected NAME or NAME:DTYPE:C,H,W'),
    'a shape of two axes': ('x:float16:4,32', 'expected NAME or NAME:DTYPE:C,H,W'),
    'a shape of no column': (':float16:4,32,32', 'expected NAME or NAME:DTYPE:C,H,W'),
    'a negative size': ('x:float16:4,32,-32', 'expected NAME or NAME:DTYPE:C,H,W'),
}


@pytest.fixture(scope='module')
def of_bytes(tmp_path_factory) -> pathlib.Path:
    """A source whose shards have latents of which they tell dtype and shape, and others."""
    source = tmp_path_factory.mktemp('of_bytes') / 'source'
    columns = latent_files.MDS_COLUMNS | {'latents_512': 'bytes'}
    latent_files.write_mds(source, [samples_of_two()], columns)
    return source


def samples_of_two() -> list[dict]:
    return [
        {'latents_256': x, 'latents_512': x, 'caption': 'x', 'width': np.int32(3)}
        for x in made_latents((4, 32, 32), 'float16', 40)
    ]


@pytest.mark.parametrize(('latents_from', 'message'), CHOSEN_BADLY.values(), ids=CHOSEN_BADLY)
def test_latents_that_nothing_tells_are_asked_for(of_bytes, tmp_path, latents_from, message):
    with pytest.raises(ValueError, match=message):
        built.build(of_bytes, '', tmp_path / 'data', latents_from=latents_from)


@pytest.mark.parametrize(
    ('kind', 'latents_from', 'message'),
    [
        ('ndarray', 'latents_256', 'latents_256 is ndarray, .* Write the shards again'),
        ('ndarray', 'latents_256:float16:4,32,32', 'latents_256 is ndarray, .* Write the shards'),
        (
            'ndarray:float16:4,,32',
            'latents_256',
            r'\.mds: latents_256 has rows \(\) of float16',
        ),
    ],
)
def test_latents_whose_shapes_are_in_the_samples_are_refused(tmp_path, kind, latents_from, message):
    columns = latent_files.MDS_COLUMNS | {'latents_512': 'bytes', 'latents_256': kind}
    latent_files.write_mds(tmp_path / 'array', [samples_of_two()], columns)
    with pytest.raises(ValueError, match=message):
        built.build(tmp_path / 'array', '', tmp_path / 'data', latents_from=latents_from)


def test_latents_are_of_the_column_that_is_chosen(of_bytes, tmp_path):
    chosen = 'latents_512:bfloat16:16,16,16'
    found = built.build(of_bytes, '', tmp_path / 'a', latents_from=chosen, latents='in_place')
    assert input_pipeline.open_data(found).latents == ('bfloat16', (1, 16, 16, 16))
    found = built.build(of_bytes, '', tmp_path / 'b', latents_from='latents_256')
    assert input_pipeline.open_data(found).latents == ('float16', (1, 4, 32, 32))


NO_LATENTS = {
    'of double precision': (np.zeros((4, 32, 32)), 'float64'),
    'of two axes': (np.zeros((32, 32), np.float16), r'\(32, 32\) of float16'),
    'of the other byte order': (np.zeros((4, 32, 32), '>f2'), 'its dtype is >f2'),
    'in the order of Fortran': (
        np.asfortranarray(np.zeros((4, 32, 32), np.float16)),
        'is in Fortran order',
    ),
    'of objects': (np.array([{}], object), 'cannot be read'),
}


@pytest.mark.parametrize(('array', 'message'), NO_LATENTS.values(), ids=NO_LATENTS)
def test_arrays_that_are_no_latents_are_refused(tmp_path, array, message: str):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=True)
    latent_files.write_tar(
        tmp_path / 'source.tar', {'0': {'npy': stream.getvalue(), 'txt': 'A caption.'}}
    )
    with pytest.raises(ValueError, match=rf'source\.tar: .*{message}'):
        built.build(tmp_path, '', tmp_path / 'data')


def test_a_source_without_captions_and_labels_is_refused(tmp_path):
    save_file({'latents': made_latents(SHAPE, 'float16')}, tmp_path / 'x.safetensors')
    with pytest.raises(ValueError, match=r"meta\.parquet is missing; .* has no captions 'caption_"):
        built.build(tmp_path, '', tmp_path / 'data')


@pytest.mark.parametrize('key', [2**63, 2**64 - 1])
def test_a_key_of_mds_that_does_not_fit_is_refused(tmp_path, key: int):
    columns = latent_files.MDS_COLUMNS | {'key': 'uint64'}
    rows = [
        {'latents_256': x, 'caption': 'x', 'width': np.int32(3), 'key': np.uint64(number)}
        for number, x in zip([2**63 - 1, key], made_latents(SHAPE, 'float16', 2), strict=True)
    ]
    latent_files.write_mds(tmp_path, [rows], columns)
    with pytest.raises(ValueError, match=rf'00000\.mds: key of sample 1 is {key}, expected'):
        built.build(tmp_path, '', tmp_path / 'data')


def test_a_name_that_is_not_utf_8_is_told_or_does_no_harm(source, tmp_path, monkeypatch):
    # Processes of pytest exchange what is logged, as UTF-8.
    monkeypatch.setattr(logging.root.manager, 'disable', logging.CRITICAL)
    folder, truth = source
    copy = shutil.copytree(folder, tmp_path / os.fsdecode(b'caf\xe9'))
    if folder.name == 'pt':
        with pytest.raises(ValueError, match=r'0\.pt: its path is not UTF-8, .* Rename'):
            built.build(copy, '', tmp_path / 'data')
    else:
        assert_holds(built.build(copy, '', tmp_path / 'data'), truth, 'rows')


@pytest.mark.slow
def test_small_writers_write_what_the_libraries_do(tmp_path):
    streaming, webdataset = map(pytest.importorskip, ('streaming', 'webdataset'))
    values = made_latents(SHAPE, 'float16', 5)
    rows = [
        {'latents_256': x, 'caption': f'Caption {n}.', 'width': np.int32(n)}
        for n, x in enumerate(values)
    ]
    latent_files.write_mds(tmp_path / 'own', [rows])
    with streaming.MDSWriter(out=str(tmp_path / 'mds'), columns=latent_files.MDS_COLUMNS) as writer:
        for row in rows:
            writer.write(row | {'latents_256': row['latents_256'].tobytes()})
    for name in ('shard.00000.mds', 'index.json'):
        assert (tmp_path / 'own' / name).read_bytes() == (tmp_path / 'mds' / name).read_bytes()
    samples = {f'{n:06}': {'npy': x, 'json': {'caption': f'{n}'}} for n, x in enumerate(values)}
    latent_files.write_tar(tmp_path / 'own.tar', samples)
    with webdataset.TarWriter(str(tmp_path / 'wds.tar')) as writer:
        for name, parts in samples.items():
            writer.write({'__key__': name, **parts})
    files = [TarFile(tmp_path / name, label='x') for name in ('own.tar', 'wds.tar')]
    own, theirs = (
        (x.keys.tolist(), x.latents(range(5))[0].tobytes(), x.text_column('caption')) for x in files
    )
    assert own == theirs


def test_folders_of_moments_are_packed_where_they_are_read(tmp_path, bucket):
    folder = tmp_path / 'vae-sd'
    truth = make_source(folder, 'npy')
    data_set = built.build(folder, '', tmp_path / 'data')
    assert_holds(data_set, truth, 'auto')
    metadata = json.loads((data_set / schema.METADATA_FILE).read_text())
    assert (metadata['moments'], metadata['text_vocabulary']) == ('deviation', 7)
    assert len(metadata['latent_mean']) == SHAPE[0]
    bucket.upload_folder(folder, 'gs://source/vae-sd')
    assert_holds(built.build('gs://source/vae-sd', '', tmp_path / 'remote'), truth, 'auto')
    for place in (folder, 'gs://source/vae-sd'):
        with pytest.raises(
            ValueError, match=r"vae-sd/00000: latents='in_place'.*Mirror the source"
        ):
            built.build(place, '', tmp_path / 'refused', latents='in_place')
    mirror.mirror(folder, tmp_path / 'tars')
    mirrored = built.build(tmp_path / 'tars', '', tmp_path / 'in_place', latents='in_place')
    assert_holds(mirrored, truth, 'rows')
    metadata = json.loads((mirrored / schema.METADATA_FILE).read_text())
    assert metadata['moments'] == 'deviation'


def test_moments_without_labels_have_captions_by_their_numbers(tmp_path):
    folder = tmp_path / 'vae-sd'
    make_source(folder, 'npy')
    (folder / 'dataset.json').write_text('{"labels": null}')
    with pytest.raises(ValueError, match=r'vae-sd/00000: has no captions'):
        built.build(folder, '', tmp_path / 'data')
    captions = {number: f'Image {number}.' for number in range(COUNT)}
    made_sources.write_captions(folder, captions)
    found = records_of(built.build(folder, '', tmp_path / 'data'), 'auto')
    assert {key: caption for key, (_, caption) in found.items()} == {
        key: caption.encode() for key, caption in captions.items()
    }


BAD_INDICES = {
    'it names a file that is not there': (
        '{"labels": [["00000/img-mean-std-00000777.npy", 1]]}',
        r'00000777\.npy: .*names it',
    ),
    'a label is a text': (
        '{"labels": [["00000/img-mean-std-00000000.npy", "a"]]}',
        r"damaged.*labels have .*'a'",
    ),
    'labels are a number': ('{"labels": 3}', r'dataset\.json: is damaged or no index of moments'),
    'it is nested too deeply': ('[' * 100_000, r'dataset\.json: is damaged or no index of moments'),
    'it has labels of some': (
        '{"labels": [["00000/img-mean-std-00000000.npy", 1]]}',
        r'00000: label are .* missing',
    ),
}


@pytest.mark.parametrize(('content', 'problem'), BAD_INDICES.values(), ids=BAD_INDICES)
def test_a_bad_index_of_moments_is_named(tmp_path, content, problem):
    folder = tmp_path / 'vae-sd'
    make_source(folder, 'npy')
    (folder / 'dataset.json').write_text(content)
    with pytest.raises(ValueError, match=problem):
        built.build(folder, '', tmp_path / 'data')


def test_a_bad_file_of_moments_is_named_and_a_changed_folder_noticed(tmp_path):
    folder = tmp_path / 'vae-sd'
    make_source(folder, 'npy')
    npy_folder = source_folder.find_source(folder).latent_files[0]
    path = folder / '00000' / 'img-mean-std-00000003.npy'
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(FileChanged, match=r'vae-sd/00000 has changed since it was listed'):
        npy_folder.fetch(str(tmp_path / 'tar'))
    with pytest.raises(ValueError, match=r'vae-sd/00000: img-mean-std-00000003\.npy cannot be re'):
        built.build(folder, '', tmp_path / 'data')
