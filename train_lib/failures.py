"""A process of a run on several hosts that fails takes the others with it, at once and by name.

    failures.join_hosts()
    with failures.shared():
        train()

Without it the others wait for minutes in a computation that needs all, and then abort. The first
process that fails leaves its error with JAX's coordinator, where a thread of every other one looks
for it. Where a computation of all fails it asks first who is still there, since a process that was
killed leaves nothing. Processes that are waiting for each other cannot unwind: all end by
`os._exit(1)`.
"""

import contextlib
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax
from absl import logging
from jax._src import distributed  # the store of the coordinator has no public name

_HEARTBEAT_SECONDS = 40  # a process that is silent for so long has died without a word

_FOLDER = 'coyo11m_tfds/failure/'
_FIRST = f'{_FOLDER}first'
_ASKED = 'coyo11m_tfds/asked/'  # who is still there, and:
_HERE = 'coyo11m_tfds/here/'  # who is
_HOSTS = 'coyo11m_tfds/hosts/'
_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 10.0  # a process whose thread does not answer for so long is dead
_LAST_SECONDS = 15.0  # the coordinator waits so long for others to learn of a failure

_ending = threading.Lock()  # never given back: one thread ends the process


def join_hosts(
    coordinator: str | None = None, count: int | None = None, index: int | None = None
) -> None:
    """Waits for the other processes of the run; without arguments JAX finds them by itself.

    Raises:
        ValueError: it does not.
    """
    try:
        jax.distributed.initialize(
            coordinator, count, index, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS
        )
    except ValueError as error:
        raise ValueError(
            f'the hosts of this run are not known: {error} Expected a TPU pod, Slurm or Open MPI, '
            'or --coordinator_address, --process_count and --process_index; on one machine '
            '--config.distributed=False.'
        ) from error


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Ends this process when another one fails here, and the others when this one does.

    With a single process it does nothing. May be entered again inside of itself, where leaving it
    by an error would wait for other processes.
    """
    if jax.process_count() == 1:
        yield
        return
    _client().key_value_set(f'{_HOSTS}{jax.process_index()}', _host(), allow_overwrite=True)
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(over,), name='failures', daemon=True)
    watcher.start()
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            _tell(error)
        raise
    finally:
        over.set()
        watcher.join()


def summary(error: BaseException) -> str:
    """One line. TensorFlow's errors quote those of Python functions with their whole traceback."""
    lines = str(error).splitlines() or ['']
    # With the module of the error, unless it is one of Python's own.
    quoted = [found for line in lines[1:] if (found := re.match(r'(?:\w+\.)*(\w+Error: .*)', line))]
    return quoted[-1][1] if quoted else f'{type(error).__name__}: {lines[0]}'


def _watch(over: threading.Event) -> None:
    client = _client()
    while not over.wait(_LOOK_SECONDS):
        # Not by waiting for the key: that could not be broken off.
        failure = dict(client.key_value_dir_get(_FOLDER)).get(_FIRST)
        if failure is not None:
            _end(failure)
        if client.key_value_dir_get(_ASKED):
            client.key_value_set(f'{_HERE}{jax.process_index()}', '', allow_overwrite=True)


def _host() -> str:
    return f'process {jax.process_index()} on {socket.gethostname()}'


def _client() -> Any:
    return distributed.global_state.client


def _tell(error: BaseException) -> None:
    """Reports the error to the coordinator, unless another process was first, and ends."""
    is_message = isinstance(error, SystemExit)
    message = summary(error)
    if isinstance(error, SystemExit):
        message = str(error.code).removeprefix('error: ')
    client = _client()
    failure = f'{_host()} has failed: {message}'
    if _is_of_a_computation(error) and (dead := _silent_hosts()):
        failure = f'{dead} does not answer: it was killed, maybe for lack of memory, or is cut off.'
    try:
        client.key_value_set(_FIRST, failure)
    except jax.errors.JaxRuntimeError:  # another was first, and this error is what came of it
        failure = client.key_value_try_get(_FIRST)
    else:
        if not is_message:
            traceback.print_exception(error)
    _end(failure)


def _is_of_a_computation(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


def _silent_hosts() -> str:
    """The processes that do not answer, by name; '' if all do."""
    client, count = _client(), jax.process_count()
    client.key_value_set(f'{_ASKED}who', '', allow_overwrite=True)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while len(here := dict(client.key_value_dir_get(_HERE))) < count:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    hosts = dict(client.key_value_dir_get(_HOSTS))
    silent = [index for index in range(count) if f'{_HERE}{index}' not in here]
    return ' and '.join(hosts.get(f'{_HOSTS}{index}', f'process {index}') for index in silent)


def _end(failure: str) -> None:
    _ending.acquire()
    client = _client()
    logging.flush()
    print(f'error: {failure}', file=sys.stderr, flush=True)
    client.key_value_set(f'{_FOLDER}known_to_{jax.process_index()}', '', allow_overwrite=True)
    deadline = time.monotonic() + _LAST_SECONDS
    # The coordinator lives in process 0, and the others abort when it is gone.
    while jax.process_index() == 0 and time.monotonic() < deadline:
        if len(client.key_value_dir_get(_FOLDER)) > jax.process_count():
            break
        time.sleep(0.1)
    os._exit(1)
