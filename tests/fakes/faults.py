"""What goes wrong with the requests to a stand-in: which of them are hit, and how.

faults = Faults()
faults.inject(Fault('503', count=2, match='GET read bucket/x'))
faults.inject_share(['cut', 'reset'], share=0.1, seed=7)
"""

import dataclasses
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

# Requests that carry the bytes of a file, from the server (read) or to it (upload).
DATA_ACTIONS = ('read', 'upload')

KINDS = {
    '429': 'refused: too many requests',
    '503': 'refused: unavailable',
    '401': 'refused: who are you',
    '403': 'refused: you may not',
    'cut': 'the body ends early and the connection is closed; Content-Length promised more',
    'stall': 'the body stops in the middle; nothing more comes, the connection stays open',
    'flip': 'one byte of a file is changed: in what is sent (read), in what is kept (upload)',
    'slow': 'the first byte comes late',
    'reset': 'the connection is reset',
    'lost': 'the request is carried out, but the connection is closed without an answer',
}


@dataclasses.dataclass
class Request:
    """One request as the log keeps it."""

    method: str
    action: str
    path: str  # `bucket/object`, `bucket/prefix` of a listing, or `repo/file`; not encoded
    range: tuple[int, int | None] | None  # asked for or uploaded; (100, None) is all from byte 100
    nbytes: int = 0  # of the answer's body
    received: int = 0  # of the request's body
    status: int | None = None  # None: no status line was sent
    fault: str | None = None
    began: float = dataclasses.field(default_factory=time.monotonic)
    ended: float | None = None

    def __str__(self) -> str:
        return f'{self.method} {self.action} {self.path}'


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong with the first `count` requests that fit, or with all of them for None.

    Of the body pass `after_bytes` before 'cut', 'stall' and 'reset', and 'flip' changes that byte;
    None is half of it (of an upload's first piece), for 'reset' nothing.
    """

    kind: str
    count: int | None = 1
    match: str = ''
    action: str | None = None
    after_bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f'fault {self.kind!r} is none of {list(KINDS)}')

    def fits(self, request: Request) -> bool:
        """Returns whether it may hit a request: by its action, its path and what a kind can do."""
        if self.action not in (None, request.action):
            return False
        # Metadata is protected by TLS alone: no client could notice a flipped byte in it.
        if self.kind == 'flip' and request.action not in DATA_ACTIONS:
            return False
        return re.search(self.match, str(request)) is not None


class Faults:
    """All faults of a server. For many threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """From now on nothing goes wrong."""
        with self._lock:
            # Each with the number of requests that it has hit, in a list, to be changed in place.
            self._faults: list[tuple[Fault, list[int]]] = []
            # What draws, with how often each request was seen.
            self._shares: list[tuple[Callable[[Request, int], Fault | None], Counter]] = []

    def inject(self, *faults: Fault) -> None:
        """Adds faults. The first that fits a request is the one that hits it."""
        with self._lock:
            self._faults += [(fault, [0]) for fault in faults]

    def inject_share(
        self,
        kinds: Sequence[str],
        share: float = 0.05,
        seed: int = 0,
        everywhere: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Hits `share` of the data requests, or `everywhere` of all, each kind as often.

        Whether a request is hit depends on `seed`, on what it asks for and how often, not on
        threads.
        """

        faults = [Fault(kind, seconds=seconds) for kind in kinds]

        def draw(request: Request, repetition: int) -> Fault | None:
            if not everywhere and request.action not in DATA_ACTIONS:
                return None
            chance = random.Random(f'{seed} {request} {request.range} {repetition}')
            if chance.random() >= share:
                return None
            fitting = [fault for fault in faults if fault.fits(request)]
            return chance.choice(fitting)

        with self._lock:
            self._shares.append((draw, Counter()))

    def choose(self, request: Request) -> Fault | None:
        """The fault that hits this request; counts it."""
        with self._lock:
            for fault, hits in self._faults:
                is_over = fault.count is not None and hits[0] >= fault.count
                if not is_over and fault.fits(request):
                    hits[0] += 1
                    return fault
            for draw, seen in self._shares:
                # By what it asks for: a repetition is drawn anew, whichever thread sends it.
                wish = str(request), request.range
                seen[wish] += 1
                if fault := draw(request, seen[wish]):
                    return fault
        return None
