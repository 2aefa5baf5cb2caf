"""Findings: one line that passes, warns or fails, with the command that mends it.

    finding.failed('disk', '/data has 2.0 GB free, expected 310.0 GB', 'choose another --data_dir')
    finding.bounded('source', 30, lambda: source_checks.check_files('gs://bucket/coyo11m'))

A check never raises what a user can mend: `bounded` turns errors, and no answer, into findings.
"""

import contextlib
import dataclasses
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coyo11m_tfds.process import ending

PASS, WARN, FAIL = 'pass', 'warn', 'fail'

_SILENCE = 1.0  # seconds


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        name: of the check.
        status: `PASS`, `WARN` or `FAIL`.
        text: what was found, in one line.
        mend: the command or the change that mends it; '' where nothing is to be mended, or where
            the text says it.
        facts: plain values for programs, as JSON can carry them.
    """

    name: str
    status: str
    text: str
    mend: str = ''
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        mend = f' -> {self.mend}' if self.mend else ''
        return f'{self.status}  {self.name}: {self.text}{mend}'


# Gives the findings of one subject.
Check = Callable[[], Iterable[Finding]]


def passed(name: str, text: str, **facts: Any) -> Finding:
    """A check without fault."""
    return Finding(name, PASS, text, '', facts)


def warned(name: str, text: str, mend: str, **facts: Any) -> Finding:
    """A finding that costs time or may fail later."""
    return Finding(name, WARN, text, mend, facts)


def failed(name: str, text: str, mend: str = '', **facts: Any) -> Finding:
    """A finding that would end a build or a run, or has damaged a data set."""
    return Finding(name, FAIL, text, mend, facts)


def of_error(name: str, error: BaseException, mend: str = '') -> Finding:
    """An error, whose message says what to do, as a failure of one line."""
    if isinstance(error, ModuleNotFoundError):
        mend = mend or ending.INSTALL
        return failed(name, f'{error.name} is not installed, which this check needs', mend)
    is_message = isinstance(error, (ValueError, OSError)) and str(error)
    text = ending.describe(error) if is_message else repr(error)
    return failed(name, ' '.join(text.split()), mend)


def bounded(name: str, seconds: float, check: Check) -> list[Finding]:
    """Runs a check for a limited time; says on standard error that it takes more than a moment.

    Args:
        name: of the finding that stands for an error or for no answer.
        seconds: to wait. A check that hangs stays behind in a daemon thread.
        check: what to run.

    Returns:
        Its findings, the last of which stands for an error.
    """
    results: queue.SimpleQueue = queue.SimpleQueue()

    def run() -> None:
        found = []
        try:
            for one in check():
                found.append(one)
        except BaseException as error:
            found.append(of_error(name, error))
        results.put(found)

    threading.Thread(target=run, name=f'check {name}', daemon=True).start()
    try:
        with contextlib.suppress(queue.Empty):
            return results.get(timeout=min(_SILENCE, seconds))
        print(f'wait  {name}: takes at most {seconds:g} s', file=sys.stderr, flush=True)
        return results.get(timeout=max(0, seconds - _SILENCE))
    except queue.Empty:
        text = f'no answer within {seconds:g} s, so nothing is known of it'
        return [failed(name, text, 'try again, or wait longer with --timeout')]
