"""Where builds of tests go, a disk or a bucket, and what lies there."""

import pathlib
import shutil
import subprocess
from typing import Any

from tests.convert.build_kills import files_of, final_folder, start
from tests.fakes.cloud import Gcs

Files = dict[str, bytes]


class Place:
    """Where a data set goes; `options` and `env` are of all builds."""

    source: object
    final: object
    env: dict[str, str]
    options: dict[str, Any]

    def start(self, job: tuple[int, int] | None = None, **options) -> subprocess.Popen:
        """Starts a build, as process `job[0]` of `job[1]` if that is given."""
        ranks = {'RANK': str(job[0]), 'WORLD_SIZE': str(job[1])} if job else {}
        return start(self.source, self.final, env=self.env | ranks, **self.options | options)


class LocalPlace(Place):
    """Data sets in local folders."""

    def __init__(self, folder: pathlib.Path, source: pathlib.Path):
        self.source, self._folder = source, folder
        self.env = {'COYO11M_LEASE_SECONDS': '2'}
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
        self.env = server.env | {'COYO11M_LEASE_SECONDS': '2'}
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
