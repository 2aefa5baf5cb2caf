"""Rules for the fields of a configuration, and the fields that a resumed run compares.

Other modules check whether the fields fit the data and the devices. Readers, the optimizer and the
model check their own fields.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import ml_collections


class FieldRule(NamedTuple):
    expected: str
    holds: Callable[[Any], bool]


def _at_least(least: float) -> FieldRule:
    return FieldRule(f'at least {least}', lambda x: least <= x < math.inf)


def _above(bound: float) -> FieldRule:
    return FieldRule(f'more than {bound}', lambda x: bound < x < math.inf)


def _one_of(*values: str) -> FieldRule:
    return FieldRule(' or '.join(map(repr, values)), lambda x: x in values)


_RULES = {
    name: rule
    for rule, names in (
        (FieldRule('from 0 to 2**31 - 1', lambda x: 0 <= x < 2**31), 'seed'),
        (_at_least(1), 'batch_size accumulate num_steps log_every keep_checkpoints'),
        (_at_least(1), 'preview.count preview.num_steps data.device_prefetch'),
        (_at_least(0), 'max_skipped_in_a_row max_skipped data.ram_budget_gb'),
        (_at_least(0), 'model.width model.depth model.num_heads model.crops model.unroll'),
        (_at_least(0), 'model.patch_size model.mlp_ratio optimizer.weight_decay'),
        (_at_least(0), 'eval_every preview_every checkpoint_every keep_every profile_steps'),
        (_at_least(-1), 'data.prefetch'),  # -1: the engine chooses
        (_above(0), 'optimizer.learning_rate optimizer.muon_learning_rate optimizer.clip_norm'),
        (_above(0), 'flow.logit_std preview.time_shift'),
        (
            FieldRule('at least 0 and less than 1', lambda x: 0 <= x < 1),
            'ema_decay optimizer.b1 optimizer.b2 preview.guidance_low',
        ),
        (FieldRule('from 0 to 1', lambda x: 0 <= x <= 1), 'preview.guidance_high'),
        (FieldRule('a finite number', math.isfinite), 'flow.logit_mean preview.guidance'),
        (
            FieldRule('the folder of a built data set, .../coyo11m_tfds/CONFIG/1.0.0', bool),
            'data.dir',
        ),
        (_one_of('bfloat16', 'float32'), 'model.dtype'),
        (_one_of('euler', 'heun'), 'preview.sampler'),
        (FieldRule('from 0 to 255, an exit status', lambda x: 0 <= x <= 255), 'requeue_status'),
    )
    for name in names.split()
}

# Of `changeable_fields` those whose values a run replaces by what is in the folders.
DATA_SET, MIX = 'data.dir', 'data.mix'

# Fields that decide what a step computes and which records it sees. The text encoder, the model
# and the optimizer are in the identity of a run (`data.TrainingData`) and cannot be changed.
_CHANGEABLE = re.compile(
    'seed|batch_size|num_steps|ema_decay|model.dtype|flow.*|optimizer.(?!name).*|'
    'data.(dir|mix|stages|text|chunk|lanes|window|caption_dropout)'
)


def check_config(config: ml_collections.ConfigDict, *, needs_data: bool = True) -> None:
    """Checks the value of every field.

    Args:
        needs_data: Whether `data.dir` is required.
    """
    fields = flatten_fields(config.to_dict())
    for name, rule in _RULES.items():
        is_needed = name != DATA_SET or (needs_data and not fields[MIX])
        if is_needed and not rule.holds(fields[name]):
            raise ValueError(f'{name}={fields[name]!r}: expected {rule.expected}')
    if fields[MIX] and fields[DATA_SET]:
        raise ValueError(f'data.mix and data.dir={fields[DATA_SET]!r}: expected only one of them')
    if fields['data.stages'] and not fields[MIX]:
        raise ValueError(f'data.stages={fields["data.stages"]!r}: expected none without data.mix')
    low, high = config.preview.guidance_low, config.preview.guidance_high
    if low >= high:
        raise ValueError(
            f'preview.guidance_low={low!r}: expected less than preview.guidance_high={high!r}'
        )
    every, kept = config.checkpoint_every, config.keep_every
    if kept and (not every or kept % every):
        raise ValueError(f'keep_every={kept}: expected a multiple of checkpoint_every={every}')


def changeable_fields(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the fields that a resumed run may change on purpose, with their values."""
    fields = flatten_fields(config.to_dict())
    return {name: value for name, value in fields.items() if _CHANGEABLE.fullmatch(name)}


def check_accepted_changes(names: Collection[str], config: ml_collections.ConfigDict) -> None:
    """Raises a ValueError for names that `changeable_fields` does not have."""
    there = changeable_fields(config)
    unknown = [name for name in names if name not in there]
    if unknown:
        raise ValueError(
            f'--accept_changes={",".join(unknown)}: expected some of {", ".join(sorted(there))}'
        )


def flatten_fields(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """Flattens nested dicts: `{'data': {'seed': 0}}` becomes `{'data.seed': 0}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten_fields(value, f'{prefix}{key}.')
        else:
            flat[f'{prefix}{key}'] = value
    return flat
