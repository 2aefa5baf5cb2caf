"""The holder of a lock: a process, described so that others can name it and see that it is dead.

data = lock_holder.this_process().to_json()
holder = lock_holder.from_json(data)
str(holder)        # 'process 4711 on host, since 2026-11-20 08:51:37 UTC'
holder.is_dead()   # True only if it ran on this very machine and does not any more
"""

import dataclasses
import datetime
import json
import os
import pathlib
import socket
import uuid

from coyo11m_tfds.storage import retry


@dataclasses.dataclass(frozen=True)
class LockHolder:
    """A process that holds a lock; all fields of a damaged record are empty.

    Attributes:
        host: name of its machine.
        pid: its number.
        since: when it took the lock.
        token: identifies this acquisition of the lock.
        lease_seconds: after that long without a renewal others may take over; 0 where locks end
            with their process.
        machine: boot of the machine and process namespace, within which `pid` means something.
        started: when the process began, in ticks since boot; tells reused numbers apart.
    """

    host: str = ''
    pid: int = 0
    since: str = ''
    token: str = ''
    lease_seconds: float = 0
    machine: str = ''
    started: str = ''

    def __str__(self) -> str:
        if not self.host:
            return 'another process'
        return f'process {self.pid} on {self.host}, since {self.since}'

    def to_json(self) -> bytes:
        """Returns what `from_json` reads."""
        return json.dumps(dataclasses.asdict(self)).encode()

    def is_dead(self) -> bool:
        """True if it certainly is: it ran on this machine, since its last boot, and is gone."""
        return self._is_here() and self.started != started(self.pid)

    def is_running(self) -> bool:
        """True if it certainly is, on this machine."""
        return self._is_here() and self.started == started(self.pid)

    def _is_here(self) -> bool:
        return self.machine == _machine() != ''


def lease_seconds() -> float:
    """Seconds without a sign of life after which a holder that cannot be seen counts as dead.

    Raises:
        ValueError: the environment variable is not a positive number.
    """
    return retry.seconds('COYO11M_LEASE_SECONDS', 60.0)


def this_process(lease_seconds: float = 0) -> LockHolder:
    """Returns this process as the holder of a lock that it takes now."""
    now = datetime.datetime.now(datetime.UTC)
    return LockHolder(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=f'{now:%Y-%m-%d %H:%M:%S} UTC',
        token=uuid.uuid4().hex,
        lease_seconds=lease_seconds,
        machine=_machine(),
        started=started(os.getpid()),
    )


def from_json(data: bytes) -> LockHolder:
    """Reads what `to_json` made; anything else becomes an unknown holder."""
    try:
        return LockHolder(**json.loads(data))
    except (TypeError, ValueError):
        return LockHolder()


def _machine() -> str:
    """Boot and process namespace; '' where the system has no such thing (not Linux)."""
    try:
        boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
        return f'{boot} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def started(pid: int) -> str:
    """When a process began; '' if no process has this number."""
    try:
        stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
    except OSError:
        return ''
    # proc(5): the name, in brackets, may hold anything; the state is field 3, the start field 22.
    state, *fields = stat.rpartition(')')[2].split()
    return '' if state in 'ZX' else fields[18]
