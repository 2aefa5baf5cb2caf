"""Times readers of a set that is larger than the memory, from a cold disk.

    python -m benchmarks.cold --dir /data/bench --gb 36     # 2 x 36 GB of disk, half an hour

Readers of `benchmarks.input` that need no converted copy, and one peer that streams: latents in
place by rows, torch over the same mapped `.pt` files, and litdata. Each run is a fresh process that
begins with nothing in the page cache, which only root can have dropped; else the files alone are.
Everything in `--dir` that this has made is removed at the end.
"""

import argparse
import pathlib
import shutil
import sys
import time
from collections.abc import Iterable, Sequence

from benchmarks import input as readers_input
from benchmarks import input_results, measure, report
from benchmarks.readers import READERS
from coyo11m_tfds import schema
from coyo11m_tfds.process import machine
from coyo11m_tfds.process.sizes import readable

_NAMES = ('rows_in_place', 'torch', 'litdata')
_SAMPLE_BYTES = schema.NUM_CROPS * schema.LATENT_NBYTES
_FILE_BYTES = 3e9  # as the model case has them
_PROBE_BYTES = 3e9
_DROP = pathlib.Path('/proc/sys/vm/drop_caches')

_COLUMNS = (
    'reader',
    'samples/s',
    'all runs',
    'CPU s per million',
    'GB from disk',
    'first batch, s',
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the data, runs readers in turns, prints a table, and removes the data."""
    flags = parse_flags(arguments)
    names = [name for name in flags.only if READERS[name].is_installed()]
    missing = ', '.join(name for name in flags.only if name not in names)
    if missing:
        print(f'not installed, and left out: {missing}', file=sys.stderr)
    flags.dir = flags.dir / 'cold'
    flags.dir.mkdir(parents=True)  # an error where it exists: it is removed below
    try:
        packages = sorted({READERS[name].package for name in names})
        print(measure.describe_machine(flags.dir, packages))
        memory = machine.usable_memory()
        print(f'{flags.gb:g} GB of latents, {readable(memory)} of memory', end='')
        print('.' if flags.gb * 1e9 > memory else ': what is read twice comes from the memory.')
        num_samples = int(flags.gb * 1e9 / _SAMPLE_BYTES)
        num_files = max(1, round(flags.gb * 1e9 / _FILE_BYTES))
        readers_input.make_data(names, flags.dir, num_samples, num_files)
        print(f'The disk in sequence: {readable(_sequential_rate(flags.dir))}/s.', end='\n\n')
        print(report.markdown_table(_COLUMNS, compare(names, flags)))
    finally:
        shutil.rmtree(flags.dir)


def parse_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--dir', type=pathlib.Path, required=True, help='folder to work in')
    parser.add_argument('--gb', type=float, default=36, help='of latents; more than the memory')
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--seconds', type=float, default=30, help='to read for, when steady')
    parser.add_argument(
        '--only', type=lambda text: text.split(','), default=_NAMES, help=','.join(_NAMES)
    )
    flags = parser.parse_args(arguments)
    for name in flags.only:
        if name not in READERS:
            parser.error(f'--only: {name!r} is none of {", ".join(READERS)}.')
    return flags


def compare(names: Sequence[str], flags: argparse.Namespace) -> list[list[str]]:
    """Runs readers in turns; returns the rows of the table."""
    results = {name: input_results.Result(name) for name in names}
    from_disk = dict.fromkeys(names, 0.0)
    for name in measure.turns(names, flags.repeats):
        drop_page_cache(_files(flags.dir))
        before = _bytes_from_disks()
        # Without the memory of all processes, for which the kernel goes through all mapped pages.
        ran = readers_input.run_task(name, 'read', flags.dir, flags.seconds, tree_memory=False)
        results[name].add_read(*ran)
        from_disk[name] = max(from_disk[name], _bytes_from_disks() - before)
    rows = []
    for name, result in results.items():
        title, rate, runs, cpu, *_ = result.row()
        first = f'{max(result.first_seconds):.2f}'
        rows.append([title, rate, runs, cpu, f'{from_disk[name] / 1e9:.1f}', first])
    return rows


def drop_page_cache(files: Iterable[pathlib.Path]) -> None:
    """Has the next reader read from the disk; as root all of it, else these files alone."""
    measure.drop_from_page_cache(files)
    try:
        _DROP.write_text('3')
    except OSError as error:
        print(f'{error}: directories and inodes stay in memory', file=sys.stderr)


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.rglob('*') if path.is_file()]


def _sequential_rate(folder: pathlib.Path) -> float:
    """Bytes a second of one of the files, read from its beginning."""
    files = sorted((folder / 'source').rglob('*.pt'))
    drop_page_cache(files)
    done, begin, buffer = 0, time.monotonic(), bytearray(1 << 20)
    with open(files[0], 'rb', buffering=0) as file:
        while done < _PROBE_BYTES and (count := file.readinto(buffer)):
            done += count
    return done / (time.monotonic() - begin)


def _bytes_from_disks() -> int:
    """Read by the whole machine since it was started."""
    fields = dict(line.split() for line in pathlib.Path('/proc/vmstat').read_text().splitlines())
    return 1024 * int(fields['pgpgin'])


if __name__ == '__main__':
    main()
