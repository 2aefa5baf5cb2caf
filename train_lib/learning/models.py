"""Models by kind, and their sizes by name.

Another model is a `flax.linen.Module` in any importable module. Like `dit.DiT`, it has the fields
`dtype` and `pin` and the method `flops`, takes the same arguments, and declares the fields of a
preset or of the block `model` that it needs. If it has a field `crops` above 1, its last argument
is the crop. Muon trains the kernels in its module `blocks`; one named `qkv` or `words` holds
three or two matrices (see `state.muon`). docs/training.md has an example.

A name is a size and a patch size. Sizes S to XL are those of DiT (Peebles & Xie 2023, table 1);
`tiny` is for the demo and the tests.
"""

import dataclasses
import importlib
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from coyo11m_tfds.process.errors import FieldError
from train_lib.learning.dit import POOLED, SEQUENCE, DiT

# 'full' saves memory: without it, a batch of 256 with S/2 takes 64 GB (compiled for a CPU).
SIZES: dict[str, dict[str, Any]] = {
    'tiny': {'width': 128, 'depth': 6, 'num_heads': 4, 'unroll': 6},
    'S': {'width': 384, 'depth': 12, 'num_heads': 6, 'remat': 'full'},
    'B': {'width': 768, 'depth': 12, 'num_heads': 12, 'remat': 'full'},
    'L': {'width': 1024, 'depth': 24, 'num_heads': 16, 'remat': 'full'},
    'XL': {'width': 1152, 'depth': 28, 'num_heads': 16, 'remat': 'full'},
}

# Of the block `model`, where they are neither 0 nor ''; a model of another kind need not have them.
_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(DiT)
    if field.default is not dataclasses.MISSING
}


def make_model(
    name: str, *, kind: str = 'dit', dtype: str = 'bfloat16', num_crops: int = 1, **fields: Any
) -> nn.Module:
    """Makes a model from the block `model` of a configuration.

    Args:
        name: Size and patch size, such as 'S/2'.
        kind: 'dit', or 'MODULE:CLASS' of a model that can be imported.
        dtype: Dtype of the computation.
        num_crops: Number of crops of an image in the data set, for a field `crops` of 0.
        **fields: Fields of the model; 0 or '' keeps the value of the preset or, without one there,
            of the model. A `text` of '' is 'sequence' if there is a `vocabulary`, else 'pooled'.

    Raises:
        FieldError: There is no such model, or it does not take the value of a field.
    """
    model = DiT
    if kind != 'dit':
        model = _import_model(kind)
    names = {field.name for field in dataclasses.fields(model)}
    values = {field: value for field, value in fields.items() if value not in (0, '')}
    for field, value in values.items():
        # A configuration has all fields of `DiT`: of another kind they must stay as they are.
        default = _DEFAULTS.get(field, 0)
        if field not in names and value != default:
            problem = f'expected {default!r}, a model of kind {kind!r} has no such field'
            raise FieldError(f'model.{field}', value, problem)
    if 1 < values.get('crops', 1) < num_crops:
        problem = (
            f'the data set has {num_crops} crops of an image, expected 0, 1 or at least as many'
        )
        raise FieldError('model.crops', values['crops'], problem)
    text = choose_text('', fields.get('vocabulary', 0))
    # Later ones replace earlier ones: what the data set says, the preset, what the user sets.
    values = {'crops': num_crops, 'text': text} | _read_preset(name) | values
    # Another kind of model need not have all fields that a preset has for `DiT`.
    values = {field: value for field, value in values.items() if field in names}
    return model(**values, dtype=jnp.dtype(dtype))


def choose_text(text: str, vocabulary: int) -> str:
    """Returns what of a text conditions the blocks: `text`, or for '' all that records hold."""
    if text:
        return text
    return SEQUENCE if vocabulary else POOLED


def identity_fields(**fields: Any) -> dict[str, Any]:
    """Returns the fields of the block `model` that decide the weights, as plain values."""
    # These change speed, memory and roundings; a resumed run may choose others.
    others = 'dtype', 'remat', 'attention', 'unroll'
    return {name: value for name, value in fields.items() if name not in others}


def _import_model(kind: str) -> Any:
    """Imports the class of a model; raises a FieldError for a class that lacks what models have."""
    module, _, name = kind.partition(':')
    try:
        model = getattr(importlib.import_module(module), name)
    # A TypeError for a relative name, such as `.mine`.
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        problem = f"{error}; expected 'dit' or MODULE:CLASS that can be imported"
        raise FieldError('model.kind', kind, problem) from error
    # A field without a default is no attribute of its class.
    fields = getattr(model, '__dataclass_fields__', ())
    attributes = set(dir(model)).union(fields)
    required = '__call__', 'dtype', 'flops', 'pin'
    missing = [attribute for attribute in required if attribute not in attributes]
    if missing:
        problem = (
            f'lacks {", ".join(missing)}: expected a flax.linen.Module with what '
            'train_lib.learning.dit.DiT has of these'
        )
        raise FieldError('model.kind', kind, problem)
    return model


def _read_preset(name: str) -> dict[str, Any]:
    """Returns the fields of a model that its name stands for."""
    size, _, patch = name.partition('/')
    # Not `isdigit`, which takes digits such as ² that are no number.
    is_patch = patch.isdecimal() and int(patch) >= 1
    if size not in SIZES or not is_patch:
        problem = f'expected SIZE/PATCH such as "S/2" with SIZE one of {", ".join(SIZES)}.'
        raise FieldError('model.name', name, problem)
    return SIZES[size] | {'patch_size': int(patch)}
