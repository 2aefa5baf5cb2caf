"""Sources of other formats, shapes and dtypes: the same keys, latents and captions, anywhere."""

import itertools
import pathlib

import ml_dtypes
import numpy as np
import pytest
import torch

import input_pipeline
from coyo11m_tfds import schema, verify
from tests import built, made_sources

COUNT = 90


def made_latents(shape: tuple[int, ...], dtype: str, count: int = COUNT) -> np.ndarray:
    """Different numbers in every row, `(count, *shape)`."""
    values = np.random.default_rng(0).standard_normal((count, *shape))
    return values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def records_of(data_set: pathlib.Path, engine: str) -> dict[int, list[np.ndarray]]:
    """All crops of each key that ten epochs show, each once."""
    found: dict[int, list[np.ndarray]] = {}
    arguments = {'batch_size': 10, 'lanes': 2, 'chunk': 32, 'window': 32, 'seed': 1}
    features = (schema.KEY, schema.LATENTS)
    batches = input_pipeline.train_batches(
        data_set, engine=engine, verify='always', features=features, **arguments
    )
    for batch in itertools.islice(batches, 10 * COUNT // 10):
        for key, latents in zip(batch['key'].tolist(), batch['latents'], strict=True):
            seen = found.setdefault(key, [])
            if not any(latents.tobytes() == x.tobytes() for x in seen):
                seen.append(latents)
    return found


def assert_holds(data_set: pathlib.Path, truth: dict[int, np.ndarray], engine: str) -> None:
    """Every key has the crops of `truth`, bit for bit, but for those that no epoch chose."""
    found = records_of(data_set, engine)
    validation = input_pipeline.eval_batches(
        data_set, batch_size=50, split=schema.VALIDATION, features=(schema.KEY, schema.LATENTS)
    )
    for batch in validation:
        pairs = zip(batch['key'].tolist(), batch['latents'], batch['mask'], strict=True)
        found |= {key: [x] for key, x, is_real in pairs if is_real}
    assert found.keys() == truth.keys()
    for key, seen in found.items():
        crops = [crop.tobytes() for crop in truth[key]]
        assert {x.tobytes() for x in seen} <= set(crops)
        assert all(x.dtype == truth[key].dtype and x.shape == truth[key].shape[1:] for x in seen)
    shown = sum(map(len, found.values()))
    assert shown >= 0.8 * sum(len(crops) for crops in truth.values())


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
    truth = dict(enumerate(rows))
    for engine in ('rows', 'chunks', 'tf_data'):
        assert_holds(data_set, truth, engine)
    stats = input_pipeline.open_data(data_set).stats()
    assert stats.latents_shape == rows.shape[1:] and stats.latent_dtype == dtype
    np.testing.assert_allclose(stats.latent_mean, 0, atol=0.2)
    assert stats.latent_std.shape == (rows.shape[2],)
    assert not verify.verify(data_set).faults
