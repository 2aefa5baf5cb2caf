"""Rules for fields, and errors in one line: with the field that is wrong, and with what to do."""

import contextlib
import errno
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

# What to do about errors of the operating system, which says only what is wrong.
_NO_ROOM = 'free some space there or choose another folder'
_NO_ACCESS = 'choose another path, or ask for the right to use this one'
_REMEDIES = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EACCES: _NO_ACCESS,
    errno.EPERM: _NO_ACCESS,
    errno.EROFS: _NO_ACCESS,
    errno.EEXIST: 'choose another path, or remove what is there',
    errno.ENOTDIR: 'a part of this path is a file; choose another path',
    errno.ENOENT: 'correct the path',
}


class FieldError(ValueError):
    """A wrong value of a field, such as `model.dtype`; programs print the field as a flag."""

    def __init__(self, field: str, value: Any, problem: str):
        # Pickling needs the arguments of this method.
        super().__init__(field, value, problem)
        self.field = field
        self.problem = f'{value!r}: {problem}'

    def __str__(self) -> str:
        return f'{self.field}={self.problem}'


def describe_type(value: Any) -> str:
    """Describes the type of a value, as 'a list', 'an int' or 'None'."""
    if value is None:
        return 'None'
    name = type(value).__name__
    article = 'an' if name[0].lower() in 'aeiou' else 'a'
    return f'{article} {name}'


class Faults:
    """Errors of independent checks, so that one message shows all of them."""

    def __init__(self):
        self._errors: list[ValueError] = []

    def add(self, error: ValueError) -> None:
        """Keeps an error, or all of another message, for `check`."""
        if isinstance(error, _SeveralFaults):
            self._errors += error.errors
        else:
            self._errors.append(error)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Keeps a ValueError of the block for `check`."""
        try:
            yield
        except ValueError as error:
            self.add(error)

    def check(self) -> None:
        """Raises the only error, or a ValueError with the messages of all."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise _SeveralFaults(self._errors)


class _SeveralFaults(ValueError):
    def __init__(self, faults: list[ValueError]):
        texts = [f'({number}) {fault}' for number, fault in enumerate(faults, 1)]
        super().__init__(f'{len(faults)} faults: {" ".join(texts)}')
        self.errors = faults


class FieldRule(NamedTuple):
    """What the value of a field must be, in words and as a test."""

    expected: str
    holds: Callable[[Any], bool]

    def check(self, field: str, value: Any) -> None:
        """Raises a FieldError, with what was expected, if the rule does not hold."""
        if not self.holds(value):
            raise FieldError(field, value, f'expected {self.expected}')


def at_least(minimum: float) -> FieldRule:
    """Returns the rule for a finite number of at least `minimum`."""
    return FieldRule(f'at least {minimum}', lambda x: minimum <= x < math.inf)


def one_of(*values: str) -> FieldRule:
    """Returns the rule for one of some texts."""
    return FieldRule(' or '.join(map(repr, values)), lambda x: x in values)


UNIT_INTERVAL = FieldRule('from 0 to 1', lambda x: 0 <= x <= 1)


class MissingFolderError(FieldError, FileNotFoundError):
    """A folder that a field names does not exist."""


def describe_error(error: BaseException) -> str:
    """Returns the message of an error in one line, often with advice."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and 'pip install' not in text:
        text = f"{error.name} is not installed: pip install -c constraints.txt -e '.[convert,text]'"
    # Of the operating system: those that this project raises have no number, but their own advice.
    elif isinstance(error, OSError) and error.errno is not None:
        text = str(error.strerror)
        if error.filename is not None:
            text = f'{error.filename}: {text}'
        if error.errno in _REMEDIES:
            text += f': {_REMEDIES[error.errno]}.'
    lines = [line.strip() for line in text.splitlines()]
    return ' '.join(filter(None, lines))


def follow_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, the error that it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def summarize_error(error: BaseException) -> str:
    """Returns the type and the first line of an error, without TensorFlow's tracebacks."""
    lines = str(error).splitlines() or ['']
    message = f'{type(error).__name__}: {lines[0]}'
    # TensorFlow's has a traceback, which ends with the error that it is about.
    for line in lines[1:]:
        # With the module of the error, unless it is one of Python's own.
        match = re.match(r'(?:\w+\.)*(\w+Error: .*)', line)
        if match:
            message = match[1]
    return message


def damaged_file_error(name: str, kind: str, problem: str) -> ValueError:
    """Returns the error for a file that is not of its kind."""
    return ValueError(
        f'{name}: is damaged or not {kind}, {problem}. Copy, download or write it again.'
    )


def check_same_entries(
    expected: Mapping[str, Any],
    entries: Mapping[str, Any],
    name: str,
    origin: str,
    advice: str = 'Remove the file, or choose another folder.',
) -> None:
    """Raises a ValueError if an entry of the file `name` differs from that expected by `origin`."""
    # In order, so that all processes and runs name the same one.
    for entry in sorted(expected.keys() | entries.keys()):
        value = entries.get(entry)
        expected_value = expected.get(entry)
        if value != expected_value:
            raise ValueError(
                f'{name}: {entry} is {value!r}, but {expected_value!r} {origin}. {advice}'
            )
