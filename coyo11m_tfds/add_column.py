"""Adds a column to a built data set, in files next to its shards.

    python -m coyo11m_tfds.embed_captions --source=SOURCE --encoder=hf:NAME \\
        --out=other
    python -m coyo11m_tfds.add_column --data_dir=DATA_SET --name=other \\
        --text=other

    input_pipeline.train_batches(data_dir, text='other', ...)
    input_pipeline.train_batches(data_dir, features=('key', 'other'), ...)

The values are text embeddings or token ids from `embed_captions` (`--text`), numbers from any
Parquet file with a column `key` (`--parquet FILE --column NAME`), or numbers of the source, in MDS
shards, Parquet files or `.json` members of tars (`--source FOLDER --column NAME`). Every record
needs a value.
The new file has a row for each record, in the order of the shards. The program replaces the
description of the columns last. Until then the data set is unchanged, and a killed command can be
repeated. The program reads the keys from the shards; if the data set is on gs://, it fetches all
bytes of the shards.

`--replace` replaces an existing column of that name, `--remove` removes the column. If the source
of latents in place has been moved or copied, `--name=latents --source=FOLDER` records the new
folder, local, on gs:// or on hf://; its files must be the same. So a data set that was built from a
copy of the hub's files can be moved to those, and needs the copy no longer.
"""

import argparse
import dataclasses
import functools
import hashlib
import keyword
import os
import re
from collections.abc import Iterator, Sequence

import numpy as np

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.convert import tasks
from coyo11m_tfds.dataset import columns, stored_dataset, texts
from coyo11m_tfds.dataset.column_file import ColumnWriter
from coyo11m_tfds.dataset.columns import AddedColumn, Column, InPlaceColumn, InPlaceFile
from coyo11m_tfds.dataset.dataset_edit import DatasetEdit, edit_dataset
from coyo11m_tfds.dataset.stored_dataset import StoredDataset
from coyo11m_tfds.process import command_line
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.report import statistics
from coyo11m_tfds.source import formats, sidecar, source_folder, source_latents
from coyo11m_tfds.source.keyed_values import KeyedValues
from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import StoredFile

_NAME = re.compile(r'[a-z][a-z0-9_]*')
_BATCH_NAMES = (
    input_pipeline.CROP,
    input_pipeline.DROP_TEXT,
    input_pipeline.MASK,
    input_pipeline.NOISE_SEED,
)
# A column of such a name would hide what batches have under it.
_RESERVED_NAMES = {*stored_dataset.READABLE, *_BATCH_NAMES, texts.RECORDS_TEXT}
_ROWS_AT_ONCE = 4096
_CHUNKS_AT_ONCE = 32  # requests to gs://
_DIGESTED_AT_ONCE = 4 << 20  # bytes


def add(
    data_dir: str | os.PathLike[str],
    name: str,
    text: str | os.PathLike[str] = '',
    *,
    parquet: str | os.PathLike[str] = '',
    source: str | os.PathLike[str] = '',
    column: str = '',
    replace: bool = False,
    scratch_dir: str = '',
) -> AddedColumn:
    """Adds a column to a data set: embeddings, tokens, or a column of a Parquet file.

    Args:
        data_dir: Folder of the data set, local or on gs://.
        name: Name of the new column: a small letter, then small letters, digits and '_'.
        text: Folder that `embed_captions` made of any column of captions, with embeddings or
            tokens; local or remote.
        parquet: Any Parquet file, or a folder of `part-NNNNN-of-MMMMM.parquet`, local or remote.
        source: The source of the data set, with numbers next to its latents.
        column: Column of `parquet` (integers, floats, or lists of these of one length), which keeps
            its dtype; or numbers of `source`, whose `.json` fractions become float32.
        replace: Whether the name may be that of an added column.
        scratch_dir: Local folder for temporary files, with room for twice the size of the values;
            '' for `.coyo11m_tfds` in the `--data_dir` of the build or, for a data set on gs://,
            this user's cache.

    Raises:
        ValueError: A wrong argument, values that cannot be read, or a record without a value.
        OSError: A folder cannot be read or written, or another process changes the data set.
    """
    origins = [os.fspath(place) for place in (text, parquet, source) if place]
    # A text is read under its own name; files of others have many columns.
    is_column_missing = not text and not column
    is_column_needless = bool(text and column)
    if len(origins) != 1 or is_column_missing or is_column_needless:
        raise ValueError('expected either text, or parquet or source with column.')
    [origin] = origins
    with edit_dataset(data_dir, scratch_dir) as edit:
        # Under the lock, as another process may add a column of this name before it.
        _check_name(edit.stored, name, replace)
        values_place = origin
        # Numbers of the source become a Parquet file first, which is read like any other.
        if source:
            latent_files = source_folder.find_source(source).latent_files
            latents_from = _read_latents_from(edit.stored)
            values_place = source_latents.write_numbers(
                latent_files, column, edit.scratch, latents_from
            )
        files = sidecar.find_sidecar_files(values_place)
        # A wrong file is refused before all shards are read for their keys.
        if files[0].local_path:
            sidecar.describe_values(files[0].path, column)
        # The empty array is for a data set without records.
        key_batches = [np.empty(0, np.int64)]
        key_batches += _read_record_keys(edit.stored)
        keys = np.concatenate(key_batches)
        values = _join_values(edit, files, column, keys)
        remedy = 'Add rows for their keys.'
        if text:
            remedy = 'Embed a column without blank captions, or build with text_embeddings.'
        _check_complete(values, keys, origin, edit.stored.folder, remedy)
        new_column = _write_values(edit, name, values)
        new_files = list(new_column.files.values())
        edit.commit({**edit.stored.columns, name: new_column}, new_files)
        return new_column


def _check_complete(
    values: KeyedValues, keys: np.ndarray, origin: str, folder: str, remedy: str
) -> None:
    """Raises a ValueError, which ends with the remedy, if a record has no value.

    `keys` are those of all records, int64 `(n,)`; the `places` of values are indices of them.
    """
    missing = np.delete(keys, values.places)
    if len(missing):
        raise ValueError(
            f'{origin}: has no value for {len(missing):,} of {len(keys):,} records of {folder}, '
            f'such as key {missing[0]}, and every record needs a value. {remedy}'
        )


def _join_values(
    edit: DatasetEdit, files: Sequence[StoredFile], column: str, keys: np.ndarray
) -> KeyedValues:
    """Returns the values of all records that have one, by their numbers."""
    folder = os.path.join(edit.scratch, 'joined')
    downloads = Scratch(os.path.join(edit.scratch, 'source'))
    hold = functools.partial(downloads.hold, shows=True)
    sidecar.join_values(files, folder, keys, hold=hold, column=column)
    return KeyedValues(folder)


def _columns_without(name: str, stored: StoredDataset) -> dict[str, Column]:
    """Returns all columns of a data set but the one of a name, if there is such a column."""
    return {other: column for other, column in stored.columns.items() if other != name}


def remove_column(data_dir: str | os.PathLike[str], name: str) -> None:
    """Removes an added column; runs that read it end with an error.

    Raises a ValueError if no such column was added.
    """
    with edit_dataset(data_dir) as edit:
        # Latents in place are a column, too, and the only copy of what its records need.
        added_names = []
        for other, column in edit.stored.columns.items():
            if isinstance(column, AddedColumn):
                added_names.append(other)
        if name not in added_names:
            raise ValueError(
                f'{edit.stored.folder}: no column {name!r} was added; there are '
                f'{sorted(added_names)}.'
            )
        edit.commit(_columns_without(name, edit.stored))


def move_latents(data_dir: str | os.PathLike[str], source: str | os.PathLike[str]) -> None:
    """Records the present folder, `source`, of a data set's latents in place.

    Files of a copy that is still there are read to its end and compared with the hub's SHA-256.
    Raises a ValueError for latents in records, and for a folder without the same files.
    """
    with edit_dataset(data_dir) as edit:
        latents = edit.stored.columns.get(schema.LATENTS)
        if not isinstance(latents, InPlaceColumn):
            raise ValueError(f'{edit.stored.folder}: its latents are in its records, not in files.')
        latent_files = source_folder.find_source(source).latent_files
        # All names first: a folder that lacks a file is refused before any is opened.
        new_files = [_find_same_name(file, latent_files, source) for file in latents.files]
        # All outlines next: they take seconds, and whole files minutes.
        moved_files = []
        for former, file in zip(latents.files, new_files, strict=True):
            moved_files.append(_describe_moved(former, file, edit))
        _compare_with_hub(latents.files, new_files)
        moved = dataclasses.replace(latents, files=tuple(moved_files))
        edit.commit({**edit.stored.columns, schema.LATENTS: moved})


def _find_same_name(
    former: InPlaceFile, latent_files: Sequence[StoredFile], source: str | os.PathLike[str]
) -> StoredFile:
    """Returns the file of a source with the name of a former file; ValueError without one."""
    matches = {}
    for file in latent_files:
        # Shards of several sub-folders have the same names, and labels with these.
        name = file.label or file.name
        # With the slashes, so that 'b.pt' is not taken for 'ab.pt'.
        if f'/{former.path}'.endswith(f'/{name}'):
            matches[name] = file
    if not matches:
        name = os.path.basename(former.path)
        raise ValueError(f'{source}: {name} is missing, but holds latents. Copy it there.')
    # The name of a shard beside the sub-folders is also the end of the path of one in them.
    return matches[max(matches, key=len)]


def _describe_moved(former: InPlaceFile, file: StoredFile, edit: DatasetEdit) -> InPlaceFile:
    """Returns the file that `former` has become; ValueError if its outline is another."""
    tasks.check_within_reach(file, edit.stored.folder)
    head = formats.format_of(file).fetch_head(file, edit.scratch, check_crc=False)
    opened = formats.open_file(file, head, _read_latents_from(edit.stored))
    moved_file = tasks.make_column_file(file, opened)
    if moved_file.digest != former.digest:
        raise columns.changed_file_error(
            file.path, 'outline has digest', moved_file.digest, former.digest
        )
    return moved_file


def _compare_with_hub(former_files: Sequence[InPlaceFile], new_files: Sequence[StoredFile]) -> None:
    """Compares former files with the SHA-256 of those on the hub; ValueError for another one.

    A former file on the hub too is compared by its recorded SHA-256, a local one is read. A local
    one that is gone cannot be compared.
    """
    pairs = []
    for former, file in zip(former_files, new_files, strict=True):
        kind, _, expected = (file.checksum or '').partition(':')
        former_kind, _, recorded = former.version.partition(':')
        # On a disk or in a bucket, the outline and the checksum of each row have to do.
        if kind != 'sha256':
            continue
        if former_kind == kind and recorded != expected:
            raise columns.changed_file_error(file.path, 'SHA-256 is', expected, recorded)
        if not former.version and os.path.isfile(former.path):
            pairs.append((former.path, file))
    num_bytes = sum(file.size for _, file in pairs)
    with Progress('Comparing the copy with the hub', num_bytes, 'B') as progress:
        for path, file in pairs:
            computed = _compute_sha256(path, progress.add)
            if file.checksum != f'sha256:{computed}':
                raise ValueError(
                    f'{file.path}: is another file than {path}, on which the data set was built: '
                    f'its SHA-256 is {file.checksum}, that of the copy {computed}. Name the commit '
                    'that was copied, or build the data set again.'
                )


def _compute_sha256(path: str, on_bytes: file_state.OnBytes) -> str:
    """Returns the hex SHA-256 of a local file; `on_bytes(n)` counts the bytes read."""
    digest = hashlib.sha256()
    with file_state.naming(path), open(path, 'rb', buffering=0) as file:
        while block := file.read(_DIGESTED_AT_ONCE):
            digest.update(block)
            on_bytes(len(block))
    return digest.hexdigest()


def _read_latents_from(stored: StoredDataset) -> schema.LatentsFrom:
    """Returns where latents and keys are in the source, as the settings of the build say."""
    settings = stored.metadata.get(schema.META_SETTINGS) or {}
    return schema.parse_latents_from(
        settings.get('latents_from', ''), settings.get('key_column', '')
    )


def _check_name(stored: StoredDataset, name: str, replace: bool) -> None:
    """Raises a ValueError unless a column may have this name, or replaces one that has it."""
    used_names = {*stored.features, *stored.columns} | _RESERVED_NAMES
    # Not latents in place, which no column of numbers can replace.
    if replace and isinstance(stored.columns.get(name), AddedColumn):
        return
    # Conditions are parsed as Python, in which such a word is no name.
    if keyword.iskeyword(name):
        raise ValueError(
            f'{stored.folder}: a new column cannot be called {name!r}, which no condition could '
            f"name. Call it '{name}_', for example."
        )
    if not _NAME.fullmatch(name) or name in used_names:
        raise ValueError(
            f'{stored.folder}: a new column cannot be called {name!r}. Expected a small letter, '
            f"then small letters, digits and '_', and none of the names {sorted(used_names)}."
        )


def _write_values(edit: DatasetEdit, name: str, values: KeyedValues) -> AddedColumn:
    """Writes the files of a column into the staging folder, one for each split.

    The places of `values` are the numbers of the records, split by split.
    """
    # A Parquet file of somebody else's has no header, and its numbers are no text.
    encoder = values.facts.get('header', {})
    feature = ''
    if encoder:
        feature = sidecar.SidecarHeader(**encoder).feature
    dtype = np.dtype(values.facts['dtype'])
    shape = tuple(values.facts['shape'])
    # Only embeddings are standardized by a model.
    moments = None
    if feature == schema.TEXT_EMBEDDING:
        moments = np.zeros((3, shape[0]))
    files = {}
    crc32c = {}
    begin = 0
    for split in edit.stored.splits.values():
        path = os.path.join(edit.staging, 'values')
        with (
            file_state.naming(path),
            open(path, 'wb') as file,
            Progress('Writing values', split.num_records, 'records') as progress,
        ):
            writer = ColumnWriter(file, dtype, shape, split.num_records)
            end = begin + split.num_records
            for start in range(begin, end, _ROWS_AT_ONCE):
                stop = min(start + _ROWS_AT_ONCE, end)
                records = np.arange(start, stop)
                rows = values.read_array(records)
                writer.write(rows)
                # Statistics are those of what a model is trained on.
                if moments is not None and split.name == schema.TRAIN:
                    moments += statistics.moments(rows)
                progress.add(len(records))
            crc32c[split.name] = writer.finish()
        begin = end
        label = split.name
        # The files of a column that is replaced stay until the new ones are described, and no
        # reader may take one for the other.
        if name in edit.stored.columns:
            label = f'{split.name}_{crc32c[split.name]}'
        files[split.name] = columns.column_file_name(name, label, edit.stored.build)
        os.rename(path, os.path.join(edit.staging, files[split.name]))
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    if moments is not None:
        mean, std = statistics.mean_and_std(moments)
    return AddedColumn(
        name=name,
        dtype=dtype.name,
        shape=shape,
        files=files,
        crc32c=crc32c,
        feature=feature,
        mean=mean,
        std=std,
        encoder=encoder,
    )


def _read_record_keys(stored: StoredDataset) -> Iterator[np.ndarray]:
    """Yields the keys of all records, split by split in the order of its records."""
    for split in stored.splits.values():
        if not split.num_records:
            continue
        if stored.split(split.name) is None:
            raise ValueError(
                f'{stored.folder}: split {split.name!r} has no chunk index. Build the data set '
                'again.'
            )
        batches = input_pipeline.eval_batches(
            stored,
            # A wrong key would give its record the value of another one, for good.
            verify='always',
            split=split.name,
            features=(schema.KEY,),
            batch_size=_ROWS_AT_ONCE,
            parallel_reads=_CHUNKS_AT_ONCE,
            prefetch=1,
        )
        with Progress(f'Reading keys of {split.name}', split.num_records, 'records') as progress:
            for batch in batches:
                # Zeros fill the last batch.
                is_record = batch[input_pipeline.MASK]
                keys = batch[schema.KEY][is_record]
                yield keys
                progress.add(len(keys))


def main() -> None:
    """Runs the command line."""
    parser = command_line.Parser('coyo11m_tfds.add_column', __doc__)
    add = parser.add_argument
    add('--data_dir', required=True, help=stored_dataset.FOLDER_HELP)
    add('--name', required=True, help='name of the column, for data.text or features=')
    source = parser.add_mutually_exclusive_group(required=True).add_argument
    text_help = 'add the embeddings or tokens in this folder, made by coyo11m_tfds.embed_captions'
    source('--text', default='', help=text_help)
    source('--parquet', default='', help='Parquet file with a column key, to add its --column')
    source('--remove', action='store_true', help='remove the column')
    source_help = 'source, to add its --column, or where latents in place lie (--name=latents)'
    source('--source', default='', help=source_help)
    column_help = 'that column: numbers, or lists of one length; devices take at most 32 bits'
    add('--column', default='', help=column_help)
    add('--replace', action='store_true', help='replace a column of this name')
    scratch_help = 'local folder for temporary files (next to the data sets)'
    add('--scratch_dir', default='', help=scratch_help)
    flags = parser.parse_args()
    if flags.column and not (flags.parquet or flags.source):
        parser.error('--column: expected only with --parquet or --source')
    if flags.parquet and not flags.column:
        parser.error('--parquet: expected with --column')
    if flags.source and not flags.column and flags.name != schema.LATENTS:
        parser.error(f'--source: expected --column, or --name={schema.LATENTS}')
    command_line.show_log()
    # True at any moment: readers know only what the description names, which comes last.
    with command_line.ends_in_one_line('nothing was changed, the same command starts again'):
        message = _run(flags)
    command_line.print_lines(f'{flags.data_dir}: {message}')


def _run(flags: argparse.Namespace) -> str:
    """Runs the command of the flags; returns the message about its result."""
    # `main` has checked that the flags fit together.
    if flags.source and not flags.column:
        move_latents(flags.data_dir, flags.source)
        return f'its latents are read from {flags.source}.'
    if flags.remove:
        remove_column(flags.data_dir, flags.name)
        return f'column {flags.name!r} is removed.'
    column = add(
        flags.data_dir,
        flags.name,
        flags.text,
        parquet=flags.parquet,
        source=flags.source,
        column=flags.column,
        replace=flags.replace,
        scratch_dir=flags.scratch_dir,
    )
    usage = f'features=({column.name!r},)'
    if column.feature:
        usage = f'text={column.name!r}'
    message = f'{usage} has {column.dtype} {column.shape} for each record.'
    if np.dtype(column.dtype).itemsize > 4:
        message += ' Devices hold numbers of at most 32 bits: `to_device` refuses this column.'
    return message


if __name__ == '__main__':
    main()
