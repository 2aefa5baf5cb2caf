"""Runs the sides of a benchmark in turns, each run in a fresh process, and prints their table.

A side is a function that takes the settings of a run and returns its figures, both of them JSON.
Linux only: /proc has the memory and the times of processes.
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

_POLL_SECONDS = 0.25  # between readings of the memory, which take up to 10 ms for each GB mapped
_PACKAGES = (
    *('jax', 'tensorflow-cpu', 'tensorflow-datasets', 'torch', 'triton', 'transformers'),
    *('litdata', 'grain', 'array_record', 'datasets'),
)
_REASONS = {'missing': 'left out', 'failed': 'failed'}

Figures = dict[str, Any]
Column = Callable[[list[Figures]], str]
RunSide = Callable[['Side'], Figures]
Sides = Mapping[str, 'Side']


@dataclasses.dataclass(frozen=True)
class Side:
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
    folder = options.dir.absolute() / 'coyo11m-benchmark'
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if not options.keep:
            stack.callback(shutil.rmtree, folder)
        print(_describe_machine(), flush=True)
        run_side = prepare(options, folder, stack)
        runs = _take_turns(options.sides, options.repeats, run_side)
    return _print_table(options.sides, columns, runs)


def _parse(doc, sides, flags, arguments) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.partition('\n')[0])
    add = parser.add_argument
    add('--dir', type=pathlib.Path, required=True, help='folder to work in')
    add('--keep', action='store_true', help='keep the data for the next run')
    add('--repeats', type=int, default=3, help='runs of each side (%(default)s)')
    help_of_only = 'sides to run, with commas between (all): ' + ', '.join(sides)
    add('--only', type=lambda text: text.split(','), default=[*sides], help=help_of_only)
    add('--before', default='', metavar='DIR', help='also measure the packages in DIR')
    for name, (default, description) in flags.items():
        kind = {'action': 'store_true'} if default is False else {'type': type(default)}
        add(f'--{name}', default=default, help=f'{description} (%(default)s)', **kind)
    options = parser.parse_args(arguments)
    options.sides = {}
    for name in options.only:
        if name not in sides:
            parser.error(f'--only: {name!r} is none of {", ".join(sides)}.')
        side = options.sides[name] = sides[name]
        if options.before and side.ours:
            title, before = f'{side.title}, before', os.path.abspath(options.before)
            options.sides[f'{name}-before'] = dataclasses.replace(side, title=title, before=before)
    return options


# --- Runs ----------------------------------------------------------------------------------------


def _take_turns(sides: Sides, repeats: int, run_side: RunSide) -> dict[str, list[Figures]]:
    """Runs every side `repeats` times, but none again that has failed."""
    runs: dict[str, list[Figures]] = {name: [] for name in sides}
    for repeat in range(repeats):
        # Each repeat begins with another side: a machine that grows warm or busy is unfair to all.
        first = repeat * len(sides) // repeats
        for name in [*list(sides)[first:], *list(sides)[:first]]:
            if not _failure(runs[name]):
                print(f'{repeat + 1} of {repeats}: {name}', file=sys.stderr, flush=True)
                figures = run_side(sides[name])
                # At once: a benchmark may be stopped before its table.
                shown = [f'{x} {n:.5g}' for x, n in figures.items() if isinstance(n, float)]
                print(f'  {", ".join(shown)}', file=sys.stderr, flush=True)
                runs[name].append(figures)
    return runs


def run(side: Side, env: Mapping[str, str] | None = None, **settings: Any) -> Figures:
    """Runs a side in a fresh process; returns its figures, or in `missing` or `failed` why not."""
    settings = {**side.settings, **settings}
    module = sys.modules[side.function.__module__].__spec__.name  # not __main__
    environment = {**os.environ, **(env or {})}
    if side.before:  # ahead of this checkout, which then gives `benchmarks` alone
        checkout = pathlib.Path(__file__).parents[1]
        environment |= {'PYTHONPATH': f'{side.before}:{checkout}', 'PYTHONSAFEPATH': '1'}
    with tempfile.TemporaryDirectory() as folder:
        answer, log = pathlib.Path(folder, 'answer'), pathlib.Path(folder, 'log')
        arguments = module, side.function.__name__, json.dumps(settings, default=str), str(answer)
        command = [sys.executable, '-m', 'benchmarks.runner', *arguments]
        measured = _measure_process(command, environment, log)
        # Without an answer it was killed, by the system for its memory, say.
        content = answer.read_text() if answer.exists() else '{"failed": "its process died"}'
        figures = json.loads(content)
        if 'failed' in figures:
            print(log.read_text(errors='replace')[-4000:], file=sys.stderr)
    return figures | measured


def _run_in_this_process(module: str, function: str, settings: str, answer: str) -> None:
    try:
        figures = getattr(importlib.import_module(module), function)(**json.loads(settings))
    except ModuleNotFoundError as error:
        figures = {'missing': str(error)}
    except Exception as error:
        traceback.print_exc()
        figures = {'failed': f'{type(error).__name__}: {error}'.splitlines()[0]}
    pathlib.Path(answer).write_text(json.dumps(figures))


def _measure_process(command: Sequence[str], env: Mapping[str, str], log: pathlib.Path) -> Figures:
    """Runs a program to its end, with its output in `log`; returns its `peak` and the `others`."""
    start, busy, peak = time.monotonic(), _busy_seconds(), 0
    own_cpu = sum(os.times()[:4])  # with that of the program, once it has ended
    with (
        open(log, 'wb') as file,
        subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while process.poll() is None:
                peak = max(peak, sum(map(_own_memory, _with_children(process.pid))))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
        finally:
            process.kill()  # after Ctrl-C, say; otherwise it has ended
    seconds, own_cpu = time.monotonic() - start, sum(os.times()[:4]) - own_cpu
    # The largest memory of all its processes together, and the share of all cores' time that other
    # programs used.
    others = max(_busy_seconds() - busy - own_cpu, 0) / seconds / os.cpu_count()
    return {'peak': peak, 'others': others}


class Meter:
    """Measures time and resources of this process and its children since its creation."""

    def __init__(self):
        self._start = self._now()

    def seconds(self) -> float:
        return time.monotonic() - self._start['seconds']

    def read(self) -> Figures:
        """Returns `seconds`, `cpu` seconds, and bytes read from the `disk`."""
        return {name: now - self._start[name] for name, now in self._now().items()}

    def rate(self, samples: int) -> Figures:
        figures = self.read()
        rate, cpu = samples / figures['seconds'], figures['cpu'] / samples
        return {'seconds': figures['seconds'], 'rate': rate, 'cpu_per_sample': cpu}

    def _now(self) -> Figures:
        cpu = disk = 0.0
        for process in _with_children(os.getpid()):
            with contextlib.suppress(psutil.NoSuchProcess):
                disk += process.io_counters().read_bytes
                cpu += sum(process.cpu_times()[:4])  # with those of children that have ended
        return {'seconds': time.monotonic(), 'cpu': cpu, 'disk': disk}


def _with_children(pid: int) -> list[psutil.Process]:
    """A process and its descendants; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process := psutil.Process(pid), *process.children(recursive=True)]
    return []


def _busy_seconds() -> float:
    """CPU time of everything on this machine."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def _own_memory(process: psutil.Process) -> int:
    """Bytes of a process, which may have ended, without pages of mapped files."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lines = pathlib.Path(f'/proc/{process.pid}/smaps_rollup').read_text().splitlines()[1:]
        fields = dict(line.split(':', 1) for line in lines)
        whole, mapped = (1024 * int(fields[name].split()[0]) for name in ('Pss', 'Pss_File'))
        return whole - mapped
    return 0


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
    name: str, spec: str = ',.0f', scale: float = 1, reduce: Callable = statistics.median
) -> Column:
    """Makes a column: the median (or another function) of a figure in all runs, times `scale`."""

    def cell(runs: list[Figures]) -> str:
        values = [scale * run[name] for run in runs if run.get(name) is not None]
        return format(reduce(values), spec) if values else ''

    return cell


def all_runs(name: str, spec: str = ',.0f', scale: float = 1) -> Column:
    """Makes a column: the smallest and the largest of a figure, times `scale`."""
    least, largest = (column(name, spec, scale, reduce) for reduce in (min, max))
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
    failures = {name: failure for name in sides if (failure := _failure(runs[name]))}
    measured = [name for name in sides if runs[name] and name not in failures]
    rows = [[sides[n].title, *(cell(runs[n]) for cell in columns.values())] for n in measured]
    ruler = ['---', *['---:'] * len(columns)]
    for row in (['side', *columns], ruler, *rows):
        print(f'| {" | ".join(row)} |')
    for name, failure in failures.items():
        print(f'\n{sides[name].title}, {failure}')
    return int(not measured or any('failed' in x for figures in runs.values() for x in figures))


def _failure(runs: Sequence[Figures]) -> str:
    last = runs[-1] if runs else {}
    return next((f'{verb}: {last[kind]}' for kind, verb in _REASONS.items() if kind in last), '')


def _describe_machine() -> str:
    """A line about the machine and the versions of the compared packages."""
    info = pathlib.Path('/proc/cpuinfo').read_text()
    cpu = re.search(r'^model name\s*: (.*)', info, re.MULTILINE)
    model = cpu[1] if cpu else platform.machine()
    memory = psutil.virtual_memory().total / 2**30
    installed = {x.name: x.version for x in importlib.metadata.distributions()}
    packages = ', '.join(f'{name} {installed[name]}' for name in _PACKAGES if name in installed)
    return (
        f'{len(os.sched_getaffinity(0))} cores ({model}), {memory:.0f} GiB of memory, '
        f'Python {platform.python_version()}; {packages}.\n'
    )


if __name__ == '__main__':
    _run_in_this_process(*sys.argv[1:])
