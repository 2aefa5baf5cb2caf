"""Builds from beginning to end: alone, disturbed, killed, and several at a time."""

import pathlib
import shutil
import signal

import pytest

from coyo11m_tfds import schema
from tests import children, made_sources
from tests.built import files_of
from tests.convert.build_kills import Build, final_folder, is_complete, run, start

NUM_SHARDS = 21


def assert_only_the_data_set(final: pathlib.Path) -> None:
    """Nothing lies there but one data set, without what only its build needed."""
    assert [path.name for path in final.parent.iterdir()] == [final.name]
    assert all(path.is_file() for path in final.iterdir())
    assert len({schema.build_of(path.name) for path in final.iterdir()} - {''}) == 1


def finished_shards(final: pathlib.Path) -> int:
    return len(list(final.glob('building-*/*.tfrecord*.json')))


@pytest.fixture(scope='module')
def source(tmp_path_factory) -> pathlib.Path:
    """300 records in three files, shards of at most 16: a build takes a second."""
    files = [range(100), range(100, 200), range(200, 300)]
    return made_sources.write_source(tmp_path_factory.mktemp('source'), files)


@pytest.fixture(scope='module')
def undisturbed(source, tmp_path_factory) -> dict:
    final = final_folder(tmp_path_factory.mktemp('undisturbed'))
    assert run(source, final).stdout.endswith('built here\n')
    assert len(list(final.glob('*.tfrecord*'))) == NUM_SHARDS
    return files_of(final)


def test_a_killed_build_goes_on_where_it_was_with_any_number_of_processes(
    source, undisturbed, tmp_path
):
    final = final_folder(tmp_path)
    process = start(source, final, num_workers=3)
    children.wait_until(lambda: finished_shards(final) >= 5)
    pids = children.of(process.pid)
    process.kill()
    process.end()
    children.wait_for_end(pids)
    done = finished_shards(final)
    assert not is_complete(final)
    # Three shards lose their receipts: one is damaged, one is of another shard, one is a folder.
    receipts = sorted(final.glob('building-*/*.tfrecord*.json'))
    receipts[0].write_text('[]')
    shutil.copy(receipts[1], receipts[2])
    receipts[3].unlink()
    receipts[3].mkdir()
    for name in ('.DS_Store', 'notes.json', b'\xff.json'.decode('utf-8', 'surrogateescape')):
        (receipts[0].parent / name).write_text('{}')
    done -= 3
    ended = run(source, final)
    assert 'Checking finished shards: 100%' in ended.stderr
    assert f'{done} of {NUM_SHARDS} shards are already finished' in ended.stderr
    assert files_of(final) == undisturbed
    assert_only_the_data_set(final)
    assert run(source, final).stdout == 'built elsewhere\n'


@pytest.fixture
def old(source, undisturbed, tmp_path) -> pathlib.Path:
    """A data set of other captions, which `undisturbed` is to replace."""
    final = final_folder(tmp_path)
    run(source, final, settings={'caption_column': 'caption'})
    assert files_of(final) != undisturbed
    return final


def test_an_interrupted_overwriting_costs_neither_the_old_data_set_nor_the_work(
    source, undisturbed, old
):
    before = files_of(old)
    process = start(source, old, overwrite=True)
    children.wait_until(lambda: finished_shards(old) >= 5)
    process.kill()
    process.end()
    assert before.items() <= files_of(old).items()
    done = finished_shards(old)
    plain = run(tmp := source / 'nothing here', old)
    assert plain.stdout == 'built elsewhere\n' and not tmp.exists()
    assert 'was interrupted and has left ' in plain.stderr
    assert before.items() <= files_of(old).items()
    assert done >= 5
    resumed = run(source, old, overwrite=True)
    assert f'{done} of {NUM_SHARDS} shards are already finished' in resumed.stderr
    assert files_of(old) == undisturbed
    assert_only_the_data_set(old)


def test_two_builds_at_once_build_once(source, undisturbed, tmp_path):
    final = final_folder(tmp_path)
    both = [start(source, final) for _ in range(2)]
    ended = [process.end() for process in both]
    assert [process.returncode for process in ended] == [0, 0], ended
    outcomes = sorted(process.stdout.splitlines()[-1] for process in ended)
    assert outcomes == ['built elsewhere', 'built here']
    assert files_of(final) == undisturbed
    assert_only_the_data_set(final)


def test_what_an_earlier_plan_left_stays_as_long_as_another_has_the_lock(source, tmp_path):
    final = final_folder(tmp_path)
    lost = start(source, final)
    children.wait_until(lambda: finished_shards(final) >= 2)
    lost.send_signal(signal.SIGSTOP)
    final.with_name('1.0.0.lock').unlink()
    holder = start(source, final, settings={'shard_bytes': 500_000})
    children.wait_until(lambda: len({path.parent for path in final.glob('building-*/*.json')}) == 2)
    holder.send_signal(signal.SIGSTOP)
    written = set(files_of(final))
    lost.send_signal(signal.SIGCONT)
    assert lost.end().returncode == 0
    assert written <= set(files_of(final))
    holder.kill()
    holder.end()
    assert 'was interrupted and has left' in run(source, final).stderr


def test_an_overwriting_with_the_same_plan_mends_a_shard(source, undisturbed, tmp_path):
    final = final_folder(tmp_path)
    run(source, final)
    shard = next(final.glob('*train*.tfrecord-00003-of-*'))
    shard.write_bytes(b'damaged')
    run(source, final, overwrite=True)
    assert files_of(final) == undisturbed
    assert_only_the_data_set(final)


@pytest.mark.parametrize('settings', [{}, {'caption_column': 'none'}])
def test_a_failed_build_leaves_no_empty_folder(source, tmp_path, settings):
    out = tmp_path / 'out'
    empty = tmp_path / 'empty'
    empty.mkdir()
    ended = start(source if settings else empty, final_folder(out), settings=settings).end()
    assert ended.returncode
    left = [path for path in tmp_path.rglob('*') if path.is_dir() and not any(path.iterdir())]
    assert left == [empty]


def start_rank(rank: int, source, final, **options) -> Build:
    env = {'RANK': str(rank), 'WORLD_SIZE': '2', 'COYO11M_LEASE_SECONDS': '3'}
    return start(source, final, env=env, **options)


def test_the_other_processes_of_a_job_wait_for_the_first(source, undisturbed, tmp_path):
    final = final_folder(tmp_path)
    other, first = (start_rank(rank, source, final) for rank in (1, 0))
    assert first.end().stdout.endswith('built here\n')
    assert other.end().stdout == 'built elsewhere\n'
    assert files_of(final) == undisturbed
    assert_only_the_data_set(final)


def test_only_the_first_process_of_a_job_may_overwrite(source, tmp_path):
    ended = start_rank(1, source, final_folder(tmp_path), overwrite=True).end()
    assert 'Overwrite it with one process' in ended.stderr.splitlines()[-1]
