"""Sources of other formats, shapes and dtypes: the same keys, latents and captions, anywhere."""

import hashlib
import itertools
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
import torch

import input_pipeline
from coyo11m_tfds import schema, verify
from coyo11m_tfds.dataset.keyed_random import splitmix64
from tests import built, made_sources
from tests.fakes import latent_files

COUNT = 90

# Crops and caption of each key.
Truth = dict[int, tuple[np.ndarray, bytes]]


def made_latents(shape: tuple[int, ...], dtype: str, count: int = COUNT) -> np.ndarray:
    """Different numbers in every row, `(count, *shape)`."""
    values = np.random.default_rng(0).standard_normal((count, *shape))
    return values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def records_of(data_set: object, engine: str) -> dict[int, tuple[list[np.ndarray], bytes]]:
    """All crops of each key that ten epochs show, each once, and its caption."""
    found: dict[int, tuple[list[np.ndarray], bytes]] = {}
    features = (schema.KEY, schema.LATENTS, schema.CAPTION)
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
        rows = zip(batch['key'].tolist(), batch['latents'], batch['caption'], real, strict=True)
        for key, latents, caption, is_real in rows:
            seen, _ = found.setdefault(key, ([], caption)) if is_real else ([], b'')
            if not any(latents.tobytes() == x.tobytes() for x in seen):
                seen.append(latents)
    return found


def assert_holds(data_set: object, truth: Truth, engine: str) -> None:
    """Every key has its caption and its crops, bit for bit, but for those that no epoch chose."""
    found = records_of(data_set, engine)
    assert found.keys() == truth.keys()
    for key, (seen, caption) in found.items():
        crops, expected = truth[key]
        assert caption == expected
        assert {x.tobytes() for x in seen} <= {crop.tobytes() for crop in crops}
        assert all(x.dtype == crops.dtype and x.shape == crops.shape[1:] for x in seen)
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


# --- Other formats -------------------------------------------------------------------------------

FORMATS = ('pt', 'safetensors', 'mds', 'tar')
SHAPE = (4, 32, 32)


def make_source(folder: pathlib.Path, kind: str) -> Truth:
    """Two files of latents with captions or labels in or beside them; what each key has."""
    folder.mkdir(parents=True)
    halves = np.array_split(np.arange(COUNT), 2)
    crops = {'safetensors': 2, 'pt': 3}.get(kind, 1)
    values = made_latents((crops, *SHAPE), 'float16')
    captions = [f'Caption of {number}: a circle.' for number in range(COUNT)]
    keys = list(range(COUNT))
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
        captions = [str(number % 7) for number in range(COUNT)]
    elif kind == 'mds':
        shards = [
            [
                {
                    'caption': captions[row],
                    'latents_256': values[row, 0],
                    'width': np.int32(row),
                }
                for row in half
            ]
            for half in halves
        ]
        latent_files.write_mds(folder, shards)
        names = [f'shard.{number:05}.mds' for number in (0, 1)]
        keys = [hash_of(names[n], row) for n in (0, 1) for row in range(len(halves[n]))]
    else:
        for number, half in enumerate(halves):
            samples = {
                f'{row:06}': {'npy': values[row, 0], 'json': {'caption': captions[row], 'w': 3}}
                for row in half
            }
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
    assert not verify.verify(data_set).faults


def test_labels_become_tokens(tmp_path):
    make_source(tmp_path / 'source', 'safetensors')
    data_set = built.build(tmp_path / 'source', '', tmp_path / 'data')
    features = (schema.TOKENS, schema.CAPTION)
    batch = next(
        input_pipeline.train_batches(data_set, batch_size=8, seed=0, lanes=2, features=features)
    )
    assert batch['tokens'].dtype == np.int32 and batch['tokens'].shape == (8, 1)
    assert [str(x).encode() for x in batch['tokens'][:, 0]] == batch['caption'].tolist()
    stats = input_pipeline.open_data(data_set).stats()
    assert (stats.text_encoder, stats.vocabulary, stats.num_tokens) == ('labels', 7, 1)
    built.build(tmp_path / 'source', '', tmp_path / 'data')  # is the one that is there
