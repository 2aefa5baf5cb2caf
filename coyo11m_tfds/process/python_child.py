"""Code that runs in a Python process of its own, because it may claim devices, hang or crash."""

import json
import os
import subprocess
import sys
from typing import Any

_TIMEOUT = 240.0  # seconds; a large model takes a minute to load

# The last keeps JAX from taking three quarters of a GPU's memory.
_QUIETLY = {
    'COYO11M_TRACEBACK': '',
    'TF_CPP_MIN_LOG_LEVEL': '3',
    'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
}


def run_python(program: str, seconds: float = _TIMEOUT) -> Any:
    """Runs code in its own process; returns the last line of its output, parsed as JSON.

    Raises a ValueError with the last line of its errors if it fails, and a TimeoutError.
    """
    try:
        process = subprocess.run(
            [sys.executable, '-c', program],
            env=os.environ | _QUIETLY,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f'no answer within {seconds:g} s') from None
    # SIGKILL, which the system sends to the process that takes most memory.
    if process.returncode == -9:
        raise ValueError('the process was killed, most likely because it ran out of memory')
    if process.returncode:
        output = process.stderr.strip() or f'exit status {process.returncode} without a message'
        # Programs of this project and Python's tracebacks end with the message.
        raise ValueError(output.splitlines()[-1].removeprefix('error: '))
    # Libraries may have printed lines of their own before it.
    try:
        return json.loads(process.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise ValueError(f'no answer, but: {process.stdout.strip()[-200:]}') from None
