"""Checks a data set: compares all files and records with checksums.

    python -m coyo11m_tfds.verify gs://BUCKET/data/coyo11m_tfds/latents/1.0.0

Shards and columns are read once, several at a time. Their lengths and CRC-32Cs are compared with
`checksums-<ID>.json`, records with their own CRC-32Cs. Latents in place are checked too: each row
that a record uses is compared with its CRC-32C, an object in a bucket with the object's, and a file
on the hub with the hub's SHA-256; for this one file of the hub at a time is on the local disk.
Rows that have no checksums yet, of a build with `read_latents='heads'`, get them if there are no
faults: their files are fetched whole, four at a time.
`--fast` reads only the small files and, of local files with latents in place, the directory of a
`.pt` file and 64 KiB at each end of others; it compares the lengths of all other files and, on
gs://, the storage's CRC-32Cs.

Bytes from gs:// that changed on the way are read again, so every reported fault is in the stored
file. Files of another build are ignored, because that build may be running, and so are those that
TFDS's `convert_format` has added. The exit status is 0 without faults, 1 with faults (one line
each), and 2 if the data set cannot be checked.
"""

import argparse
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
from coyo11m_tfds.dataset import (
    column_file,
    columns,
    manifest,
    records,
    row_checksums,
    stored_dataset,
)
from coyo11m_tfds.dataset.chunk_index import ChunkIndex, index_file_name
from coyo11m_tfds.dataset.splits import StoredSplit, parse_splits, strip_alternative_formats
from coyo11m_tfds.process import command_line
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage import scratch, stored_file
from coyo11m_tfds.storage.base import WritableFolder
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.stored_file import StoredFile

_PARALLEL_FILES = 8
_SHARD = '.tfrecord'  # in the names of shards, and of no other file

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """The result of a verification."""

    faults: list[str]  # lines `FILE: its state, expected state`
    unused_files: list[str]  # names of harmless files that a killed `add_column` left
    num_files: int
    num_bytes: int
    num_unchecked: int = 0  # files with latents in place whose rows have no checksums yet


def verify(
    data_dir: str | os.PathLike[str], *, fast: bool = False, scratch_dir: str = ''
) -> VerifyResult:
    """Checks all files of a data set.

    Args:
        data_dir: Folder of the data set, local or `gs://`.
        fast: Whether to leave shards, columns and rows in place unread, as `--fast` does.
        scratch_dir: Local folder for a file of the hub with latents in place; '' for
            `.coyo11m_tfds` in the `--data_dir` of the build or, for a data set on gs://, this
            user's cache.

    Raises:
        ValueError: `data_dir` is not the folder of a data set.
        OSError: The storage is out of reach.
    """
    folder = storage.expand_home(data_dir).rstrip('/')
    if not folder or not issubclass(storage.class_of(folder), WritableFolder):
        raise ValueError(f'{folder!r}: expected a local path or gs://bucket/folder of a data set.')
    # The data set is in `NAME/CONFIG/VERSION` of the `--data_dir` of its build.
    data_dir_of_build = f'{folder}/../../..'
    downloads = scratch.choose_folder(schema.NAME, data_dir_of_build, scratch_dir)
    listing = storage.list_folder(folder)
    build = _identify_build(folder, listing)
    files = {}
    for name, file in listing.items():
        # Files of other builds may belong to one that runs at this moment.
        if schema.build_of(name) in ('', build):
            files[name] = file
    # Either of them tells what must be there; without both, nothing can be missing.
    checksums_file = schema.of_build(schema.CHECKSUMS_FILE, build)
    if schema.INFO_FILE not in files and checksums_file not in files:
        raise ValueError(
            f'{folder}: there is no {schema.INFO_FILE}. Expected the folder of a built data set, '
            '.../coyo11m_tfds/CONFIG/1.0.0.'
        )
    return _Verification(folder, files, build, fast, scratch.Scratch(downloads)).run()


def _identify_build(folder: str, files: Mapping[str, StoredFile]) -> str:
    """Returns the ID of the build that the files of a folder are of; '' for names without one."""
    if schema.INFO_FILE in files:
        # A damaged file is reported later, as a fault of that file.
        with contextlib.suppress(OSError, ValueError):
            info = manifest.read_small_file(f'{folder}/{schema.INFO_FILE}') or b''
            first_split, *_ = parse_splits(info)
            if first_split.build:
                return first_split.build
    # Without it, the record of checksums tells. A folder may have those of several builds; then
    # the missing file is a fault of any of them.
    builds = [schema.build_of(name) for name in files if name.startswith('checksums')]
    return builds[0] if builds else ''


class _Verification:
    """Reads the files of one data set, and collects its faults."""

    def __init__(
        self,
        folder: str,
        files: Mapping[str, StoredFile],
        build: str,
        fast: bool,
        downloads: scratch.Scratch,
    ):
        self._folder = folder
        self._files = files
        self._build = build
        self._fast = fast
        self._downloads = downloads
        self._checksums_file = schema.of_build(schema.CHECKSUMS_FILE, build)
        self._columns_file = schema.of_build(schema.COLUMNS_FILE, build)
        self.faults: list[str] = []
        self._column_scans: dict[str, Callable[[], column_file.ColumnScan]] = {}
        self._recorded: dict[str, FileState] = {}  # files as the build recorded them

    def run(self) -> VerifyResult:
        """Checks small files, then names, then what is large; returns all faults."""
        # First, because every other file is compared with it.
        self._recorded = self._parse(self._checksums_file, manifest.parse_checksums) or {}
        # It has a digest of its own, and `add_column` replaces it after the record of checksums.
        self._recorded.pop(self._columns_file, None)
        all_columns = self._parse(self._columns_file, columns.parse_columns) or {}
        splits = self._parse(schema.INFO_FILE, parse_splits) or []
        converted = set[str]()
        index_files = set[str]()
        shards = set[str]()
        for split in splits:
            converted.update(split.converted)
            index_files.add(index_file_name(split.name, split.build))
            shards.update(split.file_names)
        # What `convert_format` has added is TFDS's own, without checksums.
        self._files = {name: x for name, x in self._files.items() if name not in converted}
        parsed_names = {self._checksums_file, self._columns_file, schema.INFO_FILE} | index_files
        # Only compared: nothing here needs what they hold.
        for name in sorted(self._files.keys() - parsed_names):
            if not _is_large(name):
                self._parse(name, bytes)
        self._check_names(splits)
        for name in sorted(index_files):
            self._parse(name, ChunkIndex.parse)
        # Before the shards, among which the columns are scanned by what is found here.
        places = self._locate_columns(all_columns, splits)
        self._check_shards(shards)
        num_unchecked = 0
        latents = all_columns.get(schema.LATENTS)
        if isinstance(latents, columns.InPlaceColumn):
            self._check_sources(latents, places)
            num_unchecked = len(latents.unchecked)
        unused_files = columns.unused_column_files(self._files, all_columns, self._build)
        return VerifyResult(
            faults=self.faults,
            unused_files=sorted(unused_files),
            num_files=len(self._files),
            num_bytes=sum(file.size for file in self._files.values()),
            num_unchecked=num_unchecked,
        )

    def _parse(self, name: str, parse: Callable[[bytes], T]) -> T | None:
        """Returns the content of a small file; None if it is missing, or for a reported fault."""
        if name not in self._files:
            return None
        try:
            data = self._files[name].read()
            built = data
            # Only this file may change after the build: TFDS may add formats to it.
            if name == schema.INFO_FILE:
                built = strip_alternative_formats(data)
            fault = self._compare(name, len(built), google_crc32c.value(built))
            if not fault:
                return parse(data)
        except OSError as error:
            fault = self._describe_unreadable(name, error)
        except ValueError as error:
            fault = f'cannot be used ({error}), expected what the build wrote'
        # No error: one run reports all faults.
        self.faults.append(f'{name}: {fault}')
        return None

    def _compare(self, name: str, size: int, crc32c: int | None) -> str:
        """Returns how a file differs from the record of checksums; '' if it does not."""
        expected = self._recorded.get(name)
        # In a data set of another program, nothing is recorded.
        if not expected:
            return ''
        if size != expected.size:
            return f'has {size} bytes, expected {expected.size}'
        # None where nothing has computed it yet, and the storage keeps none.
        if crc32c not in (None, expected.crc32c):
            return f'CRC-32C is {crc32c:08x}, expected {expected.crc32c:08x}'
        return ''

    def _describe_unreadable(self, name: str, error: OSError) -> str:
        """Returns the fault of a local file; raises the error of a storage out of reach."""
        if not self._files[name].local_path:
            raise error
        return f'cannot be read ({error.strerror or error})'

    def _check_names(self, splits: Sequence[StoredSplit]) -> None:
        """Compares the names of the files with the expected ones."""
        expected = {schema.INFO_FILE, schema.FEATURES_FILE, self._checksums_file}
        expected.update(self._recorded)
        for split in splits:
            expected.add(index_file_name(split.name, split.build))
            expected.update(split.file_names)
        for name in sorted(expected - self._files.keys()):
            self.faults.append(f'{name}: is missing')
        # Without a record, as in a data set of another program, any file may belong to it.
        if not self._recorded:
            return
        for name in sorted(self._files.keys() - expected):
            # Files of columns are no faults: those that no column uses are listed as harmless.
            if name == self._columns_file or columns.is_column_file_name(name):
                continue
            self.faults.append(f'{name}: is unexpected, a file of {self._files[name].size} bytes')

    def _locate_columns(
        self, all_columns: Mapping[str, columns.Column], splits: list[StoredSplit]
    ) -> np.ndarray:
        """Prepares the scans of added columns; returns the places of latents in place.

        A place has file, row and CRC-32C: uint32 `(n, 3)`.
        """
        # The empty array is for a data set without latents in place.
        places = [np.empty((0, 3), np.uint32)]
        for column, split in itertools.product(all_columns.values(), splits):
            try:
                if isinstance(column, columns.InPlaceColumn):
                    places.append(column.locate(self._folder, split.name, split.num_records))
                else:
                    file, start, dtype = column.locate(self._folder, split.name, split.num_records)
                    scan = functools.partial(column_file.ColumnScan, start, dtype)
                    self._column_scans[file.name] = scan
            except ValueError as error:
                # A recorded file is compared with its checksum, which reports the fault once.
                if isinstance(column, columns.InPlaceColumn):
                    name = column.places_file(split.name)
                else:
                    name = column.files.get(split.name, '')
                if name not in self._recorded:
                    self.faults.append(str(error))
        return np.concatenate(places)

    def _check_sources(self, latents: columns.InPlaceColumn, places: np.ndarray) -> None:
        """Compares the files that latents lie in with the description; reads unless `fast`."""
        # By file, and in each file by row, so that the reads go forward.
        order = np.lexsort((places[:, 1], places[:, 0]))
        places = places[order]
        starts = np.searchsorted(places[:, 0], np.arange(len(latents.files) + 1))
        listed_files = latents.find_files()
        for number, file in enumerate(latents.files):
            listed_file = listed_files[number]
            try:
                current_file = file.check(listed_file)
                # Rows without checksums are read when these are computed.
                if self._fast or number in latents.unchecked:
                    continue
                # The bucket's checksum of the whole object is the version of the file.
                if current_file.crc32c is not None:
                    current_file.scan(stored_file.ChecksumScan)
                    continue
                rows = places[starts[number] : starts[number + 1], 1:]
                # A file of the hub is fetched, which compares its SHA-256.
                with self._downloads.hold(current_file, shows=True) as path:
                    _check_rows(file, path, latents.row_nbytes, rows)
            except (OSError, ValueError) as error:
                # A storage out of reach says nothing about its file, so the run ends.
                if listed_file and not listed_file.local_path and isinstance(error, OSError):
                    raise
                self.faults.append(str(error))

    def _check_shards(self, shards: set[str]) -> None:
        """Reads shards and columns, several at a time, or with `fast` compares their sizes."""
        # Files of columns that nothing names are harmless, and not read.
        expected = shards | self._recorded.keys() | self._column_scans.keys()
        names = []
        for name in sorted(self._files.keys() & expected):
            # The others were read whole before.
            if _is_large(name):
                names.append(name)
        num_bytes = 0
        if not self._fast:
            num_bytes = sum(self._files[name].size for name in names)
        with (
            Progress('Verifying shards', num_bytes, 'B', {'shards': len(names)}) as progress,
            # Its threads do not keep the program from ending after an error.
            multiprocessing.pool.ThreadPool(_PARALLEL_FILES) as pool,
        ):
            check = functools.partial(self._check_shard, on_bytes=progress.add)
            for name, fault in zip(names, pool.imap(check, names), strict=True):
                progress.add(0, shards=1)
                if fault:
                    self.faults.append(f'{name}: {fault}')

    def _check_shard(self, name: str, on_bytes: Callable[[int], None]) -> str:
        """Returns the fault of a shard or a column; '' if it has none."""
        file = self._files[name]
        fault = self._compare(name, file.size, file.crc32c)
        # A file of another size or checksum is another file: its records would say no more.
        if self._fast or fault:
            return fault
        is_shard = _SHARD in name
        # A column without a description is only compared with its checksum.
        make_scan = records.RecordScan if is_shard else stored_file.ChecksumScan
        try:
            scan: Any = file.scan(self._column_scans.get(name, make_scan), on_bytes)
        except OSError as error:
            return self._describe_unreadable(name, error)
        fault = self._compare(name, file.size, scan.crc32c)
        # A shard may end within a record, which no block shows.
        if is_shard:
            scan.end()
        # Both: the first says that it is another file, the second which record is damaged.
        problem = getattr(scan, 'problem', '')
        return ', '.join(filter(None, [fault, problem]))


def _check_rows(
    file: columns.InPlaceFile, local_path: str, row_nbytes: int, rows: np.ndarray
) -> None:
    """Reads rows of a file, `(n, 2)` with their CRC-32Cs; ValueError for wrong ones."""
    wrong_rows = []
    with open(local_path, 'rb') as opened:
        for row, expected in rows.tolist():
            computed = google_crc32c.value(file.read_row(opened.fileno(), row, row_nbytes))
            if computed != expected:
                wrong_rows.append((row, computed, expected))
    if wrong_rows:
        message = column_file.wrong_rows_message(*wrong_rows[0], len(wrong_rows))
        raise ValueError(f'{file.path}: {message}')


def _is_large(name: str) -> bool:
    """Returns whether a file is a shard or a column, which is not kept in memory to be read."""
    return _SHARD in name or columns.is_column_file_name(name)


def main() -> None:
    """Runs the command line; the exit status is that of the module's docstring."""
    parser = command_line.Parser('coyo11m_tfds.verify', __doc__)
    add = parser.add_argument
    add('data_dir', help=stored_dataset.FOLDER_HELP + '; also gs://')
    fast_help = 'compare only sizes and, on gs://, recorded checksums; do not read shards'
    add('--fast', action='store_true', help=fast_help)
    scratch_help = 'local folder for files of the hub (next to the data sets)'
    add('--scratch_dir', default='', help=scratch_help)
    flags = parser.parse_args()
    command_line.show_log()
    with command_line.ends_in_one_line('nothing was changed', status=2):
        result = verify(flags.data_dir, fast=flags.fast, scratch_dir=flags.scratch_dir)
    for name in result.unused_files:
        command_line.print_lines(
            f'{name}: was left by a killed add_column; the next one removes it.'
        )
    command_line.print_lines(*result.faults)
    faults = 'no faults'
    if result.faults:
        faults = format_count(len(result.faults), 'fault')
    scope = 'all of them read.'
    if flags.fast:
        scope = 'shards not read: only their sizes compared.'
    command_line.print_lines(
        f'{flags.data_dir}: {faults} in {format_count(result.num_files, "file")}, '
        f'{format_count(result.num_bytes, "byte")}, {scope}'
    )
    if result.faults:
        command_line.print_lines('To fix this, copy those files again, or build with --overwrite.')
    # Only of a data set without faults: a damaged file would get the checksums of its damage.
    elif result.num_unchecked:
        sys.exit(_complete_checksums(flags, result.num_unchecked))
    sys.exit(bool(result.faults))


def _complete_checksums(flags: argparse.Namespace, num_unchecked: int) -> bool:
    """Computes the checksums of rows that have none, unless `--fast`; returns whether rows are bad.

    `num_unchecked` is the number of their files.
    """
    files = format_count(num_unchecked, 'file')
    if flags.fast:
        command_line.print_lines(
            f'The rows of {files} with latents have no checksums yet: without --fast they are '
            'computed.'
        )
        return False
    outlook = 'what was computed is recorded, the same command goes on'
    with command_line.ends_in_one_line(outlook, status=2):
        faults = row_checksums.compute_row_checksums(flags.data_dir, flags.scratch_dir)
    command_line.print_lines(*faults, f'The rows of {files} with latents have checksums now.')
    return bool(faults)


if __name__ == '__main__':
    main()
