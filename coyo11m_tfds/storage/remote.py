"""Reads remote files: downloads and verifies a whole file, or reads a few bytes.

The clients of gs:// and the hub give addresses and credentials. urllib3 reads the bytes, in one
stream a file, because neither client notices a stall in reasonable time. Ranges of 1.6 MB over TLS
cost 28 to 34 us of CPU for each 24.6 KB; with requests they cost 42 to 50 us, with http.client 22
to 30.
"""

import base64
import contextlib
import hashlib
import io
import os
import re
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import google_crc32c

from coyo11m_tfds.storage import retry, source_files
from coyo11m_tfds.storage.file_state import ignore_bytes, naming
from coyo11m_tfds.storage.source_files import StoredFile

if TYPE_CHECKING:
    import urllib3
    from urllib3 import BaseHTTPResponse

_BLOCK = 1 << 18  # bytes received at a time

# Attempts that together receive this much do not count as failures: the transfer of a file of GBs
# may break off more often than a request is retried.
_PROGRESS = 16 << 20

_threads = threading.local()

# What may lead requests elsewhere. It is compared each time, as getproxies() takes 0.5 ms.
_CERTIFICATES = ('REQUESTS_CA_BUNDLE', 'CURL_CA_BUNDLE', 'SSL_CERT_FILE')
_PROXIES = ('https_proxy', 'http_proxy', 'all_proxy', 'no_proxy')
_ENVIRONMENT = (*_CERTIFICATES, *_PROXIES, *map(str.upper, _PROXIES))


class Changed(OSError):
    """A file has changed since it was described."""


def fetch(file: StoredFile, target: str, on_bytes: Callable[[int], None] = ignore_bytes) -> None:
    """Downloads and verifies a remote file; afterwards all of it is on the disk.

    If the connection breaks, it requests only the rest. After an error the target may hold a part
    of the file.

    Args:
        file: On gs:// or hf://.
        target: Local path in an existing temporary folder.
        on_bytes: Called with the number of received bytes, or a negative number for bytes that
            proved wrong. The sum is `file.size`.
    """
    with open(target, 'wb', buffering=0) as stream:
        part = _Part(file, stream, on_bytes)
        retry.call(part.complete, f'downloading {file.path}')
        os.fsync(stream.fileno())


def read_range(file: StoredFile, start: int, length: int) -> bytes:
    """Reads `length` bytes at offset `start` of a file, remote or local."""
    if not 0 <= start <= start + length <= file.size:
        raise ValueError(
            f'{file.path}: has {file.size} bytes, expected {length} from byte {start} on.'
        )
    if not length:
        return b''
    if not file.is_remote:
        with open(file.path, 'rb') as stream:
            stream.seek(start)
            content = stream.read(length)
        if len(content) != length:
            raise _changed(file, f'it ends at byte {start + len(content)}, not {file.size}')
        return content

    def attempt() -> bytes:
        with _get(file, start, start + length) as response:
            content = response.read(decode_content=False)
        if len(content) != length:
            raise retry.Corrupted(f'received {len(content)} bytes, expected {length}')
        return content

    return retry.call(attempt, f'reading {file.path}')


@contextlib.contextmanager
def _get(file: StoredFile, start: int, stop: int) -> Iterator['BaseHTTPResponse']:
    """Requests bytes `start` to `stop`; the answer's body is just these."""
    import urllib3

    url, headers = _address(file.path)
    headers |= {'Accept-Encoding': 'identity', 'Range': f'bytes={start}-{stop - 1}'}
    # Redirections, of the hub, are followed, without the credentials to another host.
    redirect = urllib3.Retry(None, connect=0, read=0, status=0, other=0, redirect=5)
    stall = retry.stall_seconds()  # to connect, and between two pieces of the body
    options: dict[str, Any] = {'preload_content': False, 'timeout': stall, 'retries': redirect}
    with _connections(url).request('GET', url, headers=headers, **options) as response:
        if response.status in (404, 410):
            raise FileNotFoundError(f'{file.path} is gone; it was there when it was listed.')
        if response.status == 416:
            raise _changed(file, response.headers.get('Content-Range', 'it is shorter'))
        if response.status >= 400:
            raise Refused(response)
        _check_answer(file, start, stop, response)
        yield response


class Refused(OSError):
    """The answer of a server has `status` 4xx or 5xx."""

    def __init__(self, response: 'BaseHTTPResponse'):
        self.response, self.status = response, response.status
        # The hub says it in a header, gs:// in JSON.
        body = response.read(1000).decode(errors='replace')
        in_json = re.search(r'"message": *"([^"]*)"', body)
        said = response.headers.get('X-Error-Message') or (in_json[1] if in_json else body)
        super().__init__(f'{response.status} {response.reason}: {" ".join(said.split())}')


def _check_answer(file: StoredFile, start: int, stop: int, response: 'BaseHTTPResponse') -> None:
    """Compares the range, the size and the checksum of the whole file with what is expected."""
    answered = response.headers.get('Content-Range', '')
    total = re.fullmatch(r'bytes \d+-\d+/(\d+)', answered)
    if total and int(total[1]) != file.size:
        raise _changed(file, f'it has {total[1]} bytes, not {file.size}')
    if answered != f'bytes {start}-{stop - 1}/{file.size}':
        raise retry.Corrupted(
            f'{file.path}: asked for bytes {start} to {stop - 1}, the answer is '
            f'{response.status} {answered!r}'
        )
    # gs:// sends the checksum of the whole object with every range.
    stored = re.search(r'crc32c=([\w+/]+=*)', response.headers.get('X-Goog-Hash', ''))
    found = f'crc32c:{base64.b64decode(stored[1]).hex()}' if stored else file.checksum
    if found != (file.checksum or found):
        raise _changed(file, f'its checksum is {found}, not {file.checksum}')


def _changed(file: StoredFile, how: str) -> Changed:
    return Changed(
        f'{file.path} has changed since it was listed ({how}). Run the same command again, when '
        'nobody writes to it any more.'
    )


def _address(path: str) -> tuple[str, dict[str, str]]:
    """The address of a file, and headers with the credentials of this machine."""
    if path.startswith('gs://'):
        from coyo11m_tfds.storage import gcs

        return gcs.download_address(path), gcs.credentials()
    import huggingface_hub
    from huggingface_hub import utils

    uri, hub = source_files.hub_uri(path), source_files.hub_endpoint()
    kind: dict[str, Any] = {'repo_type': 'dataset', 'revision': uri.revision, 'endpoint': hub}
    url = huggingface_hub.hf_hub_url(uri.id, uri.path_in_repo, **kind)
    return url, utils.build_hf_headers(library_name='coyo11m_tfds')


def _connections(url: str) -> 'urllib3.PoolManager':
    """The connections of this thread; a forked process must not share those of its parent."""
    host = url.split('/')[2]
    key = (os.getpid(), host, *map(os.environ.get, _ENVIRONMENT))
    if getattr(_threads, 'key', None) != key:
        _threads.key, _threads.pool = key, _connect(url)
    return _threads.pool


def _connect(url: str) -> 'urllib3.PoolManager':
    import certifi
    import urllib3

    certificates = next(filter(None, map(os.environ.get, _CERTIFICATES)), certifi.where())
    parts, proxies = urllib.parse.urlsplit(url), urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get('all')
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ''):
        return urllib3.PoolManager(ca_certs=certificates)
    user = urllib.parse.unquote(urllib3.util.parse_url(proxy).auth or '')
    headers = urllib3.make_headers(proxy_basic_auth=user or None)
    return urllib3.ProxyManager(proxy, proxy_headers=headers, ca_certs=certificates)


class _Part:
    """The beginning of a file in a stream, and its checksum."""

    def __init__(self, file: StoredFile, stream: io.FileIO, on_bytes: Callable[[int], None]):
        self._file = file
        self._stream = stream
        self._on_bytes = on_bytes
        self._begin()

    def complete(self) -> None:
        """Downloads what is missing and checks the whole."""
        file = self._file
        while self._size < file.size:
            begin = self._size
            try:
                retry.call(self._append, f'downloading {file.path}')
            except retry.GivenUp:
                if self._size < begin + _PROGRESS:
                    raise
        size, found = self._size, f'{self._kind}:{self._hash.digest().hex()}'
        if size != file.size or found != (file.checksum or found):
            self._stream.seek(0)
            self._stream.truncate()
            self._on_bytes(-size)
            self._begin()
            raise retry.Corrupted(
                f'{file.path}: the checksum of {size} bytes is {found}, '
                f'expected {file.checksum} of {file.size} bytes'
            )

    def _begin(self) -> None:
        self._size = 0
        self._kind = (self._file.checksum or 'sha256:').partition(':')[0]
        if self._kind == 'crc32c':
            self._hash: Any = google_crc32c.Checksum()
        else:
            self._hash = hashlib.new(self._kind.removeprefix('git-'), usedforsecurity=False)
        if self._kind == 'git-sha1':
            self._hash.update(b'blob %d\0' % self._file.size)

    def _append(self) -> None:
        """One request for all that is missing."""
        with _get(self._file, self._size, self._file.size) as response:
            for block in response.stream(_BLOCK, decode_content=False):
                rest = memoryview(block)
                with naming(self._stream.name):
                    while rest:
                        rest = rest[self._stream.write(rest) :]
                self._hash.update(block)
                self._size += len(block)
                self._on_bytes(len(block))
