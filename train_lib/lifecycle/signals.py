"""Ends a run early on a signal, such as Ctrl-C, after it has saved a checkpoint of new steps.

A preempted host gets SIGTERM and about 30 seconds; the other hosts may get no signal. All hosts
must save the same step, because each writes a share of a checkpoint. Signals that the process was
started to ignore, as by `nohup`, stay ignored.
"""

# Imported fast: it does not import JAX.

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from coyo11m_tfds.process import stop_signals

# The others warn, perhaps again and again, and may come before one of these.
_URGENT = signal.SIGINT, signal.SIGTERM

# A scheduler may send a signal to a process, to its parent that hands it on, and to their group.
_SECONDS_OF_ONE_REQUEST = 1

_requests: list['StopRequest'] = []  # of the run that trains now; at most one
_exit_status: dict[int, int] = {}  # by signal, for an immediate end


class BrokenOff(BaseException):
    """A stop was requested during repeatable work; this is not an `Exception`."""


def install(status: int | None = None) -> None:
    """Makes signals end the process with a line, as long as nothing must be saved.

    The exit status is `status`; without one, 128 and the number of the signal, as of a shell.
    """
    # Another call only changes the status.
    is_first_call = not _exit_status
    for number in stop_signals.STOP_SIGNALS:
        _exit_status[number] = 128 + number
        if status is not None:
            _exit_status[number] = status
    if not is_first_call:
        return
    # Python runs signal handlers in its main thread, which may be in the compiler for minutes. So a
    # thread learns of each signal, and ends the process by `os._exit`, because TensorFlow and XLA
    # cannot be interrupted while the interpreter shuts down.
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    for number in stop_signals.find_heeded():
        signal.signal(number, _leave_to_thread)
    threading.Thread(target=_watch, args=(receiver,), name='signals', daemon=True).start()


class StopRequest:
    """Makes signals request a stop; one before the first step or a second one ends the process.

    A program's own handlers stay, except those of Ctrl-C and SIGTERM.
    """

    def __init__(self):
        import jax
        from jax.experimental import multihost_utils

        # One process uses signal handlers. Several use JAX's preemption service, which
        # `jax.distributed.initialize` starts: it catches SIGTERM, informs the other processes, and
        # lets them agree on a step that no process has passed. This costs 15 microseconds a step
        # (two processes, one machine).
        self._is_alone = jax.process_count() == 1
        self._reached_sync_point = multihost_utils.reached_preemption_sync_point
        self._is_stopping = False
        self._repeatable = False
        # The handlers before, by signal.
        self._previous = {}
        # For the thread of `install`: whether a step has been taken, whether a signal has come, and
        # the time of the first urgent one.
        self.can_save = False
        self.is_noted = False
        self.first_urgent: float | None = None

    def __enter__(self) -> 'StopRequest':
        _requests.append(self)
        for number in stop_signals.find_heeded():
            if self._takes(number):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception):
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        _requests.remove(self)

    def reached(self, step: int) -> bool:
        """Whether the run stops after this step; every process must call this after every step."""
        self.can_save = True
        if self._is_alone:
            return self._is_stopping
        return self._reached_sync_point(step)

    @contextlib.contextmanager
    def repeatable(self) -> Iterator[None]:
        """Allows a stop request to interrupt a block, by a `BrokenOff` in the main thread."""
        # With several processes the block completes: its computations need all of them.
        self._repeatable = self._is_alone
        try:
            # After the flag is set: a signal in between raises one itself.
            if self._is_stopping and self._is_alone:
                raise BrokenOff
            yield
        finally:
            self._repeatable = False

    def _takes(self, number: signal.Signals) -> bool:
        """Whether this signal requests a stop, rather than what it does already."""
        if number == signal.SIGTERM:
            # JAX keeps its own handler where there are several processes.
            return self._is_alone
        is_free = signal.getsignal(number) in (signal.SIG_DFL, _leave_to_thread)
        return is_free or number == signal.SIGINT

    def _receive(self, number: int, _) -> None:
        """Notes a request, as the handler of signals in the main thread."""
        # JAX's preemption service knows SIGTERM alone, so another signal becomes one.
        if not self._is_alone:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        is_first = not self._is_stopping
        self._is_stopping = True
        if is_first and self._repeatable:
            raise BrokenOff


def _leave_to_thread(number: int, _) -> None:
    """Handles a signal by nothing: the thread of `install` acts."""


def _watch(receiver: socket.socket) -> None:
    """Acts on each signal, whose number the interpreter writes to a socket."""
    while True:
        number = receiver.recv(1)[0]
        # Those of a program's own handlers come here, too.
        if number not in _exit_status:
            continue
        request = _requests[0] if _requests else None
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            name = 'Ctrl-C'
        if request is None or not request.can_save:
            _leave(number, f'{name}: left at once, there was nothing to save.')
        now = time.monotonic()
        if number not in _URGENT:
            if not request.is_noted:
                _write_line(f'{name}: saving, then leaving.')
        elif request.first_urgent is None:
            request.first_urgent = now
            _write_line(f'{name}: saving, then leaving. Once more leaves at once.')
        elif now - request.first_urgent > _SECONDS_OF_ONE_REQUEST:
            _leave(number, f'{name} again: left at once; the last checkpoint is what is kept.')
        request.is_noted = True


def _write_line(text: str) -> None:
    """Writes a line to standard error, from any thread."""
    # Not by `print`: the main thread may hold the lock of the stream, and never release it.
    with contextlib.suppress(OSError):
        start = '\n' if sys.stderr.isatty() else ''  # below a ^C
        os.write(2, f'{start}{text}\n'.encode())


def _leave(number: int, text: str) -> NoReturn:
    """Ends the process at once with a line and the status of a signal."""
    _write_line(text)
    os._exit(_exit_status[number])
