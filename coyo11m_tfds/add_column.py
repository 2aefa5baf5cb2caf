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

`--replace` also takes the name of a column that is there, `--remove` removes one. If the latents of
the data set lie in place, and the source has been moved or copied, `--name=latents --source=FOLDER`
says where it is now; its files must be the same.
"""

import argparse
import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import input_pipeline
from coyo11m_tfds import schema
from coyo11m_tfds.convert import in_place
from coyo11m_tfds.dataset import columns, manifest, stored_dataset, texts
from coyo11m_tfds.dataset.columns import AddedColumn, Column, ColumnFile
from coyo11m_tfds.dataset.stored_dataset import StoredDataset
from coyo11m_tfds.process import command_line, ending
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.reading import names, verified
from coyo11m_tfds.report import statistics
from coyo11m_tfds.source import part_files, pt_file, remote_heads, sidecar
from coyo11m_tfds.source.joined import Joined
from coyo11m_tfds.storage import build_lock, file_state, held_folder, source_files, stored_files
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.scratch import Scratch, choose_folder
from coyo11m_tfds.storage.source_files import SourceFile

_NAME = re.compile(r'[a-z][a-z0-9_]*')
_TAKEN = {*stored_dataset.READABLE, names.DROP_TEXT, names.MASK, texts.RECORDS}
_ROWS_AT_ONCE = 4096
_CHUNKS_AT_ONCE = 32  # requests to gs://


@dataclasses.dataclass(frozen=True)
class _Values:
    """Values to add.

    Attributes:
        place: path or URL of the file or folder that they come from.
        joined: the values; the place of each is the number of its record, over all splits.
        dtype, shape: of a row.
        feature, encoder: see `AddedColumn`.
    """

    place: str
    joined: Joined
    dtype: np.dtype
    shape: tuple[int, ...]
    feature: str
    encoder: Mapping[str, Any]


def add(
    data_dir: str | os.PathLike[str],
    name: str,
    text: str | os.PathLike[str] = '',
    *,
    parquet: str | os.PathLike[str] = '',
    column: str = '',
    replace: bool = False,
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
        replace: instead of a column of this name, if there is one.
        scratch_dir: local folder for the values on their way, twice as much room as they take; ''
            for where a build has it: `.coyo11m_tfds` beside the folder of the data set, or this
            user's cache for one on gs://.

    Raises:
        ValueError: there is no data set, or already a column of this name; the files hold something
            else, or lack the value of a record; or a record is damaged.
        TimeoutError: another process writes this data set.
        OSError: a file cannot be read or written.
    """
    if bool(text) == bool(parquet) or bool(parquet) != bool(column):
        raise ValueError('expected either text, or parquet with column.')
    with _editing(data_dir, scratch_dir) as edit:
        _check_name(edit.stored, name, replace)
        place = os.fspath(text or parquet)
        files = part_files.find(place)
        if not files[0].is_remote:  # before the shards are read for their keys
            sidecar.describe(files[0].path, column)
        values = _join(edit.stored, place, files, column, edit.scratch)
        return _add(edit, name, values)


def remove(data_dir: str | os.PathLike[str], name: str) -> None:
    """Removes an added column; runs that read it end with an error.

    Raises:
        ValueError: there is no data set, or no such column.
        TimeoutError, OSError: as of `add`.
    """
    with _editing(data_dir) as edit:
        added = {n for n, x in edit.stored.columns.items() if isinstance(x, AddedColumn)}
        if name not in added:
            raise ValueError(
                f'{edit.stored.folder}: no column {name!r} was added; there are {sorted(added)}.'
            )
        edit.commit({n: x for n, x in edit.stored.columns.items() if n != name})


def move_latents(data_dir: str | os.PathLike[str], source: str | os.PathLike[str]) -> None:
    """Says where the `.pt` files lie now that the latents of a data set are in.

    Args:
        data_dir: folder of the data set, local or on gs://.
        source: folder of the source, whose files of the same names have the same contents, as far
            as the CRC-32s in their directories tell.

    Raises:
        ValueError: there is no data set in place, or a file is missing or another one.
        TimeoutError, OSError: as of `add`.
    """
    with _editing(data_dir) as edit:
        latents = edit.stored.columns.get(schema.LATENTS)
        if not isinstance(latents, Column):
            raise ValueError(f'{edit.stored.folder}: its latents lie in its records, in no source.')
        _, there = source_files.list_files(source, schema.LATENTS_FOLDER, ('.pt',))
        by_name = {os.path.basename(name): file for name, file in there.items()}
        files = [_find_moved(file, by_name, os.fspath(source), edit) for file in latents.files]
        moved = dataclasses.replace(latents, files=tuple(files))
        edit.commit({**edit.stored.columns, schema.LATENTS: moved})


def _find_moved(
    before: ColumnFile, by_name: Mapping[str, SourceFile], source: str, edit: '_Edit'
) -> ColumnFile:
    name = os.path.basename(before.path)
    if name not in by_name:
        raise ValueError(f'{source}: {name} is missing, and latents lie in it. Copy it there.')
    file = by_name[name]
    in_place.check_within_reach(file, edit.stored.folder)
    head = remote_heads.fetch_head(file, edit.scratch, check_crc=False)
    found = in_place.describe(file, pt_file.LatentShard(head, name=file.path))
    if found.digest != before.digest:
        raise ValueError(
            f'{file.path}: is another file than {before.path} was when the data set was built: '
            f'its directory has digest {found.digest}, expected {before.digest}.'
        )
    return found


@dataclasses.dataclass(frozen=True)
class _Edit:
    """A data set whose lock this process holds, to change its columns.

    Attributes:
        stored: the data set.
        destination: its folder.
        staging: local folder for files that `commit` puts there.
        scratch: local folder for other files, empty at first.
        lock: of the data set.
    """

    stored: StoredDataset
    destination: Destination
    staging: str
    scratch: str
    lock: build_lock.Lock

    def commit(self, found: Mapping[str, Column | AddedColumn], files: Sequence[str] = ()) -> None:
        """Puts files into their place, then what describes these columns; removes what is over.

        Checksums are put before the description of the columns: a column that this does not name
        does not exist, so that after a kill in between the same command is given again.
        """
        build, folder = self.stored.build, self.destination.folder
        columns.write(self.staging, found, build)
        names = [*files, schema.of_build(schema.COLUMNS_FILE, build)]
        there = stored_files.list_folder(folder)
        over = there.keys() & columns.left_over(there, found, build)
        if recorded := there.get(schema.of_build(schema.CHECKSUMS_FILE, build)):
            content = bytes(stored_files.read(recorded, stored_files.Content).data)
            states = {x: file_state.of_file(os.path.join(self.staging, x)) for x in names}
            kept = {x: state for x, state in manifest.parse(content).items() if x not in over}
            manifest.write(self.staging, kept | states, build)
            names.insert(-1, recorded.name)
        if not self.lock.is_ours():
            raise OSError(f'{folder}: another process writes there. Run the same command again.')
        for name in names:
            path = os.path.join(self.staging, name)
            self.destination.put(path, name, file_state.of_file(path).crc32c)
        self.destination.remove(over - set(names))


@contextlib.contextmanager
def _editing(data_dir: str | os.PathLike[str], scratch_dir: str = '') -> Iterator[_Edit]:
    """Within it nobody else changes the data set; nothing is left of what it puts elsewhere."""
    folder = os.fspath(data_dir).rstrip('/')
    stored_dataset.open_data(folder)  # where there is no data set there shall be no lock
    with build_lock.hold(folder, wait_seconds=None) as lock:
        stored = stored_dataset.open_data(folder)
        parent = choose_folder(schema.NAME, f'{folder}/../../..', os.fspath(scratch_dir))
        os.makedirs(parent, exist_ok=True)
        destination = Destination(folder)
        with held_folder.make(parent, 'column-') as scratch:
            destination.sweep()  # what a killed one left
            try:
                edit = _Edit(stored, destination, destination.staging(scratch), scratch, lock)
                there = stored_files.list_folder(folder)
                if columns.left_over(there, stored.columns, stored.build):
                    edit.commit(stored.columns)
                yield edit
            finally:
                destination.sweep()


def _check_name(stored: StoredDataset, name: str, replace: bool) -> None:
    taken = {*stored.features, *stored.columns} | _TAKEN
    if replace and isinstance(stored.columns.get(name), AddedColumn):
        return
    if not _NAME.fullmatch(name) or name in taken:
        raise ValueError(
            f'{stored.folder}: a new column cannot be called {name!r}; taken are {sorted(taken)}. '
            "Use small letters, digits and '_'."
        )


def _join(
    stored: StoredDataset, place: str, files: Sequence[SourceFile], column: str, scratch: str
) -> _Values:
    """Brings values into the order of the records; ValueError if a record lacks one."""
    keys = np.concatenate([np.empty(0, np.int64), *_keys(stored)])
    folder = os.path.join(scratch, 'joined')
    downloads = Scratch(os.path.join(scratch, 'source'), max(file.size for file in files))
    sidecar.join(files, folder, keys, hold=downloads.hold_showing, column=column)
    joined = Joined(folder)
    facts = joined.facts
    values = _Values(
        place=place,
        joined=joined,
        dtype=np.dtype(facts['dtype']),
        shape=tuple(facts['shape']),
        feature=sidecar.Header(**facts['header']).feature if 'header' in facts else '',
        encoder=facts.get('header', {}),
    )
    _check_complete(stored, values, np.delete(keys, joined.places))
    return values


def _add(edit: _Edit, name: str, values: _Values) -> AddedColumn:
    """Writes the files and puts them into their place, instead of a column of this name."""
    stored = edit.stored
    is_text = values.feature == schema.TEXT_EMBEDDING
    sums = np.zeros((3, values.shape[0])) if is_text else None
    files = {split: columns.file_name(name, split, stored.build) for split in stored.splits}
    written, first = {}, 0
    for split, file in files.items():
        number = sum(stored.splits[split].shard_lengths)
        written[split] = _write(
            os.path.join(edit.staging, file),
            range(first, first + number),
            values,
            sums if split == schema.TRAIN else None,
        )
        first += number
    column = AddedColumn(
        name,
        values.dtype.name,
        values.shape,
        files,
        written,
        values.feature,
        encoder=values.encoder,
    )
    if sums is not None:
        mean, std = statistics.mean_and_std(sums)
        column = dataclasses.replace(column, mean=mean, std=std)
    others = {n: x for n, x in stored.columns.items() if n != name}
    if name in stored.columns:  # no file of it may be replaced while it is there
        edit.commit(others)
    edit.commit({**others, name: column}, list(files.values()))
    return column


def _write(path: str, places: range, values: _Values, sums: np.ndarray | None) -> str:
    """Writes the values of a split and adds their moments to `sums`; returns their CRC-32C."""
    with (
        file_state.naming(path),
        open(path, 'wb') as file,
        Progress('Writing values', len(places), 'records') as progress,
    ):
        writer = columns.Writer(file, values.dtype, values.shape, len(places))
        for first in range(places.start, places.stop, _ROWS_AT_ONCE):
            some = np.arange(first, min(first + _ROWS_AT_ONCE, places.stop))
            read = sidecar.read(values.joined, some)
            writer.write(read)
            if sums is not None:
                sums += statistics.moments(read)
            progress.add(len(some))
        return writer.finish()


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


def _keys(stored: StoredDataset) -> Iterator[np.ndarray]:
    """The keys of all records, split by split in the order of its records, some at a time."""
    for split in stored.splits:
        if not any(stored.splits[split].shard_lengths):
            continue
        if stored.split(split) is None:
            raise ValueError(
                f'{stored.folder}: split {split!r} has no chunk index. Build the data set again.'
            )
        batches = input_pipeline.eval_batches(
            stored,
            verify=verified.ALWAYS,
            split=split,
            features=(schema.KEY,),
            batch_size=_ROWS_AT_ONCE,
            parallel_reads=_CHUNKS_AT_ONCE,
            prefetch=1,
        )
        num_records = sum(stored.splits[split].shard_lengths)
        with Progress(f'Reading keys of {split}', num_records, 'records') as progress:
            for batch in batches:
                keys = batch[schema.KEY][batch[names.MASK]]
                yield keys
                progress.add(len(keys))


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
    source.add_argument('--remove', action='store_true', help='remove the column')
    source.add_argument('--source', default='', help='where the latents lie in place by now')
    add_argument(
        '--column',
        default='',
        help='of --parquet: numbers, or lists of one length; devices take at most 32 bits',
    )
    add_argument('--replace', action='store_true', help='also a column that is there')
    add_argument('--scratch_dir', default='', help='local folder for the values on their way')
    flags = parser.parse_args()
    if bool(flags.parquet) != bool(flags.column):
        parser.error('--parquet and --column: expected both or neither')
    if flags.source and flags.name != schema.LATENTS:
        parser.error(f'--source: only latents lie in one, expected --name={schema.LATENTS}')
    return flags


def main() -> None:
    """Runs the command line; bad input ends it with one message and exit status 1."""
    flags = parse_flags()
    command_line.show_log()
    outlook = 'nothing was changed, the same command starts again'
    with ending.in_one_line(outlook, (ValueError, OSError)):
        said = _run(flags)
    print(f'{flags.data_dir}: {said}')


def _run(flags: argparse.Namespace) -> str:
    """Does what the flags say; returns what to tell of it."""
    flags.data_dir = stored_dataset.choose(flags.data_dir)
    options = vars(flags)
    is_removed, source = options.pop('remove'), options.pop('source')
    if source:
        move_latents(flags.data_dir, source)
        return f'its latents are read from {source}.'
    if is_removed:
        remove(flags.data_dir, flags.name)
        return f'column {flags.name!r} is removed.'
    column = add(**options)
    what = f'text={column.name!r}' if column.feature else f'features=({column.name!r},)'
    said = f'{what} has {column.dtype} {column.shape} for each record.'
    if np.dtype(column.dtype).itemsize > 4:
        said += ' Devices hold numbers of at most 32 bits: `to_device` refuses this column.'
    return said


if __name__ == '__main__':
    main()
