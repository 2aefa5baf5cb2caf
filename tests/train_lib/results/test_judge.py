"""The judge of drawn pictures, against its definition."""

import numpy as np
import pytest

from train_lib.results import judge

COUNT = 12


@pytest.fixture(scope='module')
def true_pictures():
    """Twelve different pictures, of which the last two are equal."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (COUNT, 64, 32, 3), dtype=np.uint8)
    pictures[-1] = pictures[-2]
    return pictures


def _naive_areas(picture):
    rows, columns = picture.shape[0] // 32, picture.shape[1] // 32
    areas = [
        picture[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns].reshape(-1, 3).mean(0)
        for r in range(32)
        for c in range(32)
    ]
    return np.concatenate(areas)


def test_areas_are_means(true_pictures):
    areas = judge.mean_areas(true_pictures)
    assert areas.dtype == np.float32
    np.testing.assert_allclose(areas, [_naive_areas(x) for x in true_pictures], rtol=1e-6)
    with pytest.raises(ValueError, match=r'48 x 32 pixels .* expected multiples of 32'):
        judge.mean_areas(np.zeros((1, 48, 32, 3), np.uint8))


def test_verdicts_are_their_definitions(true_pictures):
    rng = np.random.default_rng(1)
    areas = judge.mean_areas(true_pictures)
    own = np.array([3, 3, 4, 10, 11, 0])
    drawn = areas[[3, 5, 4, 11, 10, 0]] + rng.normal(0, 3, (6, 3072)).astype(np.float32)
    drawn[5] = areas.mean(0)
    verdicts = judge.Judge(areas, np.zeros(COUNT, bool)).compare(drawn, own)
    distances = np.sqrt(np.square(drawn[:, None].astype(float) - areas).mean(-1))
    np.testing.assert_array_equal(verdicts.nearest[:3], [3, 5, 4])
    np.testing.assert_allclose(verdicts.distance, distances[np.arange(6), own], rtol=1e-3)
    # Equal pictures are one: the 10 for the 11 is as right as the 11 itself.
    assert verdicts.exact[:5].tolist() == [True, False, True, True, True]
    for number in range(6):
        nearer = {areas[other].tobytes() for other in range(COUNT)
                  if distances[number, other] < distances[number, own[number]] - 1e-6}  # fmt: skip
        assert verdicts.first_five[number] == (len(nearer) < 5)


def test_equal_pictures_are_one_however_their_distances_are_rounded():
    rng = np.random.default_rng(0)
    drawn = rng.uniform(0, 255, (64, 3072)).astype(np.float32)
    areas = rng.uniform(0, 255, (101, 3072)).astype(np.float32)
    # Four are nearer to each drawn one than its own, which is one of many that are equal.
    areas[:4] = drawn.mean(0)
    areas[:4, 0] = range(4)
    areas[4:] = areas[4]
    own = rng.integers(4, 101, 64)
    verdicts = judge.Judge(areas, np.zeros(101, bool)).compare(drawn, own)
    assert verdicts.first_five.all() and not verdicts.exact.any()


def test_the_floor_is_the_most_similar_of_what_is_known(true_pictures):
    areas = judge.mean_areas(true_pictures)
    similar = areas.copy()
    similar[1] = areas[0] + 2
    is_known = np.arange(COUNT) > 0
    floor = judge.Judge(similar, is_known).find_floor(np.array([0, 11]))
    assert floor.nearest[0] == 1
    assert floor.distance[0] == pytest.approx(2, rel=1e-3)
    # What training has shown under another name is no floor to be above.
    assert floor.exact.tolist() == [False, True]
    assert judge.Judge(areas, np.zeros(COUNT, bool)).find_floor(np.array([0])) is None


def test_a_table_has_shares_and_means():
    drawn = {'exact': np.array([True, False, False]), 'distance': np.array([1.0, 2.0, 6.0])}
    floor = {'exact': np.array([False] * 3), 'distance': np.array([70.0] * 3)}
    assert judge.write_table({'drawn': drawn, 'floor': floor}) == [
        '       exact  distance',
        'drawn  33.3%       3.0',
        'floor   0.0%      70.0',
    ]
