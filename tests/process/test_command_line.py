"""Programs end with one line, and with the exit status that shells expect."""

import re
import signal

import pytest

from coyo11m_tfds.process import command_line
from tests import children

PROGRAM = """
import gc, os, signal, time
from coyo11m_tfds.process import command_line

signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
what = sys.argv[1]

short = ['collects']

def wait(phase):
    print(phase, flush=True)
    time.sleep(1 if phase in short else 60)

with command_line.ends_in_one_line('nothing is lost', status=3):
    if what == 'fails':
        raise ValueError('a  b.pt: is\\n\\n  bad')
    if what == 'is refused':
        os.mkdir('/proc/self/x')
    if what == 'has no room':
        open('/dev/full', 'wb', buffering=0).write(b'x')
    if what == 'is ended by the system':
        os.kill(os.getpid(), signal.SIGBUS)
    if what == 'has a bug':
        raise KeyError('x')
    try:
        if what == 'collects':
            once = ['collects']
            gc.callbacks.append(lambda *_: once and wait(once.pop()))
            gc.collect()
        wait('works')
    finally:
        if what == 'clears up':
            wait('clears up')
        print('cleared up', flush=True)
"""


def end(
    what: str, *phases: str, number: int = signal.SIGINT, program: str = PROGRAM
) -> tuple[int, str, str]:
    """Sends a signal in each phase; returns the status, and what it then printed."""
    with children.python(program, what) as child:
        for phase in phases:
            assert child.stdout.readline() == f'{phase}\n'
            child.send_signal(number)
        out, err = child.communicate(timeout=30)
    return child.returncode, out, err


def test_an_error_is_one_line():
    assert end('fails') == (3, '', 'error: a  b.pt: is bad\n')


def test_a_truncated_file_shows_where_it_was_read():
    status, _, err = end('is ended by the system')
    assert status == -signal.SIGBUS
    assert err.startswith('Fatal Python error: Bus error') and 'in <module>' in err


def test_an_error_of_the_system_says_what_to_do():
    status, _, said = end('is refused')
    assert status == 3
    assert re.fullmatch(r'error: /proc/self/x: [A-Z][\w ]+: \w.*\.\n', said)
    _, _, said = end('has no room')
    assert said.endswith(
        'No space left on device: free some space there or choose another folder.\n'
    )


SHOWN = """
import logging, sys
from coyo11m_tfds.process import command_line
from coyo11m_tfds.storage import retry

name = 'a\\x1b]0;t\\x07\\nerror: b \\u202e\\udcff.jpg'
command_line.show_log()
attempts = iter((ConnectionError, None))

def read():
    if error := next(attempts):
        raise error(name)

retry.call(read, name)
logger = logging.getLogger('library')
logger.warning('%s\\nmore', '\\x1b[31m')
try:
    raise OSError(2, 'No such file', name)
except OSError:
    logger.exception('failed')
command_line.print_lines(name, 'caf\\xe9')
parser = command_line.Parser('x', 'Does x.')
with command_line.ends_in_one_line(''):
    if sys.argv[1] == 'parses':
        parser.parse_args([name])
    raise ValueError(f'{name}: is bad')
"""
ESCAPED_NAME = r'a\x1b]0;t\x07\nerror: b \u202e\udcff.jpg'


@pytest.mark.parametrize('encoding', ['utf-8', 'ascii'])
def test_names_control_no_terminal_and_no_character_is_too_much(encoding, monkeypatch):
    monkeypatch.setenv('PYTHONIOENCODING', encoding)
    monkeypatch.setenv('COYO11M_RETRY_SECONDS', '0.001')
    status, out, said = end('parses', program=SHOWN)
    assert status == 2
    cafe = r'caf\xe9' if encoding == 'ascii' else 'caf\xe9'
    assert out.splitlines() == [ESCAPED_NAME, cafe]
    *lines, last = [re.sub(r'^\d\d:\d\d:\d\d ', '', line) for line in said.splitlines()]
    assert lines[0].startswith(f'WARNING: {ESCAPED_NAME}: ConnectionError: a')
    assert lines[0].endswith('failed).')
    # Messages of libraries may have several lines.
    assert lines[1:4] == [r'WARNING: \x1b[31m', 'more', 'ERROR: failed']
    assert lines[-1].endswith(repr(ESCAPED_NAME).replace('\\\\', '\\'))
    assert last.startswith(f'error: unrecognized arguments: {ESCAPED_NAME}; ')
    assert not re.search('[^\n -~\xe9]', out + said)


def test_the_last_line_of_an_error_is_one_line_without_codes(monkeypatch):
    monkeypatch.setenv('COYO11M_RETRY_SECONDS', '0.001')
    status, _, said = end('fails', program=SHOWN)
    shown = ESCAPED_NAME.replace(r'\n', ' ')
    assert (status, said.splitlines()[-1]) == (1, f'error: {shown}: is bad')


def test_a_bug_and_who_asks_for_it_get_the_traceback(monkeypatch):
    status, _, said = end('has a bug')
    assert status == 1
    assert said.startswith('Traceback') and said.endswith("KeyError: 'x'\n")
    monkeypatch.setenv(command_line.TRACEBACK_VARIABLE, '1')
    status, _, said = end('fails')
    assert status == 1 and 'Traceback' in said


def test_an_interrupt_is_one_line_after_clearing_up():
    assert end('works', 'works') == (130, 'cleared up\n', 'Interrupted: nothing is lost.\n')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_polite_kill_clears_up(number):
    assert end('works', 'works', number=number) == (128 + number, 'cleared up\n', '')


def test_a_closed_terminal_whose_shell_says_so_too_lets_it_clear_up():
    brief = PROGRAM.replace("short = ['collects']", "short = ['clears up']")
    ended = end('clears up', 'works', 'clears up', number=signal.SIGHUP, program=brief)
    assert ended == (129, 'cleared up\n', '')


def test_a_second_interrupt_does_not_wait():
    assert end('clears up', 'works', 'clears up') == (-signal.SIGINT, '', '')


def test_an_interrupt_is_not_lost_where_exceptions_are_ignored():
    status, out, said = end('collects', 'collects')
    assert (status, said) == (130, 'Interrupted: nothing is lost.\n')
    assert out.endswith('cleared up\n')


def test_a_program_in_the_background_is_not_interrupted():
    ignoring = PROGRAM.replace('signal.default_int_handler', 'signal.SIG_IGN')
    ignoring = ignoring.replace(
        'what = sys', 'signal.signal(signal.SIGHUP, signal.SIG_IGN); what = sys'
    )
    with children.python(ignoring.replace("['collects']", "['works']"), 'works') as child:
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGHUP)
        out, err = child.communicate(timeout=30)
    assert (child.returncode, out, err) == (0, 'cleared up\n', '')
