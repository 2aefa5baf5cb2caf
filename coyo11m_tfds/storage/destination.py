"""A folder that finished files are put into, local or `gs://`.

    folder = Destination('gs://bucket/data/coyo11m_tfds/latents/1.0.0')   # or a local path
    staging = folder.staging(fallback='/tmp')       # write the file there, then
    folder.put(f'{staging}/x', 'parts/x', crc32c)
    folder.put_bytes('parts/x.json', b'{}')
    folder.inventory('parts')                       # {'x': FileState(size, crc32c), 'x.json': ...}
    folder.verify({'parts/x': FileState(size, crc32c)})
    folder.remove(['parts/x'])

A name stands for a whole file or for none: nothing half-written is ever seen under it, and when
`put` returns, the file survives a loss of power. What is there is identified by its checksum, read
from the file itself or from the storage's own record, never from a cache.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping

from coyo11m_tfds.storage import source_files
from coyo11m_tfds.storage.file_state import FileState, ignore_bytes
from coyo11m_tfds.storage.local_folder import LocalFolder


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
            crc32c: CRC-32C of the file. A copy or an upload of the file must have the same.

        Raises:
            OSError: the file cannot be stored, e.g. because the disk is full.
            PermissionError: there are no credentials for the bucket, or they are refused.
        """
        self._store.put(os.fspath(local_file), name, crc32c)

    def put_bytes(self, name: str, data: bytes) -> None:
        """Stores a small file, replacing what is there; raises as `put` does."""
        self._store.put_bytes(name, data)

    def read(self, name: str) -> bytes | None:
        """Reads a small file; None if there is none."""
        return self._store.read(name)

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

    def sizes(self) -> dict[str, int]:
        """Bytes of all files in the folder and below it, by relative name; {} if there is none."""
        return self._store.sizes()

    def verify(self, states: Mapping[str, FileState]) -> None:
        """Checks that files are there, by one listing; others do not matter.

        Checksums are compared in a bucket only, where the listing has them.

        Args:
            states: what they should be, by relative name.

        Raises:
            OSError: a file is missing, or differs; names it.
        """
        self._store.verify(states)

    def sweep(self) -> None:
        """Removes what killed processes left: in the staging folder, and empty sub-folders."""
        self._store.sweep()

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, by relative name, and sub-folders that are empty then.

        Names of nothing are ignored.
        """
        self._store.remove(names)
