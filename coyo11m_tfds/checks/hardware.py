"""Cores, memory and disks of this machine, within the limits of its container.

hardware.check_cores()      # [Finding('cores', 'pass', '4 usable of 64 (limited by ...)')]
hardware.check_memory()
hardware.check_disks({'data_dir': ('OUT', 310 * 10**9), 'scratch': ('/scratch', 32 * 10**9)})
"""

import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping

from coyo11m_tfds.checks import finding
from coyo11m_tfds.checks.finding import Finding
from coyo11m_tfds.process import machine
from coyo11m_tfds.process.sizes import readable

# Planning a build of 12 million rows takes 1.5 GB; a process that writes, or reads with TensorFlow,
# takes 0.5 GB.
_AMPLE_MEMORY, _LEAST_MEMORY = 2_000_000_000, 500_000_000

# For logs, stores of captions and unfinished files, besides data.
_LEAST_ROOM = 1_000_000_000

SSD, MEMORY, NETWORK = 'SSD', 'memory', 'network'
ROTATING = 'rotating or virtual disk'  # virtual ones seldom say what they are
DISK = 'disk'  # nothing more is known of it
_IN_MEMORY = ('tmpfs', 'ramfs')
_NETWORK = re.compile(r'nfs\d?|cifs|smb3?|9p|ceph|lustre|gpfs|beegfs|fuse\..*|afs|glusterfs')


@dataclasses.dataclass(frozen=True)
class Disk:
    """The disk that a folder lies on, or would lie on.

    Attributes:
        folder: the one in question, or the nearest above it that exists.
        device: number that tells one file system from another.
        free: bytes that this user may still write.
        file_system: its name, such as 'ext4'; '' where the system does not tell.
        kind: `SSD`, `ROTATING`, `MEMORY`, `NETWORK` or `DISK`.
    """

    folder: str
    device: int
    free: int
    file_system: str
    kind: str


def check_cores(root: str | os.PathLike[str] = '/') -> list[Finding]:
    """How many cores can be kept busy; `root` holds `proc` and `sys`."""
    usable, there = machine.usable_cpus(root), os.cpu_count() or 1
    facts = {'usable': usable, 'there': there}
    if usable < there:
        text = f"{usable} usable of {there}, as the container's quota or the affinity allows"
    else:
        text = f'{usable}, without a quota'
    if usable == 1:
        mend = 'give the machine or the container more cores, e.g. docker run --cpus=4'
        return [finding.warned('cores', f'{text}: builds and encoders are slow', mend, **facts)]
    return [finding.passed('cores', text, **facts)]


def check_memory(root: str | os.PathLike[str] = '/') -> list[Finding]:
    """How much memory is free; `root` holds `proc` and `sys`."""
    usable, free = machine.usable_memory(root), machine.free_memory(root)
    text = f'{readable(free)} free of {readable(usable)} that this machine or container has'
    facts = {'usable': usable, 'free': free}
    mend = 'end other programs, or raise the limit, e.g. docker run --memory=16g'
    if free < _LEAST_MEMORY:
        needs = f'{text}; a process needs {readable(_LEAST_MEMORY)}'
        return [finding.failed('memory', needs, mend, **facts)]
    if free < _AMPLE_MEMORY:
        return [finding.warned('memory', f'{text}, little for a large source', mend, **facts)]
    return [finding.passed('memory', text, **facts)]


def look_at_disk(
    folder: str | os.PathLike[str],
    root: str | os.PathLike[str] = '/',
    usage: Callable[[str], tuple[int, int, int]] = shutil.disk_usage,
) -> Disk:
    """Finds the disk of a folder, which need not exist yet.

    Args:
        folder: local.
        root: folder that holds `proc` and `sys`.
        usage: gives `(total, used, free)` bytes of the file system of a folder.
    """
    path = pathlib.Path(folder).expanduser().absolute()
    existing = next(place for place in (path, *path.parents) if place.exists())
    if existing.is_file():
        raise NotADirectoryError(f'{path}: {existing} is a file; name another folder.')
    device = existing.stat().st_dev
    file_system = _file_system(device, root)
    kind = _kind(device, file_system, root)
    return Disk(str(existing), device, usage(str(existing))[2], file_system, kind)


def check_disks(
    places: Mapping[str, tuple[str, int | None]],
    root: str | os.PathLike[str] = '/',
    usage: Callable[[str], tuple[int, int, int]] = shutil.disk_usage,
) -> list[Finding]:
    """Checks that there is room in local folders, and tells what kind of disk they are on.

    Args:
        places: of each name the folder, and the bytes that will be written to it; None where it is
            only read.
        root, usage: see `look_at_disk`.
    """
    findings, taken = [], dict[int, int]()
    for name, (folder, needed) in places.items():
        label = f'disk of {name}'
        try:
            disk = look_at_disk(folder, root, usage)
        except OSError as error:
            findings.append(finding.of_error(label, error))
            continue
        if needed is not None:  # places on one disk share its room
            taken[disk.device] = needed = needed + taken.get(disk.device, 0)
            needed = max(needed, _LEAST_ROOM)
        findings.append(_judge(label, name, folder, disk, needed))
    return findings


def _judge(label: str, name: str, folder: str, disk: Disk, needed: int | None) -> Finding:
    facts = dataclasses.asdict(disk) | {'needed': needed}
    on = f'{disk.kind} ({disk.file_system})' if disk.file_system else disk.kind
    text = f'{folder} has {readable(disk.free)} free on {on}'
    option = '--data_dir' if name == 'data_dir' else 'scratch_dir in the config of the build'
    if needed is not None and not os.access(disk.folder, os.W_OK | os.X_OK):
        text = f'{folder}: this user cannot write to {disk.folder}'
        return finding.failed(label, text, f'choose another {option}', **facts)
    if needed is not None and disk.free < needed:
        text += f', expected {readable(needed)} for what will be on this disk'
        return finding.failed(label, text, f'free some space, or choose another {option}', **facts)
    if disk.kind == MEMORY:
        text += ', which counts as memory and is gone after a restart'
        return finding.warned(label, text, f'choose another {option}', **facts)
    if disk.kind == NETWORK and name == 'data_dir':
        text += ', where reading by rows is slow and a lost server ends the process'
        return finding.warned(label, text, "train with --config.data.engine='chunks'", **facts)
    return finding.passed(label, text, **facts)


def _file_system(device: int, root: str | os.PathLike[str]) -> str:
    """The name of the file system with this number; '' if the system does not tell."""
    try:
        lines = pathlib.Path(root, 'proc/self/mountinfo').read_text().splitlines()
    except OSError:  # not Linux
        return ''
    wanted = f'{os.major(device)}:{os.minor(device)}'
    for line in lines:
        mount, _, system = line.partition(' - ')
        if mount.split()[2] == wanted:
            return system.split()[0]
    return ''


def _kind(device: int, file_system: str, root: str | os.PathLike[str]) -> str:
    if file_system in _IN_MEMORY:
        return MEMORY
    if _NETWORK.fullmatch(file_system):
        return NETWORK
    block = pathlib.Path(root, f'sys/dev/block/{os.major(device)}:{os.minor(device)}')
    # Of a partition the queue is that of the whole disk, the folder above it.
    for queue in (block / 'queue', block.resolve().parent / 'queue'):
        try:
            return ROTATING if (queue / 'rotational').read_text().strip() == '1' else SSD
        except OSError:
            continue
    return DISK
