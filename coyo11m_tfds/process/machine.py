"""Cores and memory that this process may use; in a container, less than the machine has.

    machine.usable_cpus()     # 4
    machine.usable_memory()   # 17179869184 bytes

Limits are those of the process's control group and of every group above it, version 1 and 2.
"""

import math
import os
import pathlib
from collections.abc import Iterator


def usable_cpus(root: str | os.PathLike[str] = '/') -> int:
    """Returns how many cores this process can keep busy, at least 1; `root` holds proc and sys."""
    if hasattr(os, 'sched_getaffinity'):
        num_cpus = len(os.sched_getaffinity(0))
    else:
        num_cpus = os.cpu_count() or 1
    quotas = [_numbers(folder / 'cpu.max') for folder in _groups(root, '')]
    for folder in _groups(root, 'cpu'):
        files = folder / 'cpu.cfs_quota_us', folder / 'cpu.cfs_period_us'
        quotas.append([number for file in files for number in _numbers(file)])
    for quota in quotas:
        if len(quota) == 2 and min(quota) > 0:  # microseconds of each period
            num_cpus = min(num_cpus, math.ceil(quota[0] / quota[1]))
    return num_cpus


def usable_memory(root: str | os.PathLike[str] = '/') -> int:
    """Returns the bytes of memory that this process and the others of its group can use."""
    limits = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
    for controller, name in (('', 'memory.max'), ('memory', 'memory.limit_in_bytes')):
        for folder in _groups(root, controller):
            limits += _numbers(folder / name)
    return min(limits)


def _groups(root: str | os.PathLike[str], controller: str) -> Iterator[pathlib.Path]:
    """Yields the folders of the process's control group and of those above it that are mounted.

    The controller is one of version 1; '' for version 2.
    """
    try:
        lines = pathlib.Path(root, 'proc/self/cgroup').read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(':', 2)
        if controller not in controllers.split(','):
            continue
        below = pathlib.PurePosixPath(path.lstrip('/'))
        # Version 2 may be mounted beside version 1; several controllers may share a mount.
        for mount in {controller, controllers} if controller else ('', 'unified'):
            top = pathlib.Path(root, 'sys/fs/cgroup', mount)
            # In a container the path may be that on the host, of which only the top is mounted.
            yield from {top, top / below, *(top / parent for parent in below.parents)}


def _numbers(file: pathlib.Path) -> list[int]:
    """The numbers in a file; [] if there is no such file or it says 'max'."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
