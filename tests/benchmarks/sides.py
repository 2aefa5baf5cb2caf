"""Sides of a made-up benchmark, in a module of their own: each fresh process imports it."""

import os
from typing import Any


def answer(**settings: Any) -> dict[str, Any]:
    """Returns its settings with figures."""
    return settings | {'rate': 2.0, 'cpu_per_sample': 1e-6}


def fail() -> None:
    """Raises an error of two lines."""
    raise ValueError('no\nand more')


def lack() -> None:
    """Raises the error of a package that is not installed."""
    raise ModuleNotFoundError('no peer here')


def die() -> None:
    """Ends the process without an answer."""
    os._exit(3)
