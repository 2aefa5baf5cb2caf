"""Runs the sides of a benchmark in turns, each run in a fresh process, and makes their table.

A side is a function that takes the settings of a run (JSON) and returns its figures (JSON). A side
that lacks a package is left out, and a side that fails is named below the table. This runs only on
Linux, because /proc tells the memory and time of processes.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

_PROC = pathlib.Path('/proc')
_TICKS = os.sysconf('SC_CLK_TCK')
_WATCH_SECONDS = 0.25  # between looks at the memory, which take up to 10 ms for each GB mapped
_PACKAGES = (
    'jax',
    'tensorflow-cpu',
    'tensorflow-datasets',
    'torch',
    'triton',
    'transformers',
    'litdata',
    'grain',
    'array_record',
    'datasets',
)

Figures = dict[str, Any]
Column = Callable[[list[Figures]], str]
Once = Callable[['Side'], Figures]


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    title: str
    function: Callable[..., Figures]  # of a module of `benchmarks`, called in a fresh process
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # besides the run's
    ours: bool = False  # whether `--before` measures it twice
    before: str = ''  # folder from which the project is imported; '' for this checkout


def main(
    doc: str,
    sides: Mapping[str, Side],
    columns: Mapping[str, Column],
    flags: Mapping[str, tuple[Any, str]],
    begin: Callable[[argparse.Namespace, pathlib.Path, contextlib.ExitStack], Once],
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs the sides of the command line, prints the table, and returns the exit status.

    Args:
        doc: Docstring of the benchmark, whose first line `--help` shows.
        flags: Default and help of each flag of this benchmark.
        begin: Prepares the runs and returns a function that runs a side. It gets all flags, a
            folder for data (removed at the end without `--keep`), and an `ExitStack` that ends with
            the benchmark. It may change `flags.sides`, the chosen sides.
    """
    chosen = _parse(doc, sides, flags, arguments)
    folder = chosen.dir.absolute() / 'coyo11m-benchmark'
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if not chosen.keep:
            stack.callback(shutil.rmtree, folder)
        print(describe_machine(), flush=True)
        once = begin(chosen, folder, stack)
        runs = compare(chosen.sides, chosen.repeats, once)
    return show(chosen.sides, columns, runs)


def _parse(doc, sides, flags, arguments) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.partition('\n')[0])
    add = parser.add_argument
    add('--dir', type=pathlib.Path, required=True, help='folder to work in')
    add('--keep', action='store_true', help='keep the data for the next run')
    add('--repeats', type=int, default=3, help='runs of each side (%(default)s)')
    what = 'sides to run, with commas between (all): ' + ', '.join(sides)
    add('--only', type=lambda text: text.split(','), default=[*sides], help=what)
    add('--before', default='', metavar='DIR', help='also measure the packages in DIR')
    for name, (default, words) in flags.items():
        if default is False:
            add(f'--{name}', action='store_true', help=words)
        else:
            add(f'--{name}', type=type(default), default=default, help=f'{words} (%(default)s)')
    chosen = parser.parse_args(arguments)
    chosen.sides = {}
    for name in chosen.only:
        if name not in sides:
            parser.error(f'--only: {name!r} is none of {", ".join(sides)}.')
        side = chosen.sides[name] = sides[name]
        if chosen.before and side.ours:
            title, before = f'{side.title}, before', os.path.abspath(chosen.before)
            chosen.sides[f'{name}-before'] = dataclasses.replace(side, title=title, before=before)
    return chosen


# --- Runs ----------------------------------------------------------------------------------------


def compare(sides: Mapping[str, Side], repeats: int, once: Once) -> dict[str, list[Figures]]:
    """Calls `once` for every side in turns, `repeats` times; skips sides that have failed.

    Each repeat begins with another side.
    """
    runs: dict[str, list[Figures]] = {name: [] for name in sides}
    for repeat in range(repeats):
        first = repeat * len(sides) // repeats
        for name in [*list(sides)[first:], *list(sides)[:first]]:
            if not _reason(runs[name]):
                print(f'{repeat + 1} of {repeats}: {name}', file=sys.stderr, flush=True)
                runs[name].append(once(sides[name]))
    return runs


def run(side: Side, env: Mapping[str, str] | None = None, **settings: Any) -> Figures:
    """Runs a side in a fresh process and returns its figures.

    These have `peak`, the largest memory in bytes of all its processes together, and `others`, the
    share of all cores' time that other programs used (benchmarks/README.md). Instead of figures, a
    side that could not run has the reason in `missing` or `failed`.
    """
    settings = {**side.settings, **settings}
    module = sys.modules[side.function.__module__].__spec__.name  # not __main__
    environment = {**os.environ, **(env or {})}
    if side.before:  # ahead of this checkout, which then gives `benchmarks` alone
        here = pathlib.Path(__file__).parents[1]
        environment |= {'PYTHONPATH': f'{side.before}:{here}', 'PYTHONSAFEPATH': '1'}
    with tempfile.TemporaryDirectory() as folder:
        answer = pathlib.Path(folder) / 'answer'
        arguments = module, side.function.__name__, json.dumps(settings, default=str)
        command = [sys.executable, '-m', 'benchmarks.runner', *arguments]
        measured, output = _measure([*command, str(answer)], environment)
        died = json.dumps({'failed': 'its process died'})
        figures = json.loads(answer.read_text() if answer.exists() else died)
    if 'failed' in figures:
        print(output[-4000:], file=sys.stderr)
    return figures | measured


def _answer() -> None:
    """Runs one side in this process; the command line is that of `run`."""
    module, function, settings, answer = sys.argv[1:]
    try:
        figures = getattr(importlib.import_module(module), function)(**json.loads(settings))
    except ModuleNotFoundError as error:
        figures = {'missing': str(error)}
    except Exception as error:
        traceback.print_exc()
        figures = {'failed': f'{type(error).__name__}: {error}'.splitlines()[0]}
    pathlib.Path(answer).write_text(json.dumps(figures))


def _measure(command: Sequence[str], environment: Mapping[str, str]) -> tuple[Figures, str]:
    """Runs a program to its end; returns `peak` and `others`, and what it printed."""
    start, busy, own, peak = time.monotonic(), _busy_seconds(), sum(os.times()[:4]), 0
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
    process = subprocess.Popen(command, env=environment, **pipes)

    def watch() -> None:
        nonlocal peak
        while process.returncode is None:
            pids = [process.pid, *_descendants(process.pid)]
            peak = max(peak, sum(map(_own_memory, pids)))
            time.sleep(_WATCH_SECONDS)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        output, _ = process.communicate()
    except BaseException:  # Ctrl-C, say: the watcher ends with the process
        process.kill()
        process.wait()
        raise
    watcher.join()
    seconds, own = time.monotonic() - start, sum(os.times()[:4]) - own
    others = max(_busy_seconds() - busy - own, 0) / seconds / os.cpu_count()
    return {'peak': peak, 'others': others}, output.decode(errors='replace')


class Meter:
    """Measures time and resources of this process and its children since its creation."""

    def __init__(self):
        self._start = self._now()

    def seconds(self) -> float:
        """Seconds since the creation."""
        return time.monotonic() - self._start[0]

    def read(self) -> Figures:
        """Returns `seconds`, `cpu` seconds, and bytes read from the `disk`."""
        names = 'seconds', 'cpu', 'disk'
        return {n: now - was for n, now, was in zip(names, self._now(), self._start, strict=True)}

    def rate(self, samples: int) -> Figures:
        """Returns `seconds`, `rate` and `cpu_per_sample` for a number of samples."""
        figures = self.read()
        rate, cpu = samples / figures['seconds'], figures['cpu'] / samples
        return {'seconds': figures['seconds'], 'rate': rate, 'cpu_per_sample': cpu}

    def _now(self) -> tuple[float, float, int]:
        cpu, disk = sum(os.times()[:4]), _disk_bytes(os.getpid())
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                disk += _disk_bytes(pid)
                # The name of the program, in parentheses, may hold spaces.
                after_name = (_PROC / str(pid) / 'stat').read_text().rpartition(')')[2].split()
                cpu += sum(map(int, after_name[11:15])) / _TICKS
        return time.monotonic(), cpu, disk


def _disk_bytes(pid: int) -> int:
    """Bytes that a process, and those it has waited for, had to read from a disk."""
    return next(int(line.split()[1]) for line in _lines(f'{pid}/io') if 'read_bytes' in line)


def _busy_seconds() -> float:
    """CPU time of everything on this machine."""
    user, nice, system, _idle, _waiting, *interrupts = map(int, _lines('stat')[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / _TICKS


def _own_memory(pid: int) -> int:
    """Bytes of a process, which may have ended, without pages of mapped files."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = dict(line.split(':', 1) for line in _lines(f'{pid}/smaps_rollup')[1:])
        whole, mapped = (1024 * int(fields[name].split()[0]) for name in ('Pss', 'Pss_File'))
        return whole - mapped
    return 0


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in (_PROC / str(pid) / 'task').iterdir():
            for child in (thread / 'children').read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _lines(name: str) -> list[str]:
    return (_PROC / name).read_text().splitlines()


def prepare_cache(folders: Iterable[pathlib.Path], cold: bool) -> None:
    """Puts files into the page cache or, if `cold`, drops them from it."""
    for path in (path for folder in folders for path in folder.rglob('*') if path.is_file()):
        with open(path, 'rb', buffering=0) as file:
            if cold:
                os.fsync(file.fileno())  # only what is on the disk can be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while not cold and file.read(1 << 20):
                pass


# --- The table -----------------------------------------------------------------------------------


def column(
    name: str, spec: str = ',.0f', scale: float = 1, of: Callable = statistics.median
) -> Column:
    """Makes a column: the median (or another function `of` the runs) of a figure times `scale`."""

    def words(runs: list[Figures]) -> str:
        values = [scale * run[name] for run in runs if run.get(name) is not None]
        return format(of(values), spec) if values else ''

    return words


def all_runs(name: str, spec: str = ',.0f', scale: float = 1) -> Column:
    """Makes a column: the smallest and the largest of a figure, times `scale`."""
    least, largest = (column(name, spec, scale, of) for of in (min, max))
    return lambda runs: f'{least(runs)} to {largest(runs)}'


RATE = {
    'samples/s': column('rate'),
    'all runs': all_runs('rate'),
    'CPU us a sample': column('cpu_per_sample', ',.1f', 1e6),
}


def show(
    sides: Mapping[str, Side], columns: Mapping[str, Column], runs: Mapping[str, list[Figures]]
) -> int:
    """Prints the table, and below it the sides without figures; returns the exit status."""
    of_all = {
        'peak MB': column('peak', scale=1e-6, of=max),
        'others': column('others', '.0%', of=max),
    }
    columns = {**columns, **of_all}
    measured = [name for name in sides if runs[name] and not _reason(runs[name])]
    rows = [[sides[n].title, *(words(runs[n]) for words in columns.values())] for n in measured]
    print(markdown_table(['side', *columns], rows))
    for name, side in sides.items():
        if reason := _reason(runs[name]):
            print(f'\n{side.title}, {reason}')
    return int(not measured or any('failed' in run for of_side in runs.values() for run in of_side))


def _reason(runs: Sequence[Figures]) -> str:
    """Why a side has no figures; '' if it has."""
    last = runs[-1] if runs else {}
    kinds = {'missing': 'left out', 'failed': 'failed'}
    return next((f'{words}: {last[kind]}' for kind, words in kinds.items() if kind in last), '')


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats rows as Markdown; the first column holds names, the others figures."""
    lines = [columns, ['---', *['---:'] * (len(columns) - 1)], *rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def describe_machine() -> str:
    """Returns a line about the machine and the versions of the compared packages."""
    cpu = next((x.partition(': ')[2] for x in _lines('cpuinfo') if x.startswith('model name')), '')
    memory = int(_lines('meminfo')[0].split()[1]) / 2**20
    installed = {x.name: x.version for x in importlib.metadata.distributions()}
    versions = [f'{name} {installed[name]}' for name in _PACKAGES if name in installed]
    return (
        f'{len(os.sched_getaffinity(0))} cores ({cpu or platform.machine()}), {memory:.0f} GiB of '
        f'memory, Python {platform.python_version()}; {", ".join(versions)}.\n'
    )


if __name__ == '__main__':
    _answer()
