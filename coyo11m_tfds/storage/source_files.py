"""Lists and describes files: path, size and checksum; local, `gs://` and `hf://`.

No contents are read. A data set on the hub is pinned to its present commit, so that all files have
one version; `@revision` after its name chooses another commit.
"""

import dataclasses
import os
import pathlib
import stat
from typing import TYPE_CHECKING

from coyo11m_tfds.storage import retry
from coyo11m_tfds.storage.file_state import FileState

if TYPE_CHECKING:
    import huggingface_hub

    from coyo11m_tfds.storage import gcs

_GCS = 'gs://'
_HUB = 'hf://'


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """One file of a source.

    Attributes:
        version: Text that changes with the content: the checksum if the storage knows one,
            otherwise the size and the modification time.
        checksum: `crc32c:<8 hex digits>` on gs://; on the hub `sha256:<hex>` or, for small files,
            `git-sha1:<hex>`; None if the storage knows none.
    """

    path: str  # local, or URL on gs:// or hf://
    size: int  # in bytes
    version: str
    checksum: str | None
    recorded: FileState | None = None  # of the record of `mirror`, if there is one
    label: str = ''  # path within a source, for formats that compute keys from it

    @property
    def name(self) -> str:
        """The path without its folder."""
        return os.path.basename(self.path)

    @property
    def is_remote(self) -> bool:
        """Whether it must be fetched before it can be memory-mapped."""
        return is_remote(self.path)

    @property
    def crc32c(self) -> int | None:
        """The CRC-32C that the storage keeps; None if it keeps none."""
        kind, _, digits = (self.checksum or '').partition(':')
        return int(digits, 16) if kind == 'crc32c' else None


def list_files(
    folder: str | os.PathLike[str], sub_folder: str, suffixes: tuple[str, ...]
) -> tuple[str, dict[str, StoredFile]]:
    """Lists the files in a folder and in one of its sub-folders.

    Args:
        folder: Local or remote.
        sub_folder: Name of the sub-folder, which need not exist.
        suffixes: Suffixes of the names of wanted files. Hidden files are left out.

    Returns:
        The folder as in the paths of its files (on the hub with the commit), and the files by
        relative name.
    """

    def is_wanted(name: str) -> bool:
        parent, base = os.path.split(name)
        # A leading dot marks what tools leave behind, like macOS's '._000000-000009.pt'.
        is_visible = not base.startswith('.')
        return is_visible and parent in ('', sub_folder) and base.endswith(suffixes)

    text = os.fspath(folder)
    if not text:
        raise ValueError('no folder given, expected the folder of a source.')
    if not is_remote(text):
        path = pathlib.Path(text)
        paths = list(path.iterdir())
        if (path / sub_folder).is_dir():
            paths += (path / sub_folder).iterdir()
        names = {found.relative_to(path).as_posix(): found for found in paths}
        return str(path), {name: describe(names[name]) for name in names if is_wanted(name)}
    text = text.rstrip('/')
    if _kind(text) == _GCS:
        files = _gcs_files(text, sub_folder)
    else:
        text, files = _hub_folder(text)
    return text, {name: file for name, file in files.items() if is_wanted(name)}


def describe(path: str | os.PathLike[str]) -> StoredFile:
    """Describes one file, local or remote."""
    text = os.fspath(path)
    try:
        if not is_remote(text):
            return _local_file(pathlib.Path(text))
        if _kind(text) == _GCS:
            from coyo11m_tfds.storage import gcs

            if found := gcs.stat(text):
                return _gcs_file(text, found)
            raise FileNotFoundError(text)
        _, files = _hub_files(text)
        if hub_uri(text).path_in_repo not in files:
            raise FileNotFoundError(text)
        return files[hub_uri(text).path_in_repo]
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f'{text} is missing or a folder; expected a file.') from None


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a URL."""
    return '://' in os.fspath(path)


def hub_uri(path: str) -> 'huggingface_hub.utils.HfUri':
    """Splits `hf://datasets/owner/name@revision/path` into its parts."""
    from huggingface_hub import utils

    uri = utils.parse_hf_uri(path)
    if uri.type != 'dataset':
        raise ValueError(
            f'{path} is a {uri.type} on the hub; expected hf://datasets/owner/name[@revision].'
        )
    return uri


def hub_endpoint() -> str | None:
    """Returns the address of another hub from the present environment; None for the usual hub."""
    return os.environ.get('HF_ENDPOINT') or None


def _kind(url: str) -> str:
    for kind in (_GCS, _HUB):
        if url.startswith(kind):
            return kind
    raise ValueError(
        f'{url}: expected a local path, {_GCS}bucket/... or {_HUB}datasets/owner/name/...'
    )


def _local_file(path: pathlib.Path) -> StoredFile:
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        raise FileNotFoundError(path)
    return StoredFile(str(path), state.st_size, local_version(state), None)


def local_version(state: os.stat_result) -> str:
    """Returns the version of a local file; see `StoredFile`."""
    return f'{state.st_size}-{state.st_mtime_ns}'


def _gcs_files(folder: str, sub_folder: str) -> dict[str, StoredFile]:
    from coyo11m_tfds.storage import gcs

    below = gcs.list_objects(f'{folder}/{sub_folder}') if sub_folder else {}
    found = gcs.list_objects(folder) | {f'{sub_folder}/{x}': file for x, file in below.items()}
    if not found and not gcs.is_folder(folder):
        raise FileNotFoundError(folder)
    return {name: _gcs_file(f'{folder}/{name}', file) for name, file in found.items()}


def _gcs_file(url: str, found: 'gcs.Stat') -> StoredFile:
    if found.crc32c < 0:
        return StoredFile(url, found.size, f'{found.size}-{found.generation}', None)
    checksum = f'crc32c:{found.crc32c:08x}'
    return StoredFile(url, found.size, checksum, checksum)


def _hub_files(url: str) -> tuple[str, dict[str, StoredFile]]:
    """The data set's URL with the commit, and all its files by their path in it."""
    import huggingface_hub
    from huggingface_hub import errors

    uri = hub_uri(url)
    api = huggingface_hub.HfApi(endpoint=hub_endpoint())
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
    base = f'{_HUB}datasets/{uri.id}@{info.sha}'
    return base, {file.rfilename: _hub_file(base, file) for file in info.siblings or ()}


def _hub_folder(url: str) -> tuple[str, dict[str, StoredFile]]:
    """The URL of a folder with the commit, and all files below it by name relative to it."""
    base, files = _hub_files(url)
    within = hub_uri(url).path_in_repo
    prefix = f'{within}/' if within else ''
    found = {name.removeprefix(prefix): f for name, f in files.items() if name.startswith(prefix)}
    if not found:
        raise FileNotFoundError(url)
    return f'{base}/{within}'.rstrip('/'), found


def _hub_file(base: str, file: 'huggingface_hub.hf_api.RepoSibling') -> StoredFile:
    checksum = f'sha256:{file.lfs.sha256}' if file.lfs else f'git-sha1:{file.blob_id}'
    assert file.size is not None  # as `files_metadata` was asked for
    return StoredFile(f'{base}/{file.rfilename}', file.size, checksum, checksum)
