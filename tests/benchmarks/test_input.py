"""The benchmark of the input on little data: same samples for all readers, right arithmetic."""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks import input, input_results, measure, report, source
from benchmarks.readers import BARE, READERS
from benchmarks.streams import BATCH_SIZE, Stream, from_the_start, read_for, read_once
from coyo11m_tfds import schema
from coyo11m_tfds.source.pt_file import LatentShard

NUM_SAMPLES = 8 * BATCH_SIZE
COMPARED = 3  # batches

# Those that start no process read in this one.
IN_PROCESS = ('rows', 'rows_always', 'rows_in_place', 'ours', 'ours_configured', 'tf_data', 'tfds')


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder that `--dir` names, with the source and what the builder has made of it."""
    folder = tmp_path_factory.mktemp('bench')
    input.make_data(['ours', 'rows_in_place'], folder, NUM_SAMPLES)
    return folder


def open_stream(folder: pathlib.Path, name: str, state: bytes | None = None) -> Stream:
    return READERS[name].open(folder / (READERS[name].writer or 'source'), state)


def take(stream: Stream, count: int) -> list[dict[str, np.ndarray]]:
    batches = itertools.islice(stream.epoch(), count)
    return [{name: np.asarray(x) for name, x in batch.items()} for batch in batches]


@pytest.mark.parametrize('name', IN_PROCESS)
def test_a_reader_gives_whole_batches_of_different_samples_of_the_source(
    folder: pathlib.Path, name: str
):
    check_batches(take(open_stream(folder, name), COMPARED), crops_of(folder / 'source'))


def crops_of(made: pathlib.Path) -> dict[int, list[bytes]]:
    """The three crops of each key of a source."""
    found = {}
    for path in source.files(made)[:-1]:
        shard = LatentShard(path)
        stored, _ = shard.latents(np.arange(len(shard.keys)))
        for key, row in zip(shard.keys.tolist(), stored, strict=True):
            found[key] = [crop.tobytes() for crop in row.reshape(schema.NUM_CROPS, -1)]
    return found


def check_batches(batches: list[dict[str, np.ndarray]], crops: dict[int, list[bytes]]) -> None:
    """Whole batches of different samples, in another order than the source has."""
    keys = np.concatenate([batch[schema.KEY] for batch in batches]).tolist()
    assert len(set(keys)) == COMPARED * BATCH_SIZE
    assert keys != sorted(keys, key=list(crops).index)
    for batch in batches:
        assert batch[schema.LATENTS].dtype == np.float16
        for key, latents in zip(batch[schema.KEY].tolist(), batch[schema.LATENTS], strict=True):
            given = latents.reshape(-1, *schema.LATENT_SHAPE)
            assert all(crop.tobytes() in crops[key] for crop in given)


@pytest.mark.parametrize('name', IN_PROCESS)
def test_a_reader_resumes_where_its_state_was_taken(folder: pathlib.Path, name: str):
    stream = open_stream(folder, name)
    batches = iter(stream.epoch())
    for _ in range(2):
        next(batches)
    state = stream.state(2)
    expected = [np.asarray(next(batches)[schema.KEY]) for _ in range(COMPARED)]

    resumed = take(open_stream(folder, name, state), COMPARED)

    np.testing.assert_array_equal([batch[schema.KEY] for batch in resumed], expected)
    assert len(state) < 1000 or name == 'tfds'  # which keeps the samples of its buffer


def test_a_state_of_another_data_set_is_refused(folder: pathlib.Path):
    state = json.loads(open_stream(folder, 'ours').state(2)) | {'order': '0123456789abcdef'}

    with pytest.raises(ValueError, match=r'the state is of 0123456789abcdef, this is .*window'):
        open_stream(folder, 'ours', json.dumps(state).encode())


def test_bare_reading_gives_the_records_of_the_files(folder: pathlib.Path):
    [batch] = take(open_stream(folder, BARE), 1)

    written = b''.join(
        path.read_bytes() for path in (folder / 'builder').rglob('*-train.tfrecord-*')
    )
    assert batch['record'].shape == (BATCH_SIZE,)
    assert all(record in written for record in batch['record'][:8])


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name in READERS if name not in (*IN_PROCESS, BARE)])
def test_a_peer_gives_the_samples_of_the_source_and_resumes(
    tmp_path_factory: pytest.TempPathFactory, name: str
):
    if not READERS[name].is_installed():
        pytest.skip(f'{READERS[name].package} is not installed')
    # WebDataset wants a file for each worker.
    num_samples = 44 * BATCH_SIZE if name == 'webdataset' else NUM_SAMPLES

    folder = tmp_path_factory.mktemp('peer')

    [result] = compare(folder, name, num_samples)

    assert result.rate > 0
    assert result.same == [True]
    check_batches(dump(folder, name), crops_of(folder / 'source'))


def dump(folder: pathlib.Path, name: str) -> list[dict[str, np.ndarray]]:
    """The first batches of a reader that starts processes: opened in a fresh one, as always."""
    data = folder / (READERS[name].writer or 'source')
    program = f"""
import pathlib, sys
import numpy as np
from benchmarks.readers import READERS
if __name__ == '__main__':
    reader, data = READERS[{name!r}], pathlib.Path({str(data)!r})
    reader.prepare(data)
    for number, batch in zip(range({COMPARED}), reader.open(data, None).epoch()):
        np.savez(f'{folder}/{{number}}.npz', **{{name: np.asarray(x) for name, x in batch.items()}})
"""
    (folder / 'dump.py').write_text(program)
    environment = os.environ | {'PYTHONPATH': os.getcwd()}
    subprocess.run([sys.executable, str(folder / 'dump.py')], env=environment, check=True)
    return [dict(np.load(folder / f'{number}.npz')) for number in range(COMPARED)]


def compare(folder: pathlib.Path, name: str, num_samples: int) -> list[input_results.Result]:
    """Runs everything once, in processes, for a tenth of a second each."""
    flags = input.parse_flags([f'--dir={folder}', '--repeats=1', '--seconds=0.1'])
    input.make_data([name], folder, num_samples)
    return input.compare([name], flags, make_ready=lambda: None)


@pytest.mark.slow
def test_the_command_runs_in_fresh_processes_and_prints_a_table_and_a_picture(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
):
    picture = tmp_path / 'input.svg'
    arguments = [f'--dir={tmp_path / "made"}', f'--samples={4 * BATCH_SIZE}', '--repeats=1']
    input.main([*arguments, '--seconds=0.1', '--only=torch', f'--svg={picture}'])

    output = capsys.readouterr().out.splitlines()
    assert 'cores' in output[0] and 'torch' in output[0]
    header, _, row = (line.split('|')[1:-1] for line in output if line.startswith('|'))
    values = dict(zip(map(str.strip, header), map(str.strip, row), strict=True))
    assert values['reader'] == READERS['torch'].title
    assert float(values['samples/s'].replace(',', '')) > 0
    assert values['same batches'] == 'yes'
    assert int(values['peak MB']) > 50
    assert values['samples/s'] in picture.read_text()
    kept = (tmp_path / 'made' / 'source' / source.STAMP).stat()
    input.make_data(['torch'], tmp_path / 'made', 4 * BATCH_SIZE)
    assert (tmp_path / 'made' / 'source' / source.STAMP).stat() == kept


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--dir=x', '--only=ours,mdz'], "'mdz' is none of rows"),
        ([], '--dir: name a folder'),
    ],
)
def test_a_command_that_cannot_work_is_refused(
    capsys: pytest.CaptureFixture, arguments: list[str], words: str
):
    with pytest.raises(SystemExit):
        input.parse_flags(arguments)

    assert words in capsys.readouterr().err


# --- Arithmetic --------------------------------------------------------------------------------


class Clock:
    """Time that passes only when a made-up reader lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.cpu = 100.0, 0.0
        monkeypatch.setattr(time, 'monotonic', lambda: self.now)
        monkeypatch.setattr(measure, 'cpu_seconds', lambda: self.cpu)

    def stream(self, lengths: list[int], before_epoch: float, a_batch: float) -> Stream:
        """Epochs of so many batches; all but the first as long as the last."""
        lengths = iter([*lengths, *itertools.repeat(lengths[-1], 1000)])

        def epoch():
            self.pass_by(before_epoch)
            for number in range(next(lengths)):
                self.pass_by(a_batch)
                yield number

        return Stream(epoch, state=lambda taken: b'')

    def pass_by(self, seconds: float) -> None:
        self.now, self.cpu = self.now + seconds, self.cpu + 2 * seconds


def test_a_rate_counts_neither_the_warm_up_nor_the_gaps_between_epochs(
    monkeypatch: pytest.MonkeyPatch,
):
    stream = Clock(monkeypatch).stream([100], before_epoch=50, a_batch=0.125)

    rate = read_for(stream, seconds=40)

    assert rate.batches / rate.seconds == 8
    assert rate.cpu_seconds == 2 * rate.seconds
    assert rate.seconds == 40


def test_a_reader_warms_up_for_a_second_at_least(monkeypatch: pytest.MonkeyPatch):
    taken = []
    clock = Clock(monkeypatch)

    def epoch():
        for number in itertools.count():
            clock.pass_by(1 / 64)
            taken.append(number)
            yield number

    rate = read_for(Stream(epoch, state=lambda taken: b''), seconds=1)

    assert rate.batches == 64
    assert len(taken) == 2 * 64


def test_epochs_that_are_shorter_than_a_warm_up_are_read_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
):
    stream = Clock(monkeypatch).stream([4], before_epoch=1, a_batch=0.5)

    rate = read_for(stream, seconds=10)

    assert rate.batches / rate.seconds == 2


def test_a_cold_rate_counts_all_of_one_epoch(monkeypatch: pytest.MonkeyPatch):
    first = []
    clock = Clock(monkeypatch)
    stream = clock.stream([20], before_epoch=2, a_batch=0.5)

    rate = read_once(stream, 16, on_first=lambda: first.append(clock.now))

    assert (rate.batches, rate.seconds, rate.cpu_seconds) == (16, 10, 20)
    assert first == [102.5]


@pytest.mark.parametrize(
    'read',
    [
        lambda stream: read_for(stream, seconds=1),
        lambda stream: read_once(stream, 1, on_first=lambda: None),
    ],
    ids=['steady', 'cold'],
)
def test_a_reader_without_a_full_batch_is_an_error(monkeypatch: pytest.MonkeyPatch, read):
    with pytest.raises(RuntimeError, match='no full batch'):
        read(Clock(monkeypatch).stream([0], 0, 1))


def test_a_reader_that_forgets_its_place_reads_from_the_start():
    read = []

    def epochs():
        for number in range(5):
            read.append(number)
            yield number

    open_at = from_the_start(lambda folder: epochs)
    state = open_at(pathlib.Path(), None).state(3)

    stream = open_at(pathlib.Path(), state)

    assert list(stream.epoch()) == [3, 4]
    assert read == [0, 1, 2, 3, 4]
    assert list(stream.epoch()) == [0, 1, 2, 3, 4]
    assert json.loads(stream.state(1)) == {'batches': 4}


def result(name: str, rate: float, **values) -> input_results.Result:
    """Three runs at and around a rate."""
    rates = {'rates': [rate, rate / 2, 2 * rate], 'cpu_per_million': [20.0, 10.0, 90.0]}
    times = {'first_seconds': [2.0, 1.0, 9.0], 'resume_seconds': [3.0, 2.0, 9.0]}
    sizes = {'memory': [5_000_000, 7_000_000], 'mapped': [1_000_000], 'state_bytes': 250}
    return input_results.Result(
        name, **{**rates, **times, **sizes, 'others': [0.04, 0.01], 'same': [True], **values}
    )


RESULTS = [
    result('ours', 90_000),
    result(BARE, 120_000, resume_seconds=[]),
    result('mds', 20_000),
    result('webdataset', 12_000, same=[True, False]),
    result('torch', 100_000),
]


def test_the_table_shows_medians_and_what_is_worst():
    _, _, ours, bare, _, webdataset, _ = input_results.make_table(RESULTS).splitlines()

    assert ours == (
        '| this pipeline by chunks | 90,000 | 45,000 to 180,000 | 20.0 | 7 | 1 | 2.00 | 3.00 | 250 '
        '| yes | 4% |'
    )
    assert '| 2.00 |  |  |  | 4% |' in bare
    assert '3.00, reads from the start | 250 | no |' in webdataset


def test_ratios_are_to_the_fastest_of_each_kind():
    assert input_results.make_ratios(RESULTS) == [
        'this pipeline by chunks to the best streaming peer (4 is wanted): 4.50 (MosaicML '
        '`StreamingDataset`)',
        'this pipeline by chunks to the best reader of mapped files (0.8 is wanted): 0.90 (torch '
        '`DataLoader`, mapped `.pt`)',
        'this pipeline by chunks to bare TFRecord reading (0.75 is wanted): 0.75 (bare '
        'TFRecord reading)',
        'this pipeline by chunks, resume to cold start (1.5 at most): 1.50; 250 bytes of state '
        '(1,000 at most)',
    ]
    assert input_results.make_ratios(RESULTS[1:]) == []


def test_the_picture_ranks_readers_and_bars_are_as_long_as_they_are_fast():
    drawn = input_results.draw(RESULTS)

    bars = re.findall(r'<rect class="bar (\w*)" x="[^"]*" y="[^"]*" width="([^"]*)"', drawn)
    lengths = [float(width) for _, width in bars]
    assert [kind for kind, _ in bars] == ['', '', 'ours', '', '']
    np.testing.assert_allclose(
        np.divide(lengths, lengths[0]), [1, 100 / 120, 90 / 120, 20 / 120, 12 / 120], atol=1e-3
    )
    assert 270 + lengths[0] < 760  # where bars begin, and the width of the picture
    names = [
        'bare TFRecord',
        'torch DataLoader',
        '>this pipeline by chunks<',
        'MosaicML',
        'WebDataset',
    ]
    places = [drawn.index(name) for name in names]
    assert places == sorted(places)
    assert 'prefers-color-scheme: dark' in drawn


def test_words_in_a_picture_are_escaped():
    page = report.Page(10, 10, label='a < "b"')

    assert 'aria-label="a &lt; &quot;b&quot;"' in page.svg([report.text('1 < 2', 0, 0)])
    assert '>1 &lt; 2</text>' in page.svg([report.text('1 < 2', 0, 0)])


# --- Measuring processes -----------------------------------------------------------------------


def test_memory_that_processes_share_counts_once(tmp_path: pathlib.Path):
    size = 64 << 20
    (tmp_path / 'mapped').write_bytes(b'x' * size)
    program = f"""
import mmap, os, time
own = bytearray({size})
own[::4096] = bytes({size} // 4096)  # so that all of it is there
with open({str(tmp_path / 'mapped')!r}, 'rb') as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sum(mapped[::{4096}])
if os.fork():
    os.wait()
else:
    time.sleep(1.5)
    os._exit(0)
"""
    marks = measure.Marks(tmp_path / 'marks')
    marks.mark('begin')

    run = measure.run([sys.executable, '-c', program], marks, tree_memory=True)

    assert size < run.tree_memory.peak < 1.5 * size
    assert size < run.tree_memory.peak_mapped < 1.5 * size


def test_cpu_time_includes_processes_that_still_run():
    before, own = measure.cpu_seconds(), time.process_time()
    code = 'import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()'
    with subprocess.Popen(
        [sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()  # it has used its half second, and waits
        running = measure.cpu_seconds()
        process.communicate(b'\n')

    used_here = time.process_time() - own
    assert running - before > 0.45 > used_here
    assert measure.cpu_seconds() >= running


def test_readers_take_turns_and_each_repeat_begins_with_another():
    turns = list(measure.turns(['a', 'b', 'c'], repeats=3))

    assert turns == ['a', 'b', 'c', 'b', 'c', 'a', 'c', 'a', 'b']
