"""Programs of the project, many in a row, for what a command line is answered with."""

import json
import os
import re
import subprocess
from collections.abc import Sequence

from tests import children
from tests.checkout import CHECKOUT

# Forks after the slow imports, so that each program begins at once in a process of its own.
_START = """
import importlib, json, os, runpy, sys, warnings
warnings.simplefilter('ignore')
commands = json.loads(sys.argv[1])
for program in {program for program, _ in commands}:  # train_lib.main defines its flags
    importlib.import_module(program.replace('train_lib.main', 'train_lib.run'))

print('=== ended with 0', flush=True)
for program, arguments in commands:
    child = os.fork()
    if not child:
        sys.argv = [program, *arguments]
        try:
            runpy.run_module(program, run_name='__main__', alter_sys=True)
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code)
            sys.stdout.flush()
            os._exit(1 if isinstance(end.code, str) else end.code or 0)
    _, status = os.waitpid(child, 0)
    print('=== ended with', os.waitstatus_to_exitcode(status), flush=True)
"""


def run(commands: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[int, list[str]]]:
    """The exit status and the lines of each program, on a terminal of 80 columns."""
    ended = subprocess.run(
        [*children.interpreter(forked=True), '-c', _START, json.dumps(commands)],
        cwd=CHECKOUT,
        env=os.environ | {'COLUMNS': '80'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=True,
    )
    # Of one that was killed, the status is negative. In front of the first is what the imports
    # print, and behind the last is nothing.
    _, _, *parts, _ = re.split(r'=== ended with (-?\d+)\n', ended.stdout)
    outputs = parts[::2]
    statuses = parts[1::2]
    results = []
    for output, status in zip(outputs, statuses, strict=True):
        results.append((int(status), output.splitlines()))
    return results
