"""Rules for the fields of a configuration, and the fields that a resumed run compares.

Readers, the optimizer and the model check their own fields.
"""

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from typing import Any

import ml_collections

import input_pipeline
from coyo11m_tfds import storage
from coyo11m_tfds.process.errors import (
    UNIT_INTERVAL,
    FieldError,
    FieldRule,
    MissingFolderError,
    at_least,
    one_of,
)


def _above(bound: float) -> FieldRule:
    return FieldRule(f'more than {bound}', lambda x: bound < x < math.inf)


_SHARE = FieldRule('at least 0 and less than 1', lambda x: 0 <= x < 1)
_DATA_FOLDER = 'the folder of a built data set, .../coyo11m_tfds/CONFIG/1.0.0'

_RULES = {
    name: rule
    for rule, names in (
        (at_least(1), 'accumulate num_steps log_every keep_checkpoints data.device_prefetch'),
        (at_least(1), 'preview.count preview.num_steps'),
        (at_least(0), 'max_skipped_in_a_row max_skipped data.ram_budget_gb'),
        (at_least(0), 'model.width model.depth model.num_heads model.crops model.unroll'),
        (at_least(0), 'model.patch_size model.mlp_ratio optimizer.weight_decay profile_steps'),
        (at_least(0), 'eval_every preview_every checkpoint_every keep_every'),
        (at_least(-1), 'data.prefetch'),  # -1: the engine chooses
        (_above(0), 'optimizer.learning_rate optimizer.muon_learning_rate optimizer.clip_norm'),
        (_above(0), 'flow.logit_std preview.time_shift'),
        (_SHARE, 'ema_decay optimizer.b1 optimizer.b2 preview.guidance_low'),
        (UNIT_INTERVAL, 'preview.guidance_high'),
        (FieldRule('a finite number', math.isfinite), 'flow.logit_mean preview.guidance'),
        (FieldRule('from 0 to 2**31 - 1', lambda x: 0 <= x < 2**31), 'seed'),
        (FieldRule('from 0 to 255, an exit status', lambda x: 0 <= x <= 255), 'requeue_status'),
        (FieldRule(_DATA_FOLDER, bool), 'data.dir'),
        (one_of('bfloat16', 'float32'), 'model.dtype'),
        (one_of('euler', 'heun'), 'preview.sampler'),
    )
    for name in names.split()
}

# Changeable fields whose values a run replaces by what the folders hold.
DATA_SET, MIX = 'data.dir', 'data.mix'

# The settings of a run also have what of JAX's environment changes roundings, below this name.
ENVIRONMENT = 'environment'

# Fields that decide what a step computes and which records it sees. The text encoder, the model
# and the optimizer are in the identity of a run (`data.TrainingData`) and cannot be changed.
_CHANGEABLE = re.compile(
    'seed|batch_size|num_steps|ema_decay|model.dtype|flow.*|optimizer.(?!name).*|'
    'data.(dir|mix|stages|text|chunk|lanes|window|caption_dropout)'
)


def check_config(config: ml_collections.ConfigDict, *, needs_data: bool = True) -> None:
    """Raises a FieldError if a field has a wrong value; `data.dir` may be empty if not needed."""
    fields = flatten_fields(config.to_dict())
    if missing := [name for name in _RULES if name not in fields]:
        raise ValueError(
            f'the configuration lacks the field {missing[0]!r}: set the fields of a block one by '
            'one, so that the others keep their defaults'
        )
    for name, rule in _RULES.items():
        is_needed = name != DATA_SET or (needs_data and not fields[MIX])
        if is_needed:
            rule.check(name, fields[name])
    if fields[MIX] and fields[DATA_SET]:
        raise FieldError(DATA_SET, fields[DATA_SET], 'expected none with data.mix')
    if fields['data.stages'] and not fields[MIX]:
        raise FieldError('data.stages', fields['data.stages'], 'expected none without data.mix')
    low, high = config.preview.guidance_low, config.preview.guidance_high
    if low >= high:
        problem = f'expected less than preview.guidance_high={high!r}'
        raise FieldError('preview.guidance_low', low, problem)
    if config.gradient_dtype not in ('float32', config.model.dtype):
        problem = f"expected 'float32' or model.dtype={config.model.dtype!r}"
        raise FieldError('gradient_dtype', config.gradient_dtype, problem)
    every, kept = config.checkpoint_every, config.keep_every
    if kept and (not every or kept % every):
        problem = f'expected a multiple of checkpoint_every={every}'
        raise FieldError('keep_every', kept, problem)


def open_sources(config: ml_collections.ConfigDict) -> tuple[input_pipeline.MixSource, ...]:
    """Opens the data sets of `data.mix` or `data.dir`; reads their metadata and no records."""
    field = MIX if config.data.mix else DATA_SET
    data = config.data.mix or config.data.dir
    try:
        return input_pipeline.open_mix(data)
    except FileNotFoundError as error:
        raise MissingFolderError(field, data, str(error).removeprefix(f'{data}: ')) from error


def with_absolute_places(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns all fields as JSON holds them; places in them are valid in every folder."""
    fields = json.loads(json.dumps(config.to_dict()))
    data, preview = fields['data'], fields['preview']
    for source in [data, *data['mix']]:
        source['dir'] = _make_absolute(source['dir'])
    # `init_from` may end in @STEP, and names on the hub are no places.
    fields['init_from'] = _make_absolute(fields['init_from'])
    runner, colon, model = fields['encoder'].partition(':')
    if os.path.isdir(model):
        fields['encoder'] = f'{runner}{colon}{_make_absolute(model)}'
    if os.path.isdir(preview['vae']):
        preview['vae'] = _make_absolute(preview['vae'])
    return fields


def _make_absolute(place: str) -> str:
    return storage.make_absolute(place) if place else ''


def changeable_fields(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the fields that a resumed run may change on purpose, with their values."""
    fields = flatten_fields(config.to_dict())
    return {name: value for name, value in fields.items() if _CHANGEABLE.fullmatch(name)}


def check_accepted_changes(names: Collection[str], config: ml_collections.ConfigDict) -> None:
    """Raises a ValueError for names that `changeable_fields` does not have."""
    changeable = changeable_fields(config)
    names = [name for name in names if not name.startswith(f'{ENVIRONMENT}.')]
    unknown = [name for name in names if name not in changeable]
    if unknown:
        expected = f'expected some of {", ".join(sorted(changeable))}'
        raise ValueError(f'--accept_changes={",".join(unknown)}: {expected}')


def flatten_fields(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """Flattens nested dicts: `{'data': {'seed': 0}}` becomes `{'data.seed': 0}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten_fields(value, f'{prefix}{key}.')
        else:
            flat[f'{prefix}{key}'] = value
    return flat
