"""The hosts of a run: how they join, and how all end when one of them fails."""

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from absl import logging

from coyo11m_tfds.process import command_line, errors

_HEARTBEAT_SECONDS = 40  # a process that is silent for so long has died unnoticed
_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 10.0  # a process whose thread does not answer for so long is dead
_LAST_SECONDS = 15.0  # the coordinator waits so long for others to learn of a failure

# Keys in the store of JAX's coordinator.
_FAILURES = 'coyo11m_tfds/failure/'
_FIRST_FAILURE = f'{_FAILURES}first'
_ROLL_CALL = 'coyo11m_tfds/roll_call/'  # every process that is alive must answer
_ALIVE = 'coyo11m_tfds/alive/'  # the answers
_NAMES = 'coyo11m_tfds/names/'
_TEXTS = 'coyo11m_tfds/texts/'

_text_numbers = itertools.count()
# The first process may wait for the storage, and for the next window of a quota.
_TEXT_MILLISECONDS = 3_600_000

_end_lock = threading.Lock()  # never released: one thread ends the process


def join_hosts(
    coordinator: str | None = None, count: int | None = None, index: int | None = None
) -> None:
    """Waits for the other processes of the run; without arguments JAX finds them by itself.

    Args:
        coordinator: HOST:PORT of process 0.
        count: Number of processes.
        index: Number of this process.

    Raises:
        ValueError: No arguments are given, and JAX finds no other processes.
    """
    import jax

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


def take_from_first(compute: Callable[[], str]) -> str:
    """Returns the text that process 0 computes; all processes call this together, and wait."""
    import jax
    from orbax.checkpoint import multihost

    if jax.process_count() == 1:
        return compute()
    client: Any = multihost.get_jax_distributed_client()
    # All processes make the same calls in the same order.
    key = f'{_TEXTS}{next(_text_numbers)}'
    if jax.process_index() == 0:
        client.key_value_set(key, compute())
    # If process 0 fails, `share_failures` ends the others.
    return client.blocking_key_value_get(key, _TEXT_MILLISECONDS)


@contextlib.contextmanager
def share_failures() -> Iterator[None]:
    """Ends this process when another one fails here, and the others when this one does."""
    # Else they would wait for minutes in a computation that needs all processes, and then abort.
    # All end by `os._exit(1)`: processes that wait for each other cannot unwind. A block whose end
    # would wait so needs a nested context.
    import jax

    if jax.process_count() == 1:
        yield
        return
    # The first process that fails leaves its error with JAX's coordinator, where a thread of every
    # other process looks for it.
    hosts = _Hosts()
    ended = threading.Event()
    watcher = threading.Thread(target=hosts.watch, args=(ended,), name='failures', daemon=True)
    watcher.start()
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            # Else the thread may find this error, and end the process before it has been printed.
            ended.set()
            watcher.join()
            hosts.report(error)
        raise
    finally:
        ended.set()
        watcher.join()


class _Hosts:
    """The processes of a run, as they know each other by the coordinator."""

    def __init__(self):
        import jax
        from orbax.checkpoint import multihost

        # That of the coordinator's store of keys and values, for which JAX has no public name.
        self._client: Any = multihost.get_jax_distributed_client()
        self._index = jax.process_index()
        self._count = jax.process_count()
        self._name = f'process {self._index} on {socket.gethostname()}'
        # Its name here, because this module is imported before JAX.
        self._computing_failed = jax.errors.JaxRuntimeError
        self._set(f'{_NAMES}{self._index}', self._name)

    def watch(self, ended: threading.Event) -> None:
        """Looks for the failure of another process, and answers roll calls."""
        while not ended.wait(_LOOK_SECONDS):
            # Polls, because a wait for the key could not be interrupted.
            failure = dict(self._client.key_value_dir_get(_FAILURES)).get(_FIRST_FAILURE)
            if failure is not None:
                self._end(failure)
            if self._client.key_value_dir_get(_ROLL_CALL):
                self._set(f'{_ALIVE}{self._index}')

    def report(self, error: BaseException) -> None:
        """Reports the error to the coordinator, unless another process was first, and ends."""
        is_message = isinstance(error, SystemExit)
        summary = str(error) if is_message else errors.summarize_error(error)
        failure = f'{self._name} has failed: {summary.removeprefix("error: ")}'
        # If a shared computation fails, maybe another process was killed, which leaves no error.
        if self._is_of_a_computation(error):
            silent_names = self._call_roll()
            if silent_names:
                reason = 'it was killed, maybe for lack of memory, or is cut off.'
                failure = f'{silent_names} does not answer: {reason}'
        try:
            self._client.key_value_set(_FIRST_FAILURE, failure)
        except self._computing_failed:
            # Another process failed first, and this error is a consequence.
            failure = self._client.key_value_try_get(_FIRST_FAILURE)
        else:
            if not is_message:
                traceback.print_exception(error)
        self._end(failure)

    def _is_of_a_computation(self, error: BaseException | None) -> bool:
        """Whether an error is one of JAX's computations, or a consequence of one."""
        while error is not None and not isinstance(error, self._computing_failed):
            error = error.__cause__ or error.__context__
        return error is not None

    def _call_roll(self) -> str:
        """Returns the names of the processes that do not answer; '' if all do."""
        self._set(f'{_ROLL_CALL}now')
        # The thread that answers for this process has ended.
        self._set(f'{_ALIVE}{self._index}')
        answers = self._wait_for(_ALIVE, self._count, _ANSWER_SECONDS)
        names = dict(self._client.key_value_dir_get(_NAMES))
        silent = []
        for index in range(self._count):
            if f'{_ALIVE}{index}' not in answers:
                # A process that died early has left no name.
                silent.append(names.get(f'{_NAMES}{index}', f'process {index}'))
        return ' and '.join(silent)

    def _end(self, failure: str) -> NoReturn:
        """Ends this process with a line; process 0 first waits for the others to learn of it."""
        _end_lock.acquire()
        logging.flush()
        command_line.print_lines(f'error: {failure}', file=sys.stderr)
        self._set(f'{_FAILURES}known_to_{self._index}')
        # The coordinator lives in process 0, and the others abort when it is gone. It waits for
        # those who answered a roll call; for all, if there was none.
        if self._index == 0:
            num_alive = len(self._client.key_value_dir_get(_ALIVE)) or self._count
            # Each of them adds an entry to that of the failure itself.
            self._wait_for(_FAILURES, num_alive + 1, _LAST_SECONDS)
        os._exit(1)

    def _wait_for(self, folder: str, count: int, seconds: float) -> dict[str, str]:
        """Returns the entries of a folder as soon as there are `count`, or after some seconds."""
        deadline = time.monotonic() + seconds
        while True:
            entries = dict(self._client.key_value_dir_get(folder))
            if len(entries) >= count or time.monotonic() > deadline:
                return entries
            time.sleep(0.1)

    def _set(self, key: str, value: str = '') -> None:
        """Sets an entry in the store of the coordinator."""
        self._client.key_value_set(key, value, allow_overwrite=True)
