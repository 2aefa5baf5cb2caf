"""An HTTP/1.1 server on loopback that refuses, delays, loses and damages answers on demand.

    class Clock(FakeServer):
        def describe(self, call):
            return 'read', 'time'

        def answer(self, call):
            return Reply(200, time.ctime().encode())

        def refuse(self, status, call):
            return Reply(status, b'not now')

    with Clock() as clock:
        clock.inject(Fault('503', count=2))
        urllib.request.urlopen(clock.url)

A thread for each connection; connections are kept alive. A client in another process gets 2.4 to
3.3 GB/s and 3,800 small answers a second over one connection (2 cores, otherwise idle).
"""

import contextlib
import dataclasses
import http.client
import http.server
import io
import re
import select
import time
import urllib.parse
from collections.abc import Iterator, Mapping

from tests.fakes.fake_faults import Fault, Faults, Request
from tests.fakes.fake_loopback import LoopbackServer, reset

_PIECE = 1 << 18  # bytes read or sent at a time
_SLOW_SECONDS = 0.5
_STALL_SECONDS = 10.0  # longer than the patience that tests give their clients


class BrokenOff(Exception):
    """The request's body ends here: the client left, or a fault wants it so."""


class Body:
    """The body of a request, with Content-Length or in chunks.

    TensorFlow announces both; then the chunks count, as RFC 9112 wants it.
    """

    def __init__(self, stream: io.BufferedIOBase, headers: http.client.HTTPMessage):
        self._stream = stream
        self._chunked = 'chunked' in headers.get('Transfer-Encoding', '').lower()
        self._left = 0 if self._chunked else int(headers.get('Content-Length', 0))
        self._ended = not self._chunked and self._left == 0
        self.announced = int(headers.get('Content-Length', 0))
        self.received = 0
        self.limit: int | None = None  # a fault lets only so many bytes through

    def peek(self) -> bytes:
        """The beginning of it, or what has come of that; nothing is taken."""
        return b'' if self._ended else self._stream.peek()

    def pieces(self) -> Iterator[bytes]:
        """The rest of the body, as it comes; raises BrokenOff where it ends early."""
        while not self._ended:
            size = _PIECE
            if self.limit is not None:
                size = min(size, self.limit - self.received)
                if size <= 0:
                    raise BrokenOff
            piece = self._read_some(size)
            self.received += len(piece)
            if piece:
                yield piece

    def read(self) -> bytes:
        """The rest of the body."""
        return b''.join(self.pieces())

    def _read_some(self, size: int) -> bytes:
        if self._chunked and self._left == 0:
            line = self._stream.readline(100)
            if not line:
                raise BrokenOff
            self._left = int(line.split(b';')[0], 16)
            if self._left == 0:
                while self._stream.readline(1000).strip():
                    pass  # trailers
                self._ended = True
                return b''
        piece = self._stream.read(min(size, self._left))
        if not piece:
            raise BrokenOff
        self._left -= len(piece)
        if self._left == 0:
            if self._chunked:
                self._stream.readline(10)
            else:
                self._ended = True
        return piece


@dataclasses.dataclass
class Call:
    """A request on its way through the server. `path` is still percent-encoded."""

    method: str
    path: str
    query: dict[str, str]
    headers: http.client.HTTPMessage
    body: Body
    flip: Fault | None = None

    @property
    def range(self) -> tuple[int, int | None] | None:
        """First and last byte that are asked for (Range) or uploaded (Content-Range)."""
        asked = re.match(r'bytes=(\d*)-(\d*)$', self.headers.get('Range', ''))
        if asked and asked[1]:
            return int(asked[1]), int(asked[2]) if asked[2] else None
        if asked and asked[2]:
            return -int(asked[2]), None
        uploaded = re.match(r'bytes (\d+)-(\d+)/', self.headers.get('Content-Range', ''))
        return (int(uploaded[1]), int(uploaded[2])) if uploaded else None

    @property
    def client(self) -> str:
        agent = self.headers.get('User-Agent', '')
        known = {'TSL': 'tensorflow', 'gcsfs': 'gcsfs', 'hf_hub': 'huggingface_hub'}
        found = re.search('|'.join(known), agent)
        return known[found[0]] if found else agent.split('/')[0]

    def file_pieces(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """The pieces of an uploaded file, one byte of them changed if a fault wants it."""
        passed = 0
        for piece in pieces:
            place = -1 if self.flip is None else self.flip.after_bytes
            if place is None:
                place = len(piece) // 2 if passed == 0 else -1
            if passed <= place < passed + len(piece):
                piece = flipped(piece, place - passed)
            passed += len(piece)
            yield piece


def flipped(data: bytes | memoryview, place: int) -> bytes:
    """`data` with one bit of one byte changed."""
    damaged = bytearray(data)
    damaged[place] ^= 0x10
    return bytes(damaged)


@dataclasses.dataclass
class Reply:
    """An answer; `body` is bytes or anything with the buffer interface."""

    status: int
    body: bytes | memoryview = b''
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


def select_range(call: Call, data: bytes | memoryview, headers: Mapping[str, str]) -> Reply:
    """A file or the range of it that is asked for: 200, 206 or 416."""
    size = len(data)
    if call.range is None or 'Range' not in call.headers:
        return Reply(200, memoryview(data), headers)
    first, last = call.range
    first = max(0, size + first) if first < 0 else first
    stop = size if last is None else min(last + 1, size)
    if first >= stop:
        return Reply(416, headers={'Content-Range': f'bytes */{size}'})
    headers = {**headers, 'Content-Range': f'bytes {first}-{stop - 1}/{size}'}
    return Reply(206, memoryview(data)[first:stop], headers)


class FakeServer:
    """Base of the stand-ins; a context manager that serves while it is open.

    Attributes:
        inject, inject_share: add faults, see `Faults`.
        requests: the log, in the order in which requests came.
        latency: seconds added to every request.
        errors: what went wrong in the stand-in itself; stays empty.
    """

    def __init__(self):
        self.faults = Faults()
        self.inject = self.faults.inject
        self.inject_share = self.faults.inject_share
        self.requests: list[Request] = []
        self.latency = 0.0
        self.errors: list[BaseException] = []
        self._http = LoopbackServer(_Handler)
        self._http.fake = self
        self.address: tuple[str, int] = self._http.server_address
        self.url = f'http://127.0.0.1:{self.address[1]}'

    def describe(self, call: Call) -> tuple[str, str]:
        """Action and path of a request, for the log; must not read the body."""
        raise NotImplementedError

    def answer(self, call: Call) -> Reply:
        raise NotImplementedError

    def refuse(self, status: int, call: Call) -> Reply:
        """What this service says with 401, 403, 429, 503."""
        raise NotImplementedError

    def clear(self) -> None:
        """Empties the log."""
        self.requests.clear()

    def heal(self) -> None:
        """No faults and no latency any more."""
        self.faults.clear()
        self.latency = 0.0

    def __enter__(self):
        self._http.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._http.stop()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    rbufsize = _PIECE

    def handle(self):
        # The client left, or a fault closed the connection under the reader.
        with contextlib.suppress(OSError, ValueError):
            super().handle()

    def log_message(self, *args):
        pass  # the log is in memory

    def _serve(self):
        fake = self.server.fake
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = Body(self.rfile, self.headers)
        call = Call(self.command, url.path, query, self.headers, body)
        try:
            action, path = fake.describe(call)
        except NotImplementedError as error:
            fake.errors.append(error)
            self.send_error(501)
            return
        request = Request(call.method, action, path, call.range, call.client)
        fault = fake.faults.choose(request)
        request.fault = fault and fault.kind
        fake.requests.append(request)
        time.sleep(fake.latency)
        try:
            self._answer(fake, call, request, fault)
        except BrokenOff:
            self._leave(fault)
        finally:
            request.received = body.received
            request.ended = time.monotonic()

    def _answer(self, fake: FakeServer, call: Call, request: Request, fault: Fault | None):
        kind = fault.kind if fault else None
        if kind in ('401', '403', '429', '503'):
            for _ in call.body.pieces():
                pass
            self._send(request, fake.refuse(int(kind), call), None)
            return
        if kind == 'slow':
            time.sleep(_SLOW_SECONDS if fault.seconds is None else fault.seconds)
        if kind == 'flip':
            call.flip = fault
        if kind in ('cut', 'stall', 'reset') and request.action == 'upload' and call.body.announced:
            call.body.limit = fault.after_bytes
            if fault.after_bytes is None:
                call.body.limit = 0 if kind == 'reset' else call.body.announced // 2
        if kind == 'reset' and fault.after_bytes is None:
            raise BrokenOff
        try:
            reply = fake.answer(call)
            for _ in call.body.pieces():
                pass
        except BrokenOff:
            raise
        except Exception as error:  # a hole in the stand-in; the fixture fails the test for it
            fake.errors.append(error)
            self.close_connection = True  # of the request's body there may be more to come
            reply = Reply(500, repr(error).encode())
        if kind == 'lost':
            raise BrokenOff
        self._send(request, reply, fault)

    def _send(self, request: Request, reply: Reply, fault: Fault | None):
        body = memoryview(reply.body).cast('B')
        kind = fault.kind if fault else None
        stop = len(body)
        if kind in ('cut', 'stall', 'reset', 'flip'):
            place = len(body) // 2 if fault.after_bytes is None else fault.after_bytes
            place = min(place, len(body))
            if kind != 'flip':
                stop = place
            elif request.action == 'read' and reply.status < 300 and place < len(body):
                body = memoryview(flipped(body, place))
        if self.command == 'HEAD':
            stop = 0
        if kind in ('cut', 'stall') and stop == 0:
            raise BrokenOff  # nothing of the body may pass: keep the head back too
        request.status = reply.status
        self.send_response(reply.status)
        for name, value in {'Content-Length': str(len(body)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self._send_all(request, body[:stop])
        if kind in ('cut', 'stall', 'reset'):
            raise BrokenOff

    def _send_all(self, request: Request, body: memoryview):
        for start in range(0, len(body), _PIECE):
            piece = body[start : start + _PIECE]
            # A client that has its last byte may look into the log at once: so count first.
            request.nbytes += len(piece)
            self.connection.sendall(piece)

    def _leave(self, fault: Fault | None):
        """Ends the connection the way the fault wants it."""
        self.close_connection = True
        if fault and fault.kind == 'stall':
            # Ends early when the client leaves; what it still sends stays unread.
            seconds = _STALL_SECONDS if fault.seconds is None else fault.seconds
            hung_up = select.poll()
            hung_up.register(self.connection, select.POLLRDHUP)
            hung_up.poll(1000 * seconds)
        if fault and fault.kind == 'reset':
            reset(self.connection)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve
