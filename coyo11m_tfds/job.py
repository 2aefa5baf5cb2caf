"""Which process of a job this one is.

if job.process_index() == 0:
    build()
"""

import os
import sys


def process_index() -> int:
    """Returns the number of this process in its job, 0 if it is alone.

    It is the environment variable `RANK` (torchrun and its kin), else that of `jax.distributed`
    where a program has set that up. JAX itself is not started by asking.

    Raises:
        ValueError: `RANK` is no number.
    """
    rank = os.environ.get('RANK')
    if rank:
        if not rank.isdecimal():
            raise ValueError(f'RANK={rank}: expected the number of this process, from 0 up.')
        return int(rank)
    jax = sys.modules.get('jax')
    if jax and jax.distributed.is_initialized():
        return jax.process_index()
    return 0
