"""Starts builds in processes of their own, kills them, and looks at what they leave."""

import atexit
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

from coyo11m_tfds import storage
from tests import children
from tests.convert import build_program

SETTINGS = {'shard_bytes': 400_000, 'validation_fraction': 0.2}


def final_folder(out: pathlib.Path) -> pathlib.Path:
    """Where the data set of a config `x` lies in a folder of data sets."""
    return out / 'coyo11m_tfds' / 'x' / '1.0.0'


class Build:
    """A build in a process of its own, forked from one that has imported all it needs."""

    def __init__(self, env: dict[str, str], *arguments: str):
        self._folder = tempfile.mkdtemp()
        self._process = children.fork(build_program.run, self._folder, env, *arguments)
        # So that a failed test waits for nobody.
        atexit.register(self._process.kill)
        self.pid: int = self._process.pid or 0

    def poll(self) -> int | None:
        """Returns the exit status, negative after a signal; None as long as it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kills the process; its workers end with it."""
        self._process.kill()

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process alone."""
        os.kill(self.pid, number)

    def end(self) -> subprocess.CompletedProcess:
        """Waits for the end; returns status and output."""
        try:
            self._process.join(300)
        finally:
            self._process.kill()
            self._process.join()
        texts = []
        for name in ('out', 'err'):
            file = pathlib.Path(self._folder, name)
            # A process that was killed before its first line has neither.
            texts.append(file.read_text() if file.exists() else '')
        shutil.rmtree(self._folder)
        return subprocess.CompletedProcess([], self._process.exitcode or 0, *texts)


def start(
    source: object, final: object, env: dict | None = None, settings: dict | None = None, **options
) -> Build:
    """Starts a build; `options` and `settings` are those of `build_program.build`."""
    options = {'num_workers': 1} | options
    settings = SETTINGS | (settings or {})
    # The arguments of a process are texts.
    return Build(env or {}, str(source), str(final), json.dumps(options), json.dumps(settings))


def run(source: object, final: object, **options) -> subprocess.CompletedProcess:
    """Runs a build that must succeed."""
    ended = start(source, final, **options).end()
    assert ended.returncode == 0, ended.stderr
    return ended


def is_complete(final: pathlib.Path) -> bool:
    """Whether a data set is in its folder: this file comes last."""
    return (final / 'dataset_info.json').exists()


class Place:
    """Where builds of a source put one data set, on a disk or in a bucket, in a folder `out`."""

    def __init__(self, source: object, out: str, scratch: pathlib.Path, env: dict[str, str]):
        self._source = source
        self._folder = storage.open_writable_folder(f'{out}/coyo11m_tfds/x')
        self._env = env | {'COYO11M_LEASE_SECONDS': '4'}
        self._final = storage.open_writable_folder(f'{self._folder.folder}/1.0.0')
        self._scratch = scratch

    def start(self, job: tuple[int, int] | None = None, **options) -> Build:
        """Starts a build, as process `job[0]` of `job[1]` if that is given."""
        env = self._env
        if job:
            index, count = job
            env = env | {'RANK': str(index), 'WORLD_SIZE': str(count)}
        options |= {'scratch_dir': str(self._scratch)}
        return start(self._source, self._final.folder, env=env, **options)

    def put(self, files: dict[str, bytes]) -> None:
        """Makes them the data set."""
        for name, data in files.items():
            self._final.write(name, data)

    def read(self) -> dict[str, bytes]:
        """The data set's files."""
        return self._final.read_all('')

    def others(self) -> set[str]:
        """What is there beside the files of the data set."""
        own_names = {f'1.0.0/{name}' for name in self.read()}
        return self._folder.sizes().keys() - own_names

    def clear(self) -> None:
        """Removes the data set, and what builds have left."""
        self._folder.remove(self._folder.sizes())
        shutil.rmtree(self._scratch, ignore_errors=True)
