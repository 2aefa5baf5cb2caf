"""Data sets on the Hugging Face hub, which are only read, at one commit each.

The hub counts requests in windows of five minutes, fewest for listings, and some thousand for the
addresses of files (https://huggingface.co/docs/hub/rate-limits). So a process lists a commit once,
and keeps the address of a file for as long as it serves.
"""

import dataclasses
import email.utils
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Mapping

import huggingface_hub
from huggingface_hub import errors, utils

from coyo11m_tfds.storage import remote, retry
from coyo11m_tfds.storage.base import ReadableFolder
from coyo11m_tfds.storage.remote import RemoteFolder
from coyo11m_tfds.storage.stored_file import StoredFile

USUAL_WINDOW = 300.0  # seconds of a window in which the hub counts requests

_HOUR = 3600.0  # seconds for which the hub signs an address
# A request may begin shortly before the end of an address.
_KEPT_SHARE = 0.95

# A data set may have been renamed, and a mirror of the hub may lead to the hub itself.
_MAX_REDIRECTS = 5

Files = Mapping[str, StoredFile]  # by path in a data set


class Hub(RemoteFolder):
    """A folder of a data set, or all of it, `hf://datasets/owner/name[@revision][/folder]`."""

    keeps_versions = True

    def pin(self) -> 'Hub':
        """Returns the folder at its present commit; FileNotFoundError if it has no files."""
        base, files = _list_dataset(self.folder)
        path_in_repo = _parse_url(self.folder).path_in_repo
        # Git has no empty folders.
        if not _files_below(files, path_in_repo):
            raise FileNotFoundError(self.folder)
        return Hub(f'{base}/{path_in_repo}')

    def is_version_of(self, folder: ReadableFolder) -> bool:
        """Returns whether this is the folder, which names no commit, at one commit."""
        if not isinstance(folder, Hub):
            return False
        own = _parse_url(self.folder)
        other = _parse_url(folder.folder)
        # Of two commits, neither is a version of the other.
        if not _is_commit(own.revision) or _is_commit(other.revision):
            return False
        return (own.id, own.path_in_repo) == (other.id, other.path_in_repo)

    def list(self, sub_folder: str = '', *, deep: bool = False) -> dict[str, StoredFile]:
        """Returns the files of the data set's commit; a named one is listed once a process."""
        try:
            _, files = _list_dataset(self.folder)
        except FileNotFoundError:
            return {}
        files_below = _files_below(files, _parse_url(self.path_of(sub_folder)).path_in_repo)
        if deep:
            return files_below
        direct_files = {}
        for name, file in files_below.items():
            if '/' not in name:
                direct_files[name] = file
        return direct_files

    def exists(self) -> bool:
        """Returns whether there are files below the folder: git has no empty ones."""
        return bool(self.list(deep=True))

    @classmethod
    def describe(cls, path: str) -> StoredFile:
        """Returns a file with its checksum; its path gets the commit."""
        _, files = _list_dataset(path)
        name = _parse_url(path).path_in_repo
        if name not in files:
            raise FileNotFoundError(path)
        return files[name]

    @classmethod
    def _request(cls, path: str) -> tuple[str, dict[str, str]]:
        url = _url_of(path)
        file_address = _addresses.setdefault(url, _FileAddress())
        # One thread asks for the address, and those that read the same file wait for it.
        with file_address.lock:
            if time.monotonic() >= file_address.end:
                file_address.renew(url, path)
            address = file_address.address
        return address, _headers_for(address, url)

    @classmethod
    def _forget_address(cls, path: str, address: str) -> bool:
        url = _url_of(path)
        # The hub itself refused: another address would come from it, too.
        if address == url:
            return False
        file_address = _addresses.setdefault(url, _FileAddress())
        with file_address.lock:
            # Another thread may have renewed it since.
            if file_address.address == address:
                file_address.end = 0.0
        return True


@dataclasses.dataclass(frozen=True)
class Quota:
    """The requests for addresses of files that an account may send in a window."""

    limit: int
    seconds: float


def read_quota(path: str) -> Quota | None:
    """Returns the quota of this machine's account, by a request for a file; None if it is not told.

    Raises an OSError if the hub refuses the request.
    """
    url = _url_of(path)

    def ask() -> Quota | None:
        headers = _headers_for(url, url)
        with remote.send_request(url, headers, 0, 1, redirects=False) as response:
            remote.check_status(response, path)
            # RateLimit-Policy: "fixed window";"resolvers";q=5000;w=300
            policy = response.headers.get('RateLimit-Policy', '')
        match = re.search(r'"resolvers";\s*q=(\d+);\s*w=(\d+)', policy)
        # A mirror of the hub may have no quotas.
        if not match:
            return None
        return Quota(int(match[1]), float(match[2]))

    return retry.call(ask, f'reading {path}')


@dataclasses.dataclass
class _FileAddress:
    """The address at which a file is read, in any number of ranges, until it ends."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    address: str = ''
    end: float = 0.0  # as `time.monotonic` counts

    def renew(self, url: str, path: str) -> None:
        """Asks the hub, which signs an address on the host that has the file.

        Raises a FileNotFoundError or a `remote.Refused`, with the path of the file.
        """
        # Before the request, as the hub signs the address at some time during it.
        begin = time.monotonic()
        seconds = _HOUR
        address = url
        for _ in range(_MAX_REDIRECTS):
            headers = _headers_for(address, url)
            with remote.send_request(address, headers, 0, 1, redirects=False) as response:
                remote.check_status(response, path)
                location = response.get_redirect_location()
                if not location:
                    break
                # The connection is used again only if nothing is left in it.
                response.drain_conn()
                address = urllib.parse.urljoin(address, location)
                seconds = _seconds_left(address, response.headers.get('Date', ''))
            # Of files, a hub has addresses with this part alone.
            if '/resolve/' not in urllib.parse.urlsplit(address).path:
                break
        self.address = address
        self.end = begin + _KEPT_SHARE * seconds


# By the URL of a file on the hub.
_addresses: dict[str, _FileAddress] = {}
# By endpoint, data set and commit, which never changes. A branch may, so it is listed each time.
_listings: dict[tuple[str | None, str, str], Files] = {}
_listing_lock = threading.Lock()


def _forget_all() -> None:
    """Forgets addresses and locks, which threads of a parent process may hold."""
    global _listing_lock
    _addresses.clear()
    _listing_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_all)


def _url_of(path: str) -> str:
    """Returns the URL of a file at the hub, which redirects to the address of its content."""
    uri = _parse_url(path)
    return huggingface_hub.hf_hub_url(
        uri.id,
        uri.path_in_repo,
        repo_type='dataset',
        revision=uri.revision,
        endpoint=_endpoint(),
    )


def _headers_for(address: str, url: str) -> dict[str, str]:
    """Returns the headers of a request: another host than that of `url` must not see the token."""
    if urllib.parse.urlsplit(address).netloc != urllib.parse.urlsplit(url).netloc:
        return {}
    return utils.build_hf_headers(library_name='coyo11m_tfds')


def _seconds_left(address: str, date: str) -> float:
    """Returns how long a signed address serves, at most an hour; `date` is the hub's present."""
    parts = urllib.parse.urlsplit(address)
    query = urllib.parse.parse_qs(parts.query)
    # Seconds since 1970. A hub may also sign in another way, or not at all.
    expires = query.get('Expires', [''])[0]
    # Not `isdigit`, which takes ², of which `float` makes no number.
    if not expires.isdecimal():
        return _HOUR
    # By the clock of the hub, as that of this machine may be wrong.
    now = time.time()
    parsed_date = email.utils.parsedate_tz(date)
    if parsed_date:
        now = email.utils.mktime_tz(parsed_date)
    return min(_HOUR, float(expires) - now)


def _files_below(files: Files, folder: str) -> dict[str, StoredFile]:
    """Returns the files below a folder, '' for all, by their names within it."""
    prefix = f'{folder}/' if folder else ''
    files_below = {}
    for name, file in files.items():
        if name.startswith(prefix):
            files_below[name.removeprefix(prefix)] = file
    return files_below


def _parse_url(url: str) -> utils.HfUri:
    """Returns the parts of `hf://datasets/owner/name@revision/path`."""
    uri = utils.parse_hf_uri(url)
    if uri.type != 'dataset':
        raise ValueError(
            f'{url} is a {uri.type} on the hub; expected hf://datasets/owner/name[@revision].'
        )
    return uri


def _endpoint() -> str | None:
    """Returns the address of the hub; None for that of Hugging Face."""
    # The address of another hub, which the client reads only once, when it is imported.
    return os.environ.get('HF_ENDPOINT') or None


def _is_commit(revision: str | None) -> bool:
    """Returns whether a revision is the whole hash of a commit, and no branch or tag."""
    return re.fullmatch('[0-9a-f]{40}', revision or '') is not None


def _list_dataset(url: str) -> tuple[str, Files]:
    """Returns the URL of a data set at its commit, and all its files by path.

    Raises:
        FileNotFoundError: The hub has no such data set, or no such revision of it.
    """
    uri = _parse_url(url)
    commit = uri.revision or ''
    # Threads that open one data set wait for the first of them, which lists it.
    with _listing_lock:
        files = _listings.get((_endpoint(), uri.id, commit))
        if files is None:
            commit, files = _request_listing(url)
            _listings[_endpoint(), uri.id, commit] = files
    return f'hf://datasets/{uri.id}@{commit}', files


def _request_listing(url: str) -> tuple[str, Files]:
    """Returns the commit of a data set's revision, and all its files by path."""
    uri = _parse_url(url)
    api = huggingface_hub.HfApi(endpoint=_endpoint())
    try:
        # One request for the commit and all files; listing a tree has no time-out.
        info = retry.call(
            lambda: api.dataset_info(
                uri.id, revision=uri.revision, files_metadata=True, timeout=retry.stall_seconds()
            ),
            f'listing {url}',
        )
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise FileNotFoundError(url) from None
    assert info.sha is not None  # of one data set
    files = {}
    for file in info.siblings or ():
        assert file.size is not None  # as `files_metadata` was requested
        # Git keeps only a pointer to a large file, whose own hash is that of the pointer.
        checksum = f'sha256:{file.lfs.sha256}' if file.lfs else f'git-sha1:{file.blob_id}'
        path = f'hf://datasets/{uri.id}@{info.sha}/{file.rfilename}'
        files[file.rfilename] = StoredFile(path, file.size, checksum, checksum)
    return info.sha, files
