"""Data sets on the Hugging Face hub, which are only read, at one commit each."""

import os
from collections.abc import Mapping
from typing import Any

import huggingface_hub
from huggingface_hub import errors, utils

from coyo11m_tfds.storage import retry
from coyo11m_tfds.storage.file_state import StrPath
from coyo11m_tfds.storage.remote import RemoteFolder
from coyo11m_tfds.storage.stored_file import StoredFile


class Hub(RemoteFolder):
    """A folder of a data set, or all of it, `hf://datasets/owner/name[@revision][/folder]`."""

    def __init__(self, folder: StrPath, files: Mapping[str, StoredFile] = {}):
        super().__init__(folder)
        # Of a pinned folder, by relative name: its commit cannot change, so it is listed once.
        self._files = files

    def pin(self) -> 'Hub':
        if self._files:
            return self
        base, files = _list_dataset(self.folder)
        path_in_repo = _parse_url(self.folder).path_in_repo
        prefix = f'{path_in_repo}/' if path_in_repo else ''
        files_below = {n.removeprefix(prefix): f for n, f in files.items() if n.startswith(prefix)}
        if not files_below:
            raise FileNotFoundError(self.folder)
        return Hub(f'{base}/{path_in_repo}', files_below)

    def list(self, sub_folder: str = '', *, deep: bool = False) -> dict[str, StoredFile]:
        prefix = f'{sub_folder}/' if sub_folder else ''
        try:
            files = self.pin()._files
        except FileNotFoundError:
            return {}
        files_below = {n.removeprefix(prefix): f for n, f in files.items() if n.startswith(prefix)}
        return {name: file for name, file in files_below.items() if deep or '/' not in name}

    def exists(self) -> bool:
        return bool(self.list(deep=True))

    @classmethod
    def describe(cls, path: str) -> StoredFile:
        _, files = _list_dataset(path)
        if (name := _parse_url(path).path_in_repo) not in files:
            raise FileNotFoundError(path)
        return files[name]

    @classmethod
    def _request(cls, path: str) -> tuple[str, dict[str, str]]:
        uri = _parse_url(path)
        kind: dict[str, Any] = {'repo_type': 'dataset', 'revision': uri.revision}
        url = huggingface_hub.hf_hub_url(uri.id, uri.path_in_repo, endpoint=_endpoint(), **kind)
        return url, utils.build_hf_headers(library_name='coyo11m_tfds')


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
    """The data set's URL with the commit, and all its files by path."""
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
    base, files = f'hf://datasets/{uri.id}@{info.sha}', {}
    for file in info.siblings or ():
        assert file.size is not None  # as `files_metadata` was requested
        checksum = f'sha256:{file.lfs.sha256}' if file.lfs else f'git-sha1:{file.blob_id}'
        name = file.rfilename
        files[name] = StoredFile(f'{base}/{name}', file.size, checksum, checksum)
    return base, files
