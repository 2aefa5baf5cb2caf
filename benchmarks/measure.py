"""Runs a program in a process of its own and measures it, for all benchmarks of this folder.

    run = measure.run([sys.executable, '-m', 'benchmarks.convert', ...], marks_file)
    run.seconds, run.between('imported', 'flushed'), run.cpu_since('imported')
    run.main_memory.peak_rss, run.worker_memory.peak_rss

    run = measure.run(command, marks_file, tree_memory=True)
    run.tree_memory.peak, run.tree_memory.peak_mapped       # of all its processes together

    measure.Marks(marks_file).mark('imported')      # in the program, or in a process it starts

Linux only: memory is read from /proc.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

_SAMPLE_SECONDS = 0.05
_TREE_SECONDS = 0.5
_PROC = pathlib.Path('/proc')

# Free memory below this share of all is what the kernel keeps free anyway.
_FREE_SHARE = 1 / 64


class Marks:
    """Points in time of a run, in a file that all its processes may append to."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)

    def mark(self, name: str) -> None:
        """Notes the time, and the CPU time of this process and of children that have ended."""
        cpu = sum(os.times()[:4])
        with open(self.path, 'a', encoding='ascii') as file:
            file.write(f'{name} {time.monotonic()} {cpu}\n')

    def read(self) -> dict[str, tuple[float, float]]:
        """Returns (time, CPU time) of each name, of the first mark of that name."""
        marks: dict[str, tuple[float, float]] = {}
        for line in self.path.read_text('ascii').splitlines():
            name, at, cpu = line.split()
            marks.setdefault(name, (float(at), float(cpu)))
        return marks


@dataclasses.dataclass
class Memory:
    """Most memory of a process, in bytes.

    Attributes:
        peak_rss: all that was resident, pages of mapped files among it.
        peak_anonymous: its own memory, without mapped files; seen every 50 ms.
    """

    peak_rss: int = 0
    peak_anonymous: int = 0

    def include(self, other: 'Memory') -> None:
        """Takes the larger of both figures."""
        self.peak_rss = max(self.peak_rss, other.peak_rss)
        self.peak_anonymous = max(self.peak_anonymous, other.peak_anonymous)


@dataclasses.dataclass
class TreeMemory:
    """Most memory of several processes together, in bytes; seen every half second.

    A page that n of them share counts as an n-th of a page for each (the kernel's PSS).

    Attributes:
        peak: all of it, without pages of mapped files.
        peak_mapped: pages of mapped files.
    """

    peak: int = 0
    peak_mapped: int = 0


@dataclasses.dataclass(frozen=True)
class Run:
    """One measurement.

    Attributes:
        seconds: from the start of the process to its end.
        cpu_seconds: of the process and all that it has started and waited for.
        marks: (time, CPU time) by name.
        main_memory: of the process.
        worker_memory: of the largest process that it started; zeros where it started none.
        others_share: of all cores' time, what other processes and the kernel's threads took.
        tree_memory: of all its processes; zeros unless it was asked for.
    """

    seconds: float
    cpu_seconds: float
    marks: dict[str, tuple[float, float]]
    main_memory: Memory
    worker_memory: Memory
    others_share: float
    tree_memory: TreeMemory = dataclasses.field(default_factory=TreeMemory)

    def between(self, first: str, second: str) -> float:
        """Seconds from one mark to the other."""
        return self.marks[second][0] - self.marks[first][0]

    def cpu_since(self, mark: str) -> float:
        """CPU seconds of all processes from a mark of the main process to its end."""
        return self.cpu_seconds - self.marks[mark][1]


def run(command: Sequence[str], marks: Marks, tree_memory: bool = False) -> Run:
    """Runs a program to its end.

    Args:
        command: of the program.
        marks: that it makes.
        tree_memory: measure `Run.tree_memory`. The kernel goes through all pages for that,
            which may take 10 ms for each GB that is mapped.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    main, workers, tree = Memory(), Memory(), TreeMemory()
    start, busy, own = time.monotonic(), _busy_seconds(), _own_seconds()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    watchers = [threading.Thread(target=_watch, args=(process, main, workers))]
    if tree_memory:
        watchers.append(threading.Thread(target=_watch_tree, args=(process, tree)))
    for watcher in watchers:
        watcher.start()
    try:
        output, _ = process.communicate()
    except BaseException:  # Ctrl-C, say: the watchers end with the process
        process.kill()
        process.wait()
        raise
    seconds = time.monotonic() - start
    busy, own = _busy_seconds() - busy, _own_seconds() - own
    for watcher in watchers:
        watcher.join()
    if process.returncode:
        tail = output.decode(errors='replace')[-4000:]
        raise RuntimeError(f'{" ".join(command)} ended with {process.returncode}:\n{tail}')
    others_share = max(busy - own, 0) / seconds / os.cpu_count()
    return Run(seconds, own, marks.read(), main, workers, others_share, tree)


def _busy_seconds() -> float:
    """CPU time of everything on this machine."""
    user, nice, system, _idle, _waiting, *interrupts = map(int, _lines('stat')[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf('SC_CLK_TCK')


def _own_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _watch(process: subprocess.Popen, main: Memory, workers: Memory) -> None:
    while process.returncode is None:
        main.include(memory_of(process.pid))
        for pid in _descendants(process.pid):
            workers.include(memory_of(pid))
        time.sleep(_SAMPLE_SECONDS)


def _watch_tree(process: subprocess.Popen, tree: TreeMemory) -> None:
    while process.returncode is None:
        sizes = [_pss(pid) for pid in [process.pid, *_descendants(process.pid)]]
        tree.peak = max(tree.peak, sum(whole - mapped for whole, mapped in sizes))
        tree.peak_mapped = max(tree.peak_mapped, sum(mapped for _, mapped in sizes))
        time.sleep(_TREE_SECONDS)


def _pss(pid: int) -> tuple[int, int]:
    """Bytes of all pages and of those of mapped files; of a process that may have ended."""
    try:
        lines = (_PROC / str(pid) / 'smaps_rollup').read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    fields = dict(line.split(':', 1) for line in lines)
    whole, mapped = (1024 * int(fields[name].split()[0]) for name in ('Pss', 'Pss_File'))
    return whole, mapped


def cpu_seconds() -> float:
    """CPU time so far of this process and of all that it has started, those running included."""
    ticks = 0
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name of the program, in parentheses, may hold spaces.
            after_name = (_PROC / str(pid) / 'stat').read_text().rpartition(')')[2].split()
            ticks += sum(map(int, after_name[11:15]))  # utime, stime, cutime, cstime
    return _own_seconds() + ticks / os.sysconf('SC_CLK_TCK')


def memory_of(pid: int) -> Memory:
    """Most memory so far of a process; zeros if it has ended."""
    try:
        lines = (_PROC / str(pid) / 'status').read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return Memory()
    fields = dict(line.split(':', 1) for line in lines)
    sizes = [int(fields.get(name, '0 kB').split()[0]) for name in ('VmHWM', 'RssAnon')]
    return Memory(1024 * sizes[0], 1024 * sizes[1])


def _descendants(pid: int) -> Iterable[int]:
    try:
        for thread in (_PROC / str(pid) / 'task').iterdir():
            for child in (thread / 'children').read_text().split():
                yield int(child)
                yield from _descendants(int(child))
    except (FileNotFoundError, ProcessLookupError):
        return


def turns(names: Sequence[str], repeats: int) -> Iterator[str]:
    """Yields all names in each repeat, and says on the terminal how far it is.

    Each repeat begins with another name, so that none always follows the same one.
    """
    for repeat in range(repeats):
        first = repeat * len(names) // repeats
        for name in [*names[first:], *names[:first]]:
            print(f'{repeat + 1} of {repeats}: {name}', file=sys.stderr, flush=True)
            yield name


@contextlib.contextmanager
def memory_filler(folder: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Yields a function that fills free memory with page cache, as it is on a machine in use.

    A virtual machine may hand free memory back to its host. To touch a page of 4 KB for the first
    time then took 9 us on the machine of the README, otherwise 0.2 us: what is measured would be
    how much memory happens to be at hand.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        size = 0

        def fill() -> None:
            nonlocal size
            buffer = bytearray(1 << 20)
            while memory_info('MemFree') > memory_info('MemTotal') * _FREE_SHARE:
                size += len(buffer)
                os.truncate(file.fileno(), size)  # the file stays empty: it takes no disk
                os.preadv(file.fileno(), [buffer], size - len(buffer))

        yield fill


def read_through(paths: Iterable[pathlib.Path]) -> None:
    """Reads files, so that they are in the page cache."""
    buffer = bytearray(1 << 20)
    for path in paths:
        with open(path, 'rb', buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_from_page_cache(paths: Iterable[pathlib.Path]) -> None:
    """Has the next reader read files from the disk."""
    for path in paths:
        with open(path, 'rb') as file:
            os.fsync(file.fileno())  # only what is on the disk can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flush(folder: pathlib.Path) -> None:
    """Waits until all files in a folder are on the disk."""
    for path in [folder, *folder.rglob('*')]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def size_of(folder: pathlib.Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine(folder: pathlib.Path, packages: Iterable[str]) -> str:
    """Returns a sentence on the machine, the file system of a folder, and packages' versions."""
    cpu = next(
        (line.split(':')[1].strip() for line in _lines('cpuinfo') if line.startswith('model name')),
        platform.machine(),
    )
    versions = ', '.join(f'{name} {importlib.metadata.version(name)}' for name in packages)
    return (
        f'{num_cores()} cores ({cpu}), {memory_info("MemTotal") / 2**30:.0f} GiB '
        f'of memory, {_file_system(folder)}, Linux {platform.release()}, '
        f'Python {platform.python_version()}; {versions}.'
    )


def _file_system(folder: pathlib.Path) -> str:
    mounts = [line.split()[:3] for line in _lines('mounts')]
    holding = [mount for mount in mounts if folder.absolute().is_relative_to(mount[1])]
    device, _, kind = max(holding, key=lambda mount: len(mount[1]))
    return f'{kind} on {device}'


def memory_info(name: str) -> int:
    """Bytes of an entry of /proc/meminfo: `MemTotal`, `MemAvailable`."""
    line = next(line for line in _lines('meminfo') if line.startswith(f'{name}:'))
    return 1024 * int(line.split()[1])


def _lines(name: str) -> list[str]:
    return (_PROC / name).read_text().splitlines()
