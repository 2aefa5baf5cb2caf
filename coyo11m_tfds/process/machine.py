"""Cores and memory that this process may use, which in a container are fewer than the machine has.

    machine.usable_cpus()     # 4
    machine.usable_memory()   # 17179869184 bytes
    machine.free_memory()     # 9663676416 of them

Limits are those of the process's control group and of every group above it, version 1 and 2.
"""

import math
import os
import pathlib
from collections.abc import Iterator


def usable_cpus(root: str | os.PathLike[str] = '/') -> int:
    """Returns how many cores this process can keep busy, at least 1.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    if hasattr(os, 'sched_getaffinity'):
        num_cpus = len(os.sched_getaffinity(0))
    else:
        num_cpus = os.cpu_count() or 1
    quotas = [_read(folder / 'cpu.max') for folder in _groups(root, '')]
    for folder in _groups(root, 'cpu'):
        quotas.append(_read(folder / 'cpu.cfs_quota_us') + _read(folder / 'cpu.cfs_period_us'))
    for quota in quotas:
        if len(quota) == 2 and min(quota) > 0:  # microseconds of each period
            num_cpus = min(num_cpus, math.ceil(quota[0] / quota[1]))
    return num_cpus


def usable_memory(root: str | os.PathLike[str] = '/') -> int:
    """Returns the bytes of memory that this process can use together with all others of its group.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    limits = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
    for folder in _groups(root, ''):
        limits += _read(folder / 'memory.max')
    for folder in _groups(root, 'memory'):
        limits += _read(folder / 'memory.limit_in_bytes')
    return min(limits)


def free_memory(root: str | os.PathLike[str] = '/') -> int:
    """Returns the bytes of memory that this process could take now without displacing others.

    The page cache counts as free, because the kernel gives it up on demand.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    free = [usable_memory(root)]
    for folder in _groups(root, ''):
        free += _left(folder, 'memory.max', 'memory.current')
    for folder in _groups(root, 'memory'):
        free += _left(folder, 'memory.limit_in_bytes', 'memory.usage_in_bytes')
    meminfo = _fields(pathlib.Path(root, 'proc/meminfo'))
    if 'MemAvailable:' in meminfo:
        free.append(1024 * meminfo['MemAvailable:'])
    return max(0, min(free))


def _left(folder: pathlib.Path, limit: str, usage: str) -> list[int]:
    """The memory that a control group leaves of its limit; [] if it has none."""
    numbers = _read(folder / limit) + _read(folder / usage)
    if len(numbers) < 2:
        return []
    stat = _fields(folder / 'memory.stat')
    cached = stat.get('total_inactive_file', stat.get('inactive_file', 0))
    return [numbers[0] - numbers[1] + cached]


def _groups(root: str | os.PathLike[str], controller: str) -> Iterator[pathlib.Path]:
    """Yields the folders of the process's control group and of those above it that are mounted.

    Args:
        root: folder that holds `proc` and `sys`.
        controller: of version 1; '' for version 2.
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


def _read(file: pathlib.Path) -> list[int]:
    """The numbers in a file; [] if there is no such file or it says 'max'."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []


def _fields(file: pathlib.Path) -> dict[str, int]:
    """The first number after the name on each line; {} if there is no such file."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
