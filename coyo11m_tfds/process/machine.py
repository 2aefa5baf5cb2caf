"""Cores and memory that this process and all its control groups (version 2) may use."""

import itertools
import math
import os
import pathlib

# Device files of a GPU, and of TPUs up to v4 and from v5e on.
_DEVICES = (('gpu', 'nvidia[0-9]*'), ('tpu', 'accel[0-9]*'), ('tpu', 'vfio/[0-9]*'))


def usable_cpus(root: str | os.PathLike[str] = '/') -> int:
    """Returns how many cores this process can use, at least 1; `root` holds proc and sys."""
    # Linux alone has it: a scheduler may have bound this process to some cores.
    if hasattr(os, 'sched_getaffinity'):
        num_cpus = len(os.sched_getaffinity(0))
    else:
        num_cpus = os.cpu_count() or 1
    for numbers in _limits(root, 'cpu.max'):
        if len(numbers) == 2:
            quota, period = numbers  # microseconds
            # Part of a core is a core that others use, too.
            num_cpus = min(num_cpus, math.ceil(quota / period))
    return num_cpus


def usable_memory(root: str | os.PathLike[str] = '/') -> int:
    """Returns the memory in bytes that this process and the others of its group can use."""
    physical = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    limits = itertools.chain.from_iterable(_limits(root, 'memory.max'))
    return min([physical, *limits])


def accelerators(root: str | os.PathLike[str] = '/') -> set[str]:
    """Returns which of 'gpu' and 'tpu' this machine has, by its device files."""
    # JAX, which takes seconds to start, may lack the package for them.
    dev = pathlib.Path(root, 'dev')
    kinds = set()
    for kind, pattern in _DEVICES:
        if any(dev.glob(pattern)):
            kinds.add(kind)
    return kinds


def _limits(root: str | os.PathLike[str], name: str) -> list[list[int]]:
    """Returns the numbers in a file of the process's control group and of those above it."""
    limits = []
    for folder in _control_groups(root):
        try:
            words = (folder / name).read_text().split()
            limits.append([int(word) for word in words])
        # A group without this limit has no such file, or a word in it.
        except (OSError, ValueError):
            continue
    return limits


def _control_groups(root: str | os.PathLike[str]) -> set[pathlib.Path]:
    """Returns the folders where the process's control group, and those above it, may be mounted."""
    try:
        lines = pathlib.Path(root, 'proc/self/cgroup').read_text().splitlines()
    except OSError:  # not Linux
        return set()
    folders = set()
    for line in lines:
        # Of version 2, which may be mounted next to version 1.
        if not line.startswith('0::/'):
            continue
        below = pathlib.PurePosixPath(line.removeprefix('0::/'))
        for mount in ('', 'unified'):
            top = pathlib.Path(root, 'sys/fs/cgroup', mount)
            # In a container the path may be that on the host, of which only the top is mounted.
            folders |= {top, top / below}
            folders.update(top / parent for parent in below.parents)
    return folders
