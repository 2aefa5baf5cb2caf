"""Command lines of programs: help from the docstring, a readable log, and one line at the end.

An error that a user can fix ends the process with `error: ...` and status 1, Ctrl-C with
`Interrupted: ...` and status 130, SIGTERM, SIGHUP and the other `STOP_SIGNALS` with 128 and their
number. All unwind the stack, so locks and scratch folders are released; a second Ctrl-C ends the
process at once. `COYO11M_TRACEBACK=1` in the environment shows the traceback instead of one line.
"""

import argparse
import contextlib
import faulthandler
import gc
import logging
import os
import pathlib
import re
import shutil
import signal
import sys
import textwrap
import threading
import types
from collections.abc import Iterator
from typing import NoReturn, TextIO

import absl.logging

import coyo11m_tfds
from coyo11m_tfds.process import errors, programs, stop_signals
from coyo11m_tfds.process.shown_text import escape_for_terminal

VERSION = f'coyo11m_tfds {coyo11m_tfds.__version__}'

TRACEBACK_VARIABLE = 'COYO11M_TRACEBACK'

INTERRUPTED = 128 + signal.SIGINT  # the exit status that shells give to Ctrl-C

# Subclasses of RuntimeError, which some programs take for fixable; these mean nothing to users.
_BUGS = NotImplementedError, RecursionError

# Not their parent folder, which may hold a virtual environment.
OWN_CODE = tuple(
    str(pathlib.Path(__file__).parents[2] / name)
    for name in ('coyo11m_tfds', 'train_lib', 'input_pipeline.py')
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors end the program with `error: ...` in one line, and status 2."""

    def __init__(self, program: str, doc: str):
        """Takes the name of the module that is run, and its docstring with an indented command."""
        width = min(shutil.get_terminal_size().columns, 100) - 1
        wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
        paragraphs = []
        for paragraph in doc.strip().split('\n\n'):
            # Commands keep their lines.
            is_command = paragraph.startswith(' ')
            paragraphs.append(paragraph if is_command else wrapper.fill(paragraph))
        super().__init__(
            prog=f'python -m {program}',
            usage='%(prog)s [--FLAG=VALUE ...]',  # the description shows whole commands
            description='\n\n'.join(paragraphs),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument('--version', action='version', version=VERSION)

    def error(self, message: str) -> NoReturn:
        """Ends the program with the message, and a command that would be right."""
        line = f'error: {message}; {example_of_use(self.prog, self.description)}'
        self.exit(2, f'{escape_for_terminal(line)}\n')


def list_programs(package: str, doc: str | None) -> None:
    """Runs `python -m` of a package with this docstring, which lists the package's programs."""
    Parser(package, doc or '').parse_args()
    print_lines(*programs.describe_programs(package), '', 'python -m NAME --help shows more.')


def example_of_use(program: str, doc: str | None) -> str:
    """Returns advice: the first command in `doc` that begins with `program`."""
    # With the lines that go on after a backslash.
    command = re.search(rf'^ {{4}}({re.escape(program)} (?:.*\\\n)*.*)', doc or '', re.MULTILINE)
    if not command:
        return 'see --help'
    words = command[1].replace('\\', ' ').split()
    return f'expected e.g. `{" ".join(words)}`, see --help'


# --- The log ------------------------------------------------------------------------------------


class SafeFormatter(logging.Formatter):
    """Formats messages without codes for terminals; those of this project in one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the message of a record, escaped."""
        text = super().formatMessage(record)
        # A name that holds a line feed must not look like a message of its own.
        if record.pathname.startswith(OWN_CODE):
            return escape_for_terminal(text)
        return _escape_lines(text)

    def formatException(self, ei) -> str:
        """Returns a traceback, whose lines are escaped."""
        return _escape_lines(super().formatException(ei))


def _escape_lines(text: str) -> str:
    return '\n'.join(map(escape_for_terminal, text.split('\n')))


class LogFormatter(SafeFormatter):
    """Formats the time of day and the message, with the level of a warning or worse."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the lines of a record."""
        time = self.formatTime(record, '%H:%M:%S')
        level = ''
        if record.levelno > logging.INFO:
            level = f'{record.levelname}: '
        return f'{time} {level}{super().format(record)}'


def show_log() -> None:
    """Shows the log of the program, such as its progress."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(handlers=[handler])
    # Its handler takes the place of this one where absl parses the flags.
    absl.logging.get_absl_handler().setFormatter(LogFormatter())
    absl.logging.set_verbosity(absl.logging.INFO)


# --- The output ---------------------------------------------------------------------------------


def print_lines(*lines: object, file: TextIO | None = None) -> None:
    """Prints each argument as a line, to standard output by default; takes any characters."""
    file = file or sys.stdout
    encoding = file.encoding or 'utf-8'
    for line in lines:
        # Not every terminal has all characters, and `print` would fail.
        shown = escape_for_terminal(line).encode(encoding, 'backslashreplace').decode(encoding)
        print(shown, file=file, flush=True)


# --- The end ------------------------------------------------------------------------------------


@contextlib.contextmanager
def ends_in_one_line(
    outlook: str,
    fixable: tuple[type[BaseException], ...] = (ValueError, OSError),
    status: int = 1,
) -> Iterator[None]:
    """Ends the process with one line after an error or an interrupt, in the main thread.

    Errors that a user can fix, of the types `fixable`, end it with `status`; others show their
    traceback. `outlook` ends the line after an interrupt, such as how to continue.
    """
    previous = {number: signal.getsignal(number) for number in stop_signals.find_heeded()}
    unwind_on_signals()
    # A crash in a library then shows where, in place of nothing.
    if not faulthandler.is_enabled():
        faulthandler.enable()
    kinds: tuple[type[BaseException], ...] = (KeyboardInterrupt, ModuleNotFoundError, *fixable)
    try:
        yield
    except kinds as error:
        if wants_traceback() or isinstance(error, _BUGS):
            raise
        print_error(error, outlook)
        sys.exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else status)
    finally:
        # A program may call this several times, and a notebook goes on.
        for number, handler in previous.items():
            signal.signal(number, handler)


def unwind_on_signals() -> None:
    """Makes the first of the stop signals unwind the stack, unless it is ignored.

    Ctrl-C raises KeyboardInterrupt, and a second one kills; the others raise SystemExit.
    """
    for number in stop_signals.find_heeded():
        if number != signal.SIGINT:
            signal.signal(number, _exit_once)
        # Unless a notebook, say, has its own handler.
        elif signal.getsignal(number) is signal.default_int_handler:
            signal.signal(number, _interrupt_once)


def _exit_once(number: int, frame: types.FrameType | None) -> NoReturn:
    """Handles a signal but Ctrl-C; ignores further ones, which would stop the clearing up."""
    for other in stop_signals.find_heeded():
        if other != signal.SIGINT:
            signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def _interrupt_once(number: int, frame: types.FrameType | None) -> None:
    """Handles Ctrl-C: raises KeyboardInterrupt, and leaves the next one to the system."""
    # Exceptions in callbacks of the garbage collector, such as that of JAX, are ignored.
    callbacks = {getattr(callback, '__code__', None) for callback in gc.callbacks}
    while frame and frame.f_code not in callbacks:
        frame = frame.f_back
    if frame:
        # The signal came within one: once more, when it has ended.
        threading.Timer(0.01, os.kill, [os.getpid(), number]).start()
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def wants_traceback() -> bool:
    """Whether the environment asks for tracebacks in place of one line."""
    return bool(os.environ.get(TRACEBACK_VARIABLE))


def print_error(error: BaseException, outlook: str) -> None:
    """Prints one line for an error or an interrupt; see `ends_in_one_line`."""
    if isinstance(error, KeyboardInterrupt):
        line = f'Interrupted: {outlook}.'
    else:
        line = f'error: {errors.describe_error(error)}'
    print_lines(line, file=sys.stderr)
