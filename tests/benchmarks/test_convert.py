"""The benchmark of the conversion on a tiny source: same work for all writers, right arithmetic."""

import mmap
import pathlib
import signal
import sys
import time

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from benchmarks import convert, measure, source
from benchmarks.writers import WRITERS, Writer, read_captions, samples
from coyo11m_tfds.source.pt_file import LatentShard
from tests import children

NUM_SAMPLES = 50

# A build with two processes is the same code with another number, and takes seconds to start them.
IN_TURN = [name for name in WRITERS if name != 'builder2']


@pytest.fixture(scope='module')
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return source.make(tmp_path_factory.mktemp('made') / 'source', NUM_SAMPLES, num_files=2)


@pytest.mark.parametrize('name', IN_TURN)
def test_every_writer_writes_all_that_is_in_the_source(
    tmp_path: pathlib.Path, tiny_source: pathlib.Path, name: str
):
    if not WRITERS[name].is_installed():
        pytest.skip(f'{WRITERS[name].package} is not installed')
    (tmp_path / 'out').mkdir()
    marks = measure.Marks(tmp_path / 'marks')

    WRITERS[name].write(tiny_source, tmp_path / 'out', marks)

    marks.mark('flushed')
    times = [marks.read()[mark][0] for mark in ('imported', 'writing', 'flushed')]
    assert times == sorted(times)
    written = b''.join(map(_content, (tmp_path / 'out').rglob('*')))
    rows = list(samples(tiny_source, read_captions(tiny_source)))
    assert len(rows) == NUM_SAMPLES
    if WRITERS[name].copies_latents:
        assert all(latents.tobytes() in written for _, latents, _ in rows)
    if name != 'cp':  # whose captions are still compressed
        assert all(caption.encode() in written for _, _, caption in rows)


def _content(path: pathlib.Path) -> bytes:
    if path.suffix == '.array_record':  # whose files have a header in every 64 KB
        return b''.join(ArrayRecordReader(str(path)).read_all())
    return path.read_bytes() if path.is_file() else b''


def test_a_source_is_what_the_builder_expects_and_is_made_once(tmp_path: pathlib.Path):
    made = source.make(tmp_path / 'x', num_samples=7, num_files=2, seed=1)

    *pt_files, captions_file = source.files(made)
    shards = [LatentShard(path) for path in pt_files]
    assert [len(shard.keys) for shard in shards] == [4, 3]
    keys = np.concatenate([shard.keys for shard in shards])
    captions = read_captions(made)
    assert sorted(captions) == sorted(keys.tolist())
    assert list(captions) != keys.tolist()
    assert all(200 <= len(caption) <= 600 for caption in captions.values())
    values = shards[0].latents(np.arange(4))[1]
    assert (values.mean(), values.std()) == pytest.approx((1, 6), rel=0.1)
    before = captions_file.stat()
    source.make(tmp_path / 'x', num_samples=7, num_files=2, seed=1)
    assert captions_file.stat() == before
    source.make(tmp_path / 'x', num_samples=7, num_files=2, seed=2)
    assert not np.array_equal(LatentShard(pt_files[0]).keys, keys[:4])


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: pathlib.Path):
    (tmp_path / 'thesis.tex').write_text('x')

    with pytest.raises(ValueError, match='is no source made by'):
        source.make(tmp_path, num_samples=4, num_files=1)

    assert (tmp_path / 'thesis.tex').exists()


@pytest.mark.slow
def test_the_command_runs_in_fresh_processes_and_prints_a_table(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
):
    convert.main(['--dir', str(tmp_path), '--gb=0.001', '--repeats=1', '--only=cp,in_place'])

    machine, _, header, _, *rows = capsys.readouterr().out.splitlines()
    assert 'cores' in machine and 'numpy' in machine
    rows = [[value.strip() for value in row.split('|')[1:-1]] for row in rows]
    assert {len(row) for row in rows} == {len(header.split('|')[1:-1])}
    assert [row[0] for row in rows] == [WRITERS[name].title for name in ('cp', 'in_place')]
    assert all(float(row[1].replace(',', '')) > 0 for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['marks', 'source']


def test_a_writer_that_is_not_known_is_refused(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        convert.main(['--dir=x', '--only=cp,mdz'])

    assert "'mdz' is none of builder, builder2" in capsys.readouterr().err


def test_writers_that_are_not_installed_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Writer, 'is_installed', lambda self: False)
    with pytest.raises(SystemExit, match=r'^error: not installed: mds, litdata; see'):
        convert.main([f'--dir={tmp_path}', '--only=mds,litdata'])


def test_ratios_are_those_of_the_medians_to_the_fastest_of_the_others():
    def result(name: str, *seconds: float) -> convert.Result:
        runs = [
            measure.Run(
                seconds=10 + taken,
                cpu_seconds=3,
                marks={'imported': (8, 1), 'writing': (9, 0), 'flushed': (9 + taken, 0)},
                main_memory=measure.Memory(5_000_000, 0),
                worker_memory=measure.Memory(),
                others_share=0.04,
            )
            for taken in seconds
        ]
        return convert.Result(name, num_samples=1000, num_bytes=24_000_000, runs=runs)

    results = [
        result('builder', 1, 2, 30),
        result('tfds', 14),
        result('tfds_unshuffled', 8),
        result('mds', 20),
        result('webdataset', 11),
    ]

    assert convert.make_ratios(results) == [
        'One process to the generator builder of TFDS (2.5 is wanted): 4.00; '
        'with captions and planning 3.00',
        'One process to MosaicML, WebDataset and litdata (4 is wanted): 5.50; '
        'with captions and planning 4.00',
    ]
    _, _, builder, tfds, *_ = convert.make_table(results).splitlines()
    assert builder == (
        '| this builder, 1 process | 500 | 33 to 1,000 | 12 | 1.00 | 333 | 1.00 | 12.0 | 2,000 '
        '| 5 |  | 4% |'
    )
    assert '| 71 | 71 to 71 | 2 | 7.00 |' in tfds


def test_memory_is_that_of_each_process_and_mapped_files_are_told_apart(tmp_path: pathlib.Path):
    size = 64 << 20
    with open(tmp_path / 'mapped', 'wb') as file:
        file.truncate(size)
    program = f"""
import mmap, subprocess, sys, time
code = 'x = b"x" * {2 * size}; import time; time.sleep(0.3)'
worker = subprocess.Popen([sys.executable, '-c', code])
with open({str(tmp_path / 'mapped')!r}, 'rb') as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sum(mapped[::{mmap.PAGESIZE}])
    worker.wait()
"""
    marks = measure.Marks(tmp_path / 'marks')
    marks.mark('begin')

    run = measure.run([sys.executable, '-c', program], marks)

    assert run.main_memory.peak_rss > size > run.main_memory.peak_anonymous > 0
    assert run.worker_memory.peak_rss > run.worker_memory.peak_anonymous > 2 * size
    assert run.seconds > 0.3
    assert run.cpu_since('begin') == run.cpu_seconds - run.marks['begin'][1]
    assert run.cpu_seconds > 0.01
    assert list(run.marks) == ['begin']


def test_a_run_that_fails_says_what_it_printed(tmp_path: pathlib.Path):
    with pytest.raises(RuntimeError, match='ended with 3:\noh no'):
        measure.run(
            [sys.executable, '-c', 'import sys; print("oh no"); sys.exit(3)'],
            measure.Marks(tmp_path / 'marks'),
        )


def test_an_interrupt_ends_the_program_that_is_measured(tmp_path: pathlib.Path):
    ready = tmp_path / 'ready'
    measured = """
        import pathlib, signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(60)
    """
    program = """
        import signal, textwrap
        from benchmarks import measure
        signal.signal(signal.SIGINT, signal.default_int_handler)
        measured = 'import sys\\n' + textwrap.dedent(sys.argv[1])
        measure.run([sys.executable, '-c', measured, sys.argv[2]], measure.Marks('marks'))
    """
    with children.python(program, measured, ready) as child:
        while not ready.exists():
            assert child.poll() is None, child.communicate()
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=30)
    assert child.returncode == -signal.SIGINT


def test_the_first_mark_of_a_name_counts(tmp_path: pathlib.Path):
    marks = measure.Marks(tmp_path / 'marks')
    marks.mark('writing')
    first = marks.read()
    marks.mark('writing')

    assert marks.read() == first
