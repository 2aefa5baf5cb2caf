"""Cores and memory that this process and all its control groups (version 2) may use."""

import itertools
import math
import os
import pathlib

# Device files of a GPU, and of TPUs up to v4 and from v5e on.
_DEVICES = ('gpu', 'nvidia[0-9]*'), ('tpu', 'accel[0-9]*'), ('tpu', 'vfio/[0-9]*')


def usable_cpus(root: str | os.PathLike[str] = '/') -> int:
    """Returns how many cores this process can use, at least 1; `root` holds proc and sys."""
    if hasattr(os, 'sched_getaffinity'):
        num_cpus = len(os.sched_getaffinity(0))
    else:
        num_cpus = os.cpu_count() or 1
    for quota in _limits(root, 'cpu.max'):  # microseconds of each period, and the period
        if len(quota) == 2:
            num_cpus = min(num_cpus, math.ceil(quota[0] / quota[1]))
    return num_cpus


def usable_memory(root: str | os.PathLike[str] = '/') -> int:
    """Returns the memory in bytes that this process and the others of its group can use."""
    physical = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return min([physical, *itertools.chain.from_iterable(_limits(root, 'memory.max'))])


def accelerators(root: str | os.PathLike[str] = '/') -> set[str]:
    """Returns which of 'gpu' and 'tpu' this machine has, by its device files."""
    # JAX, which takes seconds to start, may lack the package for them.
    dev = pathlib.Path(root, 'dev')
    return {kind for kind, files in _DEVICES for _ in dev.glob(files)}


def _limits(root: str | os.PathLike[str], name: str) -> list[list[int]]:
    """The numbers in a file of the process's control group, and of each mounted one above it."""
    limits = []
    try:
        lines = pathlib.Path(root, 'proc/self/cgroup').read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    for path in (line.removeprefix('0::/') for line in lines if line.startswith('0::/')):
        # Version 2 may be mounted next to version 1.
        for top in (pathlib.Path(root, 'sys/fs/cgroup', mount) for mount in ('', 'unified')):
            # In a container the path may be that on the host, of which only the top is mounted.
            below = pathlib.PurePosixPath(path)
            for folder in {top, top / below, *(top / parent for parent in below.parents)}:
                try:
                    limits.append([int(word) for word in (folder / name).read_text().split()])
                except (OSError, ValueError):
                    continue
    return limits
