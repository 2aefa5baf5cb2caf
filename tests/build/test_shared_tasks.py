"""Builds that several processes of a job share: the same bytes, whoever of them dies."""

import pathlib
import signal
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from coyo11m_tfds import schema
from coyo11m_tfds.build import local_runner, shared_tasks
from coyo11m_tfds.build.build_folder import BuildFolder
from coyo11m_tfds.build.finished_shards import FinishedShards
from coyo11m_tfds.build.tasks import ShardResult, ShardTask
from coyo11m_tfds.process import job
from coyo11m_tfds.report.shard_statistics import ShardStatistics
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.scratch import Scratch
from tests import made_sources
from tests.build import plans
from tests.build.build_kills import end, start, wait_until
from tests.build.places import BucketPlace, Files, LocalPlace, Place
from tests.fakes.cloud import Gcs, fake_gcs

NUM_SHARDS = 17


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Five groups of tasks: a file each."""
    files = [range(start, start + 45) for start in range(0, 225, 45)]
    return made_sources.write_source(tmp_path_factory.mktemp('source'), files)


@pytest.fixture(scope='module')
def server(source, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gcs]:
    with fake_gcs(tmp_path_factory.mktemp('gcs')) as server:
        server.upload_folder(source, 'gs://source/coyo')
        yield server
        assert server.errors == []


@pytest.fixture(scope='module')
def expected(source, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """What one process builds."""
    place = LocalPlace(tmp_path_factory.mktemp('expected'), source)
    assert end(place.start()).returncode == 0
    return place.read()


@pytest.fixture(params=['local', pytest.param('bucket', marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, source, tmp_path: pathlib.Path) -> Place:
    if request.param == 'local':
        return LocalPlace(tmp_path / 'out', source)
    return bucket_place(request.getfixturevalue('server'), tmp_path)


def bucket_place(server: Gcs, folder: pathlib.Path) -> Place:
    place = BucketPlace(folder, server, folder.name)
    place.env |= {'COYO11M_LEASE_SECONDS': '60'}  # longer than a process is stopped here
    return place


def end_well(*processes) -> list[str]:
    """Waits for processes that must succeed; returns what each did."""
    ended = [end(process) for process in processes]
    assert [process.returncode for process in ended] == [0] * len(ended), ended
    return [process.stdout.splitlines()[-1] for process in ended]


def check_whole(place: Place, expected: Files) -> None:
    assert place.read() == expected
    assert place.others() == []


def start_and_stop_first(place: Place, count: int = 2) -> subprocess.Popen:
    """Starts the first process of a job, and stops it when the tasks can be had."""
    first = place.start((0, count))
    wait_until(lambda: place.finished() >= 1)
    first.send_signal(signal.SIGSTOP)
    return first


def wait_until_it_helps(place: Place, other: subprocess.Popen) -> None:
    """Returns when a process beside a first one that sleeps has written a shard."""
    wait_for_line(other, 'helps to write')
    had = place.finished()
    wait_until(lambda: place.finished() > had)


def wait_for_line(process: subprocess.Popen, part: str) -> None:
    for line in process.stderr:
        if part in line:
            return
    raise AssertionError(f'it ended without a line of {part!r}')


# --- Who writes ------------------------------------------------------------------------------


def build_in_job(place: Place, expected: Files, count: int) -> None:
    processes = [place.start((index, count)) for index in reversed(range(count))]
    assert end_well(*processes) == ['built elsewhere'] * (count - 1) + ['built here']
    check_whole(place, expected)


@pytest.mark.slow
@pytest.mark.parametrize('count', [2, 3])
def test_processes_of_a_job_build_what_one_builds(place, expected, count: int):
    build_in_job(place, expected, count)


@pytest.mark.slow
def test_processes_of_a_job_build_in_a_bucket(server, expected, tmp_path):
    build_in_job(bucket_place(server, tmp_path), expected, count=2)


def test_while_the_first_sleeps_the_others_write_all_shards(place, expected):
    first = start_and_stop_first(place)
    assert place.finished() < NUM_SHARDS
    other = place.start((1, 2))
    wait_until(lambda: place.finished() == NUM_SHARDS)
    first.send_signal(signal.SIGCONT)
    assert end_well(first, other) == ['built here', 'built elsewhere']
    check_whole(place, expected)


@pytest.mark.slow
def test_one_of_a_machine_writes_and_the_others_wait(source, expected, tmp_path):
    place = LocalPlace(tmp_path, source)
    first = start_and_stop_first(place)
    place.env |= {'LOCAL_RANK': '1'}
    other = place.start((1, 2), wait_hours=2 / 3600)
    finished = place.finished()
    assert 'TimeoutError' in end(other).stderr
    assert place.finished() == finished
    first.send_signal(signal.SIGCONT)
    end_well(first)
    check_whole(place, expected)


@pytest.mark.slow
def test_latents_in_place_are_shared_too(source, tmp_path):
    settings = {'latents': 'in_place'}
    alone, shared = (LocalPlace(tmp_path / name, source) for name in ('alone', 'shared'))
    end_well(alone.start(settings=settings))
    processes = [shared.start((index, 2), settings=settings) for index in (0, 1)]
    end_well(*processes)
    check_whole(shared, alone.read())


@pytest.mark.parametrize('count', [1, 2, 3, 7])
def test_every_process_looks_after_all_tasks_its_own_first(source, tmp_path, count: int):
    tasks = plans.make_plan(source, tmp_path / 'cache').tasks
    groups = sorted({task.group for task in tasks})
    for index in range(count):
        order = shared_tasks.in_turn(tasks, index, count)
        assert sorted(task.fingerprint for task in order) == sorted(t.fingerprint for t in tasks)
        seen = list(dict.fromkeys(task.group for task in order))
        own = groups[index::count]
        assert seen[: len(own)] == own
        if own != groups:
            last_of_next = groups[(index + 1) % count :: count][-1:]
            assert seen[len(own) :][: len(last_of_next)] == last_of_next


def test_a_task_can_be_told_to_another_process(source, tmp_path):
    tasks = plans.make_plan(source, tmp_path / 'cache').tasks
    packed = shared_tasks.pack(tasks, Destination(tmp_path / 'work'))
    for task, told in zip(tasks, packed, strict=True):
        assert ShardTask.from_json(told.to_json()) == told
        ours, theirs = task.inputs.open(), told.inputs.open()
        assert ours.captions(slice(None)) == theirs.captions(slice(None))


# --- Who dies --------------------------------------------------------------------------------


def test_of_two_processes_the_second_is_killed(place, expected):
    first = start_and_stop_first(place)
    other = place.start((1, 2), num_workers=2)
    wait_until_it_helps(place, other)
    other.kill()
    end(other)
    first.send_signal(signal.SIGCONT)
    assert end_well(first) == ['built here']
    check_whole(place, expected)


def test_the_first_is_killed_the_others_end_and_the_same_command_resumes(place, expected):
    first = start_and_stop_first(place)
    other = place.start((1, 2))
    wait_until_it_helps(place, other)
    first.kill()
    end(first)
    ended = end(other)
    assert ended.returncode != 0
    assert 'RuntimeError' in ended.stderr.splitlines()[-1]
    assert 'ended without a word' in ended.stderr.splitlines()[-1]
    processes = [place.start((index, 2)) for index in (0, 1)]
    assert end_well(*processes) == ['built here', 'built elsewhere']
    check_whole(place, expected)


@pytest.mark.slow
def test_a_first_process_that_is_started_again_finds_its_helpers(place, expected):
    first = start_and_stop_first(place)
    place.env |= {'COYO11M_LEASE_SECONDS': '60'}  # of the helper: it waits as long as that takes
    other = place.start((1, 2))
    wait_until_it_helps(place, other)
    first.kill()
    end(first)
    place.env |= {'COYO11M_LEASE_SECONDS': '2'}
    again = place.start((0, 2))
    assert end_well(again, other) == ['built here', 'built elsewhere']
    check_whole(place, expected)


@pytest.mark.slow
def test_a_helper_that_slept_disturbs_no_other_build(place, tmp_path):
    first = start_and_stop_first(place)
    other = place.start((1, 2))
    wait_until_it_helps(place, other)
    other.send_signal(signal.SIGSTOP)
    first.kill()
    end(first)
    changed = {'settings': {'caption_column': 'caption'}}
    again = place.start(**changed)
    wait_for_line(again, 'The captions of')
    other.send_signal(signal.SIGCONT)
    assert end_well(again, other) == ['built here', 'built elsewhere']
    alone = LocalPlace(tmp_path / 'alone', place.source)
    alone.env = place.env
    end_well(alone.start(**changed))
    check_whole(place, alone.read())


class Complete(BuildFolder):
    """Becomes complete when a process begins another build in it."""

    def is_complete(self) -> bool:
        return self._is_complete

    _is_complete = False

    def begin(self) -> None:
        super().begin()
        self._is_complete = True


def test_a_process_stores_nothing_once_another_build_has_begun(source, tmp_path):
    tasks = plans.make_plan(source, tmp_path / 'cache').tasks
    folder = Complete(str(tmp_path / '1.0.0'))
    shared_tasks.offer(folder.work, tasks)
    staged = tmp_path / 'shard'
    staged.touch()

    def engine(tasks, finished):
        folder.begin()
        result = ShardResult('train', 0, 0, 0, 0, np.array([0]), ShardStatistics(None))
        finished.save(tasks[0], staged, result)
        yield tasks[0], result

    shared_tasks.help_out(folder, engine, (1, 2), wait_seconds=60)
    assert staged.exists()
    assert folder.work.read_all(schema.BUILD_DATA) == folder.work.read_all('finished') == {}


def test_what_others_have_written_is_left_out(tmp_path):
    """By now it cannot be written any more."""
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    made = plans.make_plan(source, tmp_path / 'cache')
    written = plans.write(made, tmp_path / 'work')
    made_sources.latents_file(source, 0).unlink()
    finished = FinishedShards(Destination(tmp_path / 'work'), are_shared=True)
    scratch = Scratch(tmp_path / 'scratch', 10**9)
    seen = list(local_runner.write_shards(made.tasks, finished, scratch, str(tmp_path), 1))
    results = sorted((result.split, result.index, result.crc32c) for _, result in seen)
    assert results == [(result.split, result.index, result.crc32c) for result in written]


def test_only_what_is_written_from_now_on_counts(tmp_path):
    """A shard that is damaged is written again, though it has a record."""
    source = made_sources.write_source(tmp_path / 'source', [range(20)])
    made = plans.make_plan(source, tmp_path / 'cache')
    plans.write(made, tmp_path / 'work')
    finished = FinishedShards(Destination(tmp_path / 'work'))
    damaged, *whole = made.tasks
    finished.forget([damaged])
    assert [task for task, _ in finished.look(made.tasks)] == whole


def test_a_process_that_cannot_write_leaves_it_to_the_first(source, expected, tmp_path):
    place = LocalPlace(tmp_path, source)
    first = start_and_stop_first(place)
    (tmp_path / 'file').touch()
    other = place.start((1, 2), scratch_dir=str(tmp_path / 'file'))
    wait_for_line(other, 'no longer helps')
    first.send_signal(signal.SIGCONT)
    assert end_well(first, other) == ['built here', 'built elsewhere']
    check_whole(place, expected)


# --- What the others learn -------------------------------------------------------------------


@pytest.mark.slow
def test_the_others_learn_why_the_first_failed(source, expected, tmp_path):
    place = LocalPlace(tmp_path, source)
    place.source = missing = tmp_path / 'missing'
    others = [place.start((index, 3)) for index in (1, 2)]
    first = end(place.start((0, 3)))
    assert 'missing' in first.stderr.splitlines()[-1]
    for other in others:
        ended = end(other)
        assert ended.returncode != 0
        last = ended.stderr.splitlines()[-1]
        assert last.startswith('RuntimeError') and str(missing) in last, last
    # The failure is not taken for that of the next attempt, which may begin some seconds later.
    place.source, place.env = source, {}
    other = place.start((1, 2))
    end_well(place.start((0, 2)), other)
    check_whole(place, expected)


def test_a_process_of_a_job_waits_no_longer_than_it_may(source, tmp_path):
    place = LocalPlace(tmp_path, source)
    ended = end(place.start((1, 2), wait_hours=0.5 / 3600))
    assert ended.returncode != 0
    last = ended.stderr.splitlines()[-1]
    assert last.startswith('TimeoutError')
    assert str(place.final) in last
    assert not place.final.parent.exists() or place.others() == []


# --- Which process this is ---------------------------------------------------------------------

JOBS = {
    'RANK': ('WORLD_SIZE', 'LOCAL_RANK'),
    'SLURM_PROCID': ('SLURM_NTASKS', 'SLURM_LOCALID'),
    'OMPI_COMM_WORLD_RANK': ('OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'),
}


@pytest.mark.parametrize('variable', JOBS)
def test_a_process_knows_its_number_in_a_job(monkeypatch, variable: str):
    size, local_rank = JOBS[variable]
    for name in (*JOBS, *(name for names in JOBS.values() for name in names)):
        monkeypatch.delenv(name, raising=False)
    assert (job.process_index(), job.has_others()) == (0, False)
    assert (job.share(), job.is_first_of_machine()) == ((0, 1), True)
    monkeypatch.setenv(variable, '0')
    assert (job.process_index(), job.has_others()) == (0, True)
    monkeypatch.setenv(variable, '3')
    assert job.process_index() == 3
    assert job.is_first_of_machine()
    monkeypatch.setenv(local_rank, '2')
    assert not job.is_first_of_machine()
    monkeypatch.setenv(local_rank, '0')
    assert job.is_first_of_machine()
    with pytest.raises(ValueError, match=f'{variable}=3 and {size}=: expected the number'):
        job.share()
    monkeypatch.setenv(size, '4')
    assert job.share() == (3, 4)
    monkeypatch.setenv(variable, 'x')
    with pytest.raises(ValueError, match=f'{variable}=x: expected the number'):
        job.process_index()


def test_a_job_of_unknown_size_is_refused(source, tmp_path):
    place = LocalPlace(tmp_path, source)
    ended = end(start(source, place.final, env={'RANK': '1'}))
    assert 'ValueError: RANK=1 and WORLD_SIZE=: expected' in ended.stderr.splitlines()[-1]
