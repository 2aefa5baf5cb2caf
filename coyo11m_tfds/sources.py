"""Where the source lies: a folder of `.pt` files and one Parquet file of captions.

    source = sources.find('/data/coyo11m')          # or gs://bucket/folder,
    source = sources.find('hf://datasets/KBlueLeaf/coyo11m-256px-ccrop-latent')
    source.latent_files[0].path   # '/data/coyo11m/latents-3crop/000000-000009.pt'
    source.captions_file.size     # bytes

Finding lists names, sizes and checksums and reads no file. What is on the hub is pinned to the
commit that is found, so that all files are of one version; `@revision` after the name chooses it.
"""

import base64
import dataclasses
import functools
import inspect
import os
import pathlib
import stat
from typing import TYPE_CHECKING

from coyo11m_tfds import retry, schema

if TYPE_CHECKING:
    import gcsfs
    import huggingface_hub

_GCS = 'gs://'
_HUB = 'hf://'
_SUFFIXES = ('.pt', '.parquet')


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One file of a source.

    Attributes:
        path: local path, or URL on gs:// or hf://.
        size: in bytes.
        version: changes when the content does: the checksum if the storage knows one, else size
            and time of the last change.
        checksum: `crc32c:<8 hex digits>` on gs://; on the hub `sha256:<hex>` or, of small files,
            `git-sha1:<hex>`; None where the storage knows none.
    """

    path: str
    size: int
    version: str
    checksum: str | None

    @property
    def name(self) -> str:
        """The path without its folder."""
        return os.path.basename(self.path)

    @property
    def is_remote(self) -> bool:
        """Whether it has to be fetched before it can be memory-mapped."""
        return is_remote(self.path)


@dataclasses.dataclass(frozen=True)
class Source:
    """The files of a source.

    Attributes:
        root: the folder; of one on the hub with the commit.
        latent_files: in the order of the data set.
        captions_file: the Parquet file.
    """

    root: str
    latent_files: tuple[SourceFile, ...]
    captions_file: SourceFile


def find(root: str | os.PathLike[str]) -> Source:
    """Finds the files of a source and checks that none is missing.

    Args:
        root: local folder, `gs://bucket/folder` or `hf://datasets/owner/name[@revision][/folder]`.

    Raises:
        ValueError: the folder is missing, or lacks the `.pt` files or the captions.
        PermissionError: credentials are missing or refused.
        OSError: the storage cannot be reached.
    """
    folder = os.fspath(root)
    try:
        folder, files = _list(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f'{folder} is not a folder; expected the folder of the source data.'
        ) from None
    latents = f'{folder}/{schema.LATENTS_FOLDER}'
    latent_files = [
        files[name]
        for name in sorted(files)
        if os.path.dirname(name) == schema.LATENTS_FOLDER and name.endswith('.pt')
    ]
    if not latent_files:
        raise ValueError(
            f'No .pt files in {latents}; expected files like 000000-000009.pt there. '
            f'Is {folder} the folder that contains {schema.LATENTS_FOLDER}/?'
        )
    if schema.CAPTIONS_FILE not in files:
        tables = [name for name in sorted(files) if '/' not in name and name.endswith('.parquet')]
        raise ValueError(
            f'{folder}/{schema.CAPTIONS_FILE} is missing; expected the Parquet file of captions '
            f'under this name (Parquet files in the folder: {", ".join(tables) or "none"}).'
        )
    return Source(folder, tuple(latent_files), files[schema.CAPTIONS_FILE])


def describe(path: str | os.PathLike[str]) -> SourceFile:
    """Looks at one file, local or remote.

    Raises:
        ValueError: there is no such file.
        PermissionError: credentials are missing or refused.
        OSError: the storage cannot be reached.
    """
    text = os.fspath(path)
    try:
        if not is_remote(text):
            return _local_file(pathlib.Path(text))
        if _kind(text) == _GCS:
            info = retry.call(lambda: gcs().info(text), f'looking for {text}')
            if info['type'] != 'file':
                raise FileNotFoundError(text)
            return _gcs_file(info)
        _, files = _hub_files(text)
        if hub_uri(text).path_in_repo not in files:
            raise FileNotFoundError(text)
        return files[hub_uri(text).path_in_repo]
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f'{text} is missing or a folder; expected a file.') from None


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a URL."""
    return '://' in os.fspath(path)


def gcs() -> 'gcsfs.GCSFileSystem':
    """Returns gcsfs with the credentials of this machine, for any thread.

    It tries every request once, so that `retry.call` decides, and gives a stalled one up.
    """
    return _gcs(os.getpid(), retry.stall_seconds())


def crc32c_checksum(stored: str) -> str:
    """Returns what gs:// says of an object's CRC-32C as it is written in `SourceFile`."""
    return f'crc32c:{base64.b64decode(stored).hex()}'


def hub_uri(path: str) -> 'huggingface_hub.utils.HfUri':
    """Takes `hf://datasets/owner/name@revision/path` apart.

    Raises:
        ValueError: it is not the URL of a data set on the hub.
    """
    from huggingface_hub import utils

    uri = utils.parse_hf_uri(path)
    if uri.type != 'dataset':
        raise ValueError(
            f'{path} is a {uri.type} on the hub; expected hf://datasets/owner/name[@revision].'
        )
    return uri


def hub_endpoint() -> str | None:
    """Address of the hub if it is not the usual one; read anew, unlike huggingface_hub's own."""
    return os.environ.get('HF_ENDPOINT') or None


def _kind(url: str) -> str:
    for kind in (_GCS, _HUB):
        if url.startswith(kind):
            return kind
    raise ValueError(
        f'{url}: expected a local path, {_GCS}bucket/... or {_HUB}datasets/owner/name/...'
    )


def _list(folder: str) -> tuple[str, dict[str, SourceFile]]:
    """Lists a folder of the source.

    Returns:
        The folder as it stands in the paths of its files; and its files and those of the folder of
        latents, by name relative to it.

    Raises:
        FileNotFoundError: there is no such folder.
        NotADirectoryError: it is a file.
    """
    if not is_remote(folder):
        return str(pathlib.Path(folder)), _local_files(pathlib.Path(folder))
    if _kind(folder) == _GCS:
        folder = folder.rstrip('/')
        return folder, _gcs_files(folder)
    base, files = _hub_files(folder)
    within = hub_uri(folder).path_in_repo
    prefix = f'{within}/' if within else ''
    chosen = {name.removeprefix(prefix): f for name, f in files.items() if name.startswith(prefix)}
    if not chosen:
        raise FileNotFoundError(folder)
    return f'{base}/{within}'.rstrip('/'), {n: f for n, f in chosen.items() if _is_wanted(n)}


def _is_wanted(name: str) -> bool:
    # A leading dot marks what tools leave behind, like macOS's '._000000-000009.pt'.
    return name.endswith(_SUFFIXES) and not os.path.basename(name).startswith('.')


# --- Local ------------------------------------------------------------------------------------


def _local_files(folder: pathlib.Path) -> dict[str, SourceFile]:
    paths = list(folder.iterdir())
    latents = folder / schema.LATENTS_FOLDER
    if latents.is_dir():
        paths += latents.iterdir()
    return {
        path.relative_to(folder).as_posix(): describe(path)
        for path in paths
        if _is_wanted(path.name)
    }


def _local_file(path: pathlib.Path) -> SourceFile:
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        raise FileNotFoundError(path)
    return SourceFile(str(path), state.st_size, f'{state.st_size}-{state.st_mtime_ns}', None)


# --- gs:// ------------------------------------------------------------------------------------


@functools.cache
def _gcs(process: int, stall_seconds: float) -> 'gcsfs.GCSFileSystem':
    # fsspec's own cache has an instance for each thread, and to find credentials takes seconds.
    del process
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=stall_seconds, sock_read=stall_seconds)
    return _gcs_class()(
        use_listings_cache=False, requests_timeout=timeout, skip_instance_cache=True
    )


@functools.cache
def _gcs_class() -> type:
    # Not gcsfs.GCSFileSystem: that one also asks every bucket for its kind, by gRPC.
    from gcsfs import core

    class OneAttempt(core.GCSFileSystem):
        # As it comes, a request is tried six times in half a minute, those with refused
        # credentials too; within the attempts of `retry.call` this would be minutes of silence.
        _request = inspect.unwrap(core.GCSFileSystem._request)

    return OneAttempt


def _gcs_files(folder: str) -> dict[str, SourceFile]:
    infos = retry.call(lambda: gcs().ls(folder, detail=True), f'listing {folder}')
    latents = f'{folder}/{schema.LATENTS_FOLDER}'
    if any(info['type'] == 'directory' and f'{_GCS}{info["name"]}' == latents for info in infos):
        infos += retry.call(lambda: gcs().ls(latents, detail=True), f'listing {latents}')
    prefix = folder.removeprefix(_GCS) + '/'
    names = {info['name'].removeprefix(prefix): info for info in infos}
    if all(name == info['name'] for name, info in names.items()):
        raise FileNotFoundError(folder)  # nothing is in it, so it is not there, or it is a file
    return {
        name: _gcs_file(info)
        for name, info in names.items()
        if info['type'] == 'file' and _is_wanted(name)
    }


def _gcs_file(info: dict) -> SourceFile:
    # Objects with an encryption key of the customer's have no checksum here.
    checksum = crc32c_checksum(info['crc32c']) if 'crc32c' in info else None
    version = checksum or f'{info["size"]}-{info["generation"]}'
    return SourceFile(f'{_GCS}{info["name"]}', info['size'], version, checksum)


# --- hf:// ------------------------------------------------------------------------------------


def _hub_files(url: str) -> tuple[str, dict[str, SourceFile]]:
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
    return base, {file.rfilename: _hub_file(base, file) for file in info.siblings}


def _hub_file(base: str, file: 'huggingface_hub.hf_api.RepoSibling') -> SourceFile:
    checksum = f'sha256:{file.lfs.sha256}' if file.lfs else f'git-sha1:{file.blob_id}'
    return SourceFile(f'{base}/{file.rfilename}', file.size, checksum, checksum)
