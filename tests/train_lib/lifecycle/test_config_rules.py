"""Every field of a configuration has a range, and what is outside of it is told by name."""

import re

import pytest

from configs import default
from train_lib.lifecycle import config_rules

# Fields that others check: the data set, its order, the model, the optimizer and the devices do.
ELSEWHERE = re.compile(
    r'data\.(cache_dir|mix|stages|chunk|lanes|window|text|engine|verify|.*bad.*|parallel_reads)'
    r'|data\.(caption_dropout|require_text)'
    r'|batch_size|compilation_cache|distributed|encoder|init_(average|from)|mesh\..*'
    r'|model\.(kind|name|attention|remat|text|prediction)|optimizer\.(name|schedule|warmup_steps)'
    r'|preview\.(split|vae)|wandb\.project'
)
CHANGEABLE = re.compile(
    r'batch_size|data\.(caption_dropout|chunk|dir|lanes|mix|stages|text|window)|ema_decay|flow\..*'
    r'|model\.dtype|num_steps|optimizer\.(?!name).*|seed'
)

BAD = {
    name: value
    for value, names in (
        (
            -1,
            'checkpoint_every eval_every keep_every preview_every max_skipped max_skipped_in_a_row',
        ),
        (-1, 'model.crops model.depth model.num_heads model.patch_size model.unroll model.width'),
        (-1, 'profile_steps seed'),
        (0, 'accumulate data.device_prefetch keep_checkpoints log_every num_steps'),
        (0, 'preview.count preview.num_steps'),
        (0.0, 'flow.logit_std optimizer.clip_norm optimizer.muon_learning_rate preview.time_shift'),
        (1.0, 'ema_decay optimizer.b1 preview.guidance_low'),
        (
            -0.1,
            'data.cache_gb data.ram_budget_gb model.mlp_ratio optimizer.b2 optimizer.weight_decay',
        ),
        (float('nan'), 'optimizer.learning_rate preview.guidance'),
        (float('inf'), 'flow.logit_mean'),
        (-2, 'data.prefetch'),
        (256, 'requeue_status'),
        (1.5, 'preview.guidance_high'),
        ('', 'data.dir'),
        ('float16', 'gradient_dtype model.dtype'),
        ('ddim', 'preview.sampler'),
    )
    for name in names.split()
}


def config_with(**changes):
    config = default.get_config()
    config.update_from_flattened_dict({'data.dir': '/somewhere'} | changes)
    return config


FIELDS = config_rules.flatten_fields(default.get_config().to_dict())


def test_every_field_is_checked_somewhere():
    assert {name for name in FIELDS if not ELSEWHERE.fullmatch(name)} == BAD.keys()
    config_rules.check_config(config_with())


@pytest.mark.parametrize(('field', 'value'), BAD.items(), ids=BAD)
def test_a_value_out_of_its_range_is_told_with_what_is_expected(field, value):
    with pytest.raises(ValueError, match=re.escape(f'{field}={value!r}: expected ')):
        config_rules.check_config(config_with(**{field: value}))


# More than the ranges of single fields: what an array of a run cannot count, and Python's None.
BEYOND = {
    'more steps than int32 holds': ('num_steps', 2**31, 'from 1 to 2**31 - 1'),
    'no number': ('keep_every', None, "a value: 0 or '' stands for none"),
    'no text': ('encoder', None, "a value: 0 or '' stands for none"),
}


@pytest.mark.parametrize(('field', 'value', 'expected'), BEYOND.values(), ids=BEYOND)
def test_a_value_that_no_run_could_have_is_told(field, value, expected):
    with pytest.raises(ValueError, match=re.escape(f'{field}={value!r}: expected {expected}')):
        config_rules.check_config(config_with(**{field: value}))


UNFIT = {
    'guidance that ends before it begins': (
        'preview.guidance_low',
        0.7,
        'preview.guidance_high',
        0.3,
        'less than',
    ),
    'keeping at steps without a checkpoint': (
        'keep_every',
        25,
        'checkpoint_every',
        10,
        'a multiple of',
    ),
    'keeping more often than there are checkpoints': (
        'keep_every',
        5,
        'checkpoint_every',
        10,
        'a multiple of',
    ),
    'keeping without checkpoints': ('keep_every', 10, 'checkpoint_every', 0, 'a multiple of'),
    'gradients in less than what is computed in': (
        'gradient_dtype',
        'bfloat16',
        'model.dtype',
        'float32',
        "'float32' or",
    ),
}


@pytest.mark.parametrize(('field', 'value', 'other', 'limit', 'problem'), UNFIT.values(), ids=UNFIT)
def test_fields_that_do_not_fit_each_other_are_refused(field, value, other, limit, problem):
    message = re.escape(f'{field}={value!r}: expected {problem} {other}={limit!r}')
    with pytest.raises(ValueError, match=message):
        config_rules.check_config(config_with(**{field: value, other: limit}))
    config_rules.check_config(config_with(keep_every=20, checkpoint_every=10))


def test_what_may_change_is_what_steps_compute_with_and_which_records_they_see():
    expected = {name for name in FIELDS if CHANGEABLE.fullmatch(name)}
    assert {*config_rules.changeable_fields(config_with())} == expected


def test_places_of_a_run_are_those_of_the_folder_in_which_it_began(tmp_path, monkeypatch):
    (tmp_path / 'model').mkdir()
    monkeypatch.chdir(tmp_path)
    config = default.get_config()
    monkeypatch.setenv('HOME', str(tmp_path))
    config.data.mix = ({'dir': 'data'}, {'dir': 'gs://bucket/data'}, {'dir': '~/data'})
    config.init_from, config.encoder, config.preview.vae = 'run@2', 'jax:model', '~/model'
    config.data.cache_dir, config.compilation_cache = '~/cache', '~/compiled'
    (tmp_path / 'compiled').mkdir()
    fields = config_rules.with_absolute_places(config)
    assert [source['dir'] for source in fields['data']['mix']] == [
        f'{tmp_path}/data',
        'gs://bucket/data',
        f'{tmp_path}/data',
    ]
    assert fields['data']['cache_dir'] == f'{tmp_path}/cache'
    assert fields['compilation_cache'] == f'{tmp_path}/compiled'
    assert (fields['init_from'], fields['encoder'], fields['preview']['vae']) == (
        f'{tmp_path}/run@2',
        f'jax:{tmp_path}/model',
        f'{tmp_path}/model',
    )
    config.encoder, config.preview.vae = 'jax:owner/name', 'owner/vae'
    fields = config_rules.with_absolute_places(config)
    assert (fields['encoder'], fields['preview']['vae']) == ('jax:owner/name', 'owner/vae')
