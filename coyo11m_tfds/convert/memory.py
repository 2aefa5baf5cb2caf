"""The memory that a build takes, and a check before it: who runs out of it dies without a word.

Measured are pages that no file holds: the system can give up the others, such as TensorFlow's code.
"""

from coyo11m_tfds.process import machine, workers
from coyo11m_tfds.process.sizes import readable

_PROGRAM = 550_000_000  # of `build` with TensorFlow, Beam and torch; it also writes, if it is alone
_WORKER = 250_000_000  # of each process if several write
_JOINED_ROW, _PLANNED_ROW = 130, 70  # while captions are joined, and of the plan that stays


def needed(num_rows: int, num_workers: int) -> int:
    """Returns the bytes that a build of a source with so many rows takes."""
    writing = _PLANNED_ROW * num_rows + _WORKER * (num_workers if num_workers > 1 else 0)
    return _PROGRAM + max(_JOINED_ROW * num_rows, writing)


def fitting_workers(num_rows: int) -> int:
    """Returns how many processes can write in the usable memory, at least 1."""
    room = machine.usable_memory() - needed(0, 1) - _PLANNED_ROW * num_rows
    return max(1, room // _WORKER)


def check(num_rows: int, num_workers: int) -> None:
    """Raises a ValueError if a build with at least so many processes cannot fit; 0 is for any."""
    count = workers.chosen(num_workers) or 1
    memory, need = machine.usable_memory(), needed(num_rows, count)
    if need > memory:
        fits = fitting_workers(num_rows) if needed(num_rows, 1) <= memory else 0
        remedy = f'Set num_workers to {fits} or' if fits else 'Use a machine with more, or'
        raise ValueError(
            f'the build of {num_rows:,} rows with num_workers={count} takes {readable(need)} of '
            f'memory, but this process can use {readable(memory)}. {remedy} raise its limit.'
        )
