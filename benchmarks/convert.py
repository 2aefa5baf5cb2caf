"""Times the conversion of a source: this builder, its peers, and `cp` of the same bytes.

    python -m benchmarks.convert --dir /tmp/bench                # 2 GB, 3 repeats, ten minutes
    python -m benchmarks.convert --dir /tmp/bench --gb 8 --only builder2,cp
    python -m benchmarks.convert --dir /tmp/bench --worker_memory

Every run is a fresh process that reads the same files and flushes what it has written to the disk
before its time ends; its output is then deleted. The source is in the page cache, or with `--cold`
not, in every run. Writers take turns, in another order in each repeat. What is not installed is
left out; benchmarks/README.md says how to install it, what is measured, and what came out.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from benchmarks import measure, report, source
from benchmarks.writers import RANDOM_ACCESS_WRITERS, SHARD_WRITERS, TFDS_WRITERS, WRITERS

_FILES = 4
_SETTLE_SECONDS = 2
_MB, _GB = 10**6, 10**9

# (ours, the others, of which the fastest counts, name of the ratio of their speeds)
_RATIOS = (
    ('builder', TFDS_WRITERS, 'One process to the generator builder of TFDS (2.5 is wanted)'),
    ('builder', SHARD_WRITERS, 'One process to MosaicML, WebDataset and litdata (4 is wanted)'),
    ('builder', RANDOM_ACCESS_WRITERS, 'One process to HF datasets and ArrayRecord'),
    ('builder2', ('cp',), 'Two processes to `cp` (0.5 is wanted)'),
    ('builder', ('unchecked',), 'One process to itself without checks (0.9 is wanted)'),
    ('builder2', ('unchecked2',), 'Two processes to themselves without checks (0.9 is wanted)'),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for and prints its table."""
    flags = parse_flags(arguments)
    if flags.run:
        run_here(flags.run, flags.dir)
        return
    available = [name for name in flags.only or WRITERS if WRITERS[name].is_installed()]
    if not available:
        sys.exit(f'error: not installed: {", ".join(flags.only)}; see benchmarks/README.md')
    packages = sorted({WRITERS[name].package for name in available})
    flags.dir.mkdir(parents=True, exist_ok=True)
    print(measure.describe_machine(flags.dir, packages), end='\n\n')
    if flags.worker_memory:
        print(measure_memory(flags.dir, (flags.gb or 3) * _GB))
    else:
        num_bytes = (flags.gb or 2) * _GB
        with measure.memory_filler(flags.dir) as fill:
            make_ready = _make_ready(fill if flags.fill_memory else lambda: None, flags.cold)
            results = compare(available, flags.dir, num_bytes, flags.repeats, make_ready)
        print('\n'.join([make_table(results), *make_ratios(results)]))


def parse_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--dir', type=pathlib.Path, required=True, help='folder to work in')
    parser.add_argument('--gb', type=float, help='size of the source; 2, for --worker_memory 3')
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--only', type=lambda text: text.split(','), help=','.join(WRITERS))
    parser.add_argument('--cold', action='store_true', help='read the source from the disk')
    parser.add_argument('--fill_memory', action='store_true', help='with page cache, before a run')
    parser.add_argument('--worker_memory', action='store_true', help='measure memory instead')
    parser.add_argument(
        '--run', choices=WRITERS, metavar='WRITER', help='run one writer and measure nothing'
    )
    flags = parser.parse_args(arguments)
    for name in flags.only or ():
        if name not in WRITERS:
            parser.error(f'--only: {name!r} is none of {", ".join(WRITERS)}.')
    return flags


def _make_ready(
    fill_memory: Callable[[], None], cold: bool
) -> Callable[[list[pathlib.Path]], None]:
    """Brings memory and the files of the source into the same state before each run."""

    def make_ready(files: list[pathlib.Path]) -> None:
        fill_memory()
        if cold:
            measure.drop_from_page_cache(files)
        else:
            measure.read_through(files)

    return make_ready


@dataclasses.dataclass(frozen=True)
class Result:
    """The medians of all runs of one writer.

    Attributes:
        name: in `WRITERS`.
        num_samples: that each run converted.
        num_bytes: of the source.
        runs: in the order of the repeats.
    """

    name: str
    num_samples: int
    num_bytes: int
    runs: list[measure.Run]

    def seconds(self, since: str) -> float:
        """Median time from a mark to the flushed output."""
        return self._median(lambda run: run.between(since, 'flushed'))

    def row(self, one_process: 'Result') -> list[str]:
        """A row of the table; its ratios are to `one_process` of this builder."""
        rates = sorted(self.num_samples / run.between('writing', 'flushed') for run in self.runs)
        cpu = self._median(lambda run: run.cpu_since('imported'))
        main, worker = (
            max(getattr(run, field).peak_rss for run in self.runs)
            for field in ('main_memory', 'worker_memory')
        )
        return [
            WRITERS[self.name].title,
            f'{self.num_samples / self.seconds("writing"):,.0f}',
            f'{rates[0]:,.0f} to {rates[-1]:,.0f}',
            f'{self.num_bytes / self.seconds("writing") / _MB:,.0f}',
            f'{self.seconds("writing") / one_process.seconds("writing"):.2f}',
            f'{self.num_samples / self.seconds("imported"):,.0f}',
            f'{self.seconds("imported") / one_process.seconds("imported"):.2f}',
            f'{self._median(lambda run: run.seconds):.1f}',
            f'{cpu / self.num_samples * 1e6:,.0f}',
            f'{main / _MB:,.0f}',
            f'{worker / _MB:,.0f}' if worker else '',
            f'{max(run.others_share for run in self.runs):.0%}',
        ]

    def _median(self, of: Callable[[measure.Run], float]) -> float:
        return statistics.median(map(of, self.runs))


_COLUMNS = (
    'writer',
    'samples/s',
    'all runs',
    'MB/s',
    'times as slow as ours',
    'with captions, planning',
    'times as slow as ours',
    'whole process, s',
    'CPU s per million',
    'peak MB',
    'of a worker',
    'others',
)


def compare(
    names: Sequence[str],
    folder: pathlib.Path,
    num_bytes: float,
    repeats: int,
    make_ready: Callable[[list[pathlib.Path]], None],
) -> list[Result]:
    """Runs writers in turns.

    Args:
        names: of the writers, in `WRITERS`.
        folder: to work in.
        num_bytes: size of the source, about; it is made if need be.
        repeats: runs of each writer.
        make_ready: called before each run with the files of the source.
    """
    num_samples = max(round(num_bytes / source.SAMPLE_BYTES), _FILES)
    made = source.make(folder / 'source', num_samples, _FILES)
    files = source.files(made)
    made_bytes = sum(path.stat().st_size for path in files)
    results = [Result(name, num_samples, made_bytes, []) for name in names]
    by_name = {result.name: result for result in results}
    for name in measure.turns(names, repeats):
        make_ready(files)
        by_name[name].runs.append(_run(name, made))
    return results


def run_here(name: str, made: pathlib.Path) -> None:
    """Converts a source in this process, as `compare` has it done in a fresh one."""
    out, marks = _out_of(made)
    WRITERS[name].write(made, out, marks)
    measure.flush(out)
    marks.mark('flushed')


def _run(name: str, made: pathlib.Path) -> measure.Run:
    """Converts a source in a fresh process; deletes what it has written.

    Raises:
        RuntimeError: it failed, or has written less than there are latents.
    """
    out, marks = _out_of(made)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    marks.path.unlink(missing_ok=True)
    command = [sys.executable, '-m', 'benchmarks.convert', f'--run={name}', f'--dir={made}']
    try:
        run = measure.run(command, marks)
        written = measure.size_of(out)
    finally:
        shutil.rmtree(out)
        _let_disk_settle()
    expected = sum(path.stat().st_size for path in source.files(made)[:-1])
    if WRITERS[name].copies_latents and written < 0.99 * expected:
        raise RuntimeError(f'{name} has written {written:,} bytes of {expected:,}')
    return run


def _let_disk_settle() -> None:
    """Waits for what a deletion leaves to do, so that the next run need not.

    A file system mounted with `discard` tells the disk of every deleted block when its journal is
    written, which is at somebody's next `fsync`.
    """
    os.sync()
    time.sleep(_SETTLE_SECONDS)


def _out_of(made: pathlib.Path) -> tuple[pathlib.Path, measure.Marks]:
    return made.parent / 'out', measure.Marks(made.parent / 'marks')


def make_table(results: Iterable[Result]) -> str:
    """Returns the results as Markdown."""
    results = list(results)
    one_process = next((r for r in results if r.name == 'builder'), results[0])
    return report.markdown_table(_COLUMNS, [result.row(one_process) for result in results])


def make_ratios(results: Iterable[Result]) -> list[str]:
    """Returns how fast this builder is beside those of the others that were measured."""
    by_name = {result.name: result for result in results}
    lines = []
    for ours, theirs, text in _RATIOS:
        others = [by_name[name] for name in theirs if name in by_name]
        if ours in by_name and others:
            writing, all_of_it = (
                min(other.seconds(since) for other in others) / by_name[ours].seconds(since)
                for since in ('writing', 'imported')
            )
            lines.append(f'{text}: {writing:.2f}; with captions and planning {all_of_it:.2f}')
    return lines


def measure_memory(folder: pathlib.Path, num_bytes: float) -> str:
    """Builds from one `.pt` file and returns a table of the memory of each process."""
    made = source.make(folder / 'one_file', round(num_bytes / source.SAMPLE_BYTES), num_files=1)
    columns = 'build', 'process', 'peak MB', 'of these its own, without mapped files'
    rows = []
    for name in ('builder', 'builder2'):
        run = _run(name, made)
        for process, memory in (('first', run.main_memory), ('worker', run.worker_memory)):
            if memory.peak_rss:
                peak, own = memory.peak_rss / _MB, memory.peak_anonymous / _MB
                rows.append([WRITERS[name].title, process, f'{peak:,.0f}', f'{own:,.0f}'])
    return report.markdown_table(columns, rows)


if __name__ == '__main__':
    main()
