"""Every field of a configuration has a range, and what is outside of it is told by name."""

import re

import pytest

from configs import default
from train_lib import settings

# Fields that others check: the data set, its order, the model, the optimizer and the devices do.
ELSEWHERE = {
    'data.chunk',
    'data.lanes',
    'data.window',
    'data.text',
    'distributed',
    'mesh.data',
    'mesh.fsdp',
    'model.name',
    'model.attention',
    'model.remat',
    'optimizer.schedule',
    'optimizer.warmup_steps',
    'preview.split',
}

BAD = {
    'accumulate': 0,
    'batch_size': 0,
    'checkpoint_every': -1,
    'data.caption_dropout': 1.5,
    'data.device_prefetch': 0,
    'data.dir': '',
    'data.engine': 'lines',
    'data.on_bad_records': 'ignore',
    'data.parallel_reads': 0,
    'data.prefetch': -2,
    'data.private_threads': -1,
    'data.ram_budget_gb': -1.0,
    'data.verify': 'twice',
    'ema_decay': 1.0,
    'eval_every': -1,
    'flow.logit_mean': float('inf'),
    'flow.logit_std': 0.0,
    'keep_checkpoints': 0,
    'log_every': 0,
    'data.max_bad_fraction': 1.5,
    'max_skipped': -1,
    'max_skipped_in_a_row': -1,
    'model.dtype': 'int32',
    'num_steps': 0,
    'optimizer.b1': 1.0,
    'optimizer.b2': -0.1,
    'optimizer.clip_norm': 0.0,
    'optimizer.learning_rate': float('nan'),
    'optimizer.weight_decay': -0.1,
    'preview.count': 0,
    'preview.guidance': float('nan'),
    'preview.num_steps': 0,
    'preview_every': -1,
    'profile_steps': -1,
    'seed': -1,
}


def config_with(**changes):
    config = default.get_config()
    config.update_from_flattened_dict({'data.dir': '/somewhere'} | changes)
    return config


def test_every_field_is_checked_somewhere():
    assert set(settings.flatten(default.get_config().to_dict())) == set(BAD) | ELSEWHERE
    settings.check(config_with())


@pytest.mark.parametrize('field', BAD)
def test_a_value_out_of_its_range_is_told_with_what_is_expected(field):
    with pytest.raises(ValueError, match=re.escape(f'{field}={BAD[field]!r}: expected ')):
        settings.check(config_with(**{field: BAD[field]}))


def test_what_may_change_is_what_steps_compute_with():
    assert set(settings.changeable(config_with())) == {
        'data.caption_dropout',
        'ema_decay',
        'flow.logit_mean',
        'flow.logit_std',
        'model.dtype',
        'num_steps',
        'optimizer.b1',
        'optimizer.b2',
        'optimizer.clip_norm',
        'optimizer.learning_rate',
        'optimizer.schedule',
        'optimizer.warmup_steps',
        'optimizer.weight_decay',
    }
