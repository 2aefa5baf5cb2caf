"""A child process that does with TensorFlow's gs:// files what it is told.

    with Gfile(gcs.env) as gfile:
        gfile('write', 'gs://bucket/a', 'hello')  # None
        gfile('read', 'gs://bucket/a')            # 'hello'
        gfile('read', 'gs://bucket/missing')      # raises GfileError('NotFoundError: ...')

TensorFlow takes seconds to start and reads its environment once, hence one child for many steps.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


class GfileError(Exception):
    """What TensorFlow raised: 'NotFoundError: ...'."""


class Gfile:
    """Starts and ends the child process; every call is one step in it."""

    def __init__(self, env: Mapping[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'tests.fakes.cloud_gfile'],
            env={**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3', **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self, step: str, *arguments: Any) -> Any:
        """Result of a step of `_steps`, as JSON carries it."""
        self._process.stdin.write(json.dumps([step, *arguments]) + '\n')
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if 'error' in answer:
            raise GfileError(answer['error'])
        return answer['result']

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        # It has nothing to finish, and TensorFlow takes seconds to leave by itself.
        self._process.kill()
        self._process.communicate()


def _steps() -> dict[str, Any]:
    import tensorflow as tf

    gfile = tf.io.gfile

    def read(path: str) -> str:
        with gfile.GFile(path, 'rb') as file:
            return file.read().decode('latin-1')

    def write(path: str, text: str, mode: str = 'wb') -> None:
        with gfile.GFile(path, mode) as file:
            file.write(text.encode('latin-1'))

    def stat(path: str) -> list[Any]:
        found = gfile.stat(path)
        return [found.length, found.is_directory]

    return {
        'append': lambda path, text: write(path, text, 'ab'),
        'exists': gfile.exists,
        'glob': gfile.glob,
        'isdir': gfile.isdir,
        'listdir': gfile.listdir,
        'makedirs': gfile.makedirs,
        'read': read,
        'remove': gfile.remove,
        'rename': gfile.rename,
        'rmtree': gfile.rmtree,
        'stat': stat,
        'write': write,
    }


def _main() -> None:
    steps = _steps()
    for line in sys.stdin:
        step, *arguments = json.loads(line)
        try:
            answer = {'result': steps[step](*arguments)}
        except Exception as error:
            answer = {'error': f'{type(error).__name__}: {error}'}
        print(json.dumps(answer), flush=True)


if __name__ == '__main__':
    _main()
