"""A folder that finished files are put into, local or `gs://`.

    folder = Destination('gs://bucket/data/coyo11m_tfds/latents')   # or a local path
    staging = folder.staging(fallback='/tmp')       # write the file there, then
    folder.put(f'{staging}/x', '1.0.0.parts/x', crc32c)
    folder.put_bytes('1.0.0.parts/x.json', b'{}')
    folder.inventory('1.0.0.parts')                 # {'x': FileState(size, crc32c), 'x.json': ...}
    folder.promote('1.0.0.parts', '1.0.0', last='dataset_info.json', replace=True)

A name stands for a whole file or for none: nothing half-written is ever seen under it, and when
`put` returns, the file survives a loss of power. What is there is identified by its checksum, read
from the file itself or from the storage's own record, never from a cache.
"""

import os
from collections.abc import Callable, Collection, Mapping

from coyo11m_tfds.storage import source_files
from coyo11m_tfds.storage.file_state import FileState, ignore_bytes
from coyo11m_tfds.storage.local_folder import LocalFolder


def _no_check() -> None:
    """The check of a folder that no other process writes to."""


class Destination:
    """A folder that files are put into; it need not exist yet. Safe to use from many threads.

    Attributes:
        folder: its path or URL, without a slash at the end.
        is_remote: whether it is in a bucket.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """Does not touch the storage.

        Raises:
            ValueError: the folder is empty text, or a URL of another kind than `gs://bucket/folder`.
        """
        path = os.fspath(folder)
        if not path:
            raise ValueError('the destination is empty text, expected a folder.')
        self.folder = path.rstrip('/') or '/'
        self.is_remote = source_files.is_remote(path)
        if self.is_remote:
            from coyo11m_tfds.storage import gcs_folder  # imports the storage's client

            self._store: gcs_folder.GcsFolder | LocalFolder = gcs_folder.GcsFolder(path)
        else:
            self._store = LocalFolder(self.folder)

    def staging(self, fallback: str | os.PathLike[str]) -> str:
        """Returns an existing local folder to write files in that will be `put`.

        For a local destination this is a hidden folder inside it, so that `put` only renames; for a
        remote one it is `fallback`.
        """
        return self._store.staging(os.fspath(fallback))

    def put(self, local_file: str | os.PathLike[str], name: str, crc32c: int) -> None:
        """Moves a local file to `name`, replacing what is there; the local file is gone afterwards.

        Args:
            local_file: a file in the folder that `staging` gave.
            name: relative to the folder; folders in it are made.
            crc32c: of the file. Where the file is copied or uploaded, the copy must have it.

        Raises:
            OSError: the file cannot be stored, e.g. because the disk is full.
            PermissionError: there are no credentials for the bucket, or they are refused.
        """
        self._store.put(os.fspath(local_file), name, crc32c)

    def put_bytes(self, name: str, data: bytes) -> None:
        """Stores a small file, replacing what is there; raises as `put` does."""
        self._store.put_bytes(name, data)

    def read_all(self, folder: str, names: Collection[str] | None = None) -> dict[str, bytes]:
        """Reads the (small) files directly in a sub-folder, by name; {} if it does not exist.

        Args:
            folder: relative to the destination.
            names: of the files to read, as far as they are there; None for all.
        """
        return self._store.read_all(folder, names)

    def inventory(
        self,
        folder: str = '',
        on_bytes: Callable[[int], None] = ignore_bytes,
        names: Collection[str] | None = None,
    ) -> dict[str, FileState]:
        """Returns the state of the files directly in a sub-folder, by name; {} if there is none.

        Local files are read through, at the speed of the disk. Remote ones are one listing.

        Args:
            folder: relative to the destination.
            on_bytes: is told how many local bytes were read, from several threads.
            names: of the files that matter; None for all.
        """
        return self._store.inventory(folder, on_bytes, names)

    def identity(self, folder: str, last: str) -> str:
        """Returns what identifies a complete sub-folder, before and after `promote`.

        Locally it is the number of its inode, in a bucket a digest of names, sizes and checksums;
        '' if `last` is not in it.
        """
        return self._store.identity(folder, last)

    def verify(self, folder: str, states: Mapping[str, FileState]) -> None:
        """Checks that a sub-folder holds these files and no others, by a listing.

        Checksums are compared in a bucket only, where the listing has them.

        Raises:
            OSError: a file is missing, is not expected, or differs; names it.
        """
        self._store.verify(folder, states)

    def promote(
        self,
        folder: str,
        final: str,
        last: str,
        replace: bool = False,
        check: Callable[[], None] = _no_check,
    ) -> None:
        """Makes the sub-folder `folder`, with all that is in it, the sub-folder `final`.

        What lies in `final` without `last` is not complete and is replaced. Locally this is one
        rename; a complete `final` is exchanged for `folder` in one step where the system can do
        that, else it is moved to `<folder>.old` first. In a bucket `last` of the old ones is
        deleted before the others, the objects are copied by the storage and `last` after all
        others, so that a reader that waits for `last` never sees a part; the originals are deleted
        when a listing has shown that the copies are whole. After a kill at any point the same call
        finishes it; when it has been finished without `replace`, the call does nothing.

        Args:
            folder: relative to the destination.
            final: relative to the destination.
            last: name of the file in it that says that it is complete.
            replace: whether `final` may be complete already.
            check: called before each step that cannot be undone; what it raises ends the call.

        Raises:
            FileNotFoundError: neither `folder` nor `final` holds `last`.
            FileExistsError: `final` is complete already; nothing has been changed.
            OSError: another process has changed `final` meanwhile.
        """
        self._store.promote(folder, final, last, replace, check)

    def sweep(self) -> None:
        """Removes what killed processes left in the staging folder.

        Only while no other process writes here (see `build_lock`).
        """
        self._store.sweep()

    def keep_only(
        self, folder: str, names: Collection[str], check: Callable[[], None] = _no_check
    ) -> None:
        """Removes the files directly in a sub-folder whose names are not given.

        Args:
            folder: relative to the destination.
            names: of the files that stay.
            check: see `promote`.
        """
        self._store.keep_only(folder, names, check)

    def remove(self, last: str = '', check: Callable[[], None] = _no_check) -> None:
        """Removes the whole folder with all that is in it, if it exists.

        Args:
            last: name of a file in it that stays until all others are gone.
            check: see `promote`.
        """
        self._store.remove(last, check)
