"""Functions whose arguments are the fields of a class of options, declared once."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec('Arguments')
Options = TypeVar('Options')
Result = TypeVar('Result')


def takes(
    options_class: Callable[Arguments, Options],
) -> Callable[[Callable[[Options], Result]], Callable[Arguments, Result]]:
    """Gives a function of options the arguments of their class, such as a dataclass.

        @dataclasses.dataclass(frozen=True)
        class Options:
            data: str
            _: dataclasses.KW_ONLY
            batch_size: int = 1

        @takes(Options)
        def read(options: Options) -> Batches: ...

        read('D', batch_size=8)

    Type checkers, `help` and notebooks see the arguments by name, with their defaults. Wrong
    arguments are a TypeError, which names the class.
    """

    def decorate(function: Callable[[Options], Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            return function(options_class(*args, **kwargs))

        parameters = inspect.signature(options_class).parameters
        signature = inspect.signature(function).replace(parameters=list(parameters.values()))
        # Else `inspect` would find that of the function, whose only argument is the options.
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate
