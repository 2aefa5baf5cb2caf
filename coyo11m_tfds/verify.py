"""Checks a data set: compares every file and every record with its checksum.

    python -m coyo11m_tfds.verify gs://BUCKET/data/coyo11m_tfds/latents/1.0.0

Shards and columns are read once, several at a time. Their lengths and CRC-32Cs are compared with
`checksums-<ID>.json`, records with their own CRC-32Cs. Latents in place are checked too: each row
that a record uses is compared with its CRC-32C, and an object in a bucket with the object's.
`--fast` reads only the small files and, of local files with latents in place, the directory of a
`.pt` file and 64 KiB at each end of others; it compares the lengths of all other files and, on
gs://, the storage's CRC-32Cs.

Bytes from gs:// that changed on the way are read again, so every reported fault is in the stored
file. Files of another build are ignored, because that build may be running, and so are those that
TFDS's `convert_format` has added. The exit status is 0 without faults, 1 with faults (one line
each), and 2 if the data set cannot be checked.
"""

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing.pool
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import google_crc32c
import numpy as np

from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import columns, manifest, records, stored_dataset
from coyo11m_tfds.dataset.chunk_index import ChunkIndex, index_file_name
from coyo11m_tfds.dataset.stored_dataset import StoredSplit
from coyo11m_tfds.process import command_line, ending
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.storage import stored_file
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.stored_file import StoredFile

_PARALLEL = 8  # files that are read at a time

_SHARD = '.tfrecord'  # in the names of shards, and of no other file

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Verified:
    """The result of a verification."""

    faults: list[str]  # lines `FILE: what was found, expected what`
    left_over: list[str]  # names of harmless files that a killed `add_column` left
    num_files: int
    num_bytes: int


def verify(data_dir: str | os.PathLike[str], *, fast: bool = False) -> Verified:
    """Checks all files of a data set.

    Args:
        data_dir: Folder of the data set, local or `gs://`.
        fast: Whether to leave shards, columns and rows in place unread, as `--fast` does.
    """
    folder = os.fspath(data_dir).rstrip('/')
    if not folder or ('://' in folder and not folder.startswith('gs://')):
        raise ValueError(f'{folder!r}: expected a local path or gs://bucket/folder of a data set.')
    files = storage.list_folder(folder)
    build = _find_build(folder, files)
    files = {n: file for n, file in files.items() if schema.build_of(n) in ('', build)}
    checksums = schema.of_build(schema.CHECKSUMS_FILE, build)
    if not {schema.INFO_FILE, checksums} & files.keys():
        raise ValueError(
            f'{folder}: there is no {schema.INFO_FILE}. Expected the folder of a built data set, '
            '.../coyo11m_tfds/CONFIG/1.0.0.'
        )
    return _Check(folder, files, build, fast).run()


def _find_build(folder: str, files: Mapping[str, StoredFile]) -> str:
    """The ID of the build that the files of a folder are of, or most of them."""
    if schema.INFO_FILE in files:
        with contextlib.suppress(OSError, ValueError):  # told later, as a fault of that file
            data = manifest.read_small_file(f'{folder}/{schema.INFO_FILE}') or b''
            if build := stored_dataset.parse_splits(data)[0].build:
                return build
    builds = [schema.build_of(name) for name in files if name.startswith('checksums')]
    return builds[0] if builds else ''


class _Check:
    """One verification."""

    def __init__(self, folder: str, files: Mapping[str, StoredFile], build: str, fast: bool):
        self._folder = folder
        self._files = files
        self._build = build
        self._fast = fast
        self._checksums = schema.of_build(schema.CHECKSUMS_FILE, build)
        self._columns = schema.of_build(schema.COLUMNS_FILE, build)
        self.faults: list[str] = []
        self._rows: dict[str, Callable[[], columns.ColumnScan]] = {}  # readers of columns
        self._recorded: dict[str, FileState] = {}  # files as the build recorded them

    def run(self) -> Verified:
        """Finds all faults."""
        self._recorded = self._parse(self._checksums, manifest.parse_checksums) or {}
        # It has a digest of its own, and `add_column` replaces it after the record of checksums.
        self._recorded.pop(self._columns, None)
        found = self._parse(self._columns, columns.parse_columns) or {}
        splits = self._parse(schema.INFO_FILE, stored_dataset.parse_splits) or []
        converted = {name for split in splits for name in split.converted}
        self._files = {name: x for name, x in self._files.items() if name not in converted}
        parsed = {self._checksums, self._columns, schema.INFO_FILE}
        parsed |= {index_file_name(split.name, split.build) for split in splits}
        for name in self._files.keys() - parsed:
            if not _is_large(name):
                self._parse(name, bytes)
        self._check_names(splits)
        for split in splits:
            self._parse(index_file_name(split.name, split.build), ChunkIndex.parse)
        places = self._locate_columns(found, splits)
        self._check_shards({name for split in splits for name in split.file_names})
        latents = found.get(schema.LATENTS)
        if isinstance(latents, columns.InPlaceColumn):
            self._check_sources(latents, places)
        left_over = sorted(columns.unused_column_files(self._files, found, self._build))
        num_bytes = sum(file.size for file in self._files.values())
        return Verified(self.faults, left_over, len(self._files), num_bytes)

    def _parse(self, name: str, parse: Callable[[bytes], T]) -> T | None:
        """The content of a small file; None if it is missing or faulty, which is told."""
        if name not in self._files:
            return None
        try:
            data = self._files[name].read()
            built = (
                stored_dataset.strip_alternative_formats(data) if name == schema.INFO_FILE else data
            )
            fault = self._differs(name, len(built), google_crc32c.value(built))
            if not fault:
                return parse(data)
        except OSError as error:
            fault = self._unreadable(name, error)
        except ValueError as error:
            fault = f'cannot be used ({error}), expected what the build wrote'
        self.faults.append(f'{name}: {fault}')
        return None

    def _differs(self, name: str, size: int, crc32c: int | None) -> str:
        """How a file differs from what was recorded of it; '' if it does not."""
        expected = self._recorded.get(name)
        if expected and size != expected.size:
            return f'has {size} bytes, expected {expected.size}'
        if expected and crc32c not in (None, expected.crc32c):
            return f'CRC-32C is {crc32c:08x}, expected {expected.crc32c:08x}'
        return ''

    def _unreadable(self, name: str, error: OSError) -> str:
        """The fault of a local file; raises the error of a storage out of reach."""
        if self._files[name].is_remote:
            raise error
        return f'cannot be read ({error.strerror or error})'

    def _check_names(self, splits: Sequence[StoredSplit]) -> None:
        """Compares the names of the files with the expected ones."""
        expected = {schema.INFO_FILE, schema.FEATURES_FILE, self._checksums, *self._recorded}
        for split in splits:
            expected |= {index_file_name(split.name, split.build), *split.file_names}
        self.faults += [f'{name}: is missing' for name in sorted(expected - self._files.keys())]
        others = {self._columns, *filter(columns.is_file_name, self._files)}
        for name in sorted(self._files.keys() - expected - others if self._recorded else ()):
            self.faults.append(f'{name}: is unexpected, a file of {self._files[name].size} bytes')

    def _locate_columns(
        self, found: Mapping[str, columns.Column], splits: list[StoredSplit]
    ) -> np.ndarray:
        """Finds the rows of columns; returns the places of latents, uint32 `(n, 3)`."""
        places = [np.empty((0, 3), np.uint32)]
        for column, split in itertools.product(found.values(), splits):
            count = sum(split.shard_lengths)
            try:
                if isinstance(column, columns.InPlaceColumn):
                    places.append(column.locate(self._folder, split.name, count))
                else:
                    file, start, dtype = column.locate(self._folder, split.name, count)
                    self._rows[file.name] = functools.partial(columns.ColumnScan, start, dtype)
            except ValueError as error:
                name = columns.column_file_name(column.name, split.name, self._build)
                if name not in self._recorded:  # else it is told with the others
                    self.faults.append(str(error))
        return np.concatenate(places)

    def _check_sources(self, latents: columns.InPlaceColumn, places: np.ndarray) -> None:
        """Compares the files that latents lie in with what they were; reads them unless `fast`."""
        places = places[np.lexsort((places[:, 1], places[:, 0]))]
        ends = np.searchsorted(places[:, 0], np.arange(len(latents.files) + 1))
        runs = itertools.starmap(slice, itertools.pairwise(ends))
        for file, found, run in zip(latents.files, latents.find_files(), runs, strict=True):
            try:
                there = file.check(found)
                if not self._fast and there.is_remote:
                    # All of it has the checksum that it is known by.
                    there.scan(stored_file.ChecksumScan)
                elif not self._fast:
                    _read_rows(file, latents.row_nbytes, places[run, 1:])
            except (OSError, ValueError) as error:
                if found and found.is_remote and isinstance(error, OSError):
                    raise
                self.faults.append(str(error))

    def _check_shards(self, shards: set[str]) -> None:
        known = sorted(self._files.keys() & {*shards, *self._recorded, *self._rows})
        names = [name for name in known if _is_large(name)]
        total = 0 if self._fast else sum(self._files[name].size for name in names)
        with (
            Progress('Verifying shards', total, 'B', {'shards': len(names)}) as progress,
            # Its threads do not keep the program from ending after an error.
            multiprocessing.pool.ThreadPool(_PARALLEL) as pool,
        ):
            check = functools.partial(self._check_shard, on_bytes=progress.add)
            for name, fault in zip(names, pool.imap(check, names), strict=True):
                progress.add(0, shards=1)
                if fault:
                    self.faults.append(f'{name}: {fault}')

    def _check_shard(self, name: str, on_bytes: Callable[[int], None]) -> str:
        """The fault of a shard; '' if it has none."""
        file = self._files[name]
        fault = self._differs(name, file.size, file.crc32c)
        if self._fast or fault:
            return fault
        whole = records.RecordScan if _SHARD in name else stored_file.ChecksumScan
        try:
            taken: Any = file.scan(self._rows.get(name, whole), on_bytes)
        except OSError as error:
            return self._unreadable(name, error)
        fault = self._differs(name, file.size, taken.crc32c)
        if _SHARD in name:
            taken.end()
        return ', '.join(filter(None, [fault, getattr(taken, 'problem', '')]))


def _read_rows(file: columns.InPlaceFile, row_nbytes: int, places: np.ndarray) -> None:
    """Reads rows of a local file, given with their CRC-32Cs; ValueError for wrong ones."""
    wrong, nbytes = [], row_nbytes // len(file.starts)
    with open(file.path, 'rb') as opened:
        for row, expected in places.tolist():
            pieces = [start + row * file.stride for start in file.starts]
            found = google_crc32c.value(
                b''.join(os.pread(opened.fileno(), nbytes, at) for at in pieces)
            )
            if found != expected:
                wrong.append(columns.wrong_row_message(row, found, expected))
    if wrong:
        more = f'; {len(wrong) - 1} more rows differ too' if wrong[1:] else ''
        raise ValueError(f'{file.path}: {wrong[0]}{more}')


def _is_large(name: str) -> bool:
    """True if a file is a shard or a column, which are read through and not kept in memory."""
    return _SHARD in name or columns.is_file_name(name)


def main() -> None:
    """Runs the command line; the exit status is that of the module's docstring."""
    parser = command_line.Parser('coyo11m_tfds.verify', __doc__)
    add = parser.add_argument
    add('data_dir', help=stored_dataset.FOLDER_HELP + '; also gs://')
    what = 'compare only sizes and, on gs://, recorded checksums; do not read shards'
    add('--fast', action='store_true', help=what)
    flags = parser.parse_args()
    command_line.show_log()
    with ending.in_one_line('nothing was changed', status=2):
        found = verify(flags.data_dir, fast=flags.fast)
    for name in found.left_over:
        print(f'{name}: was left by a killed add_column; the next one removes it.')
    for fault in found.faults:
        print(fault)
    how = 'shards not read: only their sizes compared.' if flags.fast else 'all of them read.'
    print(
        f'{flags.data_dir}: {len(found.faults) or "no"} '
        f'fault{"" if len(found.faults) == 1 else "s"} in {found.num_files} files, '
        f'{found.num_bytes:,} bytes, {how}'
    )
    if found.faults:
        print('To mend it copy those files again, or build with --overwrite.')
    sys.exit(bool(found.faults))


if __name__ == '__main__':
    main()
