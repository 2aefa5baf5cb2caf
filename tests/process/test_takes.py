"""A function of options has the fields of their class as its arguments."""

import dataclasses
import inspect

import pytest

from coyo11m_tfds.process.takes import takes


@dataclasses.dataclass(frozen=True)
class Options:
    data: str
    _: dataclasses.KW_ONLY
    size: int
    name: str = 'x'


@takes(Options)
def read(options: Options) -> tuple[str, int, str]:
    """Reads."""
    return options.data, options.size, options.name


def test_the_fields_are_the_arguments():
    assert read('d', size=3) == ('d', 3, 'x')
    assert read(size=3, data='d', name='y') == ('d', 3, 'y')
    assert str(inspect.signature(read)) == (
        "(data: str, *, size: int, name: str = 'x') -> tuple[str, int, str]"
    )
    assert (read.__name__, read.__doc__) == ('read', 'Reads.')


WRONG = {
    'one is missing': (('d',), {}, "missing 1 required keyword-only argument: 'size'"),
    'one is misspelt': (('d',), {'size': 3, 'sise': 4}, "unexpected keyword argument 'sise'"),
    'one comes without its name': (('d', 3), {'size': 3}, 'takes 2 positional arguments but 3'),
}


@pytest.mark.parametrize(('args', 'kwargs', 'message'), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(args, kwargs, message):
    with pytest.raises(TypeError, match=message):
        read(*args, **kwargs)
