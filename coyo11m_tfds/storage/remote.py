"""Reads files over HTTP: whole ones, which are verified, or ranges.

The clients of gs:// and the hub give addresses and credentials. urllib3 reads the bytes, in one
stream a file, because neither client notices a stall in reasonable time. Ranges of 1.6 MB over TLS
cost 28 to 34 us of CPU for each 24.6 KB; with requests they cost 42 to 50 us, with http.client 22
to 30.
"""

import abc
import base64
import contextlib
import hashlib
import io
import os
import re
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import certifi
import google_crc32c
import urllib3

from coyo11m_tfds.storage import retry
from coyo11m_tfds.storage.base import ReadableFolder
from coyo11m_tfds.storage.file_state import FileState, OnBytes, naming
from coyo11m_tfds.storage.stored_file import StoredFile, encoded_error, file_changed

_BLOCK = 1 << 18  # bytes received at a time

# Addresses of a file that are tried in a row while one after the other has ended.
_MAX_ADDRESSES = 3

# Attempts that together receive this much do not count as failures: the transfer of a file of GBs
# may break off more often than a request is retried.
_PROGRESS = 16 << 20

# google-auth's name of the variable for the project that requests are billed to.
USER_PROJECT = 'GOOGLE_CLOUD_QUOTA_PROJECT'

# Has the connections of each thread, see `_connections`.
_threads = threading.local()

# What may lead requests elsewhere. It is compared each time, as getproxies() takes 0.5 ms.
_CERTIFICATES = ('REQUESTS_CA_BUNDLE', 'CURL_CA_BUNDLE', 'SSL_CERT_FILE')
_PROXIES = ('https_proxy', 'http_proxy', 'all_proxy', 'no_proxy')
_ENVIRONMENT = _CERTIFICATES + _PROXIES + tuple(name.upper() for name in _PROXIES)


class RemoteFolder(ReadableFolder):
    """A folder whose files are read over HTTP."""

    @classmethod
    @abc.abstractmethod
    def _request(cls, path: str) -> tuple[str, dict[str, str]]:
        """Returns the address of a file, and headers with the credentials of this machine."""

    @classmethod
    def _forget_address(cls, path: str, address: str) -> bool:
        """Forgets an address of a file that was refused; returns whether there may be another."""
        del path, address
        return False

    @classmethod
    def read_range(cls, file: StoredFile, start: int, length: int) -> bytes:
        """Reads `length` bytes from the byte `start` on, in one request that is retried.

        Nothing compares their checksum. Raises a `FileChanged` if the storage has another version.
        """

        def attempt() -> bytes:
            with cls._get(file, start, start + length) as response:
                content = response.read(decode_content=False)
            # All that can be compared of a range: the storage's checksum is of the whole file.
            if len(content) != length:
                raise retry.Corrupted(f'received {len(content)} bytes, expected {length}')
            return content

        with _naming_refusals(file):
            return retry.call(attempt, f'reading {file.path}')

    @classmethod
    def fetch(cls, file: StoredFile, target: str, on_bytes: OnBytes) -> FileState:
        """Downloads a file to a local path, and compares its checksum; returns its state.

        `on_bytes(n)` counts what is received, with a negative number for what was received in vain.
        """
        label = f'downloading {file.path}'
        with _naming_refusals(file):
            retry.call(lambda: cls._download(file, target, on_bytes, label), label)
        return file.state

    @classmethod
    def _download(cls, file: StoredFile, target: str, on_bytes: OnBytes, label: str) -> None:
        """Downloads a file once; raises `retry.Corrupted` if its checksum is wrong."""
        size = 0
        kind, digest = _new_digest(file)
        # Unbuffered: an error of a full disk comes from the write, before the bytes count.
        with open(target, 'wb', buffering=0) as stream:

            def append() -> None:
                nonlocal size
                num_before = size
                with cls._get(file, size, file.size) as response:
                    for block in response.stream(_BLOCK, decode_content=False):
                        _write_all(stream, block)
                        digest.update(block)
                        size += len(block)
                        on_bytes(len(block))
                # A proxy may send nothing as if it were all. Requested again at once, without the
                # delays of a retry, it might do so for ever.
                if size == num_before:
                    raise retry.Corrupted(f'received 0 bytes, expected {file.size - size}')

            # After a broken connection only the rest is requested, with all attempts again as long
            # as something comes.
            while size < file.size:
                begin = size
                try:
                    retry.call(append, label)
                except retry.GivenUp:
                    if size < begin + _PROGRESS:
                        raise
            os.fsync(stream.fileno())
        checksum = f'{kind}:{digest.digest().hex()}'
        if size != file.size or file.checksum not in (None, checksum):
            # It is received once more, and would count twice.
            on_bytes(-size)
            raise retry.Corrupted(
                f'{file.path}: the checksum of {size} bytes is {checksum}, '
                f'expected {file.checksum} of {file.size} bytes'
            )

    @classmethod
    @contextlib.contextmanager
    def _get(cls, file: StoredFile, start: int, stop: int) -> Iterator[urllib3.BaseHTTPResponse]:
        """Requests bytes `start` to `stop`; the body of the response is just these."""
        if file.encoding:
            raise encoded_error(file.path, file.encoding)
        with cls._send(file.path, start, stop) as response:
            # "Range Not Satisfiable": the file ends before the range.
            if response.status == 416:
                raise file_changed(file, response.headers.get('Content-Range', 'it is shorter'))
            check_status(response, file.path)
            _check_response(file, start, stop, response)
            yield response

    @classmethod
    def _send(cls, path: str, start: int, stop: int) -> urllib3.BaseHTTPResponse:
        """Returns the response with bytes of a file, from another address if the first has ended.

        Whoever takes the response closes it.
        """
        for number in range(1, _MAX_ADDRESSES + 1):
            address, headers = cls._request(path)
            response = send_request(address, headers, start, stop)
            # A signed address that has ended is refused as if it were forbidden.
            has_ended = response.status == 403 and cls._forget_address(path, address)
            if not has_ended or number == _MAX_ADDRESSES:
                break
            response.close()
        return response


def send_request(
    address: str, headers: Mapping[str, str], start: int, stop: int, *, redirects: bool = True
) -> urllib3.BaseHTTPResponse:
    """Returns the response with bytes `start` to `stop` of an address; its taker closes it.

    With `redirects` they are followed, without the credentials to another host.
    """
    # `identity`: bytes of a compressed form would be other ones than those of the file.
    return _connections(address).request(
        'GET',
        address,
        headers={**headers, 'Accept-Encoding': 'identity', 'Range': f'bytes={start}-{stop - 1}'},
        preload_content=False,
        # That of the connection, and of each piece of the body.
        timeout=retry.stall_seconds(),
        # `retry.call` repeats requests: this only follows redirects.
        retries=urllib3.Retry(None, connect=0, read=0, status=0, other=0, redirect=5),
        redirect=redirects,
    )


def check_status(response: urllib3.BaseHTTPResponse, path: str) -> None:
    """Raises a FileNotFoundError or a `Refused` if the response is not about bytes of the file."""
    if response.status in (404, 410):
        raise FileNotFoundError(f'{path} is gone; it was there when it was listed.')
    if response.status >= 400:
        raise Refused(response)


class Refused(OSError):
    """The response of a server has `status` 4xx or 5xx."""

    def __init__(self, response: urllib3.BaseHTTPResponse):
        """Reads what the server says of the reason."""
        self.response = response
        self.status = response.status
        # The hub explains the error in a header, gs:// in JSON.
        body = response.read(1000).decode(errors='replace')
        message = response.headers.get('X-Error-Message') or json_message(body)
        line = ' '.join(message.split())
        super().__init__(f'{response.status} {response.reason}: {line}')


@contextlib.contextmanager
def _naming_refusals(file: StoredFile) -> Iterator[None]:
    """Adds the path of the file to what a server answers."""
    try:
        yield
    except Refused as error:
        raise OSError(f'{file.path}: {error}') from error


def json_message(body: str) -> str:
    """Returns the message in the JSON of an error of gs://; `body` if there is none."""
    message = retry.find_message(body) or body
    if 'requester pays' in message.lower():
        message += f' Set {USER_PROJECT} to the project of yours that pays for its requests.'
    return message


def _check_response(
    file: StoredFile, start: int, stop: int, response: urllib3.BaseHTTPResponse
) -> None:
    """Compares the range, the size and the checksum of the whole file with what is expected."""
    # gs:// unpacks gzip on its way, and then has no ranges; the other header is that of proxies.
    for header in ('X-Goog-Stored-Content-Encoding', 'Content-Encoding'):
        encoding = response.headers.get(header, 'identity')
        if encoding != 'identity':
            raise encoded_error(file.path, encoding)
    content_range = response.headers.get('Content-Range', '')
    total = re.fullmatch(r'bytes \d+-\d+/(\d+)', content_range)
    if total and int(total[1]) != file.size:
        raise file_changed(file, f'it has {total[1]} bytes, not {file.size}')
    # HTTP names the last byte, and not the one behind it.
    last = stop - 1
    if content_range != f'bytes {start}-{last}/{file.size}':
        raise retry.Corrupted(
            f'{file.path}: requested bytes {start} to {last}, the response is '
            f'{response.status} {content_range!r}'
        )
    # gs:// sends the checksum of the whole object with every range.
    checksum = file.checksum
    match = re.search(r'crc32c=([\w+/]+=*)', response.headers.get('X-Goog-Hash', ''))
    if match:
        checksum = f'crc32c:{base64.b64decode(match[1]).hex()}'
    if file.checksum not in (None, checksum):
        raise file_changed(file, f'its checksum is {checksum}, not {file.checksum}')


def _connections(url: str) -> urllib3.PoolManager:
    """Returns the connections of this thread; a forked process must not share its parent's."""
    # What the connections depend on: where it has changed, they are made anew.
    environment = (os.getpid(), *map(os.environ.get, _ENVIRONMENT))
    if getattr(_threads, 'environment', None) != environment:
        _threads.pools = {}
        _threads.environment = environment
    # By host: some are reached without the proxy.
    host = urllib.parse.urlsplit(url).netloc
    if host not in _threads.pools:
        _threads.pools[host] = _connect(url)
    return _threads.pools[host]


def _connect(url: str) -> urllib3.PoolManager:
    """Returns connections to the host of a URL, by the certificates and proxies of this machine."""
    # Of several variables the first one decides, so it replaces what the others say.
    certificates = certifi.where()
    for variable in reversed(_CERTIFICATES):
        certificates = os.environ.get(variable) or certificates
    parts = urllib.parse.urlsplit(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get('all')
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ''):
        return urllib3.PoolManager(ca_certs=certificates)
    # urllib3 takes the name and the password of a proxy from a header, and not from its URL.
    user = urllib.parse.unquote(urllib3.util.parse_url(proxy).auth or '')
    headers = urllib3.make_headers(proxy_basic_auth=user or None)
    return urllib3.ProxyManager(proxy, proxy_headers=headers, ca_certs=certificates)


def _new_digest(file: StoredFile) -> tuple[str, Any]:
    """Returns the kind of the checksum that a file has, and an object that computes it."""
    # Without a checksum, any kind: nothing is compared.
    checksum = file.checksum or 'sha256:'
    kind, _, _ = checksum.partition(':')
    if kind == 'crc32c':
        return kind, google_crc32c.Checksum()
    digest = hashlib.new(kind.removeprefix('git-'), usedforsecurity=False)
    # Git computes it of a header and the content.
    if kind == 'git-sha1':
        digest.update(b'blob %d\0' % file.size)
    return kind, digest


def _write_all(stream: io.FileIO, block: bytes) -> None:
    """Writes all of a block: a disk that becomes full first takes a part."""
    unwritten = memoryview(block)
    with naming(stream.name):
        while unwritten:
            count = stream.write(unwritten)
            unwritten = unwritten[count:]
