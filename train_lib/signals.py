"""Ends a run early: on Ctrl-C or SIGTERM, or because one of its hosts has failed.

After a signal a run saves a checkpoint if it has new steps, and ends. A preempted host gets SIGTERM
and about 30 seconds; the other hosts may get no signal. All hosts must save the same step, because
each writes a part of a checkpoint. If one process fails, the others end at once and name it; else
they would wait for minutes in a computation that needs all processes, and then abort.

This module is imported fast, because it does not import JAX.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from absl import logging

_SIGNALS = signal.SIGINT, signal.SIGTERM

# A scheduler may send a signal to a process, to its parent that hands it on, and to their group.
_SECONDS_OF_ONE_REQUEST = 1

_requests: list['StopRequest'] = []  # of the run that trains now; at most one
_exit_status: dict[int, int] = {}  # by signal, for leaving at once


class BrokenOff(BaseException):
    """A stop was requested during repeatable work; this is not an `Exception`."""


def install(status: int | None = None) -> None:
    """Makes signals end the process at once with one line, as long as nothing must be saved.

    Python runs signal handlers in its main thread, which may be in the compiler for minutes. So a
    thread learns of each signal, and ends the process by `os._exit`, because TensorFlow and XLA
    cannot be interrupted while the interpreter shuts down.

    The exit status is `status` of the last call, or 128 plus the number of the signal for None.
    """
    first = not _exit_status
    _exit_status.update({number: 128 + number if status is None else status for number in _SIGNALS})
    if not first:
        return
    told, tell = socket.socketpair()
    tell.setblocking(False)
    signal.set_wakeup_fd(tell.detach(), warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)  # the thread acts
    threading.Thread(target=_watch, args=(told,), name='signals', daemon=True).start()


class StopRequest:
    """Makes SIGTERM and Ctrl-C request a stop, within its context, instead of ending the process.

    One process uses signal handlers. Several use JAX's preemption service, which
    `jax.distributed.initialize` starts: it catches SIGTERM, tells the other processes, and lets
    them agree on a step that no process has passed. This costs 15 microseconds a step (two
    processes, one machine).

    After `install`, a signal before the end of the first step, or a second signal at any time, ends
    the process at once.
    """

    def __init__(self):
        import jax
        from jax.experimental import multihost_utils

        self._alone = jax.process_count() == 1
        self._agreed = multihost_utils.reached_preemption_sync_point
        self._noted = self._repeatable = False
        self._previous = {}
        # For the thread of `install`: whether a step has been taken, and when it was told to stop.
        self.can_save, self.told_at = False, None

    def __enter__(self) -> 'StopRequest':
        _requests.append(self)
        # JAX keeps its own handler of SIGTERM where there are several processes.
        for number in _SIGNALS if self._alone else (signal.SIGINT,):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception):
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        _requests.remove(self)

    def reached(self, step: int) -> bool:
        """Whether the run stops after this step; every process must call this after every step."""
        self.can_save = True
        return self._noted if self._alone else self._agreed(step)

    @contextlib.contextmanager
    def repeatable(self) -> Iterator[None]:
        """Allows a stop request to interrupt a block, by a `BrokenOff` in the main thread.

        With several processes the block completes: its computations need all of them.
        """
        self._repeatable = self._alone
        try:
            if self._noted and self._alone:
                raise BrokenOff
            yield
        finally:
            self._repeatable = False

    def _receive(self, number: int, _) -> None:
        if not self._alone:  # Ctrl-C becomes what JAX knows
            os.kill(os.getpid(), signal.SIGTERM)
            return
        first, self._noted = not self._noted, True
        if first and self._repeatable:
            raise BrokenOff


def _watch(told: socket.socket) -> None:
    while True:
        number = told.recv(1)[0]
        if number not in _SIGNALS:
            continue
        request = _requests[0] if _requests else None
        name = 'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'
        if request is None or not request.can_save:
            _leave(number, f'{name}: left at once, there was nothing to save.')
        if request.told_at is None:
            request.told_at = time.monotonic()
            _say(f'{name}: saving, then leaving. Once more leaves at once.')
        elif time.monotonic() - request.told_at > _SECONDS_OF_ONE_REQUEST:
            _leave(number, f'{name} again: left at once; the last checkpoint is what is kept.')


def _say(text: str) -> None:
    # Not by `print`: the main thread may hold the lock of the stream, and never give it back.
    with contextlib.suppress(OSError):
        start = '\n' if sys.stderr.isatty() else ''  # below a ^C
        os.write(2, f'{start}{text}\n'.encode())


def _leave(number: int, text: str) -> NoReturn:
    _say(text)
    os._exit(_exit_status[number])


# --- Several hosts ------------------------------------------------------------------------------

_HEARTBEAT_SECONDS = 40  # a process that is silent for so long has died without a word
_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 10.0  # a process whose thread does not answer for so long is dead
_LAST_SECONDS = 15.0  # the coordinator waits so long for others to learn of a failure

# Keys in the store of JAX's coordinator.
_FOLDER = 'coyo11m_tfds/failure/'
_FIRST = f'{_FOLDER}first'
_ASKED = 'coyo11m_tfds/asked/'  # who is still there, and:
_HERE = 'coyo11m_tfds/here/'  # who is
_HOSTS = 'coyo11m_tfds/hosts/'

_ending = threading.Lock()  # never given back: one thread ends the process


def join_hosts(
    coordinator: str | None = None, count: int | None = None, index: int | None = None
) -> None:
    """Waits for the other processes of the run; without arguments JAX finds them by itself."""
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


@contextlib.contextmanager
def failures_shared() -> Iterator[None]:
    """Ends this process when another one fails here, and the others when this one does.

    The first process that fails leaves its error with JAX's coordinator, where a thread of every
    other process looks for it. If a shared computation fails, a process first asks which others
    still answer, because a killed process leaves no error. All end by `os._exit(1)`: processes that
    wait for each other cannot unwind. Use a nested context in a block whose end would wait so.
    """
    import jax

    if jax.process_count() == 1:
        yield
        return
    hosts = _Hosts()
    over = threading.Event()
    watcher = threading.Thread(target=hosts.watch, args=(over,), name='failures', daemon=True)
    watcher.start()
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            hosts.tell(error)
        raise
    finally:
        over.set()
        watcher.join()


def summary(error: BaseException) -> str:
    """Summarizes an error in one line, without the tracebacks that TensorFlow quotes."""
    lines = str(error).splitlines() or ['']
    # With the module of the error, unless it is one of Python's own.
    quoted = [found for line in lines[1:] if (found := re.match(r'(?:\w+\.)*(\w+Error: .*)', line))]
    return quoted[-1][1] if quoted else f'{type(error).__name__}: {lines[0]}'


class _Hosts:
    """The processes of a run, as they know each other by the coordinator."""

    def __init__(self):
        import jax
        from jax._src import distributed  # the store of the coordinator has no public name

        self._client: Any = distributed.global_state.client
        self._index, self._count = jax.process_index(), jax.process_count()
        self._name = f'process {self._index} on {socket.gethostname()}'
        self._computing_failed = jax.errors.JaxRuntimeError
        self._set(f'{_HOSTS}{self._index}', self._name)

    def watch(self, over: threading.Event) -> None:
        """Looks for the failure of another process, and answers those who ask who is there."""
        while not over.wait(_LOOK_SECONDS):
            # Not by waiting for the key: that could not be broken off.
            failure = dict(self._client.key_value_dir_get(_FOLDER)).get(_FIRST)
            if failure is not None:
                self._end(failure)
            if self._client.key_value_dir_get(_ASKED):
                self._set(f'{_HERE}{self._index}')

    def tell(self, error: BaseException) -> None:
        """Reports the error to the coordinator, unless another process was first, and ends."""
        is_message = isinstance(error, SystemExit)
        message = str(error).removeprefix('error: ') if is_message else summary(error)
        failure = f'{self._name} has failed: {message}'
        if self._is_of_a_computation(error) and (dead := self._silent()):
            what = 'it was killed, maybe for lack of memory, or is cut off.'
            failure = f'{dead} does not answer: {what}'
        try:
            self._client.key_value_set(_FIRST, failure)
        except self._computing_failed:  # another was first, and this error is what came of it
            failure = self._client.key_value_try_get(_FIRST)
        else:
            if not is_message:
                traceback.print_exception(error)
        self._end(failure)

    def _is_of_a_computation(self, error: BaseException | None) -> bool:
        while error is not None and not isinstance(error, self._computing_failed):
            error = error.__cause__ or error.__context__
        return error is not None

    def _silent(self) -> str:
        """The processes that do not answer, by name; '' if all do."""
        self._set(f'{_ASKED}who')
        here = self._wait_for(_HERE, self._count, _ANSWER_SECONDS)
        hosts = dict(self._client.key_value_dir_get(_HOSTS))
        silent = [index for index in range(self._count) if f'{_HERE}{index}' not in here]
        return ' and '.join(hosts.get(f'{_HOSTS}{index}', f'process {index}') for index in silent)

    def _end(self, failure: str) -> NoReturn:
        _ending.acquire()
        logging.flush()
        print(f'error: {failure}', file=sys.stderr, flush=True)
        self._set(f'{_FOLDER}known_to_{self._index}')
        if self._index == 0:  # the coordinator lives here, and the others abort when it is gone
            # Those who answered; all, if nobody has asked.
            alive = len(self._client.key_value_dir_get(_HERE)) or self._count
            self._wait_for(_FOLDER, alive + 1, _LAST_SECONDS)
        os._exit(1)

    def _wait_for(self, folder: str, count: int, seconds: float) -> dict[str, str]:
        """What is in a folder as soon as there are `count` keys, or after some seconds."""
        deadline = time.monotonic() + seconds
        while len(found := dict(self._client.key_value_dir_get(folder))) < count:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return found

    def _set(self, key: str, value: str = '') -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)
