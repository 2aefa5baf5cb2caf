"""Builds that several processes of a job share: the same bytes, whoever of them dies."""

import pathlib
import signal
from collections.abc import Iterator

import pytest

from coyo11m_tfds.build import shared_tasks
from coyo11m_tfds.build.tasks import ShardTask
from coyo11m_tfds.process import job
from coyo11m_tfds.storage.destination import Destination
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
    place.env |= {'COYO11M_LEASE_SECONDS': '20'}  # longer than a process is stopped here
    return place


def end_well(*processes) -> list[str]:
    """Waits for processes that must succeed; returns what each did."""
    ended = [end(process) for process in processes]
    assert [process.returncode for process in ended] == [0] * len(ended), ended
    return [process.stdout.splitlines()[-1] for process in ended]


def check_whole(place: Place, expected: Files) -> None:
    assert place.read() == expected
    assert place.others() == []


def start_and_stop_first(place: Place, count: int = 2):
    """Starts the first process of a job, and stops it when the tasks can be had."""
    first = place.start((0, count))
    wait_until(lambda: place.finished() >= 1)
    first.send_signal(signal.SIGSTOP)
    return first


# --- Who writes ------------------------------------------------------------------------------


def build_in_job(place: Place, expected: Files, count: int) -> None:
    processes = [place.start((index, count)) for index in reversed(range(count))]
    assert end_well(*processes) == ['built elsewhere'] * (count - 1) + ['built here']
    check_whole(place, expected)


@pytest.mark.slow
@pytest.mark.parametrize('count', [2, 3])
def test_processes_of_a_job_build_what_one_builds(place, expected, count: int):
    build_in_job(place, expected, count)


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
    had = place.finished()
    wait_until(lambda: place.finished() > had)
    other.kill()
    end(other)
    first.send_signal(signal.SIGCONT)
    assert end_well(first) == ['built here']
    check_whole(place, expected)


def test_the_first_is_killed_the_others_end_and_the_same_command_resumes(place, expected):
    first = start_and_stop_first(place)
    other = place.start((1, 2))
    had = place.finished()
    wait_until(lambda: place.finished() > had)
    first.kill()
    end(first)
    ended = end(other)
    assert ended.returncode != 0
    assert 'RuntimeError' in ended.stderr.splitlines()[-1]
    assert 'ended without a word' in ended.stderr.splitlines()[-1]
    done = place.finished()
    assert done > had
    processes = [place.start((index, 2)) for index in (0, 1)]
    assert end_well(*processes) == ['built here', 'built elsewhere']
    check_whole(place, expected)


@pytest.mark.slow
def test_a_first_process_that_is_started_again_finds_its_helpers(place, expected):
    first = start_and_stop_first(place)
    place.env |= {'COYO11M_LEASE_SECONDS': '60'}  # of the helper: it waits as long as that takes
    other = place.start((1, 2))
    had = place.finished()
    wait_until(lambda: place.finished() > had)
    first.kill()
    end(first)
    place.env |= {'COYO11M_LEASE_SECONDS': '2'}
    again = place.start((0, 2))
    assert end_well(again, other) == ['built here', 'built elsewhere']
    check_whole(place, expected)


@pytest.mark.slow
def test_a_helper_that_slept_disturbs_no_other_build(place, expected):
    """What it had still to store belongs to a build of other settings."""
    first = start_and_stop_first(place)
    other = place.start((1, 2), settings={'caption_column': 'caption'})
    had = place.finished()
    wait_until(lambda: place.finished() > had)
    other.send_signal(signal.SIGSTOP)
    first.kill()
    end(first)
    again = place.start(settings={'caption_column': 'caption'})
    wait_until(lambda: 'finished already' in again.stderr.readline() or again.poll() is not None)
    other.send_signal(signal.SIGCONT)
    assert end_well(again, other) == ['built here', 'built elsewhere']
    alone = LocalPlace(place._folder / 'alone', place.source)
    alone.env = place.env
    end_well(alone.start(settings={'caption_column': 'caption'}))
    check_whole(place, alone.read())


def test_a_process_that_cannot_write_leaves_it_to_the_first(source, expected, tmp_path):
    place = LocalPlace(tmp_path, source)
    first = start_and_stop_first(place)
    (tmp_path / 'file').touch()
    other = place.start((1, 2), scratch_dir=str(tmp_path / 'file'))
    for line in other.stderr:
        if 'no longer helps' in line:
            break
    first.send_signal(signal.SIGCONT)
    assert end_well(first, other) == ['built here', 'built elsewhere']
    check_whole(place, expected)


# --- What the others learn -------------------------------------------------------------------


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
