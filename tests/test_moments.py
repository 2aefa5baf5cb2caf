"""Latents recorded as moments: stored as they are, drawn by (seed, epoch, key), means elsewhere."""

import dataclasses
import itertools
import pathlib

import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import input_pipeline
from coyo11m_tfds import schema, show
from tests import built, runs, small_vae
from tests.train_lib.learning import test_flow, test_step
from train_lib import data, draw
from train_lib.learning import flow, sharding

COUNT, CHANNELS = 200, 4
FEATURES = schema.KEY, schema.LATENTS, input_pipeline.NOISE_SEED


@pytest.fixture(scope='module')
def stored() -> np.ndarray:
    """Means and deviations, float32 `(n, 2C, H, W)`."""
    rng = np.random.default_rng(0)
    means = rng.normal(2, 5, (COUNT, CHANNELS, 8, 8)) * np.arange(1, 5)[:, None, None]
    deviations = rng.uniform(0.1, 4, means.shape)
    return np.concatenate([means, deviations], axis=1).astype(np.float32)


def build(stored: np.ndarray, folder: pathlib.Path, moments: str, **fields) -> pathlib.Path:
    """A data set of moments, from files as LightningDiT writes them."""
    (folder / 'source').mkdir(parents=True)
    keys = np.arange(100, 100 + len(stored))
    content = {'latents': stored, 'labels': keys % 7, 'keys': keys}
    save_file(content, folder / 'source' / 'latents_rank00_shard000.safetensors')
    fields = {'name': 'm', 'moments': moments, 'vae': 'sdxl'} | fields
    return built.build(folder / 'source', '', folder, **fields)


@pytest.fixture(scope='module')
def dataset(stored, tmp_path_factory) -> pathlib.Path:
    return build(stored, tmp_path_factory.mktemp('moments'), schema.DEVIATION)


def batches(dataset, **options) -> list[dict[str, np.ndarray]]:
    """Two epochs."""
    options = {'batch_size': 20, 'lanes': 4, 'chunk': 32, 'window': 32, 'seed': 3} | options
    training = input_pipeline.train_batches(dataset, features=FEATURES, **options)
    with training:
        return list(itertools.islice(training, 2 * round(training.steps_per_epoch)))


def test_statistics_are_those_of_drawn_latents_and_records_those_of_the_source(dataset, stored):
    opened = input_pipeline.open_data(dataset)
    stats = opened.stats()
    assert (stats.moments, stats.latents_shape) == ('deviation', (1, CHANNELS, 8, 8))
    rows = {}
    for batch in batches(dataset):
        rows |= dict(zip(batch['key'].tolist(), batch['latents'], strict=True))
    assert len(rows) >= 0.9 * opened.splits['train'].num_records
    for key, row in rows.items():
        np.testing.assert_array_equal(row, stored[key - 100])
    train = stored[np.array(sorted(rows)) - 100].astype(np.float64)
    means, deviations = np.split(train, 2, axis=1)
    rng = np.random.default_rng(1)
    drawn = means + deviations * rng.standard_normal((20, *means.shape))
    np.testing.assert_allclose(stats.latent_mean, means.mean(axis=(0, 2, 3)), rtol=0.1)
    np.testing.assert_allclose(stats.latent_std, drawn.std(axis=(0, 1, 3, 4)), rtol=0.03)
    # Deviations of 0.1 to 4 matter in the first channel.
    assert stats.latent_std[0] > 1.05 * means[:, 0].std()


def test_seeds_of_noise_are_functions_of_seed_epoch_and_key(dataset):
    first = batches(dataset)
    for options in (
        {'engine': 'chunks'},
        {'engine': 'tf_data'},
        {'seed': 3, 'process_count': 2},
        {'seed': 4},
    ):
        for step, batch in enumerate(batches(dataset, **options)):
            seeds = dict(zip(first[step]['key'], first[step]['noise_seed'], strict=True))
            same = [
                seeds.get(x) == y for x, y in zip(batch['key'], batch['noise_seed'], strict=True)
            ]
            assert all(same) if options.get('seed') != 4 else not any(same)
    seeds = {}
    for batch in first:
        assert batch['noise_seed'].dtype == np.uint32
        for key, seed in zip(batch['key'].tolist(), batch['noise_seed'].tolist(), strict=True):
            seeds.setdefault(key, set()).add(seed)
    repeated = [x for x in seeds.values() if len(x) > 1]
    assert len(repeated) > 0.8 * len(seeds)
    assert len(set().union(*seeds.values())) == sum(map(len, seeds.values()))


@pytest.mark.parametrize('kind', schema.MOMENTS)
def test_drawn_latents_have_the_moments_and_the_noise_of_their_seeds(stored, kind):
    means, deviations = np.split(stored[:64], 2, axis=1)
    as_stored = deviations if kind == schema.DEVIATION else 2 * np.log(deviations)
    moments = np.concatenate([means, as_stored], axis=1)
    stats = dataclasses.replace(test_flow.STATS, moments=kind)
    seeds = np.arange(64).astype(np.uint32) + 2**31
    drawn = np.asarray(flow.draw_latents(moments, seeds, stats))
    noise = (drawn - means) / deviations
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    backwards = flow.draw_latents(moments[::-1], seeds[::-1], stats)
    np.testing.assert_array_equal(backwards[::-1], drawn)
    others = flow.draw_latents(moments, seeds + 64, stats)
    assert not np.isclose(others, drawn).all(axis=(1, 2, 3)).any()


def test_training_draws_and_evaluation_takes_the_means(stored):
    stats = dataclasses.replace(test_flow.STATS, moments=schema.DEVIATION)
    means = stored[:8, :CHANNELS]
    of_means = flow.standardize_latents(means, test_flow.STATS)
    np.testing.assert_array_equal(flow.standardize_latents(stored[:8], stats), of_means)
    train_step, _, first = test_step.make_trainer(optax.sgd(1e-2), lambda step: 1e-2, stats=stats)

    def loss(moments: np.ndarray, first_seed: int) -> float:
        seeds = np.arange(first_seed, first_seed + 8, dtype=np.uint32)
        batch = test_step._batch() | {'latents': moments, 'noise_seed': seeds}
        return float(train_step(first, batch)[1].compute()['loss'])

    certain = np.concatenate([means, np.zeros_like(means)], axis=1)
    assert loss(certain, 0) == loss(certain, 8) != loss(stored[:8], 0)
    assert loss(stored[:8], 0) == loss(stored[:8], 0) != loss(stored[:8], 8)


def test_what_cannot_be_moments_is_refused(stored, dataset, tmp_path):
    with pytest.raises(ValueError, match=r'shard000.safetensors: its latents have 5 channels; exp'):
        build(stored[:, :5], tmp_path / 'odd', schema.DEVIATION)
    with pytest.raises(ValueError, match=r"moments.*'variance'.*deviation"):
        build(stored, tmp_path / 'other', 'variance')
    others = build(stored + 1, tmp_path / 'logs', schema.LOG_VARIANCE)
    mix = [{'name': str(i), 'dir': str(x), 'seed': i} for i, x in enumerate((dataset, others))]
    with pytest.raises(
        ValueError, match=r"its moments are 'log_variance', those of .* 'deviation'"
    ):
        batches(mix)


@pytest.mark.slow
def test_a_run_on_moments_trains_evaluates_shows_and_draws(dataset, stored, tmp_path):
    vae = str(small_vae.make(tmp_path))
    changes = {'model.text': 'sequence', 'model.patch_size': 2, 'num_steps': 4, 'preview.vae': vae}
    workdir = tmp_path / 'run'
    state = runs.train(dataset, workdir, **changes)
    assert int(state.step) == 4 and int(state.skipped) == 0
    artist = draw.Artist(workdir, vae=vae)
    assert artist.facts.moments == 'deviation' and artist.facts.latents_shape[1] == CHANNELS
    assert 'data:image/png' in show.show(dataset, vae)
    config = runs.small_config(dataset, **changes)
    mesh = sharding.make_mesh()
    samples = data.TrainingData(config, mesh).preview_samples
    assert samples.latents.shape[1:] == (CHANNELS, 8, 8)
