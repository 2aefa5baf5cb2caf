"""A check in a process of its own: it may claim devices and memory, hang or crash.

    facts = child.ask(['-c', 'print({"answer": 42})'], seconds=30)     # {'answer': 42}

The last line that the process prints is its answer, as JSON.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_KILLED = -signal.SIGKILL  # as the kernel does when memory runs out

_running: set[subprocess.Popen] = set()


def ask(
    arguments: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Runs this Python with some arguments; returns what it answers.

    Args:
        arguments: of the interpreter.
        seconds: after which it is killed.
        environment: variables beside those of this process.

    Raises:
        ValueError: it ended with an error or gave no answer; with the last line that it said.
        TimeoutError: it was killed.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors='replace',
    )
    _running.add(process)
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise TimeoutError(f'no answer within {seconds:g} s') from None
    finally:
        _running.discard(process)
    if process.returncode == _KILLED:
        raise ValueError('the process was killed, most likely because memory ran out')
    said = _last_line(errors) or f'exit status {process.returncode} without a word'
    if process.returncode:
        raise ValueError(said.removeprefix('error: '))
    try:
        answer = json.loads(_last_line(output))
        if isinstance(answer, dict):
            return answer
    except ValueError:
        pass
    raise ValueError(f'no answer, but: {_last_line(output) or said}')


def end_all() -> None:
    """Kills the processes that have given no answer yet."""
    for process in list(_running):
        process.kill()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ''
