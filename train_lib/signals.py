"""Ctrl-C and SIGTERM: save and leave where there is something to save, else leave at once.

    signals.install(status=75)          # of a program, before its slow imports
    with signals.StopRequest() as stop:
        for step in ...:
            ...
            if stop.reached(step):
                break

A host that is to be preempted gets SIGTERM and some 30 seconds; the others may get nothing. All
have to save the same step, because a checkpoint is written by all. Importing this module is quick.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

_SIGNALS = signal.SIGINT, signal.SIGTERM

# A scheduler may send a signal to a process, to its parent that hands it on, and to their group.
_SECONDS_OF_ONE_REQUEST = 1

_requests: list['StopRequest'] = []  # of the run that trains now; at most one
_exit_status: dict[int, int] = {}  # by signal, for leaving at once


class BrokenOff(BaseException):
    """A stop was requested during something that can be repeated; no error, and no `Exception`."""


def install(status: int | None = None) -> None:
    """Ends the process at once, with one line, when a signal comes and nothing is to be saved.

    Python runs signal handlers between two steps of its main thread, which may be in the compiler
    for minutes; a thread that is told of each signal is not. It ends the process by `os._exit`,
    because TensorFlow and XLA cannot be interrupted while the interpreter shuts down. May be
    called again, with another status.

    Args:
        status: exit status; 128 and the number of the signal, as a shell has it, where None.
    """
    first = not _exit_status
    _exit_status.update({number: 128 + number if status is None else status for number in _SIGNALS})
    if not first:
        return
    told, tell = socket.socketpair()
    tell.setblocking(False)
    signal.set_wakeup_fd(tell.detach(), warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, _ignore)
    threading.Thread(target=_watch, args=(told,), name='signals', daemon=True).start()


class StopRequest:
    """Notes SIGTERM and Ctrl-C instead of dying of them, for as long as the context lasts.

    With one process these are signal handlers. With several it is JAX's preemption service, which
    `jax.distributed.initialize` starts: it catches SIGTERM, tells the other processes and lets
    them agree on a step that none has passed. 15 microseconds a step (two processes, one machine).

    After `install` a signal that comes before the first step has been taken, and a second one at
    any time, end the process at once.
    """

    def __init__(self):
        import jax
        from jax.experimental import multihost_utils

        self._alone = jax.process_count() == 1
        self._agreed = multihost_utils.reached_preemption_sync_point
        self._noted = False
        self._repeatable = False
        self._previous = {}
        # For the thread of `install`: whether a step has been taken, and when it was told to stop.
        self.can_save = False
        self.told_at = None

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
        """True if the run stops after this step; every process has to ask after every step."""
        self.can_save = True
        return self._noted if self._alone else self._agreed(step)

    @contextlib.contextmanager
    def repeatable(self) -> Iterator[None]:
        """Work in this block may be interrupted, by a `BrokenOff` in the main thread.

        Of several processes none may leave the others alone in a computation, so it is completed.
        """
        if not self._alone:
            yield
            return
        self._repeatable = True
        try:
            if self._noted:
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


def _ignore(*_) -> None:
    """Replaces the default action; `_watch` is told of the signal by its socket."""


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
        start = '\n' if sys.stderr.isatty() else ''  # below a progress bar or a ^C
        os.write(2, f'{start}{text}\n'.encode())


def _leave(number: int, text: str) -> NoReturn:
    _say(text)
    os._exit(_exit_status[number])
