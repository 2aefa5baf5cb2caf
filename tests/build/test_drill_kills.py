"""A drill: builds killed at random moments lose no data set and end with the right bytes.

`make slow` runs 300 kills: of the building process, of one of its workers, of a process that waits
for it; to a disk and to a bucket; of builds and of overwrites. `COYO11M_DRILL_SEED` chooses others.
"""

import contextlib
import os
import pathlib
import random
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests import made_sources
from tests.build.build_kills import (
    children,
    end,
    files_of,
    final_folder,
    is_running,
    start,
    wait_until,
)
from tests.fakes.cloud import Gcs, fake_gcs

KILLS = {'local': 100, 'bucket': 50}  # of builds, and as many of overwrites
SEED = int(os.environ.get('COYO11M_DRILL_SEED', '0'))
OLD_SETTINGS = {'validation_fraction': 0.4}

Files = dict[str, bytes]


class LocalPlace:
    """Data sets in local folders."""

    def __init__(self, folder: pathlib.Path, source: pathlib.Path):
        self.source, self._folder = source, folder
        self.env: dict[str, str] = {}
        self.final = final_folder(folder)

    def put(self, files: Files) -> None:
        """Makes them the data set."""
        self.final.mkdir(parents=True)
        for name, data in files.items():
            (self.final / name).write_bytes(data)

    def read(self) -> Files:
        """The data set's files."""
        return files_of(self.final) if self.final.exists() else {}

    def read_building(self) -> Files:
        """Files of a build that has not been moved to its place."""
        data = self.final.with_name('1.0.0.building') / 'data'
        return files_of(data) if data.exists() else {}

    def others(self) -> list[str]:
        """What is there beside the data set."""
        return [path.name for path in self.final.parent.iterdir() if path != self.final]

    def clear(self) -> None:
        shutil.rmtree(self._folder)


class BucketPlace:
    """Data sets in a bucket."""

    def __init__(self, folder: pathlib.Path, server: Gcs, name: str):
        self._server, self._prefix = server, f'{name}/coyo11m_tfds/x/'
        self.source, self.final = 'gs://source/coyo', f'gs://data/{self._prefix}1.0.0'
        self.env = server.env | {'COYO11M_LEASE_SECONDS': '2'}
        self._folder = folder

    def put(self, files: Files) -> None:
        for name, data in files.items():
            self._server.put('data', f'{self._prefix}1.0.0/{name}', data)

    def read(self) -> Files:
        return self._below('1.0.0/')

    def read_building(self) -> Files:
        return self._below('1.0.0.building/data/')

    def others(self) -> list[str]:
        found = self._below('')
        return [name for name in found if not name.startswith('1.0.0/')]

    def clear(self) -> None:
        for name in self._below(''):
            self._server.remove('data', self._prefix + name)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _below(self, folder: str) -> Files:
        prefix = self._prefix + folder
        found = self._server.objects('data')
        return {n.removeprefix(prefix): d for n, d in found.items() if n.startswith(prefix)}


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    files = [range(100), range(100, 160)]
    return made_sources.write_source(tmp_path_factory.mktemp('source'), files)


@pytest.fixture(scope='module')
def server(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gcs]:
    with fake_gcs(tmp_path_factory.mktemp('gcs')) as server:
        server.upload_folder(source, 'gs://source/coyo')
        server.latency = 0.005  # so that there is time to kill
        yield server


@pytest.fixture(scope='module')
def expected(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, Files]:
    """The data sets before and after an overwrite."""
    both = []
    for settings in (OLD_SETTINGS, {}):
        place = LocalPlace(tmp_path_factory.mktemp('expected'), source)
        ended = end(start(source, place.final, settings=settings))
        assert ended.returncode == 0, ended.stderr
        both.append(place.read())
    return both[0], both[1]


@pytest.mark.slow
@pytest.mark.parametrize('overwrite', [False, True], ids=['build', 'overwrite'])
@pytest.mark.parametrize('kind', ['local', 'bucket'])
def test_killed_at_random_moments(source, server, expected, tmp_path, kind: str, overwrite: bool):
    choose = random.Random(f'{SEED}-{kind}-{overwrite}')
    kills = number = 0
    while kills < KILLS[kind]:
        number += 1
        folder = tmp_path / str(number)
        if kind == 'local':
            place = LocalPlace(folder, source)
        else:
            place = BucketPlace(folder, server, f'{overwrite}-{number}')
        kills += kill_until_built(place, expected, overwrite, choose)
        place.clear()


def kill_until_built(place, expected: tuple[Files, Files], overwrite: bool, choose) -> int:
    """Kills builds of one data set a few times, then lets one finish; returns the kills."""
    old, new = expected
    if overwrite:
        place.put(old)
    kills = choose.randrange(1, 6)
    for _ in range(kills):
        kill_one(place, overwrite, choose)
        check_nothing_is_lost(place, expected, overwrite)
        if not overwrite and place.read():
            break  # the rest would find it there
    ended = end(start_build(place, overwrite))
    assert ended.returncode == 0, ended.stderr
    assert place.read() == new
    assert place.others() == []
    return kills


def check_nothing_is_lost(place, expected: tuple[Files, Files], overwrite: bool) -> None:
    """One of the two data sets is whole; what says that it is complete, is."""
    old, new = expected
    found = place.read()
    if 'dataset_info.json' in found:
        assert found == new or (overwrite and found == old), sorted(found)
    elif overwrite:
        assert place.read_building() == new, (sorted(found), sorted(place.read_building()))


def kill_one(place, overwrite: bool, choose) -> None:
    """Starts a build, perhaps with a second process that waits for it, and kills one process."""
    victim = choose.choice(['parent', 'parent', 'worker', 'waiting'])
    process = start_build(place, overwrite)
    others = []
    if victim == 'waiting':
        env = {} if overwrite else choose.choice([{}, {'RANK': '1'}])
        others.append(start_build(place, overwrite, env))
    limit = time.monotonic() + 0.8 + 3.5 * choose.random()
    while time.monotonic() < limit and process.poll() is None:
        time.sleep(0.005)
    pids = children(process)
    if victim == 'parent':
        process.kill()
    elif victim == 'worker':
        for pid in pids[-1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
    for other in others:
        pids += children(other)
        other.kill()
        end(other)
    ended = end(process)
    if victim == 'worker' and ended.returncode:
        assert 'A worker process died' in ended.stderr, ended.stderr
    elif victim == 'waiting':
        assert ended.returncode == 0, ended.stderr
    wait_until(lambda: not any(is_running(pid) for pid in pids), 10)


def start_build(place, overwrite: bool, env: dict[str, str] | None = None) -> subprocess.Popen:
    options = {'num_workers': 2, 'overwrite': overwrite}
    if str(place.final).startswith('gs://'):
        options['scratch_dir'] = str(place._folder)
    return start(place.source, place.final, env=place.env | (env or {}), **options)
