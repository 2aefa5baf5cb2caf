"""Starts builds in processes of their own, kills them, and looks at what they leave: on a disk or
in a bucket."""

import atexit
import json
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types
from typing import Any

from coyo11m_tfds import schema
from tests.built import files_of
from tests.convert import build_program
from tests.fakes.cloud import Gcs

SETTINGS = {'shard_bytes': 400_000, 'validation_fraction': 0.2}


def final_folder(out: pathlib.Path) -> pathlib.Path:
    return out / 'coyo11m_tfds' / 'x' / '1.0.0'


class Build:
    """A build in a process of its own, forked from one that has imported all it needs.

    Attributes:
        pid: ID of the process.
    """

    def __init__(self, env: dict[str, str], *arguments: str):
        self._folder = tempfile.mkdtemp()
        main, sys.modules['__main__'] = sys.modules['__main__'], types.ModuleType('__main__')
        try:  # which the process would import, and a test's is pytest
            self._process = _FORKS.Process(
                target=build_program.run, args=(self._folder, env, *arguments)
            )
            self._process.start()
            atexit.register(self._process.kill)  # so that a failed test waits for nobody
        finally:
            sys.modules['__main__'] = main
        self.pid: int = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> subprocess.CompletedProcess:
        """Waits for the end; returns status and output."""
        try:
            self._process.join(300)
        finally:
            self._process.kill()
            self._process.join()
        out, err = (pathlib.Path(self._folder, name).read_text() for name in ('out', 'err'))
        shutil.rmtree(self._folder)
        return subprocess.CompletedProcess([], self._process.exitcode or 0, out, err)


_FORKS = multiprocessing.get_context('forkserver')
_FORKS.set_forkserver_preload([build_program.__name__])


def start(
    source: object, final: object, env: dict | None = None, settings: dict | None = None, **options
) -> Build:
    fields = {'num_workers': 1} | options, SETTINGS | (settings or {})
    return Build(env or {}, str(source), str(final), *map(json.dumps, fields))


def run(source: object, final: object, **options) -> subprocess.CompletedProcess:
    """Runs a build that must succeed."""
    ended = start(source, final, **options).end()
    assert ended.returncode == 0, ended.stderr
    return ended


def is_complete(final: pathlib.Path) -> bool:
    return (final / 'dataset_info.json').exists()


def assert_only_the_data_set(final: pathlib.Path) -> None:
    """Nothing lies there but one data set, without what only its build needed."""
    assert [path.name for path in final.parent.iterdir()] == [final.name]
    assert all(path.is_file() for path in final.iterdir())
    assert len({schema.build_of(path.name) for path in final.iterdir()} - {''}) == 1


def finished_shards(final: pathlib.Path) -> int:
    return len(list(final.glob('building-*/*.tfrecord*.json')))


# --- Where data sets go -------------------------------------------------------------------------

Files = dict[str, bytes]


class Place:
    """Where a data set goes; `options` and `env` are of all builds."""

    source: object
    final: object
    env: dict[str, str]
    options: dict[str, Any]

    def start(self, job: tuple[int, int] | None = None, **options) -> Build:
        """Starts a build, as process `job[0]` of `job[1]` if that is given."""
        ranks = {'RANK': str(job[0]), 'WORLD_SIZE': str(job[1])} if job else {}
        return start(self.source, self.final, env=self.env | ranks, **self.options | options)


class LocalPlace(Place):
    """Data sets in local folders."""

    def __init__(self, folder: pathlib.Path, source: pathlib.Path):
        self.source, self._folder = source, folder
        self.env = {'COYO11M_LEASE_SECONDS': '4'}
        self.options: dict[str, Any] = {}
        self.final = final_folder(folder)

    def put(self, files: Files) -> None:
        """Makes them the data set."""
        self.final.mkdir(parents=True)
        for name, data in files.items():
            (self.final / name).write_bytes(data)

    def read(self) -> Files:
        """The data set's files."""
        return files_of(self.final) if self.final.exists() else {}

    def others(self) -> list[str]:
        """What is there beside the files of the data set."""
        beside = [path.name for path in self.final.parent.iterdir() if path != self.final]
        return beside + [path.name for path in self.final.iterdir() if not path.is_file()]

    def clear(self) -> None:
        shutil.rmtree(self._folder)


class BucketPlace(Place):
    """Data sets in a bucket."""

    def __init__(self, folder: pathlib.Path, server: Gcs, name: str):
        self._server, self._prefix = server, f'{name}/coyo11m_tfds/x/'
        self.source, self.final = 'gs://source/coyo', f'gs://data/{self._prefix}1.0.0'
        self.env = server.env | {'COYO11M_LEASE_SECONDS': '4'}
        self.options = {'scratch_dir': str(folder)}
        self._folder = folder

    def put(self, files: Files) -> None:
        for name, data in files.items():
            self._server.put('data', f'{self._prefix}1.0.0/{name}', data)

    def read(self) -> Files:
        return {name: data for name, data in self._below('1.0.0/').items() if '/' not in name}

    def others(self) -> list[str]:
        found = self._below('')
        return [name for name in found if name.count('/') != 1 or not name.startswith('1.0.0/')]

    def clear(self) -> None:
        for name in self._below(''):
            self._server.remove('data', self._prefix + name)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _below(self, folder: str) -> Files:
        prefix = self._prefix + folder
        found = self._server.objects('data')
        return {n.removeprefix(prefix): d for n, d in found.items() if n.startswith(prefix)}
