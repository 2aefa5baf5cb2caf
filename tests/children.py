"""Child processes of tests, which may be killed without leaving anything behind."""

import contextlib
import itertools
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess

from tests.checkout import CHECKOUT


def interpreter(forked: bool = False) -> list[str]:
    """What stands for `python` in a command; `forked`, it has imported the large libraries before.

    A fork starts in a tenth of the time. What depends on when they are imported, or on what they
    read then, such as variables, needs a process of its own.
    """
    if not forked:
        return [sys.executable]
    client = CHECKOUT / 'tests' / 'fork_client.py'
    # It needs neither packages nor this folder, and starts in no time without them.
    return [sys.executable, '-IS', str(client), os.environ['FORKS']]


@contextlib.contextmanager
def python(code: str, *arguments: object, forked: bool = False) -> Iterator[subprocess.Popen]:
    """Runs `code`, with `sys` imported; what is not over at the end of the block is killed."""
    code = f'import sys\n{textwrap.dedent(code)}'
    command = [*interpreter(forked), '-c', code, *map(str, arguments)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def output(code: str, *arguments: object, devices: int = 1, forked: bool = False) -> str:
    """What `code` prints, which must end well; JAX has so many devices there."""
    code = textwrap.dedent(code)
    if devices > 1:
        flag = f' --xla_force_host_platform_device_count={devices}'
        # There, because a fork has the variables of its server; JAX reads them when it begins.
        code = f"import os\nos.environ['XLA_FLAGS'] += {flag!r}\n{code}"
    with python(code, *arguments, forked=forked) as child:
        out, errors = child.communicate()
    assert child.returncode == 0, errors
    return out


def program(
    name: str, *flags: object, forked: bool = False, **variables: str
) -> subprocess.CompletedProcess:
    """Runs a program of the project to its end, with more in its environment."""
    return subprocess.run(
        [*interpreter(forked), '-m', name, *map(str, flags)],
        cwd=CHECKOUT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )


_FORKS = multiprocessing.get_context('forkserver')
# Of all tests: a process of pytest has one server, which imports them once. Arrow imports pandas
# when it first converts an array.
_FORKS.set_forkserver_preload(['tests.convert.build_program', 'tests.encode_program', 'pandas'])


def fork(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Calls `function` in a process that is forked from one that has imported what it needs."""
    main = sys.modules['__main__']
    # The process would import it, and that of a test is pytest.
    sys.modules['__main__'] = types.ModuleType('__main__')
    try:
        process = _FORKS.Process(target=function, args=arguments)
        process.start()
    finally:
        sys.modules['__main__'] = main
    return process


# What makes a name lead to another file, or to none.
_STEPS = 'replace', 'rename', 'remove', 'unlink', 'rmdir', 'mkdir'


def killed_at(moment: int, run: Callable[[], object]) -> bool:
    """Calls `run` in a fork, which is killed before its step of that number; whether it was."""
    child = os.fork()
    if not child:
        # It takes long, and a kill loses nothing that was written.
        os.fsync = int
        countdown = itertools.count(moment, -1)

        def dying(function: Callable) -> Callable:
            def step(*arguments, **options):
                if next(countdown) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return step

        for name in _STEPS:
            setattr(os, name, dying(getattr(os, name)))
        run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return bool(status)


def wait_until(
    condition: Callable[[], object],
    process: subprocess.Popen | None = None,
    *,
    seconds: float = 300,  # four hosts on two busy cores take a minute to compile
) -> None:
    """Waits for something that threads or processes bring about; `process` must not end before."""
    limit = time.monotonic() + seconds
    while not condition():
        if process:
            assert process.poll() is None, process.stdout and process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.01)


def wait_for_end(pids: Iterable[int]) -> None:
    """Waits until none of the processes runs: whoever is killed leaves no orphans."""
    wait_until(lambda: not any(map(is_running, pids)), seconds=20)


def kill(pid: int) -> bool:
    """Kills a process, which may have ended; returns whether it was there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def enter(env: dict[str, str], out: str, err: str) -> None:
    """Has this process, a fork, write to files and have more in its environment."""
    for number, path in ((1, out), (2, err)):
        # To its end: both may be one file.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    os.environ.update(env)


def of(pid: int) -> list[int]:
    """IDs of the processes that the threads of a process have started and that run."""
    pids = []
    for path in pathlib.Path(f'/proc/{pid}/task').glob('*/children'):
        # A thread may have ended since it was listed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids += map(int, path.read_text().split())
    return sorted(pids)


def is_running(pid: int) -> bool:
    """Whether there is a process of this ID that has not ended, whoever has to wait for it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        text = pathlib.Path(f'/proc/{pid}/stat').read_text()
        # Behind the name of the program, which may hold spaces and parentheses.
        _, _, fields = text.rpartition(')')
        state, *_ = fields.split()
        return state != 'Z'
    return False
