"""What a picture of made-up data shows is recognized where it is true, and only there."""

import numpy as np
import pytest

from coyo11m_tfds.pictures import latent_rgb, one_object, shapes, two_objects

_COUNT = 24
_SHAPES, _SIZES, _COLOURS = shapes.SHAPES, [*two_objects.RADII], [*shapes.COLOURS]


def _true_pictures(world):
    """Pictures of combinations that are held out, by way of their latents, and what they show."""
    rng = np.random.Generator(np.random.Philox(key=5))
    _, held_out = world.split_scenes()
    scenes = [held_out[i % len(held_out)] for i in rng.permutation(_COUNT)]
    pictures = shapes.draw_scenes(scenes, world.random_geometry(scenes, rng), rng)
    latents = latent_rgb.rgb_to_latents(pictures[:, :, : shapes.CROP_SIZE]).astype(np.float16)
    return latent_rgb.latents_to_rgb(latents.astype(np.float32)), scenes


@pytest.fixture(scope='module', params=[one_object, two_objects], ids=lambda world: world.__name__)
def truth(request):
    return request.param, *_true_pictures(request.param)


def _with_thing(scene, number, **fields):
    things = list(scene.objects)
    things[number] = things[number]._replace(**fields)
    return scene._replace(objects=tuple(things))


def _another(name, names):
    return names[(names.index(name) + 1) % len(names)]


def test_true_pictures_are_right_and_plain_ones_wrong(truth):
    world, pictures, scenes = truth
    assert {x.mean() for x in world.score_pictures(pictures, scenes).values()} == {1}
    mixed = pictures.copy()
    mixed[: _COUNT // 3] = shapes.COLOURS['blue']
    shares = [x.mean() for x in world.score_pictures(mixed, scenes).values()]
    assert shares == pytest.approx([2 / 3] * len(shares))


@pytest.mark.parametrize(
    ('wrong', 'change'),
    [
        ('shape', lambda x: _with_thing(x, 0, shape=_another(x.objects[0].shape, _SHAPES))),
        ('colours', lambda x: _with_thing(x, 0, colour=_another(x.objects[0].colour, _COLOURS))),
        ('colours', lambda x: x._replace(background=_another(x.background, _COLOURS))),
    ],
)
def test_one_object_that_is_another_is_wrong_in_that(wrong, change):
    pictures, scenes = _true_pictures(one_object)
    scores = one_object.score_pictures(pictures, list(map(change, scenes)))
    assert {name: x.mean() for name, x in scores.items()} == {
        name: name not in (wrong, 'all three') for name in scores
    }


def _swap_colours(scene):
    first, second = scene.objects
    swapped = first._replace(colour=second.colour), second._replace(colour=first.colour)
    return scene._replace(objects=swapped)


@pytest.mark.parametrize(
    ('wrong', 'change'),
    [
        ('shape', lambda x: _with_thing(x, 0, shape=_another(x.objects[0].shape, _SHAPES))),
        ('size', lambda x: _with_thing(x, 1, size=_another(x.objects[1].size, _SIZES))),
        ('relation', lambda x: x._replace(relation=_another(x.relation, [*two_objects.RELATIONS]))),
        ('relation', lambda x: x._replace(objects=x.objects[::-1])),
        ('relation', _swap_colours),
    ],
)
def test_two_objects_that_look_or_stand_otherwise_are_wrong_in_that(wrong, change):
    pictures, scenes = _true_pictures(two_objects)
    scores = two_objects.score_pictures(pictures, list(map(change, scenes)))
    assert scores['colours'].all()
    assert not scores[wrong].any()
    assert not scores['all'].any()
