"""Rules for the JSON files of foreign models: each field is checked once, before anything uses it.

    config = model_fields.read_object(folder / 'config.json')
    model_fields.check(config, {'num_layers': model_fields.whole(1, 1000)}, folder / 'config.json')

A rule holds or does not, whatever the type of the value, and never raises an error.
"""

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coyo11m_tfds.process.errors import FieldRule

_MAX_BYTES = 64 << 20  # Gemma's tokenizer_config.json has 1.2 MB

BOOLEAN = FieldRule('true or false', lambda x: type(x) is bool)
OBJECT = FieldRule('an object', lambda x: isinstance(x, dict))
TEXT = FieldRule('a text', lambda x: isinstance(x, str))


def whole(least: int, most: int, multiple_of: int = 1) -> FieldRule:
    """Returns the rule for a whole number in a range, which may have to be a multiple."""
    expected = f'a whole number from {least} to {most}'
    if multiple_of > 1:
        expected += f', a multiple of {multiple_of}'

    def holds(value: Any) -> bool:
        # `type`, because true and false are whole numbers in Python.
        if type(value) is not int:
            return False
        return least <= value <= most and value % multiple_of == 0

    return FieldRule(expected, holds)


def number(least: float, most: float) -> FieldRule:
    """Returns the rule for a number in a range; NaN lies in none."""
    return FieldRule(
        f'a number from {least:g} to {most:g}',
        lambda x: type(x) in (int, float) and least <= x <= most,
    )


def exactly(value: Any) -> FieldRule:
    """Returns the rule for one value of one type."""
    return FieldRule(repr(value), lambda x: type(x) is type(value) and x == value)


def pair_of(first: FieldRule, second: FieldRule) -> FieldRule:
    """Returns the rule for a list of two values that fulfil a rule each."""

    def holds(value: Any) -> bool:
        if not isinstance(value, list) or len(value) != 2:
            return False
        return first.holds(value[0]) and second.holds(value[1])

    return FieldRule(f'a list of {first.expected} and {second.expected}', holds)


def list_of(rule: FieldRule, most: int) -> FieldRule:
    """Returns the rule for a list of 1 to `most` values that fulfil a rule."""

    def holds(value: Any) -> bool:
        # The length first: a foreign list may have millions of values.
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            return False
        return all(map(rule.holds, value))

    return FieldRule(f'a list of 1 to {most}, each {rule.expected}', holds)


def optional(rule: FieldRule) -> FieldRule:
    """Returns the rule for null, or a value that fulfils a rule."""
    return FieldRule(f'null or {rule.expected}', lambda x: x is None or rule.holds(x))


def check(fields: Mapping[str, Any], rules: Mapping[str, FieldRule], name: str | Path) -> None:
    """Raises a ValueError for a field of the file `name` that breaks its rule.

    Fields without a rule are not used. Those that are missing have defaults, or are optional.
    """
    for field, rule in rules.items():
        if field in fields and not rule.holds(fields[field]):
            raise ValueError(f'{name}: {field} is {show(fields[field])}, expected {rule.expected}')


def show(value: Any) -> str:
    """Returns a value of a foreign file in one short line."""
    return reprlib.repr(value)


def shorten(text: object) -> str:
    """Returns the text of a foreign error in one line, of which 300 characters are shown."""
    line = ' '.join(str(text).split())
    if len(line) > 300:
        line = f'{line[:300]} ...'
    return line


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises a ValueError that names the file."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f'{path}: has {show(content)}, expected an object')
    return content


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; raises a ValueError that names the file."""
    try:
        size = path.stat().st_size
        # Before it is read: parsed JSON takes many times the memory of its text.
        if size > _MAX_BYTES:
            raise ValueError(f'it has {size:,} bytes, expected at most {_MAX_BYTES:,}')
        return json.loads(path.read_text(encoding='utf-8'))
    except OSError as error:
        raise ValueError(f'{path}: cannot be read: {error.strerror}') from error
    except RecursionError:
        # Not `from` it, whose traceback has a thousand frames.
        raise ValueError(f'{path}: its objects or lists are nested too deeply') from None
    except ValueError as error:
        raise ValueError(f'{path}: is not JSON of a model: {shorten(error)}') from error
