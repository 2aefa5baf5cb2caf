"""A drill: builds killed at random moments lose no data set and end with the right bytes.

`make slow` runs 300 kills: of the building process, of one of its workers, and of a process that
waits for it, another builder or another process of its job; to a disk and to a bucket; of builds
and of overwrites. `COYO11M_DRILL_SEED` chooses others, `COYO11M_DRILL_SHARE` how many of them.
"""

import pathlib
import random
import time

import pytest

from coyo11m_tfds import schema
from tests import children, made_sources
from tests.convert.build_kills import Build, Place
from tests.damages import SEED, SHARE

Files = dict[str, bytes]
KILLS = {'local': 100 * SHARE, 'bucket': 50 * SHARE}  # of builds, and as many of overwrites
OLD_SETTINGS = {'validation_fraction': 0.4}


@pytest.fixture(scope='module')
def source(tmp_path_factory) -> pathlib.Path:
    files = [range(100), range(100, 160)]
    return made_sources.write_source(tmp_path_factory.mktemp('source'), files)


@pytest.fixture(scope='module')
def expected(source, tmp_path_factory) -> tuple[Files, Files]:
    """The data sets before and after an overwrite."""
    both = []
    for settings in (OLD_SETTINGS, {}):
        place = Place(source, str(tmp_path_factory.mktemp('expected')), source / 'scratch', {})
        ended = place.start(settings=settings).end()
        assert ended.returncode == 0, ended.stderr
        both.append(place.read())
    return both[0], both[1]


@pytest.mark.slow
@pytest.mark.parametrize('overwrite', [False, True], ids=['build', 'overwrite'])
@pytest.mark.parametrize('kind', ['local', 'bucket'])
def test_killed_at_random_moments(source, gcs, expected, tmp_path, kind, overwrite):
    choose = random.Random(f'{SEED}-{kind}-{overwrite}')
    gcs.upload_folder(source, 'gs://source/coyo')
    gcs.latency = 0.005  # so that there is time to kill
    kills = number = 0
    while kills < KILLS[kind]:
        number += 1
        out = str(tmp_path / str(number)) if kind == 'local' else f'gs://data/{number}'
        read = source if kind == 'local' else 'gs://source/coyo'
        place = Place(read, out, tmp_path / 'scratch', gcs.env)
        kills += kill_until_built(place, expected, overwrite, choose)
        place.clear()


def kill_until_built(
    place: Place, expected: tuple[Files, Files], overwrite: bool, choose: random.Random
) -> int:
    """Kills builds of one data set a few times, then lets one finish; returns the kills."""
    old, new = expected
    if overwrite:
        place.put(old)
    kills = choose.randrange(1, 6)
    for _ in range(kills):
        kill_one(place, overwrite, choose)
        check_nothing_is_lost(place, expected, overwrite)
        if not overwrite and schema.INFO_FILE in place.read():
            break  # the rest would find it there
    ended = start_build(place, overwrite).end()
    assert ended.returncode == 0, ended.stderr
    assert place.read() == new
    assert place.others() == set()
    return kills


def check_nothing_is_lost(place: Place, expected: tuple[Files, Files], overwrite: bool) -> None:
    """One of the two data sets is whole; what says that it is complete, is."""
    old, new = expected
    found = place.read()
    info = found.get(schema.INFO_FILE)
    if info is not None:
        whole = new if info == new[schema.INFO_FILE] else old
        assert whole.items() <= found.items() and (overwrite or whole == new), sorted(found)
    elif overwrite:  # killed while the three small files were replaced
        without = {n: data for n, data in new.items() if schema.build_of(n)}
        assert without.items() <= found.items(), sorted(found)


def kill_one(place: Place, overwrite: bool, choose: random.Random) -> None:
    """Starts a build, perhaps with others that wait for it, and kills one process."""
    victim = choose.choice(['first', 'first', 'worker', 'other'])
    # A job overwrites nothing.
    num_processes = 1 if overwrite else choose.choice([1, 1, 2, 3])
    ranks = [(index, num_processes) for index in range(num_processes)]
    jobs = ranks if num_processes > 1 else [None] * (1 + (victim == 'other'))
    first, *others = (start_build(place, overwrite, job) for job in jobs)
    limit = time.monotonic() + 3 * choose.random()
    while time.monotonic() < limit and first.poll() is None:
        time.sleep(0.005)
    pids = [pid for process in (first, *others) for pid in children.of(process.pid)]
    if victim == 'first':
        first.kill()
    elif victim == 'worker':
        for pid in children.of(first.pid)[-1:]:
            children.kill(pid)
    elif others:
        killed = others.pop()
        killed.kill()
        killed.end()
    check_ends(victim, first, others)
    children.wait_for_end(pids)


def check_ends(victim: str, first: Build, others: list[Build]) -> None:
    """The first fails only if it or one of its workers was killed, the others only with it."""
    ended = first.end()
    if victim == 'worker' and ended.returncode:
        assert 'A worker process died' in ended.stderr, ended.stderr
    elif victim == 'other':
        assert ended.returncode == 0, ended.stderr
    for other in [other.end() for other in others]:
        if other.returncode:
            assert ended.returncode, other.stderr
            assert 'has failed or was killed' in other.stderr.splitlines()[-1], other.stderr


def start_build(place: Place, overwrite: bool, job: tuple[int, int] | None = None) -> Build:
    return place.start(job, num_workers=3, overwrite=overwrite)
