"""A check in a process of its own, which may claim devices and memory, hang or crash.

    facts = child.ask(['-c', 'print({"answer": 42})'], seconds=30)     # {'answer': 42}

The last line that the process prints is its answer, as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# What the kernel sends to a process for which memory has run out.
_KILLED = -9


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
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors='replace',
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f'no answer within {seconds:g} s') from None
    if done.returncode == _KILLED:
        raise ValueError('the process was killed, most likely because memory ran out')
    said = _last_line(done.stderr) or f'exit status {done.returncode} without a word'
    if done.returncode:
        raise ValueError(said.removeprefix('error: '))
    try:
        answer = json.loads(_last_line(done.stdout))
        if isinstance(answer, dict):
            return answer
    except ValueError:
        pass
    raise ValueError(f'no answer, but: {_last_line(done.stdout) or said}')


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ''
