"""Times readers of the same samples: this pipeline and its peers.

    python -m benchmarks.input --dir /tmp/bench                  # 1.5 GB, 3 repeats, ten minutes
    python -m benchmarks.input --dir /tmp/bench --only rows,tf_data --repeats 5
    python -m benchmarks.input --dir /tmp/bench --cold --gb 36 --seconds 30 \\
        --only rows_in_place,chunks_in_place,torch,litdata       # a set larger than the memory

benchmarks/README.md describes the peers, the measurement and the results.
"""

import dataclasses
import hashlib
import importlib
import itertools
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from benchmarks import convert, readers, runner, source
from benchmarks.readers import BATCH_SIZE, Batch, BatchStream
from benchmarks.runner import Figures, Side
from coyo11m_tfds import schema

# A reader is steady when its buffers are full and what it has imported late is there.
_WARM_SECONDS = 1.0
_WARM_BATCHES = 8
# Batches before a resume, and after it.
_SAVED_AT = 100
_COMPARED = 8
_SHARE_OF_DISK = 0.8  # of its free room, for the formats that copy the source
FLAGS = {
    'gb': (1.5, 'size of the source'),
    'seconds': (5.0, 'seconds of reading in a run'),
    'cold': (False, 'read from the disk, each sample at most once'),
}


def _same_batches(runs: list[Figures]) -> str:
    """A column: whether the batches after a resume were those that would have come."""
    same = [run['same'] for run in runs if 'same' in run]
    if not same:
        return ''
    return 'yes' if all(same) else 'no'


COLUMNS = {
    **runner.RATE,
    'cores': runner.column('cores', '.2f'),
    'MB/s from the disk': runner.column('disk_rate', scale=1e-6),
    'first batch, s': runner.column('first', '.2f'),
    'resume, s': runner.column('resume', '.2f'),
    'bytes of state': runner.column('state'),
    'same batches': _same_batches,
}


def prepare(flags, folder: pathlib.Path, stack) -> runner.RunSide:
    """Makes the source; returns what reads it, or a copy that is made at its first use."""
    source_dir = source.make(folder, source.num_samples_of(flags.gb))
    flags.sides = _limit_copies(flags.sides, source_dir)
    return lambda side: _run_side(side, source_dir, flags.seconds, flags.cold)


def _limit_copies(sides: dict[str, Side], source_dir: pathlib.Path) -> dict[str, Side]:
    """Has peers that copy the source copy as much of it as the disk has room for."""
    num_samples = source.num_samples(source_dir)
    formats = {side.settings['format'] for side in sides.values()}
    copies = formats.intersection(_COPIES)
    # Equally much of each, so that none of them fits into the memory better than another.
    limit = num_samples
    if copies:
        free_bytes = shutil.disk_usage(source_dir).free
        bytes_of_copy = _SHARE_OF_DISK * free_bytes / len(copies)
        limit = min(limit, int(bytes_of_copy / source.SAMPLE_BYTES))
    limited = {}
    for name, side in sides.items():
        title = side.title
        settings = {**side.settings, 'num_samples': num_samples}
        if settings['format'] in copies and limit < num_samples:
            gigabytes = limit * source.SAMPLE_BYTES / 1e9
            title += f', {gigabytes:.0f} GB of it'
            settings['num_samples'] = limit
        limited[name] = dataclasses.replace(side, title=title, settings=settings)
    return limited


def _run_side(side: Side, source_dir: pathlib.Path, seconds: float, cold: bool) -> Figures:
    """Runs a side once and, if it reads from the page cache, resumes it too."""
    data = _find_or_make_data(side, source_dir)
    if isinstance(data, dict):
        return data

    def run(function: Callable[..., Figures], **settings: Any) -> Figures:
        """Calls a function with the side's settings, after its files are in the cache or not."""
        folders = {data}
        # A data set in place is read from the source, too.
        if 'in_place' in data.name:
            folders.add(source_dir)
        runner.prepare_cache(folders, cold)
        step = dataclasses.replace(side, function=function)
        return runner.run(step, data=data, **settings)

    figures = run(read, seconds=seconds, cold=cold)
    # From the disk, a resume would time the disk.
    if cold or side.before or 'rate' not in figures:
        return figures
    saved = run(save)
    if 'state' not in saved:
        return saved
    resumed = run(resume, state=saved['state'])
    if 'resume' not in resumed:
        return resumed
    return figures | {
        'resume': resumed['resume'],
        'same': resumed['batches'] == saved['batches'],
        'state': len(saved['state']),
    }


def _find_or_make_data(side: Side, source_dir: pathlib.Path) -> pathlib.Path | Figures:
    """Returns the folder that a side reads, made when it is needed; or why it could not be made."""
    name = side.settings['format']
    if not name:
        return source_dir
    limit = side.settings['num_samples']
    folder = source_dir.with_name(f'{name}-{limit}')
    if side.before:
        folder = source_dir.with_name(f'{folder.name}-before')
    if folder.exists():
        return folder
    # Under another name, so that an interrupted one is made again.
    unfinished = folder.with_suffix('.unfinished')
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    writer = dataclasses.replace(_WRITERS[name], before=side.before)
    figures = runner.run(writer, source_dir=source_dir, out=unfinished, limit=limit)
    if 'rate' not in figures:
        return figures
    print(f'{writer.title}: made {folder.name} in {figures["seconds"]:.0f} s\n', flush=True)
    unfinished.rename(folder)
    return folder


# --- One run -------------------------------------------------------------------------------------


def read(*, seconds: float, cold: bool, num_samples: int, **settings: Any) -> Figures:
    """Reads for `seconds`: if `cold` from the start and at most an epoch, otherwise once steady."""
    stream, meter = _open(**settings)
    # A second epoch would come from the page cache.
    if cold:
        one_epoch = itertools.islice(stream.epoch(), num_samples // BATCH_SIZE)
        totals = _read_timed(one_epoch, seconds, meter)
    else:
        totals = _read_steady(stream, seconds, meter)
    if not totals['batches']:
        least = 'one full batch' if cold else 'two full batches'
        raise RuntimeError(f'an epoch is too short, expected at least {least}: take more samples')
    num_samples_read = BATCH_SIZE * totals['batches']
    return {
        'rate': num_samples_read / totals['seconds'],
        'cores': totals['cpu'] / totals['seconds'],
        'disk_rate': totals['disk'] / totals['seconds'],
        'cpu_per_sample': totals['cpu'] / num_samples_read,
        'first': totals['first'],
    }


def _read_steady(stream: BatchStream, seconds: float, meter: runner.Meter) -> Figures:
    """Reads for `seconds`, without the warm-up and the gaps between epochs."""
    totals = dict.fromkeys(('batches', 'seconds', 'cpu', 'disk'), 0)
    first = 0.0
    warm_batches = _WARM_BATCHES
    while totals['seconds'] < seconds:
        batches = iter(stream.epoch())
        if next(batches, None) is None:
            break
        first = first or meter.seconds()
        skipped = 1 + readers.count_batches(itertools.islice(batches, warm_batches))
        # Of later epochs this second has passed already.
        while meter.seconds() < first + _WARM_SECONDS and next(batches, None) is not None:
            skipped += 1
        figures = _read_timed(batches, seconds - totals['seconds'], runner.Meter())
        # The one batch that is read to begin an epoch is not timed: without others, none ever is.
        if skipped + figures['batches'] == 1:
            break
        for name in totals:
            totals[name] += figures[name]
        # An epoch may be shorter than the warm-up that was meant for it.
        warm_batches = min(warm_batches, (skipped + figures['batches']) // 4)
    return totals | {'first': first}


def _read_timed(batches: Iterable[Batch], seconds: float, meter: runner.Meter) -> Figures:
    """Reads until `meter` has counted `seconds`.

    Returns its figures, the number of `batches`, and the seconds to the `first` of them.
    """
    count = 0
    first = 0.0
    last = 0.0
    for _ in batches:
        count += 1
        last = meter.seconds()
        first = first or last
        if last >= seconds:
            break
    return meter.read() | {'seconds': last, 'batches': count, 'first': first}


def save(*, num_samples: int, **settings: Any) -> Figures:
    """Stops within an epoch; returns the state, and digests of the batches after it."""
    stream, _ = _open(**settings)
    batches = iter(stream.epoch())
    batches_of_epoch = num_samples // BATCH_SIZE
    middle = min(_SAVED_AT, batches_of_epoch // 2)
    count = readers.count_batches(itertools.islice(batches, middle))
    # Before the next batches: some readers have only the state that they are in now.
    state = stream.state(count)
    return {'state': state, 'batches': _digests(batches)}


def resume(*, num_samples: int, **settings: Any) -> Figures:
    """Resumes from a state; returns the time to the first batch, and digests of the batches."""
    stream, meter = _open(**settings)
    batches = iter(stream.epoch())
    first = next(batches)
    # Without the digests, which take the benchmark's own time.
    seconds = meter.seconds()
    compared = itertools.chain([first], batches)
    return {'resume': seconds, 'batches': _digests(compared)}


def _open(
    *, reader: str, data: str, format: str, module: str, state: str = '', **options: Any
) -> tuple[BatchStream, runner.Meter]:
    """Opens a reader when all is imported, and measures from there."""
    for name in module.split():
        importlib.import_module(name)
    open_reader = getattr(readers, reader)
    meter = runner.Meter()
    return open_reader(data, state, **options), meter


def _digests(batches: Iterator[Batch]) -> list[str]:
    """Returns digests of keys and latents of the next batches."""
    digests = []
    for batch in itertools.islice(batches, _COMPARED):
        digest = hashlib.sha256()
        for name in (schema.KEY, schema.LATENTS):
            digest.update(np.asarray(batch[name]).tobytes())
        digests.append(digest.hexdigest())
    return digests


# --- Sides ---------------------------------------------------------------------------------------


def _side(title: str, reader: str, format: str, module: str, **options: Any) -> Side:
    """Returns a side that reads a format with a function of `readers`.

    `module` has the names of modules to import before the clock starts.
    """
    settings = {'reader': reader, 'format': format, 'module': module, **options}
    return Side(title, read, settings, ours=reader == 'ours')


def _ours(title: str, engine: str, format: str = 'builder', **options: Any) -> Side:
    """Returns a side of this pipeline with one of its engines."""
    module = 'input_pipeline'
    # Else TensorFlow would be imported while the clock runs.
    if engine == 'tf_data':
        module += ' tensorflow_datasets'
    return _side(title, 'ours', format, module, engine=engine, **options)


_WRITERS = {**convert.SIDES, 'in_place_four': convert.FOUR_BUILDS}
_COPIES = 'litdata', 'datasets', 'array_record'  # formats of peers; the source's own is ''
SIDES = {
    'rows': _ours('this pipeline by rows', 'rows'),
    'rows_always': _ours('by rows, all checksums', 'rows', verify='always'),
    'rows_in_place': _ours('by rows, latents in place', 'rows', 'in_place'),
    'mixture': _ours('four sources in place, mixed', 'rows', 'in_place_four', where=''),
    'mixture_where': _ours(
        'the same, a third of the records', 'rows', 'in_place_four', where='score < 0.3333'
    ),
    'chunks': _ours('by chunks', 'chunks'),
    'chunks_in_place': _ours('by chunks, latents in place', 'chunks', 'in_place'),
    'tf_data': _ours('`train_dataset`', 'tf_data'),
    'records': _side('records by number, all crops', 'by_number', 'builder', 'input_pipeline'),
    'records_alone': _side(
        'the same, one by one', 'by_number', 'builder', 'input_pipeline', alone=True
    ),
    'grain_records': _side(
        'Grain over these records', 'grain', 'builder', 'input_pipeline grain', ours='source'
    ),
    'grain_batches': _side(
        'the same, in batches', 'grain', 'builder', 'input_pipeline grain', ours='batches'
    ),
    'litdata': _side('litdata `StreamingDataset`', 'litdata', 'litdata', 'litdata'),
    'grain': _side('Grain over ArrayRecord', 'grain', 'array_record', 'grain'),
    'datasets': _side(
        'HF `Dataset`, mapped Arrow', 'datasets', 'datasets', 'datasets torch.utils.data'
    ),
    'torch': _side('torch `DataLoader`, mapped `.pt`', 'torch', '', 'torch.utils.data'),
}


if __name__ == '__main__':
    sys.exit(runner.main(__doc__, SIDES, COLUMNS, FLAGS, prepare))
