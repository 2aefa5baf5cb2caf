"""What a picture of made-up data shows is recognized where it is true, and only there."""

import dataclasses

import numpy as np
import pytest

from coyo11m_tfds.pictures import latent_rgb, one_object, shapes, two_objects

_COUNT = 24
_SHAPES, _SIZES = shapes.SHAPES, [*two_objects.RADII]


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
    ('field', 'names', 'wrong'),
    [
        ('shape', _SHAPES, {'shape', 'all three'}),
        ('colour', [*shapes.COLOURS], {'colours', 'all three'}),
        ('background', [*shapes.COLOURS], {'colours', 'all three'}),
    ],
)
def test_one_object_that_is_another_is_wrong_in_that(field, names, wrong):
    pictures, scenes = _true_pictures(one_object)
    others = [
        dataclasses.replace(scene, **{field: _another(getattr(scene, field), names)})
        for scene in scenes
    ]
    scores = one_object.score_pictures(pictures, others)
    assert {name: x.mean() for name, x in scores.items()} == {
        name: name not in wrong for name in scores
    }


def _swap_colours(scene):
    first, second = scene.objects
    return {
        'first': first._replace(colour=second.colour),
        'second': second._replace(colour=first.colour),
    }


@pytest.mark.parametrize(
    ('wrong', 'change'),
    [
        ('shape', lambda x: {'first': x.first._replace(shape=_another(x.first.shape, _SHAPES))}),
        ('size', lambda x: {'second': x.second._replace(size=_another(x.second.size, _SIZES))}),
        ('relation', lambda x: {'relation': _another(x.relation, [*two_objects.RELATIONS])}),
        ('relation', lambda x: {'first': x.second, 'second': x.first}),
        ('relation', _swap_colours),
    ],
)
def test_two_objects_that_look_or_stand_otherwise_are_wrong_in_that(wrong, change):
    pictures, scenes = _true_pictures(two_objects)
    others = [dataclasses.replace(scene, **change(scene)) for scene in scenes]
    scores = two_objects.score_pictures(pictures, others)
    assert scores['colours'].all()
    assert not scores[wrong].any()
    assert not scores['all'].any()
