"""Starts builds in processes of their own, kills them, and looks at what they leave."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

from coyo11m_tfds import schema
from tests.checkout import CHECKOUT

SETTINGS = {'shard_bytes': 400_000, 'validation_fraction': 0.2}


def final_folder(out: pathlib.Path) -> pathlib.Path:
    return out / 'coyo11m_tfds' / 'x' / '1.0.0'


def start(
    source: object, final: object, env: dict | None = None, settings: dict | None = None, **options
) -> subprocess.Popen:
    command = [
        *(sys.executable, '-m', 'tests.convert.build_program', str(source), str(final)),
        *(json.dumps({'num_workers': 1} | options), json.dumps(SETTINGS | (settings or {}))),
    ]
    return subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(source: object, final: object, **options) -> subprocess.CompletedProcess:
    """Runs a build that must succeed."""
    ended = end(start(source, final, **options))
    assert ended.returncode == 0, ended.stderr
    return ended


def end(process: subprocess.Popen, timeout: float = 300) -> subprocess.CompletedProcess:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def files_of(final: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in final.iterdir() if path.is_file()}


def is_complete(final: pathlib.Path) -> bool:
    return (final / 'dataset_info.json').exists()


def assert_only_the_data_set(final: pathlib.Path) -> None:
    """Nothing lies there but one data set, without what only its build needed."""
    assert [path.name for path in final.parent.iterdir()] == [final.name]
    assert all(path.is_file() for path in final.iterdir())
    assert len({schema.build_of(path.name) for path in final.iterdir()} - {''}) == 1


def wait_until(condition, seconds: float = 180) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def children(process: subprocess.Popen) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        path = f'/proc/{process.pid}/task/{process.pid}/children'
        return [int(pid) for pid in pathlib.Path(path).read_text().split()]
    return []


def finished_shards(final: pathlib.Path) -> int:
    return len(list(final.glob('building-*/*.tfrecord*.json')))


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return pathlib.Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z'
    return False
