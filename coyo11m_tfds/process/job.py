"""Which process of a job this one is.

if job.process_index() == 0:
    build()
index, count = job.share()
mine = tasks[index::count]
"""

import os
import sys
from typing import NamedTuple


class _Launcher(NamedTuple):
    """Its variables: the number of a process, and how many there are."""

    rank: str
    size: str


# torchrun and its kin, Slurm's srun, Open MPI's mpirun; the first that is set counts.
_LAUNCHERS = (
    _Launcher('RANK', 'WORLD_SIZE'),
    _Launcher('SLURM_PROCID', 'SLURM_NTASKS'),
    _Launcher('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'),
)


def process_index() -> int:
    """Returns the number of this process in its job, 0 if it is alone.

    It is the environment variable `RANK`, `SLURM_PROCID` or `OMPI_COMM_WORLD_RANK`, else that of
    `jax.distributed` where a program has set that up. Asking does not start JAX.

    Raises:
        ValueError: the variable is no number.
    """
    return _index() or 0


def share() -> tuple[int, int]:
    """Returns the number of this process and how many there are, `(0, 1)` if it is alone.

    Raises:
        ValueError: a variable is no number, or that of the count is missing or too small.
    """
    if launcher := _launcher():
        rank, size = launcher.rank, launcher.size
        count = os.environ.get(size, '')
        if not count.isdecimal() or process_index() >= int(count):
            raise ValueError(
                f'{rank}={os.environ[rank]} and {size}={count}: expected the number of this '
                'process, from 0 up, and the count of all.'
            )
        return process_index(), int(count)
    if _index() is not None:
        return process_index(), sys.modules['jax'].process_count()
    return 0, 1


def _launcher() -> _Launcher | None:
    return next((each for each in _LAUNCHERS if os.environ.get(each.rank)), None)


def _index() -> int | None:
    if launcher := _launcher():
        rank = os.environ[launcher.rank]
        if not rank.isdecimal():
            raise ValueError(
                f'{launcher.rank}={rank}: expected the number of this process, from 0 up.'
            )
        return int(rank)
    jax = sys.modules.get('jax')
    if jax and jax.distributed.is_initialized():
        return jax.process_index()
    return None
