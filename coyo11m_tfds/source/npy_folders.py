"""Folders of `.npy` moments, as EDM2's `dataset_tool.py encode` writes them.

    00000/img-mean-std-00000000.npy   # of image 0: float32 (2C, H, W), means and deviations
    dataset.json                      # {"labels": [["00000/img-mean-std-00000000.npy", 7], ...]}

There may be a million files, so a folder, of up to 1,000 of them, counts as one file of the source.
To fetch it is to pack it into a tar that `TarFile` reads, with the number of each image as its key.
"""

import dataclasses
import json
import os
import re
import tarfile
from collections.abc import Mapping

from coyo11m_tfds import schema, storage
from coyo11m_tfds.foreign import tar_members
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.base import ReadableFolder
from coyo11m_tfds.storage.file_state import FileState, OnBytes, ignore_bytes
from coyo11m_tfds.storage.stored_file import StoredFile, file_changed

INDEX_OF_FOLDERS = 'dataset.json'
MOMENTS_PREFIX = 'img-mean-std-'
_NAME = re.compile(rf'{MOMENTS_PREFIX}[0-9]{{1,18}}\.npy')
_READS_AT_ONCE = 16
_MAX_CLASSES = 1 << 24


@dataclasses.dataclass(frozen=True)
class NpyFolder(StoredFile):
    """A folder of `.npy` files; `size` is that of its tar."""

    classes: tuple[int | None, ...] = ()  # of the files, in the order of their names

    @property
    def local_path(self) -> None:
        """None: it is no file that can be opened where it is."""

    def fetch(self, target: str, on_bytes: OnBytes = ignore_bytes) -> FileState:
        """Writes the tar; see `StoredFile.fetch`."""
        files = _npy_files(storage.list_folder(self.path))
        # The listing at the start of a build is what its rows were planned by.
        if _describe_folder(self.path, files, self.classes).version != self.version:
            raise file_changed(self, 'its files are others')
        with (
            ThreadPool(_READS_AT_ONCE) as threads,
            tarfile.open(target, 'w', format=tarfile.USTAR_FORMAT) as tar,
        ):
            contents = threads.map(StoredFile.read, files.values())
            for name, label, content in zip(files, self.classes, contents, strict=True):
                tar_members.add_member(tar, name, content)
                # Under the same name, so that both are one sample of `TarFile`.
                stem = name.removesuffix('.npy')
                fields = json.dumps(_json_fields(name, label))
                tar_members.add_member(tar, f'{stem}.json', fields.encode())
        on_bytes(self.size)
        # Nobody has recorded a checksum of the tar with which to compare it.
        return FileState(self.size, -1)


def find_npy_folders(source: ReadableFolder, index: StoredFile) -> dict[str, StoredFile]:
    """Returns the folders of a source by the names of their tars; `index` is its `dataset.json`.

    Raises a ValueError for an index that is damaged, or names a file that is not there.
    """
    classes = _parse_classes(index)
    folders = dict[str, dict[str, StoredFile]]()
    for path, file in source.list(deep=True).items():
        folder, name = os.path.split(path)
        if folder.isdecimal():
            folders.setdefault(folder, {})[name] = file
    tars: dict[str, StoredFile] = {}
    for folder in sorted(folders):
        files = _npy_files(folders[folder])
        labels = []
        for name in files:
            # Taken out: what is left in the end belongs to no file.
            labels.append(classes.pop(f'{folder}/{name}', None))
        if files:
            path = f'{source.folder}/{folder}'
            tars[f'{folder}.tar'] = _describe_folder(path, files, tuple(labels))
    if tars and classes:
        raise ValueError(
            f'{source.folder}/{min(classes)}: {index.path} names it, and it is no file of '
            f'{MOMENTS_PREFIX}NUMBER.npy. Copy the source again.'
        )
    return tars


def _parse_classes(index: StoredFile) -> dict[str, int]:
    """Returns the class of each file by its name; {} if the images have none."""
    try:
        # Images without classes have null.
        classes = dict(json.loads(index.read())['labels'] or ())
        for name, label in classes.items():
            # By its type, because True is an int for `isinstance`.
            is_class = type(label) is int and 0 <= label < _MAX_CLASSES
            if type(name) is not str or not is_class:
                raise ValueError(f'its labels have {[name, label]!r}')
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f'{index.path}: is damaged or no index of moments ({error}); expected '
            f'{{"labels": [["00000/{MOMENTS_PREFIX}00000000.npy", 7], ...]}}. Copy it again.'
        ) from None
    return classes


def _npy_files(files: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
    """Returns the files that hold moments, in the order of their names."""
    npy_files = {}
    for name in sorted(files):
        if _NAME.fullmatch(name):
            npy_files[name] = files[name]
    return npy_files


def _json_fields(name: str, label: int | None) -> dict[str, int]:
    """Returns what the `.json` of an image holds: its number as the key, and its class, if any."""
    number = name.removeprefix(MOMENTS_PREFIX).removesuffix('.npy')
    fields = {schema.KEY: int(number)}
    if label is not None:
        fields['label'] = label
    return fields


def _describe_folder(
    path: str, files: Mapping[str, StoredFile], classes: tuple[int | None, ...]
) -> NpyFolder:
    """Returns a folder with the size that its tar will have."""
    num_blocks = 2  # the end
    listing = []
    for name, file in files.items():
        # A header and the contents, then a header and a block of JSON.
        num_content_blocks = -(-file.size // tarfile.BLOCKSIZE)  # rounded up
        num_blocks += 1 + num_content_blocks + 2
        listing.append([name, file.size, file.version])
    size = num_blocks * tarfile.BLOCKSIZE
    # Python fills the last record with zeros.
    size += -size % tarfile.RECORDSIZE
    # Without checksums, versions are times, which differ between copies.
    checksum = None
    if all(file.checksum for file in files.values()):
        checksum = f'listing:{json_digest.sha256(listing)}'
    return NpyFolder(path, size, json_digest.sha256([listing, classes]), checksum, classes=classes)
