"""Builds from beginning to end: alone, disturbed, killed, and several at a time."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from tests import made_sources
from tests.build.build_kills import (
    SETTINGS,
    assert_only_the_data_set,
    children,
    end,
    files_of,
    final_folder,
    finished_shards,
    is_running,
    run,
    start,
    wait_until,
)
from tests.checkout import CHECKOUT


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """600 records in three files, 41 shards of at most 16: a build takes a second or two."""
    files = [range(200), range(200, 400), range(400, 600)]
    return made_sources.write_source(tmp_path_factory.mktemp('source'), files)


@pytest.fixture(scope='module')
def undisturbed(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    final = final_folder(tmp_path_factory.mktemp('undisturbed'))
    assert run(source, final).stdout.endswith('built here\n')
    return files_of(final)


@pytest.mark.parametrize('num_workers', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_processes_builds_the_same(source, undisturbed, tmp_path, num_workers: int):
    final = final_folder(tmp_path)
    run(source, final, num_workers=num_workers)
    assert files_of(final) == undisturbed
    assert_only_the_data_set(final)


def test_a_killed_build_goes_on_where_it_was(source, undisturbed, tmp_path):
    final = final_folder(tmp_path)
    process = start(source, final, num_workers=2)
    wait_until(lambda: finished_shards(final) >= 5)
    pids = children(process)
    process.kill()
    end(process)
    wait_until(lambda: not any(is_running(pid) for pid in pids), 10)  # no orphans
    done = finished_shards(final)
    assert not final.exists()

    ended = run(source, final, num_workers=2)

    assert 'Checking finished shards: 100%' in ended.stderr
    assert f'{done} of 41 shards are finished already' in ended.stderr
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
    wait_until(lambda: finished_shards(old) >= 5)
    process.kill()
    end(process)
    assert files_of(old) == before
    plain = run(tmp := source / 'nothing here', old)
    assert plain.stdout == 'built elsewhere\n' and not tmp.exists()
    assert files_of(old) == before
    done = finished_shards(old)
    assert done >= 5
    resumed = run(source, old, overwrite=True)
    assert f'{done} of 41 shards are finished already' in resumed.stderr
    assert files_of(old) == undisturbed
    assert_only_the_data_set(old)


def test_an_overwriting_that_was_killed_at_its_end_is_finished_not_repeated(
    source, undisturbed, old
):
    """By the same command or by a plain build, which needs no source."""
    process = start(source, old, overwrite=True)
    journal = old.with_name('1.0.0.building') / 'journal.json'
    wait_until(lambda: journal.exists() and b'complete' in journal.read_bytes())
    process.kill()
    end(process)
    again = run(source, old, overwrite=True)
    if 'finishing' in again.stderr:
        assert again.stdout == 'built elsewhere\n'
    assert files_of(old) == undisturbed
    assert_only_the_data_set(old)


def test_two_builds_at_once_build_once(source, undisturbed, tmp_path):
    final = final_folder(tmp_path)
    both = [start(source, final) for _ in range(2)]
    ended = [end(process) for process in both]
    assert [process.returncode for process in ended] == [0, 0], ended
    outcomes = sorted(process.stdout.splitlines()[-1] for process in ended)
    assert outcomes == ['built elsewhere', 'built here']
    assert files_of(final) == undisturbed
    assert_only_the_data_set(final)


def test_a_second_build_says_what_it_waits_for_and_when_it_gives_up(source, tmp_path):
    final = final_folder(tmp_path)
    first = start(source, final)
    wait_until(lambda: finished_shards(final) >= 1)
    first.send_signal(signal.SIGSTOP)
    second = end(start(source, final, wait_hours=0.2 / 3600))
    first.kill()
    end(first)
    assert second.returncode != 0
    assert 'TimeoutError' in second.stderr
    assert str(first.pid) in second.stderr.splitlines()[-1]


def test_what_an_interrupted_build_of_other_settings_left_is_not_in_the_data_set(
    source, undisturbed, tmp_path
):
    final = final_folder(tmp_path)
    process = start(source, final, settings={'shard_bytes': 300_000})
    wait_until(lambda: finished_shards(final) >= 5)
    process.kill()
    end(process)
    run(source, final)
    assert files_of(final) == undisturbed
    assert_only_the_data_set(final)


def test_a_full_disk_ends_it_and_what_is_finished_stays(source, undisturbed, tmp_path):
    """A small file system that fills up during the build; skips where none may be mounted."""
    disk = tmp_path / 'disk'
    disk.mkdir()
    final = final_folder(disk)
    script = f"""
mount -t tmpfs -o size=17m none {disk} || exit 77
{sys.executable} -m tests.build.build_program {source} {final} \
    '{{"scratch_dir": "{tmp_path}/scratch"}}' '{json.dumps(SETTINGS)}' > {tmp_path}/log 2>&1 &
until ls {final}.building/finished/*.json > {tmp_path}/ls 2>&1; do sleep 0.002; done
head -c 17M /dev/zero > {disk}/filler 2> {tmp_path}/filler
wait $!
test $? = 1 || exit 1
rm {disk}/filler
cp -r {disk} {tmp_path}/kept
"""
    command = ['unshare', '--user', '--map-root-user', '--mount', 'bash', '-c', script]
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    if ended.returncode == 77 or 'Operation not permitted' in ended.stderr:
        pytest.skip(f'cannot mount here: {ended.stderr.strip()}')
    log = (tmp_path / 'log').read_text()
    assert ended.returncode == 0, log
    assert log.splitlines()[-1].startswith('OSError'), log
    assert 'No space left' in log.splitlines()[-1]
    kept = final_folder(tmp_path / 'kept')
    assert not kept.exists()
    assert finished_shards(kept) > 0
    run(source, kept)
    assert files_of(kept) == undisturbed
