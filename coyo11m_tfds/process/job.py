"""The number of this process in its job, and the number of processes."""

import argparse
import os
import sys
from collections.abc import Sequence

from coyo11m_tfds.process.sizes import format_count

# Variables with the number of a process and the count of all, of torchrun and its kin, Slurm's
# srun, Open MPI's mpirun; the first that is set counts.
_LAUNCHERS = {
    'RANK': 'WORLD_SIZE',
    'SLURM_PROCID': 'SLURM_NTASKS',
    'OMPI_COMM_WORLD_RANK': 'OMPI_COMM_WORLD_SIZE',
}
# Their variables with the number of a process among those of its machine.
_ON_MACHINE = 'LOCAL_RANK', 'SLURM_LOCALID', 'OMPI_COMM_WORLD_LOCAL_RANK'


def process_index() -> int:
    """Returns the number of this process in its job, 0 without a job; does not start JAX.

    Raises a ValueError for a launcher's variable that is not a number.
    """
    for variable in _LAUNCHERS:
        number = os.environ.get(variable)
        # An empty one is as good as none.
        if not number:
            continue
        if not number.isdecimal():
            raise ValueError(
                f'{variable}={number}: expected the number of this process, from 0 up.'
            )
        return int(number)
    jax = sys.modules.get('jax')
    if jax and jax.distributed.is_initialized():
        return jax.process_index()
    return 0


def index_and_count() -> tuple[int, int]:
    """Returns the number of this process and the number of processes, `(0, 1)` without a job.

    Raises a ValueError for launchers' variables that contradict each other.
    """
    index = process_index()
    for variable, count_variable in _LAUNCHERS.items():
        if not os.environ.get(variable):
            continue
        count = os.environ.get(count_variable, '')
        if not count.isdecimal() or index >= int(count):
            raise ValueError(
                f'{variable}={index} and {count_variable}={count}: expected the number of this '
                'process, from 0 up, and the count of all, which is larger. Set both, or none.'
            )
        return index, int(count)
    jax = sys.modules.get('jax')
    if jax and jax.distributed.is_initialized():
        return index, jax.process_count()
    return index, 1


def index_on_machine() -> int:
    """Returns the number of this process among those of its job on this machine, 0 if unknown."""
    for name in _ON_MACHINE:
        number = os.environ.get(name, '')
        if number.isdecimal():
            return int(number)
    return 0


def add_share_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--part=I/N` of programs whose processes share the parts of their output."""
    hint = 'number of this process, from 0, and of all (by default from the launcher)'
    parser.add_argument('--part', type=_parse_share, metavar='I/N', help=hint)


def _parse_share(text: str) -> tuple[int, int]:
    """Returns `(1, 4)` of '1/4'; `check_share` refuses numbers that do not fit together."""
    index, slash, count = text.partition('/')
    if not (slash and index.isdecimal() and count.isdecimal()):
        # Of a ValueError, argparse would show the name of this function.
        raise argparse.ArgumentTypeError(f'{text!r}: expected I/N with I from 0 to N - 1')
    return int(index), int(count)


def check_share(share: tuple[int, int]) -> None:
    """Raises a ValueError for a wrong `(number, count)`."""
    index, count = share
    if not 0 <= index < count:
        raise ValueError(f'part {index}/{count}: expected I/N with I from 0 to N - 1.')


def describe_missing_parts(parts: Sequence[object]) -> str:
    """Returns the end of a report about parts that other processes have to make; '' for none."""
    if not parts:
        return ''
    missing = format_count(len(parts), 'part is', 'parts are')
    return (
        f'; {missing} missing, such as {parts[0]}: the other processes make them, or the same '
        'command where they have ended'
    )
