"""Which process of a job this one is.

if job.process_index() == 0:
    build()
if job.has_others():
    tell_the_others()
index, count = job.share()
mine = tasks[index::count]
"""

import os
import sys

# torchrun and its kin, Slurm's srun, Open MPI's mpirun; the first that is set counts.
_VARIABLES = {
    'RANK': 'WORLD_SIZE',
    'SLURM_PROCID': 'SLURM_NTASKS',
    'OMPI_COMM_WORLD_RANK': 'OMPI_COMM_WORLD_SIZE',
}


def process_index() -> int:
    """Returns the number of this process in its job, 0 if it is alone.

    It is the environment variable `RANK`, `SLURM_PROCID` or `OMPI_COMM_WORLD_RANK`, else that of
    `jax.distributed` where a program has set that up. JAX itself is not started by asking.

    Raises:
        ValueError: the variable is no number.
    """
    return _index() or 0


def has_others() -> bool:
    """True if this process was started as one of a job, so that others may wait for it.

    Raises:
        ValueError: see `process_index`.
    """
    return _index() is not None


def share() -> tuple[int, int]:
    """Returns the number of this process and how many there are, `(0, 1)` if it is alone.

    Raises:
        ValueError: a variable is no number, or that of the count is missing or too small.
    """
    for rank, size in _VARIABLES.items():
        if os.environ.get(rank):
            count = os.environ.get(size, '')
            if not count.isdecimal() or process_index() >= int(count):
                raise ValueError(
                    f'{rank}={os.environ[rank]} and {size}={count}: expected the number of this '
                    'process, from 0 up, and the count of all.'
                )
            return process_index(), int(count)
    if has_others():
        return process_index(), sys.modules['jax'].process_count()
    return 0, 1


def _index() -> int | None:
    for name in _VARIABLES:
        if rank := os.environ.get(name):
            if not rank.isdecimal():
                raise ValueError(f'{name}={rank}: expected the number of this process, from 0 up.')
            return int(rank)
    jax = sys.modules.get('jax')
    if jax and jax.distributed.is_initialized():
        return jax.process_index()
    return None
