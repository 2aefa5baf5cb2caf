"""Times readers of the same samples: this pipeline, its peers, and bare TFRecord reading.

    python -m benchmarks.input --dir /tmp/bench                  # 1.5 GB, 3 repeats, 15 minutes
    python -m benchmarks.input --dir /tmp/bench --only ours,tfrecord --repeats 5
    python -m benchmarks.input --dir /tmp/bench --svg docs/input.svg

The samples are made once and written in every reader's own format; they are kept in `--dir`. Every
run is a fresh process that reads files in the page cache: one that starts, reads until it is steady
and then for some seconds; and one that resumes in the middle of an epoch. With `--cold` the files
are on the disk alone, and the first process reads one epoch, every sample once. Readers take turns,
in another order in each repeat. What is not installed is left out; benchmarks/README.md says how to
install it, what is measured, and what came out.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from benchmarks import input_results, measure, source
from benchmarks.readers import BARE, READERS
from benchmarks.streams import BATCH_SIZE, Batch, Rate, Stream, read_for, read_once
from benchmarks.writers import WRITERS
from coyo11m_tfds import schema

_FILES = 4

_COMPARED_BATCHES = 8  # after a resume


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for and prints its table."""
    flags = parse_flags(arguments)
    if flags.task:
        run_here(flags)
    else:
        _compare_and_show(flags)


def parse_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--dir', type=pathlib.Path, help='folder to work in')
    parser.add_argument('--samples', type=int, default=60_000, help='25 KB each')
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--seconds', type=float, default=5, help='to read for, when steady')
    parser.add_argument('--only', type=lambda text: text.split(','), help=','.join(READERS))
    parser.add_argument('--cold', action='store_true', help='one epoch, from the disk')
    parser.add_argument('--fill_memory', action='store_true', help='with page cache, before a run')
    parser.add_argument('--svg', type=pathlib.Path, help='file to draw samples per second into')
    parser.add_argument('--task', choices=_TASKS, help='do one task and measure nothing')
    parser.add_argument('--run', choices={*READERS, *WRITERS}, metavar='READER', help='whose task')
    flags = parser.parse_args(arguments)
    if not flags.dir:
        parser.error('--dir: name a folder to work in, with room for 12 GB.')
    for name in flags.only or ():
        if name not in READERS:
            parser.error(f'--only: {name!r} is none of {", ".join(READERS)}.')
    return flags


def _compare_and_show(flags: argparse.Namespace) -> None:
    names = [name for name in flags.only or READERS if READERS[name].is_installed()]
    if not names:
        sys.exit(f'error: not installed: {", ".join(flags.only)}; see benchmarks/README.md')
    packages = sorted({READERS[name].package for name in names})
    flags.dir.mkdir(parents=True, exist_ok=True)
    print(measure.describe_machine(flags.dir, packages), end='\n\n')
    make_data(names, flags.dir, flags.samples)
    with measure.memory_filler(flags.dir) as fill:
        make_ready = fill if flags.fill_memory else lambda: None
        results = compare(names, flags, make_ready)
    print(input_results.make_table(results))
    if not flags.cold:  # how fast a disk is says nothing of what is wanted of a reader
        print('\n'.join(['', *input_results.make_ratios(results)]))
    if flags.svg:
        flags.svg.write_text(input_results.draw(results), encoding='utf-8')


# --- The data ----------------------------------------------------------------------------------


def make_data(
    names: Iterable[str], folder: pathlib.Path, num_samples: int, num_files: int = _FILES
) -> None:
    """Makes the source and writes it in the formats of these readers; what is there is kept."""
    made = source.make(folder / 'source', num_samples, num_files)
    wanted = json.loads((made / source.STAMP).read_text())
    for name in dict.fromkeys(READERS[name].writer for name in names if READERS[name].writer):
        stamp = _folder_of(folder, name) / source.STAMP
        if stamp.exists() and json.loads(stamp.read_text()) == wanted:
            continue
        print(f'writing: {name}', file=sys.stderr, flush=True)
        shutil.rmtree(stamp.parent, ignore_errors=True)
        stamp.parent.mkdir()
        run_task(name, 'write', folder)
        stamp.write_text(json.dumps(wanted))


def _folder_of(folder: pathlib.Path, writer: str) -> pathlib.Path:
    return folder / (writer or 'source')


# --- The runs ----------------------------------------------------------------------------------


def compare(
    names: Sequence[str], flags: argparse.Namespace, make_ready: Callable[[], None]
) -> list[input_results.Result]:
    """Runs readers in turns; each once to read, and once to resume in the middle of an epoch.

    Args:
        names: of the readers, in `READERS`.
        flags: of the command line.
        make_ready: called before each run.
    """
    results = {name: input_results.Result(name) for name in names}
    expected: dict[str, list[str]] = {}

    def run(name: str, task: str) -> tuple[measure.Run, dict]:
        make_ready()
        folders = [_folder_of(flags.dir, READERS[name].writer)]
        if READERS[name].writer == 'in_place':
            folders.append(_folder_of(flags.dir, ''))
        ready = measure.drop_from_page_cache if flags.cold else measure.read_through
        ready(path for data in folders for path in data.rglob('*') if path.is_file())
        return run_task(name, task, flags.dir, flags.seconds)

    for name in measure.turns(names, flags.repeats):
        result = results[name]
        result.add_read(*run(name, 'read_once' if flags.cold else 'read'))
        if name == BARE:
            continue  # its records are not parsed, so that nobody could tell where it is
        if name not in expected:
            _, saved = run(name, 'save')
            expected[name], result.state_bytes = saved['batches'], saved['state_bytes']
        resumed, found = run(name, 'resume')
        result.add_resume(resumed, found['batches'] == expected[name])
    return list(results.values())


def run_task(
    name: str, task: str, folder: pathlib.Path, seconds: float = 0, tree_memory: bool = True
) -> tuple[measure.Run, dict]:
    """Runs a task in a fresh process; returns what was measured and what the task says."""
    marks = measure.Marks(folder / 'marks')
    for path in (marks.path, folder / 'answer.json'):
        path.unlink(missing_ok=True)
    command = [sys.executable, '-m', 'benchmarks.input', f'--dir={folder}', f'--run={name}']
    command += [f'--task={task}', f'--seconds={seconds}']
    run = measure.run(command, marks, tree_memory=tree_memory and task in ('read', 'read_once'))
    return run, json.loads((folder / 'answer.json').read_text())


def run_here(flags: argparse.Namespace) -> None:
    """Does one task in this process, as `compare` has it done in a fresh one."""
    marks = measure.Marks(flags.dir / 'marks')
    answer = _TASKS[flags.task](flags, marks)
    (flags.dir / 'answer.json').write_text(json.dumps(answer))


def _write(flags: argparse.Namespace, marks: measure.Marks) -> dict:
    WRITERS[flags.run].write(flags.dir / 'source', _folder_of(flags.dir, flags.run), marks)
    return {}


def _read(flags: argparse.Namespace, marks: measure.Marks) -> dict:
    stream = _open(flags, marks, state=None)
    return _answer(read_for(stream, flags.seconds, on_first=lambda: marks.mark('first')))


def _read_once(flags: argparse.Namespace, marks: measure.Marks) -> dict:
    stream, num_batches = _open(flags, marks, state=None), _num_samples(flags.dir) // BATCH_SIZE
    return _answer(read_once(stream, num_batches, on_first=lambda: marks.mark('first')))


def _answer(rate: Rate) -> dict:
    return {**dataclasses.asdict(rate), 'samples': rate.batches * BATCH_SIZE}


def _save(flags: argparse.Namespace, marks: measure.Marks) -> dict:
    """Stops in the middle of an epoch; tells which batches come after that."""
    stream = _open(flags, marks, state=None)
    middle = _num_samples(flags.dir) // BATCH_SIZE // 2
    batches = iter(stream.epoch())
    for _ in itertools.islice(batches, middle):
        pass
    state = stream.state(middle)
    _state_file(flags).write_bytes(state)
    return {'state_bytes': len(state), 'batches': _digests(batches)}


def _resume(flags: argparse.Namespace, marks: measure.Marks) -> dict:
    stream = _open(flags, marks, _state_file(flags).read_bytes())
    batches = iter(stream.epoch())
    first = next(batches)
    marks.mark('first')
    return {'batches': _digests(itertools.chain([first], batches))}


_TASKS = {
    'write': _write,
    'read': _read,
    'read_once': _read_once,
    'save': _save,
    'resume': _resume,
}


def _open(flags: argparse.Namespace, marks: measure.Marks, state: bytes | None) -> Stream:
    reader = READERS[flags.run]
    data = _folder_of(flags.dir, reader.writer)
    reader.prepare(data)
    marks.mark('imported')
    return reader.open(data, state)


def _num_samples(folder: pathlib.Path) -> int:
    return json.loads((folder / 'source' / source.STAMP).read_text())['num_samples']


def _state_file(flags: argparse.Namespace) -> pathlib.Path:
    return flags.dir / f'{flags.run}.state'


def _digests(batches: Iterator[Batch]) -> list[str]:
    """One for each of the next batches."""
    return [
        hashlib.sha256(
            b''.join(np.asarray(batch[name]).tobytes() for name in (schema.KEY, schema.LATENTS))
        ).hexdigest()
        for batch in itertools.islice(batches, _COMPARED_BATCHES)
    ]


if __name__ == '__main__':
    main()
