"""Data sets on the Hugging Face hub, which are only read, at one commit each."""

import os
from collections.abc import Mapping

import huggingface_hub
from huggingface_hub import errors, utils

from coyo11m_tfds.storage import retry
from coyo11m_tfds.storage.file_state import StrPath
from coyo11m_tfds.storage.remote import RemoteFolder
from coyo11m_tfds.storage.stored_file import StoredFile


class Hub(RemoteFolder):
    """A folder of a data set, or all of it, `hf://datasets/owner/name[@revision][/folder]`."""

    def __init__(self, folder: StrPath, files: Mapping[str, StoredFile] = {}):
        """Takes the URL and, for a folder at a commit, the files below it by relative name."""
        super().__init__(folder)
        # Of a pinned folder, by relative name: its commit cannot change, so it is listed once.
        self._files = files

    def pin(self) -> 'Hub':
        """Returns the folder at its present commit; FileNotFoundError if it has no files."""
        if self._files:
            return self
        base, files = _list_dataset(self.folder)
        path_in_repo = _parse_url(self.folder).path_in_repo
        files_below = _files_below(files, path_in_repo)
        if not files_below:
            raise FileNotFoundError(self.folder)
        return Hub(f'{base}/{path_in_repo}', files_below)

    def list(self, sub_folder: str = '', *, deep: bool = False) -> dict[str, StoredFile]:
        """Lists the files of the data set's commit, in one request unless the folder is pinned."""
        try:
            files = self.pin()._files
        except FileNotFoundError:
            return {}
        files_below = _files_below(files, sub_folder)
        if deep:
            return files_below
        return {name: file for name, file in files_below.items() if '/' not in name}

    def exists(self) -> bool:
        """Returns whether there are files below the folder: git has no empty ones."""
        return bool(self.list(deep=True))

    @classmethod
    def describe(cls, path: str) -> StoredFile:
        """Describes a file with its checksum; its path gets the commit."""
        _, files = _list_dataset(path)
        name = _parse_url(path).path_in_repo
        if name not in files:
            raise FileNotFoundError(path)
        return files[name]

    @classmethod
    def _request(cls, path: str) -> tuple[str, dict[str, str]]:
        uri = _parse_url(path)
        url = huggingface_hub.hf_hub_url(
            uri.id,
            uri.path_in_repo,
            repo_type='dataset',
            revision=uri.revision,
            endpoint=_endpoint(),
        )
        return url, utils.build_hf_headers(library_name='coyo11m_tfds')


def _files_below(files: Mapping[str, StoredFile], folder: str) -> dict[str, StoredFile]:
    """Returns the files below a folder, '' for all, by their names within it."""
    prefix = f'{folder}/' if folder else ''
    return {
        name.removeprefix(prefix): file for name, file in files.items() if name.startswith(prefix)
    }


def _parse_url(url: str) -> utils.HfUri:
    """Splits `hf://datasets/owner/name@revision/path` into its parts."""
    uri = utils.parse_hf_uri(url)
    if uri.type != 'dataset':
        raise ValueError(
            f'{url} is a {uri.type} on the hub; expected hf://datasets/owner/name[@revision].'
        )
    return uri


def _endpoint() -> str | None:
    # The address of another hub, which the client reads only once, when it is imported.
    return os.environ.get('HF_ENDPOINT') or None


def _list_dataset(url: str) -> tuple[str, dict[str, StoredFile]]:
    """Returns the URL of a data set at its commit, and all its files by path.

    Raises:
        FileNotFoundError: The hub has no such data set, or no such revision of it.
    """
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
    base = f'hf://datasets/{uri.id}@{info.sha}'
    files = {}
    for file in info.siblings or ():
        assert file.size is not None  # as `files_metadata` was requested
        # Git keeps only a pointer to a large file, whose own hash is that of the pointer.
        checksum = f'sha256:{file.lfs.sha256}' if file.lfs else f'git-sha1:{file.blob_id}'
        name = file.rfilename
        files[name] = StoredFile(f'{base}/{name}', file.size, checksum, checksum)
    return base, files
