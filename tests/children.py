"""Child processes of tests, which may be killed without leaving anything behind.

with children.python('print(sys.argv[1])', 'hello') as child:
    child.stdout.readline()   # 'hello\\n'
    child.kill()
"""

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator


@contextlib.contextmanager
def python(code: str, *arguments: object) -> Iterator[subprocess.Popen]:
    """Runs `code`, with `sys` imported; what is not over at the end of the block is killed.

    Its output is text in pipes; the environment is that of the test, with the stand-ins in it.
    """
    command = [sys.executable, '-c', f'import sys\n{textwrap.dedent(code)}', *map(str, arguments)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with child:
        try:
            yield child
        finally:
            child.kill()
