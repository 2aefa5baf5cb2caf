"""Child processes of tests, which may be killed without leaving anything behind."""

import contextlib
import os
import pathlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

from tests.checkout import CHECKOUT


@contextlib.contextmanager
def python(code: str, *arguments: object) -> Iterator[subprocess.Popen]:
    """Runs `code`, with `sys` imported; what is not over at the end of the block is killed."""
    command = [sys.executable, '-c', f'import sys\n{textwrap.dedent(code)}', *map(str, arguments)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def program(name: str, *flags: object, **variables: str) -> subprocess.CompletedProcess:
    """Runs a program of the project to its end, with more in its environment."""
    return subprocess.run(
        [sys.executable, '-m', name, *map(str, flags)],
        cwd=CHECKOUT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )


def wait_until(condition: Callable[[], object], seconds: float = 180) -> None:
    """Waits for something that other threads or processes bring about."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def of(pid: int) -> list[int]:
    """IDs of the processes that a process has started and that run."""
    with contextlib.suppress(FileNotFoundError):
        return [
            int(x) for x in pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
        ]
    return []


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return pathlib.Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z'
    return False
