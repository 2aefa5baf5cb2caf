"""Adds values to the records of a built data set, in files beside its shards; these stay the same.

    python -m coyo11m_tfds.embed_captions --source=SOURCE --encoder=hf:NAME \\
        --out=other.parquet
    python -m coyo11m_tfds.add_column --data_dir=DATA_SET --name=other \\
        --text=other.parquet

    input_pipeline.train_batches(data_dir, text='other', ...)
    input_pipeline.train_batches(data_dir, features=('key', 'other'), ...)

Text embeddings or token ids that `embed_captions` made (`--text`), or numbers of any Parquet file
with a column `key` (`--parquet FILE --column NAME`). Every record needs a value. The file that is
written has a row for each record, in the order of the shards. The description of the columns is
replaced last: until then the data set is what it was, and a command that was killed can be given
again. Keys are read from the shards, all of whose bytes are fetched for that if the data set is on
gs://.
"""

import argparse
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import input_pipeline
from coyo11m_tfds import columns, schema, texts
from coyo11m_tfds.build import manifest
from coyo11m_tfds.columns import AddedColumn
from coyo11m_tfds.process import command_line, ending
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.reading import names, stored_dataset, verified
from coyo11m_tfds.reading.stored_dataset import StoredDataset
from coyo11m_tfds.report.moments import Moments, add_vectors
from coyo11m_tfds.source import embedding_store, matrix_store, part_files, row_store
from coyo11m_tfds.storage import build_lock, file_state, held_folder, stored_files
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.scratch import Scratch, choose_folder

_NAME = re.compile(r'[a-z][a-z0-9_]*')
_TAKEN = {*stored_dataset.READABLE, names.DROP_TEXT, names.MASK, texts.RECORDS}
_ROWS_AT_ONCE = 4096
_CHUNKS_AT_ONCE = 32  # requests to gs://


@dataclasses.dataclass(frozen=True)
class _Values:
    """Values to add, looked up by key.

    Attributes:
        place: path or URL of the file or folder that they come from.
        store: finds them.
        dtype, shape: of a row.
        feature, encoder: see `AddedColumn`.
    """

    place: str
    store: embedding_store.EmbeddingStore | row_store.RowStore
    dtype: np.dtype
    shape: tuple[int, ...]
    feature: str = ''
    encoder: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def add(
    data_dir: str | os.PathLike[str],
    name: str,
    text: str | os.PathLike[str] = '',
    *,
    parquet: str | os.PathLike[str] = '',
    column: str = '',
    scratch_dir: str = '',
) -> AddedColumn:
    """Adds a column to a data set: embeddings, tokens, or a column of a Parquet file.

    What is read is one Parquet file, or a folder of `part-NNNNN-of-MMMMM.parquet`; local or remote.

    Args:
        data_dir: folder of the data set, local or on gs://.
        name: that the column is asked for by: small letters, digits and '_'.
        text: what `embed_captions` made, embeddings or tokens, of any column of captions.
        parquet: files with `column`.
        column: of integers, floats, or lists of these of one length; it keeps its dtype.
        scratch_dir: local folder for the values as a matrix, which takes as much room as they do;
            '' for where a build has it: `.coyo11m_tfds` beside the folder of the data set, or this
            user's cache for one on gs://.

    Raises:
        ValueError: there is no data set, or already a column of this name; the files hold something
            else, or lack the value of a record; or a record is damaged.
        TimeoutError: another process writes this data set.
        OSError: a file cannot be read or written.
    """
    if bool(text) == bool(parquet) or bool(parquet) != bool(column):
        raise ValueError('expected either text, or parquet with column.')
    folder = os.fspath(data_dir).rstrip('/')
    _read(folder)  # where there is no data set there shall be no lock
    with build_lock.hold(folder, wait_seconds=None) as lock:
        stored = _read(folder)
        _check_name(stored, name)
        scratch = choose_folder(schema.NAME, f'{folder}/../../..', os.fspath(scratch_dir))
        os.makedirs(scratch, exist_ok=True)
        if text:
            values = _open_text(os.fspath(text), scratch)
        else:
            values = _open_rows(os.fspath(parquet), column, scratch)
        with held_folder.make(scratch, 'column-') as staging:
            return _add(stored, name, values, lock, staging)


def _read(folder: str) -> StoredDataset:
    stored = stored_dataset.read(folder)
    if stored is None:
        raise ValueError(f'{folder}: is no data set, .../coyo11m_tfds/CONFIG/1.0.0.')
    return stored


def _check_name(stored: StoredDataset, name: str) -> None:
    taken = {*stored.features, *stored.columns} | _TAKEN
    if not _NAME.fullmatch(name) or name in taken:
        raise ValueError(
            f'{stored.folder}: a new column cannot be called {name!r}; taken are {sorted(taken)}. '
            "Use small letters, digits and '_'."
        )


def _hold(scratch: str) -> matrix_store.Hold:
    return lambda file: Scratch(scratch, file.size).hold_showing(file)


def _open_text(place: str, scratch: str) -> _Values:
    store = embedding_store.prepare_store(
        part_files.find(place), cache_dir=scratch, hold=_hold(scratch)
    )
    header = store.header
    return _Values(place, store, store.dtype, store.shape, header.feature, header.to_json())


def _open_rows(place: str, column: str, scratch: str) -> _Values:
    store = row_store.prepare_store(
        part_files.find(place), column, cache_dir=scratch, hold=_hold(scratch)
    )
    return _Values(place, store, store.dtype, store.shape)


def _add(
    stored: StoredDataset, name: str, values: _Values, lock: build_lock.Lock, fallback: str
) -> AddedColumn:
    """Writes the files and puts them into their place, the description of the columns last."""
    destination = Destination(stored.folder)
    destination.sweep()  # what a killed one left
    staging = destination.staging(fallback)
    is_text = values.feature == schema.TEXT_EMBEDDING
    sums = Moments(values.shape[0]) if is_text else None
    try:
        files = {split: columns.file_name(name, split, stored.build) for split in stored.splits}
        lacking = [
            _write(
                os.path.join(staging, file),
                stored,
                split,
                values,
                sums if split == schema.TRAIN else None,
            )
            for split, file in files.items()
        ]
        _check_complete(stored, values, np.concatenate(lacking))
        column = AddedColumn(
            name, values.dtype.name, values.shape, files, values.feature, encoder=values.encoder
        )
        if sums:
            mean, std = sums.mean_and_std()
            column = dataclasses.replace(column, mean=mean, std=std)
        columns.write(staging, {**stored.columns, name: column}, stored.build)
        lock.check()
        _commit(destination, staging, list(files.values()), stored.build)
    finally:
        destination.sweep()
    return column


def _write(
    path: str, stored: StoredDataset, split: str, values: _Values, sums: Moments | None
) -> np.ndarray:
    """Writes the values of a split as a `.npy` file, and adds them to `sums`, if any.

    Returns:
        Keys of records without a value, int64 `(n,)`; with any the file is of no use.
    """
    shape = sum(stored.splits[split].shard_lengths), *values.shape
    lacking = [np.empty(0, np.int64)]
    with (
        file_state.naming(path),
        open(path, 'wb') as file,
        Progress(split, shape[0], 'records') as progress,
    ):
        header = {'descr': values.dtype.newbyteorder('<').str, 'fortran_order': False}
        np.lib.format.write_array_header_1_0(file, header | {'shape': shape})
        for keys in _keys(stored, split):
            rows = values.store.find(keys)
            lacking.append(keys[rows < 0])
            read = values.store.read(rows[rows >= 0])
            file.write(read.data)
            if sums:
                add_vectors(sums, read)
            progress.add(len(keys))
    return np.concatenate(lacking)


def _check_complete(stored: StoredDataset, values: _Values, lacking: np.ndarray) -> None:
    """Raises a ValueError if records with these keys, int64 `(n,)`, lack a value."""
    if not len(lacking):
        return
    remedy = 'Add rows for their keys.'
    if values.feature:
        remedy = (
            'Embed a column of captions that is blank for none of them, or build a data set with '
            'the config field text_embeddings, which leaves such records out.'
        )
    num_records = sum(sum(split.shard_lengths) for split in stored.splits.values())
    raise ValueError(
        f'{values.place}: has nothing for {len(lacking):,} of {num_records:,} records of '
        f'{stored.folder}, such as key {lacking[0]}, and every record needs a value. {remedy}'
    )


def _keys(stored: StoredDataset, split: str) -> Iterator[np.ndarray]:
    """The keys of a split in the order of its records, some at a time."""
    if not any(stored.splits[split].shard_lengths):
        return
    data = input_pipeline.open_data(stored.folder)  # whose index is read once
    if data.split(split) is None:
        raise ValueError(
            f'{stored.folder}: split {split!r} has no chunk index. Build the data set again.'
        )
    batches = input_pipeline.eval_batches(
        data,
        verify=verified.ALWAYS,
        split=split,
        features=(schema.KEY,),
        batch_size=_ROWS_AT_ONCE,
        parallel_reads=_CHUNKS_AT_ONCE,
        prefetch=1,
    )
    for batch in batches:
        yield batch[schema.KEY][batch[names.MASK]]


def _commit(destination: Destination, staging: str, files: list[str], build: str) -> None:
    """Moves files, and what describes them, from `staging` to the data set.

    Checksums are moved before the description of the columns: a column that this does not name does
    not exist, so that after a kill in between the same command adds it.
    """
    names = [*files, schema.of_build(schema.COLUMNS_FILE, build)]
    states = {name: file_state.of_file(os.path.join(staging, name)) for name in names}
    there = stored_files.list_folder(destination.folder)
    if recorded := there.get(schema.of_build(schema.CHECKSUMS_FILE, build)):
        content = stored_files.read(recorded, stored_files.Content)
        manifest.write(staging, manifest.parse(bytes(content.data)) | states, build)
        names.insert(-1, recorded.name)
    for name in names:
        path = os.path.join(staging, name)
        destination.put(path, name, file_state.of_file(path).crc32c)


def parse_flags() -> argparse.Namespace:
    """Parses the command line."""
    parser = command_line.Parser('coyo11m_tfds.add_column', __doc__)
    add_argument = parser.add_argument
    add_argument('--data_dir', required=True, help=stored_dataset.FOLDER_HELP)
    add_argument('--name', required=True, help='of the column, for data.text or features=')
    source = parser.add_mutually_exclusive_group(required=True)
    made = 'what coyo11m_tfds.embed_captions made: a file or a folder'
    source.add_argument('--text', default='', help=made)
    source.add_argument('--parquet', default='', help='any Parquet file with a column key')
    add_argument(
        '--column',
        default='',
        help='of --parquet: numbers, or lists of one length; devices take at most 32 bits',
    )
    add_argument('--scratch_dir', default='', help='local folder for the values on their way')
    flags = parser.parse_args()
    if bool(flags.parquet) != bool(flags.column):
        parser.error('--parquet and --column: expected both or neither')
    return flags


def main() -> None:
    """Runs the command line; bad input ends it with one message and exit status 1."""
    flags = parse_flags()
    command_line.show_log()
    outlook = 'nothing was added, the same command starts again'
    with ending.in_one_line(outlook, (ValueError, OSError, build_lock.Lost)):
        flags.data_dir = stored_dataset.choose(flags.data_dir)
        column = add(**vars(flags))
    what = f'text={column.name!r}' if column.feature else f'features=({column.name!r},)'
    kind = f'{column.dtype} {column.shape}'
    print(f'{flags.data_dir}: {what} has {kind} for each record.')
    if np.dtype(column.dtype).itemsize > 4:
        print('Devices hold numbers of at most 32 bits: `to_device` refuses this column.')


if __name__ == '__main__':
    main()
