"""Copies of files, with receipts in `.mirror/` of the destination.

A file counts as copied if its receipt names the present version of the original, and the size and
the CRC-32C of the present copy.
"""

from collections.abc import Mapping

from absl import logging

from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.source.encoding_file import EncodedState
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.base import ReadableFolder, WritableFolder
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.receipts import Receipt, Receipts
from coyo11m_tfds.storage.stored_file import StoredFile

_RECEIPTS = '.mirror'


class CopiedFiles:
    """The copies in a destination and their receipts."""

    def __init__(self, target: WritableFolder):
        self._target = target
        self._receipts = Receipts(target, _RECEIPTS)

    def save(self, name: str, file: StoredFile, state: FileState) -> None:
        """Writes the receipt of a complete copy; `name` is its path relative to the destination."""
        # All receipts are in one folder, and names of files may be long.
        short_name = json_digest.sha256(name)[:32]
        self._receipts.write(short_name, file.version, {name: state}, {'source': file.path})

    def missing(self, files: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
        """Returns the files whose copy is missing, incomplete, or of another version."""
        folder = self._target.folder
        receipts = _by_file(self._receipts)
        orphans = []
        for name in receipts:
            # A build reads all files of latents in the folder, but no other Parquet file or index.
            if name not in files and not name.endswith(('.parquet', '.json')):
                orphans.append(name)
        if orphans:
            logging.warning(
                f'{folder} has copies of {format_count(len(orphans), "file")} that the source no '
                f'longer has, such as {min(orphans)}. Delete them, or builds will use them.'
            )
        of_this_version = {}
        for name, file in files.items():
            if name in receipts and receipts[name].origin == file.version:
                of_this_version[name] = receipts[name]
        # Receipts may outlive their files, so these are looked at, too.
        copied = self._receipts.check_files(of_this_version, f'Checking {folder}')
        missing = {}
        for name, file in files.items():
            if name not in copied:
                missing[name] = file
        return missing


def recorded_states(folder: ReadableFolder) -> dict[str, FileState]:
    """Returns the recorded state of every copy in a source's folder, by name; {} on the hub."""
    # Where nothing can be written to, `mirror` has not been.
    if not isinstance(folder, WritableFolder):
        return {}
    receipts = _by_file(Receipts(folder, _RECEIPTS))
    return {name: receipt.files[name] for name, receipt in receipts.items()}


def check_recorded_state(state: FileState, recorded: FileState, path: str) -> None:
    """Raises a ValueError if the state of the file at `path` is not the recorded one."""
    if state.agrees_with(recorded):
        return
    if isinstance(recorded, EncodedState):
        raise ValueError(
            f'{path}: has {state} now, but when it was encoded it had {recorded}. If it was '
            'copied, copy it again; otherwise give the command of encode_images again.'
        )
    raise ValueError(
        f'{path}: has {state} now, but when it was mirrored it had {recorded}. Mirror the source '
        f'again; if you have replaced the file on purpose, delete its receipt in {_RECEIPTS}/.'
    )


def _by_file(receipts: Receipts) -> dict[str, Receipt]:
    """Returns the receipts by the names of the files that they are about, one each."""
    by_file = {}
    for receipt in receipts.read().values():
        [name] = receipt.files
        by_file[name] = receipt
    return by_file
