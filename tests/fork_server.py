"""A server that imports the large libraries once, and forks a process for each program.

The processes of pytest-xdist are such forks, too.

    python -m tests.fork_server FD

FD is a socket that listens for `fork_client.py`. The server imports them at the first request, and
ends with its standard input.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator
from typing import NoReturn

from tests.checkout import CHECKOUT

# Nothing of this project: each process still shows what its modules import.
LIBRARIES = (
    *('tensorflow', 'tensorflow_datasets', 'torch', 'pandas', 'pyarrow.parquet', 'jax'),
    *('flax.linen', 'optax', 'orbax.checkpoint', 'clu.metrics', 'ml_collections.config_flags'),
)
# Variables that libraries read when they are imported.
READ_EARLY = 'JAX_', 'TF_'


@contextlib.contextmanager
def start() -> Iterator[str]:
    """Starts a server; yields the path of its socket."""
    # In another folder, the path may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix='forks-', dir='/tmp') as folder:
        with socket.socket(socket.AF_UNIX) as listener:
            path = f'{folder}/socket'
            listener.bind(path)
            listener.listen(64)
            number = listener.fileno()
            server = subprocess.Popen(
                [sys.executable, '-m', 'tests.fork_server', str(number)],
                cwd=CHECKOUT,
                stdin=subprocess.PIPE,
                pass_fds=[number],
                start_new_session=True,  # Ctrl-C is for pytest
            )
        with server:
            yield path


def serve(listener: socket.socket) -> dict:
    """Returns in a fork for each request, with what is requested; ends with standard input."""
    with listener:
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            with contextlib.suppress(ChildProcessError):  # if there is none
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if sys.stdin in ready:
                sys.exit()
            connection, _ = listener.accept()
            gc.disable()
            for library in LIBRARIES:
                importlib.import_module(library)
            gc.freeze()
            gc.enable()
            if not fork():
                break
            connection.close()
    with connection:
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        request = json.loads(connection.makefile().readline())
        if child := fork():
            for file in files:
                os.close(file)
            wait(child, connection)
    for file, number in zip(files, (0, 1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    return request


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # JAX and Python warn of forks where there are threads
        return os.fork()


def wait(child: int, client: socket.socket) -> None:
    """Tells the client how the process has ended; kills it if there is no client any more."""
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, client], [], [])
    if client in ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if client not in ready:
        client.sendall(b'%d\n' % os.waitstatus_to_exitcode(status))
    os._exit(0)


def run(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Does what `python ARGUMENTS` does, in this process."""
    changes = os.environ.items() ^ environment.items()
    late = sorted({name for name, _ in changes if name.startswith(READ_EARLY)})
    if late:
        sys.exit(f'{late} cannot change in a fork: start a process of its own')
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)  # before this project's
    if arguments[0] == '-u':  # of pytest-xdist, which flushes what it writes
        arguments = arguments[1:]
    option, program, *rest = arguments
    if option == '-m':
        sys.argv = [program, *rest]
        runpy.run_module(program, run_name='__main__', alter_sys=True)
    else:
        sys.argv = ['-c', *rest]
        main = sys.modules['__main__'] = types.ModuleType('__main__')
        exec(compile(program, '<string>', 'exec'), vars(main))


def run_to_the_end(**request) -> NoReturn:
    """Runs a program, and ends this process as Python would; an error is left to Python.

    Python would take apart all that the libraries have made, which takes it half a second.
    """
    code = None
    try:
        run(**request)
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    # What Python does first: it waits for threads, and calls what is registered for the end.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == '__main__':
    run_to_the_end(**serve(socket.socket(fileno=int(sys.argv[1]))))
