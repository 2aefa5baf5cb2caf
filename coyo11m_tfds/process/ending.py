"""Ends the programs of this package with one line after an error or an interrupt.

    def main() -> None:
        with ending.in_one_line('the same command resumes the copy'):
            mirror(...)

An error that a user can mend ends the process with `error: ...` and status 1, Ctrl-C with
`Interrupted: ...` and status 130, SIGTERM with status 143. All three unwind the stack, so locks and
scratch folders are released; a second Ctrl-C ends the process at once. If the system ends the
process, for example because a mapped file was truncated, the place in the code is shown.
`COYO11M_TRACEBACK=1` in the environment shows the traceback instead of one line.
"""

import contextlib
import errno
import faulthandler
import gc
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator

TRACEBACK_VARIABLE = 'COYO11M_TRACEBACK'

INTERRUPTED = 128 + signal.SIGINT  # the exit status that shells give to Ctrl-C

# What to do about errors of the operating system, which says only what is wrong.
_NO_ROOM = 'free some space there or choose another folder'
_NO_ACCESS = 'choose another path, or ask for the right to use this one'
_REMEDIES = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EACCES: _NO_ACCESS,
    errno.EPERM: _NO_ACCESS,
    errno.EROFS: _NO_ACCESS,
    errno.EEXIST: 'choose another path, or remove what is there',
    errno.ENOTDIR: 'a part of this path is a file; choose another path',
    errno.ENOENT: 'correct the path',
}


@contextlib.contextmanager
def in_one_line(
    outlook: str,
    kinds: tuple[type[BaseException], ...] = (ValueError, OSError),
    status: int = 1,
) -> Iterator[None]:
    """Ends the process in the way of this module; use it in the main thread.

    Args:
        outlook: End of the line after an interrupt, such as how to continue.
        kinds: Types of errors that a user can mend.
        status: Exit status after such an error.
    """
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    interrupt_once()
    if not faulthandler.is_enabled():
        faulthandler.enable()
    caught: tuple[type[BaseException], ...] = (KeyboardInterrupt, ModuleNotFoundError, *kinds)
    try:
        yield
    except caught as error:
        if wants_traceback():
            raise
        say(error, outlook)
        sys.exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else status)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def interrupt_once() -> None:
    """Makes the first Ctrl-C raise KeyboardInterrupt, and the second end the process at once.

    A process that ignores Ctrl-C, such as one in the background, still ignores it.
    """

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        # Exceptions in callbacks of the garbage collector, such as that of JAX, are ignored.
        callbacks = {getattr(callback, '__code__', None) for callback in gc.callbacks}
        while frame and frame.f_code not in callbacks:
            frame = frame.f_back
        if frame:
            threading.Timer(0.01, os.kill, [os.getpid(), number]).start()
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def wants_traceback() -> bool:
    """Whether the user asks for tracebacks."""
    return bool(os.environ.get(TRACEBACK_VARIABLE))


def say(error: BaseException, outlook: str) -> None:
    """Prints the line of an error; see `in_one_line`."""
    is_interrupt = isinstance(error, KeyboardInterrupt)
    line = f'Interrupted: {outlook}.' if is_interrupt else f'error: {describe(error)}'
    print(line, file=sys.stderr, flush=True)


def describe(error: BaseException) -> str:
    """Returns the message of an error in one line, often with advice."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and 'pip install' not in text:
        text = f"{error.name} is not installed: pip install -c constraints.txt -e '.[convert,text]'"
    elif isinstance(error, OSError) and error.errno is not None:
        place = f'{error.filename}: ' if error.filename is not None else ''
        remedy = f': {_REMEDIES[error.errno]}.' if error.errno in _REMEDIES else ''
        text = f'{place}{error.strerror}{remedy}'
    return ' '.join(filter(None, map(str.strip, text.splitlines())))
