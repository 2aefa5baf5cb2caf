"""Reads remote files: a whole one to the local disk, verified, or a few bytes.

    file = source_files.describe('gs://bucket/latents-3crop/000000-000009.pt')
    remote.fetch(file, '/scratch/000000-000009.pt')   # resumes an earlier download
    remote.read_range(file, 0, 4)                     # b'PK\\x03\\x04'

gcsfs and huggingface_hub give addresses and credentials. The bytes are read with requests, one
stream a file, because neither library notices a stall in reasonable time, or resumes a file that
another process began. 1 GB from a server on the same 2 cores, synced to disk: `fetch` from gs:// is
as fast as a bare urllib loop that does the same (0.85 against 0.75 GB/s); from the hub it has half
the speed (0.45 against 1.1), which is what SHA-256 costs. Ranges of 16 MB would be half as fast.
"""

import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from coyo11m_tfds.storage import retry, source_files
from coyo11m_tfds.storage.file_lock import FileLock
from coyo11m_tfds.storage.file_state import ignore_bytes
from coyo11m_tfds.storage.part_file import PartFile
from coyo11m_tfds.storage.source_files import SourceFile

if TYPE_CHECKING:
    import requests

_BLOCK = 1 << 18  # bytes received at a time

# Attempts that together receive this much do not count as failures: the transfer of a file of GBs
# may break off more often than a request is retried.
_PROGRESS = 16 << 20

_threads = threading.local()


class Changed(OSError):
    """A file is not what it was when it was described."""


def fetch(file: SourceFile, target: str, on_bytes: Callable[[int], None] | None = None) -> None:
    """Downloads a remote file; `target` appears when it is whole and verified.

    What was received is kept in `target + '.part'`, also when the process is killed, and the next
    call resumes from there, unless the file has another version by then. Calls for one target wait
    for each other.

    Args:
        file: on gs:// or hf://.
        target: local path in an existing folder; replaced if it is there.
        on_bytes: is told how many bytes were received or found from before; a negative number
            where bytes turned out wrong. The sum is `file.size`.

    Raises:
        FileNotFoundError: the file is gone.
        PermissionError: credentials are missing or refused.
        OSError: the storage cannot be reached, the file has changed since it was described, its
            checksum stays wrong, or the disk is full.
    """
    path = f'{target}.part'
    with FileLock(path), PartFile(path, file, on_bytes or ignore_bytes) as part:
        part.resume()
        retry.call(lambda: _complete(part), f'downloading {file.path}')
        part.move_to(target)


def is_copy(file: SourceFile, path: str) -> bool:
    """True if a local file is there and has the size and, if the storage knows one, the checksum.

    Raises:
        OSError: it cannot be read.
    """
    if not os.path.exists(path) or os.path.getsize(path) != file.size:
        return False
    with PartFile(path, file, ignore_bytes) as copy:
        copy.read()
        return copy.is_whole()


@contextlib.contextmanager
def temporary_copy(file: SourceFile) -> Iterator[str]:
    """Gives the path of a verified copy, which is deleted at the end of the `with` block.

    It is in the system's temporary folder, so this is for small files. A local file is not copied:
    its own path is given. Raises as `fetch`.
    """
    if not file.is_remote:
        yield file.path
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, file.name)
        fetch(file, path)
        yield path


def read_range(file: SourceFile, start: int, length: int) -> bytes:
    """Reads `length` bytes from byte `start` of a file, remote or local.

    Raises:
        ValueError: the range is not within the file.
        FileNotFoundError, PermissionError, OSError: as `fetch`.
    """
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
    return retry.call(lambda: _read_once(file, start, length), f'reading {file.path}')


def _read_once(file: SourceFile, start: int, length: int) -> bytes:
    with _get(file, start, start + length) as response:
        # In one piece: the blocks of `iter_content` would be copied twice.
        content = response.raw.read(decode_content=False)
    if len(content) != length:
        raise retry.Corrupted(f'{len(content)} bytes came, expected {length}')
    return content


def _complete(part: PartFile) -> None:
    """Downloads what is missing and checks the whole."""
    file = part.file
    while part.size < file.size:
        begin = part.size
        try:
            retry.call(lambda: _append(part), f'downloading {file.path}')
        except retry.GivenUp:
            if part.size < begin + _PROGRESS:
                raise
    if not part.is_whole():
        size, found = part.size, part.checksum()
        part.restart()
        raise retry.Corrupted(
            f'{file.path}: the checksum of {size} bytes is {found}, '
            f'expected {file.checksum} of {file.size} bytes'
        )


def _append(part: PartFile) -> None:
    """One request for all that is missing."""
    with _get(part.file, part.size, part.file.size, or_all=True) as response:
        if response.status_code == 200:
            part.restart()
        for block in response.iter_content(_BLOCK):
            part.append(block)


def _get(file: SourceFile, start: int, stop: int, *, or_all: bool = False) -> 'requests.Response':
    """Requests bytes `start` to `stop`; the answer's body is just these.

    With `or_all` it may be the whole file, with status 200, from a server that ignores ranges.

    Raises:
        requests.HTTPError: the server refused.
        FileNotFoundError: the file is gone.
        Changed: it has another size or checksum.
        retry.Corrupted: the answer is another range.
    """
    url, authorize = _gcs_address(file) if file.path.startswith('gs://') else _hub_address(file)
    response = _session().get(
        url,
        auth=authorize,
        headers={'Accept-Encoding': 'identity', 'Range': f'bytes={start}-{stop - 1}'},
        stream=True,
        timeout=retry.stall_seconds(),  # to connect, and between two pieces of the body
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(response)
        if response.status_code in (404, 410):
            raise FileNotFoundError(f'{file.path} is gone; it was there when it was listed.')
        if response.status_code == 416:
            raise _changed(file, response.headers.get('Content-Range', 'it is shorter'))
        if response.status_code >= 400:
            raise _refusal(response)
        if response.status_code != 200 or not or_all:
            _check_range(file, start, stop, response)
        _check_version(file, response)
        stack.pop_all()
    return response


def _refusal(response: 'requests.Response') -> Exception:
    """The error for an answer of status 4xx or 5xx, with what the server says about it."""
    import requests

    # The hub says it in a header, gs:// in JSON.
    body = next(response.iter_content(1000), b'').decode(errors='replace')
    in_json = re.search(r'"message": *"([^"]*)"', body)
    said = response.headers.get('X-Error-Message') or (in_json[1] if in_json else body)
    text = f'{response.status_code} {response.reason}: {" ".join(said.split())}'
    return requests.HTTPError(text, response=response)


def _check_range(file: SourceFile, start: int, stop: int, response: 'requests.Response') -> None:
    answered = response.headers.get('Content-Range', '')
    total = re.fullmatch(r'bytes \d+-\d+/(\d+)', answered)
    if total and int(total[1]) != file.size:
        raise _changed(file, f'it has {total[1]} bytes, not {file.size}')
    if answered != f'bytes {start}-{stop - 1}/{file.size}':
        raise retry.Corrupted(
            f'{file.path}: asked for bytes {start} to {stop - 1}, the answer is '
            f'{response.status_code} {answered!r}'
        )


def _check_version(file: SourceFile, response: 'requests.Response') -> None:
    # gs:// sends the checksum of the whole object with every range.
    stored = re.search(r'crc32c=([\w+/]+=*)', response.headers.get('X-Goog-Hash', ''))
    found = source_files.crc32c_checksum(stored[1]) if stored else file.checksum
    if found != (file.checksum or found):
        raise _changed(file, f'its checksum is {found}, not {file.checksum}')


def _changed(file: SourceFile, how: str) -> Changed:
    return Changed(
        f'{file.path} has changed since it was listed ({how}). Run the same command again, when '
        'nobody writes to it any more.'
    )


def _gcs_address(file: SourceFile) -> tuple[str, Callable]:
    storage = source_files.gcs()

    def authorize(request: Any) -> Any:
        storage.credentials.apply(request.headers)
        return request

    return storage.url(file.path), authorize


def _hub_address(file: SourceFile) -> tuple[str, Callable]:
    import huggingface_hub
    from huggingface_hub import utils

    uri = source_files.hub_uri(file.path)
    url = huggingface_hub.hf_hub_url(
        uri.id,
        uri.path_in_repo,
        repo_type='dataset',
        revision=uri.revision,
        endpoint=source_files.hub_endpoint(),
    )

    # Given as a function, so that requests does not replace it by the password of a .netrc.
    def authorize(request: Any) -> Any:
        request.headers.update(utils.build_hf_headers(library_name='coyo11m_tfds'))
        return request

    return url, authorize


def _session() -> 'requests.Session':
    """The connections of this thread; a forked process must not share those of its parent."""
    import requests

    if getattr(_threads, 'process', None) != os.getpid():
        _threads.session = requests.Session()
        _threads.process = os.getpid()
    return _threads.session
