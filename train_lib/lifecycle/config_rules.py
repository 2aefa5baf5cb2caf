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
    """Returns the rule of a finite number above a bound."""
    return FieldRule(f'more than {bound}', lambda x: bound < x < math.inf)


_SHARE = FieldRule('at least 0 and less than 1', lambda x: 0 <= x < 1)
_FINITE = FieldRule('a finite number', math.isfinite)
# Of a run, which counts its steps in int32.
_NUM_STEPS = FieldRule('from 1 to 2**31 - 1', lambda x: 1 <= x < 2**31)
_SEED = FieldRule('from 0 to 2**31 - 1', lambda x: 0 <= x < 2**31)
_EXIT_STATUS = FieldRule('from 0 to 255, an exit status', lambda x: 0 <= x <= 255)
_DATA_FOLDER = FieldRule('the folder of a built data set, .../coyo11m_tfds/CONFIG/1.0.0', bool)

# In the order in which they are checked.
_RULES = {
    'accumulate': at_least(1),
    'num_steps': _NUM_STEPS,
    'log_every': at_least(1),
    'keep_checkpoints': at_least(1),
    'data.device_prefetch': at_least(1),
    'preview.count': at_least(1),
    'preview.num_steps': at_least(1),
    'max_skipped_in_a_row': at_least(0),
    'max_skipped': at_least(0),
    'data.cache_gb': at_least(0),
    'data.ram_budget_gb': at_least(0),
    'model.width': at_least(0),
    'model.depth': at_least(0),
    'model.num_heads': at_least(0),
    'model.crops': at_least(0),
    'model.unroll': at_least(0),
    'model.patch_size': at_least(0),
    'model.mlp_ratio': at_least(0),
    'optimizer.weight_decay': at_least(0),
    'profile_steps': at_least(0),
    'eval_every': at_least(0),
    'preview_every': at_least(0),
    'checkpoint_every': at_least(0),
    'keep_every': at_least(0),
    # -1: the engine chooses.
    'data.prefetch': at_least(-1),
    'optimizer.learning_rate': _above(0),
    'optimizer.muon_learning_rate': _above(0),
    'optimizer.clip_norm': _above(0),
    'flow.logit_std': _above(0),
    'preview.time_shift': _above(0),
    'ema_decay': _SHARE,
    'optimizer.b1': _SHARE,
    'optimizer.b2': _SHARE,
    'preview.guidance_low': _SHARE,
    'preview.guidance_high': UNIT_INTERVAL,
    'flow.logit_mean': _FINITE,
    'preview.guidance': _FINITE,
    'seed': _SEED,
    'requeue_status': _EXIT_STATUS,
    'data.dir': _DATA_FOLDER,
    'model.dtype': one_of('bfloat16', 'float32'),
    'preview.sampler': one_of('euler', 'heun'),
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
    """Raises a FieldError if a field has a wrong value, and a ValueError if there is no such field.

    Args:
        config: Configuration of a run.
        needs_data: Whether it must name a data set; programs that draw need none.
    """
    fields = flatten_fields(config.to_dict())
    # A file may have replaced a whole block by one with fewer fields.
    missing = [name for name in _RULES if name not in fields]
    if missing:
        raise ValueError(
            f'the configuration lacks the field {missing[0]!r}: set the fields of a block one by '
            'one, so that the others keep their defaults'
        )
    for name, value in fields.items():
        # A file may set it, whatever the kind of the field is.
        if value is None:
            raise FieldError(name, value, "expected a value: 0 or '' stands for none")
    for name, rule in _RULES.items():
        # A mixture takes the place of the folder.
        if name == DATA_SET and (fields[MIX] or not needs_data):
            continue
        rule.check(name, fields[name])
    _check_combinations(config)


def _check_combinations(config: ml_collections.ConfigDict) -> None:
    """Raises a FieldError for values that do not go together."""
    fields = flatten_fields(config.to_dict())
    if fields[MIX] and fields[DATA_SET]:
        raise FieldError(DATA_SET, fields[DATA_SET], 'expected none with data.mix')
    if fields['data.stages'] and not fields[MIX]:
        raise FieldError('data.stages', fields['data.stages'], 'expected none without data.mix')
    low = config.preview.guidance_low
    high = config.preview.guidance_high
    if low >= high:
        problem = f'expected less than preview.guidance_high={high!r}'
        raise FieldError('preview.guidance_low', low, problem)
    if config.gradient_dtype not in ('float32', config.model.dtype):
        problem = f"expected 'float32' or model.dtype={config.model.dtype!r}"
        raise FieldError('gradient_dtype', config.gradient_dtype, problem)
    # Steps that are to be kept must be among those that are saved.
    every = config.checkpoint_every
    keeps_some = config.keep_every > 0
    if keeps_some and (not every or config.keep_every % every):
        problem = f'expected a multiple of checkpoint_every={every}'
        raise FieldError('keep_every', config.keep_every, problem)


def open_sources(config: ml_collections.ConfigDict) -> tuple[input_pipeline.MixSource, ...]:
    """Opens the data sets of `data.mix` or `data.dir`; reads their metadata and no records.

    Raises a MissingFolderError if there is no such data set, and an OSError or a ValueError if one
    cannot be read or does not fit the others.
    """
    field = MIX if config.data.mix else DATA_SET
    data = config.data.mix or config.data.dir
    try:
        return input_pipeline.open_mix(data)
    except FileNotFoundError as error:
        raise MissingFolderError(field, data, str(error).removeprefix(f'{data}: ')) from error


def with_absolute_places(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns all fields as JSON holds them; places in them are valid in every folder."""
    # A checkpoint holds them, and programs that read it run in other folders than the training.
    fields = json.loads(json.dumps(config.to_dict()))
    data = fields['data']
    data['dir'] = _make_absolute(data['dir'])
    data['cache_dir'] = _make_absolute(data['cache_dir'])
    for source in data['mix']:
        source['dir'] = _make_absolute(source['dir'])
    # It may end in @STEP.
    fields['init_from'] = _make_absolute(fields['init_from'])
    runner, colon, model = fields['encoder'].partition(':')
    fields['encoder'] = f'{runner}{colon}{_make_folder_absolute(model)}'
    fields['compilation_cache'] = _make_folder_absolute(fields['compilation_cache'])
    preview = fields['preview']
    preview['vae'] = _make_folder_absolute(preview['vae'])
    return fields


def _make_absolute(place: str) -> str:
    """Returns the absolute path of a folder or URL; '' stays what it is."""
    return storage.make_absolute(place) if place else ''


def _make_folder_absolute(name: str) -> str:
    """Returns the absolute path of a folder that exists; what is none, as on the hub, stays."""
    is_folder = os.path.isdir(storage.expand_home(name))
    return _make_absolute(name) if is_folder else name


def changeable_fields(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the fields that a resumed run may change on purpose, with their values."""
    fields = flatten_fields(config.to_dict())
    return {name: value for name, value in fields.items() if _CHANGEABLE.fullmatch(name)}


def check_accepted_changes(names: Collection[str], config: ml_collections.ConfigDict) -> None:
    """Raises a ValueError for names that `changeable_fields` does not have."""
    changeable = changeable_fields(config)
    unknown = []
    for name in names:
        # Which settings of an environment differ is known only by the checkpoint.
        is_of_environment = name.startswith(f'{ENVIRONMENT}.')
        if name not in changeable and not is_of_environment:
            unknown.append(name)
    if unknown:
        expected = f'expected some of {", ".join(sorted(changeable))}'
        raise ValueError(f'--accept_changes={",".join(unknown)}: {expected}')


def find_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple]:
    """Returns both values of each name whose values differ; 'absent' where there is none."""
    differences = {}
    for name in sorted(saved.keys() | current.keys()):
        saved_value = saved.get(name, 'absent')
        current_value = current.get(name, 'absent')
        if saved_value != current_value:
            differences[name] = saved_value, current_value
    return differences


def flatten_fields(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """Flattens nested dicts: `{'data': {'seed': 0}}` becomes `{'data.seed': 0}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten_fields(value, f'{prefix}{key}.')
        else:
            flat[f'{prefix}{key}'] = value
    return flat
