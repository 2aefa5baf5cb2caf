"""An HTTP/1.1 server on loopback that refuses, delays, loses and damages answers on demand.

It is also a proxy that stands for all hosts behind it, as TensorFlow has no setting for the address
of the storage: libcurl inside it honours `https_proxy`, and trusts `CERTIFICATE` by
`CURL_CA_BUNDLE`.
"""

import contextlib
import dataclasses
import http.client
import http.server
import io
import json
import math
import os
import pathlib
import re
import select
import socket
import socketserver
import ssl
import struct
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

from tests.fakes.faults import Fault, Faults, Request

# Of Google's storage hosts and this machine, from 2020 to 2119, with its key; it signs itself. Its
# curve is elliptic, because TensorFlow shakes hands anew for every request.
CERTIFICATE = pathlib.Path(__file__).with_name('certificate.pem')
_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
_TLS.load_cert_chain(CERTIFICATE)

_PIECE = 1 << 18  # bytes read or sent at a time
_SLOW_SECONDS = 0.1
_STALL_SECONDS = 10.0  # longer than the patience that tests give their clients


class _LoopbackServer(socketserver.ThreadingTCPServer):
    """A server with a thread for each connection that can be closed while they are open."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, fake: 'FakeServer'):
        self.fake = fake
        self.open: set[socket.socket] = set()
        super().__init__(('127.0.0.1', 0), _Handler)

    def stop(self) -> None:
        """Ends all connections and waits for their threads."""
        self.shutdown()
        for connection in list(self.open):
            with contextlib.suppress(OSError):  # it was just closed
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


class BrokenOff(Exception):
    """The request's body ends here: the client left, or a fault wants it so."""


class Body:
    """The body of a request: in chunks if they are announced, else of Content-Length."""

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
            try:
                piece = self._read_some(size)
            # A client that is killed before it has read an answer resets its connection.
            except ConnectionError:
                raise BrokenOff from None
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
            # A chunk of no bytes is the end; trailers and an empty line come behind it.
            if self._left == 0:
                while self._stream.readline(1000).strip():
                    pass
                self._ended = True
                return b''
        piece = self._stream.read(min(size, self._left))
        if not piece:
            raise BrokenOff
        self._left -= len(piece)
        if self._left == 0:
            # The line feed behind a chunk is no part of it.
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
        requested = re.match(r'bytes=(\d+)-(\d*)$', self.headers.get('Range', ''))
        if requested:
            last = int(requested[2]) if requested[2] else None
            return int(requested[1]), last
        uploaded = re.match(r'bytes (\d+)-(\d+)/', self.headers.get('Content-Range', ''))
        if uploaded:
            return int(uploaded[1]), int(uploaded[2])
        return None

    def file_pieces(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """The pieces of an uploaded file, one byte of them changed if a fault wants it."""
        place = None  # of the byte
        if self.flip is not None:
            place = self.flip.after_bytes
        passed = 0
        for piece in pieces:
            # Only when the first piece is here, its middle is known.
            if self.flip is not None and place is None:
                place = len(piece) // 2
            if place is not None and passed <= place < passed + len(piece):
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


def select_range(call: Call, data: bytes | memoryview, headers: Mapping[str, str] = {}) -> Reply:
    """A file or the range of it that is asked for: 200, 206 or 416."""
    size = len(data)
    # That of an upload is in another header.
    if call.range is None or 'Range' not in call.headers:
        return Reply(200, memoryview(data), headers)
    first, last = call.range
    stop = size if last is None else min(last + 1, size)
    if first >= stop:
        return Reply(416, headers={'Content-Range': f'bytes */{size}'})
    headers = {**headers, 'Content-Range': f'bytes {first}-{stop - 1}/{size}'}
    part = memoryview(data)[first:stop]
    return Reply(206, part, headers)


class Refused(Exception):
    """Ends a request with an error status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def json_reply(content: object, status: int = 200, **headers: str) -> Reply:
    """Returns an answer whose body is JSON."""
    headers = {'Content-Type': 'application/json; charset=UTF-8', **headers}
    return Reply(status, json.dumps(content).encode(), headers)


class FakeServer:
    """Base of the stand-ins: the method `_on_ACTION` answers, with the names in its route."""

    routes: Sequence[tuple[str, Mapping[str, str]]]  # pattern of the path, action by HTTP method

    def __init__(self):
        self.faults = Faults()
        self.inject = self.faults.inject
        self.inject_share = self.faults.inject_share
        self.requests: list[Request] = []  # in the order in which they came
        self.latency = 0.0  # seconds added to every request
        self.bytes_per_second = math.inf  # of all bodies together
        self._sending = threading.Lock()
        self._free_time = 0.0  # when what was sent so far has passed
        self.errors: list[BaseException] = []  # of the stand-in itself; stays empty
        self._http = _LoopbackServer(self)
        self.address: tuple[str, int] = self._http.server_address
        self.url = f'http://127.0.0.1:{self.address[1]}'

    def describe(self, call: Call) -> tuple[str, str]:
        """Action and path of a request, for the log; must not read the body."""
        raise NotImplementedError

    def route(self, call: Call) -> tuple[str, list[str]]:
        """Action of a request, and the names in its path."""
        for pattern, actions in self.routes:
            match = re.fullmatch(pattern, call.path)
            if match and call.method in actions:
                # Decoded after the match: a slash in a name is no border between two.
                names = [urllib.parse.unquote(name or '') for name in match.groups()]
                return actions[call.method], names
        raise NotImplementedError(f'{call.method} {call.path}')

    def answer(self, call: Call) -> Reply:
        """Does what a request wants, and returns the answer."""
        action, names = self.route(call)
        try:
            return getattr(self, f'_on_{action}')(call, *names)
        except Refused as refusal:
            return self.error_reply(refusal, call)

    def error_reply(self, refusal: Refused, call: Call) -> Reply:
        """Returns the answer of this service to a request that it refuses."""
        raise NotImplementedError

    def refuse(self, status: int, call: Call) -> Reply:
        """What this service says with 401, 403, 429, 503."""
        raise NotImplementedError

    def pace(self, num_bytes: int) -> None:
        """Waits until so many more bytes have passed at the speed of the line."""
        with self._sending:
            begin = max(self._free_time, time.monotonic())
            self._free_time = begin + num_bytes / self.bytes_per_second
            end = self._free_time
        time.sleep(max(0.0, end - time.monotonic()))

    def clear(self) -> None:
        """Empties the log."""
        self.requests.clear()

    def heal(self) -> None:
        """No faults, no latency and no limit of the speed any more."""
        self.faults.clear()
        self.latency = 0.0
        self.bytes_per_second = math.inf

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._http.stop()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _LoopbackServer
    protocol_version = 'HTTP/1.1'
    rbufsize = _PIECE

    def setup(self):
        self.server.open.add(self.request)
        if not isinstance(self.request, ssl.SSLSocket):
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().setup()

    def handle(self):
        # The client left, or a fault closed the connection under the reader.
        with contextlib.suppress(OSError, ValueError):
            super().handle()

    def finish(self):
        super().finish()
        self.server.open.discard(self.request)
        self.request.close()

    def do_CONNECT(self):
        """Serves what follows as the host that the client means, in TLS."""
        self.send_response(200)
        self.end_headers()
        self.server.open.discard(self.request)
        self.request = _TLS.wrap_socket(self.request, server_side=True)
        self.setup()
        self.close_connection = False

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
        request = Request(call.method, action, path, call.range)
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
            call.body.read()
            self._send(request, fake.refuse(int(kind), call), None)
            return
        if kind == 'slow':
            time.sleep(_SLOW_SECONDS if fault.seconds is None else fault.seconds)
        if kind == 'flip':
            call.flip = fault
        # An upload breaks off while it arrives; other requests when they are answered.
        is_upload = request.action == 'upload' and call.body.announced > 0
        if is_upload and kind in ('cut', 'stall', 'reset'):
            call.body.limit = fault.after_bytes
            if fault.after_bytes is None:
                call.body.limit = 0 if kind == 'reset' else call.body.announced // 2
        if kind == 'reset' and fault.after_bytes is None:
            raise BrokenOff
        try:
            reply = fake.answer(call)
            # What is left of it would be taken for the next request of this connection.
            call.body.read()
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
        # Nothing of the body may pass: keep the head back too.
        if kind in ('cut', 'stall') and stop == 0:
            raise BrokenOff
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
            self.server.fake.pace(len(piece))
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
            # With RST, although a stream made of the socket would keep it open.
            abort = struct.pack('ii', 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, abort)
            os.close(self.connection.detach())

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve
