"""Programs end with one line, and with the exit status that shells expect."""

import re
import signal

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


def end(what: str, *phases: str, number: int = signal.SIGINT) -> tuple[int, str, str]:
    """Sends a signal in each phase; returns the status, and what it then printed."""
    with children.python(PROGRAM, what) as child:
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


def test_a_bug_and_who_asks_for_it_get_the_traceback(monkeypatch):
    status, _, said = end('has a bug')
    assert status == 1
    assert said.startswith('Traceback') and said.endswith("KeyError: 'x'\n")
    monkeypatch.setenv(command_line.TRACEBACK_VARIABLE, '1')
    status, _, said = end('fails')
    assert status == 1 and 'Traceback' in said


def test_an_interrupt_is_one_line_after_clearing_up():
    assert end('works', 'works') == (130, 'cleared up\n', 'Interrupted: nothing is lost.\n')


def test_a_polite_kill_clears_up():
    assert end('works', 'works', number=signal.SIGTERM) == (143, 'cleared up\n', '')


def test_a_second_interrupt_does_not_wait():
    assert end('clears up', 'works', 'clears up') == (-signal.SIGINT, '', '')


def test_an_interrupt_is_not_lost_where_exceptions_are_ignored():
    status, out, said = end('collects', 'collects')
    assert (status, said) == (130, 'Interrupted: nothing is lost.\n')
    assert out.endswith('cleared up\n')


def test_a_program_in_the_background_is_not_interrupted():
    ignoring = PROGRAM.replace('signal.default_int_handler', 'signal.SIG_IGN')
    with children.python(ignoring.replace("['collects']", "['works']"), 'works') as child:
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert (child.returncode, out, err) == (0, 'cleared up\n', '')
