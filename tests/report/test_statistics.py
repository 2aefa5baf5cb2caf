"""Statistics of shards against plain NumPy, and what must be the same to the last bit."""

import base64
import io
import itertools
import json
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from coyo11m_tfds import schema
from coyo11m_tfds.pictures import latent_rgb
from coyo11m_tfds.report.statistics import LATENT_EDGES, ShardStatistics, mean_and_std, sum_channels

DIM = 5


def make_samples(count: int, seed: int = 0) -> dict[str, np.ndarray | list[bytes]]:
    """The arguments of `add`, as keyword arguments."""
    rng = np.random.default_rng(seed)
    latents = 20 * rng.standard_normal((count, *schema.LATENTS_SHAPE)) + 3
    return {
        'keys': rng.integers(-(2**62), 2**62, count),
        'captions': [b'x' * length for length in rng.integers(1, 3000, count)],
        'latents': latents.astype(np.float16).astype(np.float32),
        'text': rng.standard_normal((count, DIM)).astype(np.float16),
    }


def choose(samples: dict, rows: list[int] | range) -> dict:
    """The same samples, but only some rows."""
    captions = [samples['captions'][row] for row in rows]
    chosen = {name: samples[name][list(rows)] for name in ('keys', 'latents', 'text')}
    return chosen | {'captions': captions}


def added(*blocks: dict) -> ShardStatistics:
    statistics = ShardStatistics(DIM)
    for block in blocks:
        statistics.add(**block, sums=sum_channels(block['latents']))
    return statistics


def bits(statistics: ShardStatistics) -> str:
    return json.dumps(statistics.to_json())


def test_statistics_are_those_of_numpy():
    samples = make_samples(40)
    made = added(choose(samples, range(25)), choose(samples, range(25, 40)))
    assert (made.num_records, made.non_finite, made.non_finite_keys) == (40, 0, [])
    latents, text = (samples[name].astype(np.float64) for name in ('latents', 'text'))
    mean, std = mean_and_std(made.latent_moments)
    np.testing.assert_allclose(mean, latents.mean(axis=(0, 1, 3, 4)), rtol=1e-6)
    np.testing.assert_allclose(std, latents.std(axis=(0, 1, 3, 4)), rtol=1e-6)
    mean, std = mean_and_std(made.text_moments)
    np.testing.assert_allclose(mean, text.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(std, text.std(axis=0), rtol=1e-12)
    edges = [-np.inf, *LATENT_EDGES, np.inf]
    for channel in range(4):
        expected, _ = np.histogram(latents[:, :, channel], edges)
        np.testing.assert_array_equal(made.latent_histogram[channel], expected)
    lengths = [len(caption) for caption in samples['captions']]
    expected = np.bincount(np.minimum(lengths, 2048), minlength=2049)
    np.testing.assert_array_equal(made.caption_histogram, expected)


def test_latents_are_drawn_of_the_first_records_of_each_shard():
    samples = make_samples(100)
    made = added(choose(samples, range(50)), choose(samples, range(50, 100)))
    first = added(choose(samples, range(64)))
    np.testing.assert_array_equal(made.latent_histogram, first.latent_histogram)
    assert made.latent_histogram.sum() == 64 * 3 * 4 * 1024
    assert made.caption_histogram.sum() == 100
    both = ShardStatistics.merge([made, added(choose(samples, range(7)))])
    assert both.latent_histogram.sum() == 71 * 3 * 4 * 1024


def test_previews_are_the_middle_crops_of_the_first_records():
    samples = make_samples(9)
    captions = [b'a\xff\xfeb', 'ä'.encode() * 9999, b'', 'Ein Bär & ein <Schwan>'.encode()]
    samples['captions'][:4] = captions
    previews = added(choose(samples, range(3)), choose(samples, range(3, 9))).previews
    assert [preview.key for preview in previews] == samples['keys'][:6].tolist()
    shown = ['a\ufffd\ufffdb', 'ä' * 1000 + '…', '', 'Ein Bär & ein <Schwan>']
    assert [preview.caption for preview in previews[:4]] == shown
    for latents, preview in zip(samples['latents'], previews, strict=False):
        picture = Image.open(io.BytesIO(base64.b64decode(preview.png)))
        np.testing.assert_array_equal(np.asarray(picture), latent_rgb.latents_to_rgb(latents[1]))


# Float32 holds 3e38, but not the square of it that the moments need.
@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf, 3e38])
def test_one_number_decides_whether_a_sample_is_finite(value):
    latents = make_samples(30)['latents']
    for row in (0, 7, 29):
        latents[row].flat[-1 - 400 * row] = value
    latents[8, 2, 3] = 1e17
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        are_finite = sum_channels(latents).are_finite
    assert np.flatnonzero(~are_finite).tolist() == [0, 7, 29]


def test_at_most_ten_keys_are_kept():
    keys = np.arange(100, 125)
    statistics, other = ShardStatistics(), ShardStatistics()
    statistics.add_non_finite(keys[:8])
    statistics.add_non_finite(keys[8:])
    assert (statistics.non_finite, statistics.non_finite_keys) == (25, [*range(100, 110)])
    other.add_non_finite(keys[20:21])
    both = ShardStatistics.merge([other, statistics])
    assert (both.non_finite, both.non_finite_keys) == (26, [120, *range(100, 109)])
    with pytest.raises(ValueError, match='at least one value'):
        mean_and_std(statistics.latent_moments)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 8), max_size=4))
def test_json_keeps_every_bit(seed, lengths):
    blocks = [make_samples(count, seed + number) for number, count in enumerate(lengths)]
    statistics = added(*blocks)
    statistics.add_non_finite(np.arange(seed % 20))
    back = ShardStatistics.from_json(json.loads(bits(statistics)))
    assert bits(back) == bits(statistics)
    more = make_samples(9, seed=1)
    for each in (back, statistics):
        each.add(**more, sums=sum_channels(more['latents']))
    assert bits(back) == bits(statistics)
    assert bits(ShardStatistics.merge([back, statistics])) == bits(
        ShardStatistics.merge([statistics, back])
    )


@settings(max_examples=25)
@given(st.lists(st.integers(0, 20), max_size=5).map(sorted), st.integers(0, 3))
def test_the_size_of_blocks_hardly_matters(cuts, seed):
    samples = make_samples(20, seed)
    blocks = [choose(samples, range(*run)) for run in itertools.pairwise([0, *cuts, 20])]
    whole = added(samples)
    for made in (added(*blocks), ShardStatistics.merge([added(block) for block in blocks])):
        assert made.num_records == 20
        np.testing.assert_array_equal(made.latent_histogram, whole.latent_histogram)
        np.testing.assert_array_equal(made.caption_histogram, whole.caption_histogram)
        for name in ('latent_moments', 'text_moments'):
            ours, theirs = getattr(made, name), getattr(whole, name)
            np.testing.assert_array_equal(ours[0], theirs[0])
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_shards_are_joined_in_order():
    blocks = [make_samples(20), make_samples(20, seed=1), make_samples(20, seed=1)]
    for block, factor in zip(blocks, (1, 1e15, -1e15), strict=True):
        block['latents'] *= np.float32(factor)
    parts = [added(block) for block in blocks]
    small, large, opposite = (part.latent_moments[1] for part in parts)
    assert (
        ShardStatistics.merge(parts).latent_moments[1].tolist()
        == (small + large + opposite).tolist()
    )
    assert (large + opposite).tolist() == [0] * 4  # so that no other order gives this
    assert (small + large + opposite != small).all()
