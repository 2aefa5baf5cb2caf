"""Which requests to a stand-in server go wrong, and how: for servers of `fakes.fake_http`.

faults = Faults()
faults.inject(Fault('503', count=2, match=r'read .*\\.pt$'))  # the first two reads of each .pt
faults.inject_share(['cut', 'reset'], share=0.05, seed=1)     # one in twenty data requests
faults.choose(request)                                        # a Fault or None
"""

import collections
import dataclasses
import random
import re
import threading
import time
from collections.abc import Sequence

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
    """One request as the log keeps it.

    `path` is `bucket/object` (a listing: `bucket/prefix`) or `repo/file`, not percent-encoded.
    `range` is the byte range asked for, or that of the part uploaded, first and last byte as in
    HTTP: (0, 99) is 100 bytes, (100, None) all from byte 100, (-100, None) the last 100.
    `nbytes` counts the bytes of the answer's body that the server sent (up to 256 KB too many if
    the client hung up meanwhile), `received` those of the request's body that it read.
    `began` and `ended` say when it came and when its answer was complete (`time.monotonic`).
    `client` is the program by its User-Agent: 'tensorflow', 'gcsfs', 'huggingface_hub', or the
    first word of the header.
    """

    method: str
    action: str
    path: str
    range: tuple[int, int | None] | None
    client: str
    nbytes: int = 0
    received: int = 0
    status: int | None = None  # None: no status line was sent
    fault: str | None = None
    began: float = dataclasses.field(default_factory=time.monotonic)
    ended: float | None = None

    def __str__(self) -> str:
        return f'{self.method} {self.action} {self.path}'


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong with the first `count` requests that fit; None: with all of them.

    Attributes:
        kind: one of KINDS.
        match: regular expression, searched in 'METHOD action path', as in
            'GET read bucket/latents-3crop/000000-000009.pt'.
        method, action: HTTP method and action; None: any.
        after_bytes: how much of the body passes before 'cut', 'stall' and 'reset', which byte
            'flip' changes; None: half of it (of an upload to flip: of its first piece), for 'reset'
            nothing.
        seconds: how late 'slow' is (None: 0.5); how long 'stall' lasts (None: 10) if the client
            does not leave earlier.
    """

    kind: str
    count: int | None = 1
    match: str = ''
    method: str | None = None
    action: str | None = None
    after_bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f'fault {self.kind!r} is none of {list(KINDS)}')

    def fits(self, request: Request) -> bool:
        return (
            self.method in (None, request.method)
            and self.action in (None, request.action)
            and can_have(request, self.kind)
            and re.search(self.match, str(request)) is not None
        )


def can_have(request: Request, kind: str) -> bool:
    """Whether this request can suffer from this fault.

    Bytes are only flipped in files: those are what checksums are for. Metadata is protected by
    TLS alone, so no client could be asked to notice a flipped byte in it.
    """
    return kind != 'flip' or request.action in DATA_ACTIONS


@dataclasses.dataclass(frozen=True)
class _Share:
    """Faults for a share of the requests, drawn for each by a hash of what it asks for."""

    kinds: tuple[str, ...]
    share: float
    seed: int
    match: str
    everywhere: bool
    template: Fault

    def draw(self, request: Request, repetition: int) -> Fault | None:
        kinds = [kind for kind in self.kinds if can_have(request, kind)]
        if not (self.everywhere or request.action in DATA_ACTIONS):
            return None
        if not kinds or re.search(self.match, str(request)) is None:
            return None
        chance = random.Random(f'{self.seed} {request} {request.range} {repetition}')
        if chance.random() >= self.share:
            return None
        return dataclasses.replace(self.template, kind=chance.choice(kinds))


class Faults:
    """All faults of a server. For many threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """From now on nothing goes wrong."""
        with self._lock:
            self._faults: list[tuple[Fault, list[int]]] = []
            self._shares: list[tuple[_Share, collections.Counter]] = []

    def inject(self, *faults: Fault) -> None:
        """Adds faults. The first that fits a request is the one that hits it."""
        with self._lock:
            self._faults += [(fault, [0]) for fault in faults]

    def inject_share(
        self,
        kinds: Sequence[str],
        share: float = 0.05,
        seed: int = 0,
        *,
        match: str = '',
        everywhere: bool = False,
        **details,
    ) -> None:
        """Hits `share` of the data requests (`everywhere`: of all requests), each kind as often.

        Whether a request is hit depends on `seed`, on what it asks for and on how often that was
        asked before, not on the order in which threads happen to ask. `details` are further
        fields of `Fault`.
        """
        template = Fault(kinds[0], **details)
        rule = _Share(tuple(kinds), share, seed, match, everywhere, template)
        with self._lock:
            self._shares.append((rule, collections.Counter()))

    def choose(self, request: Request) -> Fault | None:
        """The fault that hits this request; counts it."""
        with self._lock:
            for fault, hits in self._faults:
                if (fault.count is None or hits[0] < fault.count) and fault.fits(request):
                    hits[0] += 1
                    return fault
            for rule, seen in self._shares:
                what = (str(request), request.range)
                fault = rule.draw(request, seen[what])
                seen[what] += 1
                if fault is not None:
                    return fault
        return None
