"""pytest looks into every folder of tests, and forks of `fork_server` are as other processes."""

import fnmatch
import os
import subprocess

from tests import children
from tests.checkout import CHECKOUT


def test_no_folder_of_tests_is_left_out(pytestconfig):
    patterns = pytestconfig.getini('norecursedirs')
    folders = {path.parent.name for path in (CHECKOUT / 'tests').rglob('test_*.py')}
    assert 'convert' in folders
    assert not [name for name in folders if any(fnmatch.fnmatch(name, p) for p in patterns)]


def test_a_fork_does_what_python_does(tmp_path):
    program = """
import atexit, os, sys, threading, time
print(__name__, sys.argv, os.getcwd(), os.environ['SOME'], flush=True)
atexit.register(print, 'the end')
threading.Thread(target=lambda: (time.sleep(0.2), print('a thread'))).start()
print(sys.stdin.read(), file=sys.stderr, flush=True)
"""
    common = {'cwd': tmp_path, 'env': os.environ | {'SOME': 'x'}, 'input': 'y', 'text': True}
    for last in ('', "sys.exit('bad')", 'sys.exit(7)', 'os.kill(os.getpid(), 9)'):
        python, fork = (
            subprocess.run(
                [*children.interpreter(forked), '-c', program + last, 'a'],
                capture_output=True,
                **common,
            )
            for forked in (False, True)
        )
        assert (fork.returncode, fork.stdout) == (python.returncode, python.stdout)
        assert fork.stderr == python.stderr
    assert fork.returncode == -9 and 'x\n' in fork.stdout


def test_a_fork_ends_at_an_error_with_its_traceback():
    with children.python('1 / 0', forked=True) as child:
        _, errors = child.communicate()
    assert child.returncode == 1
    assert errors.startswith('Traceback')
    assert errors.endswith('ZeroDivisionError: division by zero\n')


def test_a_fork_is_killed_with_what_stands_for_it():
    program = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'
    with children.python(program, forked=True) as child:
        pid = int(child.stdout.readline())
        assert children.is_running(pid)
    children.wait_until(lambda: not children.is_running(pid))


def test_a_fork_refuses_what_comes_too_late():
    ended = children.program('train_lib.draw', '--help', forked=True, JAX_PLATFORMS='none')
    assert ended.returncode == 1
    assert ended.stderr.startswith("['JAX_PLATFORMS'] cannot change in a fork")
