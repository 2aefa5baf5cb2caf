"""Runs the sides of a benchmark in turns, each run in a fresh process, and prints their table.

A side is a function that takes the settings of a run and returns its figures, both of them JSON.
Linux only: /proc has the memory and the times of processes.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import psutil

from coyo11m_tfds import storage

_POLL_SECONDS = 0.25  # between readings of the memory, at least
_PAUSES_A_READING = 20  # times the reading, which takes up to 10 ms for each GB mapped
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
_REASONS = {'missing': 'left out', 'failed': 'failed'}
_LOG_CHARACTERS = 4000  # of the output of a run that failed

Figures = dict[str, Any]
Column = Callable[[list[Figures]], str]
RunSide = Callable[['Side'], Figures]
Sides = Mapping[str, 'Side']


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the things that a benchmark compares."""

    title: str
    function: Callable[..., Figures]  # of a module of `benchmarks`, called in a fresh process
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # besides the run's
    ours: bool = False  # whether `--before` measures it twice
    before: str = ''  # folder from which the project is imported; '' for this checkout


def main(
    doc: str,
    sides: Sides,
    columns: Mapping[str, Column],
    flags: Mapping[str, tuple[Any, str]],
    prepare: Callable[[argparse.Namespace, pathlib.Path, contextlib.ExitStack], RunSide],
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs the sides of the command line, prints the table, and returns the exit status.

    `flags` has the default and the help of each flag of this benchmark. `prepare` gets their
    values, whose `sides` it may replace, a folder for data and an `ExitStack`.
    """
    options = _parse(doc, sides, flags, arguments)
    folder = pathlib.Path(storage.make_absolute(options.dir)) / 'coyo11m-benchmark'
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # First in, last out: what `prepare` starts, such as a server, ends before.
        if not options.keep:
            stack.callback(shutil.rmtree, folder)
        print(_describe_machine(), flush=True)
        run_side = prepare(options, folder, stack)
        runs = _take_turns(options.sides, options.repeats, run_side)
    return _print_table(options.sides, columns, runs)


def _parse(
    doc: str,
    sides: Sides,
    flags: Mapping[str, tuple[Any, str]],
    arguments: Sequence[str] | None,
) -> argparse.Namespace:
    """Returns the values of all flags, and the chosen `sides`."""
    parser = argparse.ArgumentParser(description=doc.partition('\n')[0])
    add = parser.add_argument
    add('--dir', type=pathlib.Path, required=True, help='folder to work in')
    add('--keep', action='store_true', help='keep the data for the next run')
    add('--repeats', type=int, default=3, help='runs of each side (%(default)s)')
    help_of_only = 'sides to run, with commas between (all): ' + ', '.join(sides)
    add('--only', type=lambda text: text.split(','), default=list(sides), help=help_of_only)
    add('--before', default='', metavar='DIR', help='also measure the packages in DIR')
    for name, (default, description) in flags.items():
        kind: dict[str, Any] = {'type': type(default)}
        # argparse would take any text for True.
        if default is False:
            kind = {'action': 'store_true'}
        add(f'--{name}', default=default, help=f'{description} (%(default)s)', **kind)
    options = parser.parse_args(arguments)
    options.sides = {}
    for name in options.only:
        if name not in sides:
            known_names = ', '.join(sides)
            parser.error(f'--only: {name!r} is none of {known_names}.')
        side = sides[name]
        options.sides[name] = side
        # Peers are the same in both checkouts.
        if options.before and side.ours:
            title = f'{side.title}, before'
            # Absolute, because it becomes an entry of PYTHONPATH.
            before = storage.make_absolute(options.before)
            options.sides[f'{name}-before'] = dataclasses.replace(side, title=title, before=before)
    return options


# --- Runs ----------------------------------------------------------------------------------------


def _take_turns(sides: Sides, repeats: int, run_side: RunSide) -> dict[str, list[Figures]]:
    """Runs every side `repeats` times, but none again that has failed."""
    runs: dict[str, list[Figures]] = {name: [] for name in sides}
    for repeat in range(repeats):
        # Each repeat begins with another side: a machine that grows warm or busy is unfair to all.
        first = repeat * len(sides) // repeats
        names = list(sides)
        for name in names[first:] + names[:first]:
            if _failure(runs[name]):
                continue
            print(f'{repeat + 1} of {repeats}: {name}', file=sys.stderr, flush=True)
            figures = run_side(sides[name])
            # At once: a benchmark may be stopped before its table.
            _print_figures(figures)
            runs[name].append(figures)
    return runs


def _print_figures(figures: Figures) -> None:
    """Prints the measured figures of a run in a line."""
    shown = []
    for name, figure in figures.items():
        if isinstance(figure, float):
            shown.append(f'{name} {figure:.5g}')
    line = ', '.join(shown)
    print(f'  {line}', file=sys.stderr, flush=True)


def run(side: Side, env: Mapping[str, str] | None = None, **settings: Any) -> Figures:
    """Runs a side in a fresh process; returns its figures, or in `missing` or `failed` why not."""
    settings = {**side.settings, **settings}
    # The name by which it can be imported: in the program itself, the module is `__main__`.
    module = sys.modules[side.function.__module__].__spec__.name
    environment = dict(os.environ)
    if env:
        environment |= env
    if side.before:
        # Ahead of this checkout, which then gives `benchmarks` alone.
        checkout = pathlib.Path(__file__).parents[1]
        environment['PYTHONPATH'] = f'{side.before}:{checkout}'
        # Else the current folder would come before both.
        environment['PYTHONSAFEPATH'] = '1'
    with tempfile.TemporaryDirectory() as folder:
        answer = pathlib.Path(folder, 'answer')
        log = pathlib.Path(folder, 'log')
        command = [sys.executable, '-m', 'benchmarks.runner']
        command += [module, side.function.__name__]
        command += [json.dumps(settings, default=str), str(answer)]
        measured = _measure_process(command, environment, log)
        # Without an answer it was killed, by the system for its memory, say.
        figures = {'failed': 'its process died'}
        if answer.exists():
            figures = json.loads(answer.read_text())
        if 'failed' in figures:
            output = log.read_text(errors='replace')
            print(output[-_LOG_CHARACTERS:], file=sys.stderr)
    return figures | measured


def _run_in_this_process(module: str, function: str, settings: str, answer: str) -> None:
    """Calls a function with settings, as JSON; writes its figures to the file `answer`."""
    # Whatever happens is an answer: the other sides of the benchmark go on.
    try:
        call = getattr(importlib.import_module(module), function)
        figures = call(**json.loads(settings))
    except ModuleNotFoundError as error:
        figures = {'missing': str(error)}
    except Exception as error:
        traceback.print_exc()
        description = f'{type(error).__name__}: {error}'
        # Below the table, a failure has one line; all of it is in the log.
        figures = {'failed': description.splitlines()[0]}
    pathlib.Path(answer).write_text(json.dumps(figures))


def _measure_process(command: Sequence[str], env: Mapping[str, str], log: pathlib.Path) -> Figures:
    """Runs a program to its end, with its output in `log`.

    Returns its `peak`, the largest memory in bytes of all its processes together, and `others`, the
    share of all cores' time that other programs used.
    """
    start = time.monotonic()
    busy_before = _busy_seconds()
    # With that of the program, once it has ended.
    own_cpu_before = sum(os.times()[:4])
    peak = 0
    with (
        open(log, 'wb') as file,
        subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        try:
            # By readings, because Linux keeps a peak of each process and none of all together.
            while process.poll() is None:
                reading_start = time.monotonic()
                memory = sum(map(_own_memory, _with_children(process.pid)))
                peak = max(peak, memory)
                # In a run of hours with many GB they would take an eighth of a core.
                reading_seconds = time.monotonic() - reading_start
                pause = max(_POLL_SECONDS, _PAUSES_A_READING * reading_seconds)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(pause)
        finally:
            # After Ctrl-C, say; otherwise it has ended.
            process.kill()
    seconds = time.monotonic() - start
    own_cpu = sum(os.times()[:4]) - own_cpu_before
    all_cpu = _busy_seconds() - busy_before
    # Clocks with coarse ticks may make the difference negative.
    cpu_of_others = max(all_cpu - own_cpu, 0)
    return {'peak': peak, 'others': cpu_of_others / seconds / os.cpu_count()}


class Meter:
    """Measures time and resources of this process and its children since its creation."""

    def __init__(self):
        self._start = self._now()

    def seconds(self) -> float:
        """Returns the seconds since the creation."""
        return time.monotonic() - self._start['seconds']

    def read(self) -> Figures:
        """Returns `seconds`, `cpu` seconds, and bytes read from the `disk`."""
        used = {}
        for name, now in self._now().items():
            used[name] = now - self._start[name]
        return used

    def rate(self, samples: int) -> Figures:
        """Returns `seconds`, the `rate` of samples a second, and CPU seconds a sample."""
        figures = self.read()
        return {
            'seconds': figures['seconds'],
            'rate': samples / figures['seconds'],
            'cpu_per_sample': figures['cpu'] / samples,
        }

    def _now(self) -> Figures:
        """Returns the time, and what all processes have used up to it."""
        cpu = disk = 0.0
        for process in _with_children(os.getpid()):
            # A child may end meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                disk += process.io_counters().read_bytes
                # With those of its children that have ended.
                cpu += sum(process.cpu_times()[:4])
        return {'seconds': time.monotonic(), 'cpu': cpu, 'disk': disk}


def _with_children(pid: int) -> list[psutil.Process]:
    """Returns a process and its descendants; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _busy_seconds() -> float:
    """Returns the CPU time of everything on this machine."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def _own_memory(process: psutil.Process) -> int:
    """Returns the bytes of a process, which may have ended, without pages of mapped files."""
    try:
        text = pathlib.Path(f'/proc/{process.pid}/smaps_rollup').read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    kilobytes = {}
    # Below a line with the range of addresses: 'Pss:   1234 kB'.
    for line in text.splitlines()[1:]:
        name, value = line.split(':', 1)
        kilobytes[name] = int(value.split()[0])
    # Of pages that several processes share, each counts its part, so that sums are right.
    return 1024 * (kilobytes['Pss'] - kilobytes['Pss_File'])


def prepare_cache(folders: Iterable[pathlib.Path], cold: bool) -> None:
    """Puts files into the page cache or, if `cold`, drops them from it."""
    paths = itertools.chain.from_iterable(folder.rglob('*') for folder in folders)
    for path in filter(pathlib.Path.is_file, paths):
        with open(path, 'rb', buffering=0) as file:
            if cold:
                # Only what is on the disk can be dropped.
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 20):
                    pass


# --- The table -----------------------------------------------------------------------------------


def column(
    name: str, spec: str = ',.0f', scale: float = 1, reduce: Callable = statistics.median
) -> Column:
    """Returns a column: the median (or another function) of a figure in all runs, times `scale`."""

    def cell(runs: list[Figures]) -> str:
        """Returns the text of a cell, '' if no run has the figure."""
        values = []
        for run in runs:
            if run.get(name) is not None:
                values.append(scale * run[name])
        if not values:
            return ''
        return format(reduce(values), spec)

    return cell


def all_runs(name: str, spec: str = ',.0f', scale: float = 1) -> Column:
    """Returns a column: the smallest and the largest of a figure, times `scale`."""
    least = column(name, spec, scale, min)
    largest = column(name, spec, scale, max)
    return lambda runs: f'{least(runs)} to {largest(runs)}'


RATE = {
    'samples/s': column('rate'),
    'all runs': all_runs('rate'),
    'CPU us a sample': column('cpu_per_sample', ',.1f', 1e6),
}
_OF_PROCESSES = {
    'peak MB': column('peak', scale=1e-6, reduce=max),
    'others': column('others', '.0%', reduce=max),
}


def _print_table(
    sides: Sides, columns: Mapping[str, Column], runs: Mapping[str, list[Figures]]
) -> int:
    """Prints the table, and below it the sides without figures; returns the exit status."""
    columns = {**columns, **_OF_PROCESSES}
    _print_row('side', columns)
    _print_row('---', ['---:'] * len(columns))
    failures = {}
    has_rows = False
    has_failed = False
    for name, side in sides.items():
        failure = _failure(runs[name])
        if failure:
            failures[side.title] = failure
        elif runs[name]:
            _print_row(side.title, [cell(runs[name]) for cell in columns.values()])
            has_rows = True
        for figures in runs[name]:
            # What is not installed is only left out.
            has_failed = has_failed or 'failed' in figures
    for title, failure in failures.items():
        print(f'\n{title}, {failure}')
    return int(has_failed or not has_rows)


def _print_row(title: str, cells: Iterable[str]) -> None:
    """Prints a row of a table in Markdown."""
    row = ' | '.join(cells)
    print(f'| {title} | {row} |')


def _failure(runs: Sequence[Figures]) -> str:
    """Returns why the last run of a side has no figures; '' if it has."""
    if runs:
        for kind, verb in _REASONS.items():
            if kind in runs[-1]:
                return f'{verb}: {runs[-1][kind]}'
    return ''


def _describe_machine() -> str:
    """Returns a line about the machine and the versions of the compared packages."""
    info = pathlib.Path('/proc/cpuinfo').read_text()
    cpu = re.search(r'^model name\s*: (.*)', info, re.MULTILINE)
    model = cpu[1] if cpu else platform.machine()
    memory = psutil.virtual_memory().total / 2**30
    # Not by asking for each: a name may have `-` or `_` in metadata.
    installed = {x.name: x.version for x in importlib.metadata.distributions()}
    versions = []
    for name in _PACKAGES:
        if name in installed:
            versions.append(f'{name} {installed[name]}')
    num_cores = len(os.sched_getaffinity(0))
    packages = ', '.join(versions)
    return (
        f'{num_cores} cores ({model}), {memory:.0f} GiB of memory, '
        f'Python {platform.python_version()}; {packages}.\n'
    )


if __name__ == '__main__':
    _run_in_this_process(*sys.argv[1:])
