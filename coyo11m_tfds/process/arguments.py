"""Converts arguments of callers, such as NumPy's numbers and iterables, where they come in."""

import dataclasses
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coyo11m_tfds.process.errors import FieldError

# By annotation: what is expected, the types that are converted, those that are not, and the
# conversion.
_KINDS: dict[Any, tuple[str, Any, Any, Callable[[Any], Any]]] = {
    int: ('a whole number', numbers.Integral, bool, int),
    int | None: (
        'a whole number or None',
        numbers.Integral | None,
        bool,
        lambda number: None if number is None else int(number),
    ),
    float: ('a number', numbers.Real, bool, float),
    bool: ('True or False', bool | np.bool_, (), bool),
    str: ('a string', str, (), str),
    str | os.PathLike[str]: ('a path', str | os.PathLike, (), os.fspath),
    str | Mapping[str, float]: (
        'a string, or a dict of weights',
        str | Mapping,
        (),
        lambda spec: spec,
    ),
    Sequence[str]: ("a sequence of names, such as ('key',)", Iterable, str | Mapping, tuple),
    Sequence[str] | None: (
        "a sequence of names, such as ('key',), or None",
        Iterable | None,
        str | Mapping,
        lambda names: None if names is None else tuple(names),
    ),
    Sequence[Mapping[str, Any]]: ('a sequence of dicts', Iterable, str | Mapping, tuple),
}


def convert(name: str, value: Any, kind: Any) -> Any:
    """Returns the value of an argument, converted to the type of its annotation if it can be.

    Raises a FieldError for a value of another kind; one whose annotation is not in `_KINDS` is
    returned as it is.
    """
    if kind not in _KINDS:
        return value
    expected, types, others, conversion = _KINDS[kind]
    if not isinstance(value, types) or isinstance(value, others):
        raise FieldError(name, value, f'expected {expected}')
    return conversion(value)


def convert_fields(settings: Any) -> None:
    """Converts all fields of a frozen dataclass; FieldError for a value of another kind."""
    for field in dataclasses.fields(settings):
        value = convert(field.name, getattr(settings, field.name), field.type)
        object.__setattr__(settings, field.name, value)
