"""The health of built data sets: all of `verify` that takes seconds.

    data_sets.find('OUT')                   # ['OUT/coyo11m_tfds/gemma/1.0.0']
    data_sets.check_health('OUT/coyo11m_tfds/gemma/1.0.0')

Sizes, names and small files are always compared with each other and with their checksums. Small
data sets are read through. Of large ones some chunks are read, at the offsets in the chunk index:
that finds shards that are swapped, since captions and so records differ in length, or overwritten,
but no single wrong byte elsewhere; `python -m coyo11m_tfds.verify` reads everything.
"""

import concurrent.futures
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from coyo11m_tfds import schema, verify
from coyo11m_tfds.checks import finding
from coyo11m_tfds.checks.finding import Finding
from coyo11m_tfds.dataset import columns, records, stored_splits
from coyo11m_tfds.dataset.chunk_index import ChunkIndex, file_name
from coyo11m_tfds.process.sizes import readable
from coyo11m_tfds.storage import remote, source_files, stored_files
from coyo11m_tfds.storage.source_files import SourceFile

# Bytes up to which a data set is read through: two seconds of a disk, some of a bucket.
READ_THROUGH = {False: 2_000_000_000, True: 200_000_000}  # by whether it is remote

_SPOTS = 64  # shards in which a chunk is read
_SPOTS_AT_ONCE = 8
_TOLD = 8  # faults with a line of their own


def find(data_dir: str) -> list[str]:
    """Folders of data sets: `data_dir` itself, or those below it as `tfds build` makes them.

    A folder with shards is one even if its metadata are missing; below a URL only those with
    metadata are found.

    Raises:
        ValueError: it is a URL of another kind than gs://.
        OSError: the storage cannot be reached.
    """
    data_dir = data_dir.rstrip('/') or '/'
    try:
        if _is_data_set(list(stored_files.list_folder(data_dir))):
            return [data_dir]
    except ValueError:  # no such folder; remote ones without files of their own are none either
        pass
    below = f'{data_dir}/{schema.NAME}'
    if source_files.is_remote(data_dir):
        return stored_files.folders_with(below, schema.INFO_FILE)
    folders = [
        path
        for path in pathlib.Path(below).glob('*/*')
        if path.is_dir() and stored_files.is_version(path.name)
    ]
    return sorted(
        str(path) for path in folders if _is_data_set([file.name for file in path.iterdir()])
    )


def check_health(data_dir: str, read_through: int | None = None) -> list[Finding]:
    """Looks for faults of a data set.

    Args:
        data_dir: its folder.
        read_through: bytes of shards, and of latents in place, up to which all are read; None for
            what takes seconds.

    Raises:
        ValueError: there is no data set in the folder.
        OSError: the storage cannot be reached.
    """
    name = f'data set {data_dir}'
    files = stored_files.list_folder(data_dir)
    large = [file for file in files.values() if '.tfrecord' in file.name] + _sources(data_dir)
    if read_through is None:
        read_through = READ_THROUGH[any(file.is_remote for file in large)]
    is_whole = sum(file.size for file in large) <= read_through
    found = verify.verify(data_dir, fast=not is_whole)
    faults = list(found.faults)
    if not is_whole:
        faults += _check_spots(files, {fault.partition(':')[0] for fault in faults})
    how = 'read through' if is_whole else f'a chunk of up to {_SPOTS} shards a split read'
    facts = {'files': found.num_files, 'num_bytes': found.num_bytes, 'faults': faults}
    command = f'python -m coyo11m_tfds.verify {data_dir}'
    if faults:
        return list(_tell(name, faults, command))
    text = f'{found.num_files} files, {readable(found.num_bytes)}, {how}: no fault'
    if not found.has_checksums:
        text += f', but {schema.CHECKSUMS_FILE} is missing, so that they were compared only with '
        text += 'each other'
        return [finding.warned(name, text, 'build the data set again with --overwrite', **facts)]
    return [finding.passed(name, text if is_whole else f'{text}; all of it: {command}', **facts)]


def _sources(data_dir: str) -> list[SourceFile]:
    """The files of latents in place that are there."""
    try:
        latents = columns.read(data_dir, stored_splits.find_build(data_dir)).get(schema.LATENTS)
    except ValueError:  # reported as a fault
        return []
    if not isinstance(latents, columns.Column):
        return []
    return [file for file in latents.find_files() if file]


def _tell(name: str, faults: Sequence[str], command: str) -> Iterator[Finding]:
    mend = (
        'copy the file again from where it is whole, or build the data set again with the '
        'command that built it and --overwrite'
    )
    for fault in faults[:_TOLD]:
        yield finding.failed(name, fault, mend)
    if len(faults) > _TOLD:
        yield finding.failed(name, f'{len(faults) - _TOLD} more faults', f'see {command}')


def _is_data_set(names: Sequence[str]) -> bool:
    begin = schema.INFO_FILE, 'checksums', f'{schema.NAME}-'
    return any(name.startswith(begin) for name in names)


def _check_spots(files: dict[str, SourceFile], told: set[str]) -> list[str]:
    """Reads the last chunk of some shards, each a run of whole records if all is as it was."""
    with concurrent.futures.ThreadPoolExecutor(_SPOTS_AT_ONCE) as threads:
        faults = threads.map(lambda spot: _check_spot(*spot), _spots(files, told))
        return [fault for fault in faults if fault]


def _spots(
    files: dict[str, SourceFile], told: set[str]
) -> Iterator[tuple[SourceFile, str, int, int, int]]:
    """Yields shard, name of the index, place and length of a chunk, and how many records it has."""
    if schema.INFO_FILE not in files.keys() - told:
        return
    info = stored_files.read(files[schema.INFO_FILE], stored_files.Content).data
    for split in stored_splits.parse(bytes(info)):
        name = file_name(split.name, split.build)
        if name in told or name not in files:
            continue
        index = ChunkIndex.parse(bytes(stored_files.read(files[name], stored_files.Content).data))
        chosen = np.unique(np.linspace(0, len(split.file_names) - 1, _SPOTS).round().astype(int))
        for shard in chosen.tolist() if split.file_names else ():
            file, length = files.get(split.file_names[shard]), split.shard_lengths[shard]
            if file is None or file.name in told or not length:
                continue
            first = (length - 1) // schema.CHUNK_STRIDE * schema.CHUNK_STRIDE
            offset, nbytes = index.byte_range(shard, first, length - first)
            yield file, name, int(offset), int(nbytes), length - first


def _check_spot(file: SourceFile, index: str, offset: int, nbytes: int, count: int) -> str:
    """The fault of a chunk; '' if it has none."""
    try:
        data = remote.read_range(file, offset, nbytes)
    except ValueError as error:
        return str(error)
    scan = records.RecordScan()
    scan.add(data)
    scan.end()
    if scan.problem or scan.num_records != count:
        what = scan.problem or f'{scan.num_records} records'
        return (
            f'{file.name}: bytes {offset} to {offset + nbytes} are not the {count} records that '
            f'{index} tells of ({what})'
        )
    return ''
