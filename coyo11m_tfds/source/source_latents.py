"""Keys, rows and dtype of all latent files of a source; everything except the latents.

Every file is checked before a build writes anything, of remote files only the head. Captions and
labels next to the latents are copied into Parquet files.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.foreign.file_names import find_first
from coyo11m_tfds.process.errors import FieldError
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.source import formats, keyed_values, sidecar
from coyo11m_tfds.source.latent_file import LABELS, ColumnNames, LatentFile
from coyo11m_tfds.source.pt_file import RowsDisagreeError
from coyo11m_tfds.storage.stored_file import StoredFile

# A head takes a few requests, and waiting for their answers is most of the time.
_HEADS_AT_ONCE = 8
_MAX_LABELS = 1 << 24


@dataclasses.dataclass(frozen=True)
class FileHead:
    """The rows of one `LatentFile`, or an error in place of the keys if its tensors disagree."""

    keys: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    embedding_dim: int | None
    digest: str
    moments: str = ''  # that of the `LatentFile`
    disagreement: RowsDisagreeError | None = None


class FileTexts(NamedTuple):
    """The captions and labels of one file, with their columns, if they are requested."""

    captions: tuple[str, pa.Array] | None = None
    labels: tuple[str, np.ndarray] | None = None  # classes, int64 (n,)


@dataclasses.dataclass(frozen=True)
class SourceOptions:
    """The contents to read from the files of a source."""

    latents: schema.LatentsFrom = schema.ANY_LATENTS
    captions: str | None = None  # column of captions; None if they come from Parquet files
    no_captions: str = ''  # beginning of the message for a file without these captions
    labels: bool = False  # whether to read labels in addition to such captions
    # Whether duplicate keys, and files whose tensors disagree, are no error.
    drop_bad: bool = False
    check_crc: bool = True  # whether to compare the small members of `.pt` files


def _read_head(
    file: StoredFile, head_dir: str | os.PathLike[str], options: SourceOptions
) -> tuple[FileHead, FileTexts]:
    """Opens one file, and returns what is kept of it; see `_open_head`."""
    try:
        with _open_head(file, head_dir, options) as latents:
            head = FileHead(
                keys=latents.keys,
                dtype=latents.dtype,
                shape=latents.shape,
                embedding_dim=latents.embedding_dim,
                digest=latents.digest,
                moments=latents.moments,
            )
            return head, _read_texts(latents, options)
    except RowsDisagreeError as error:
        if not options.drop_bad:
            raise
        # The file has no rows then, and is reported.
        head = FileHead(
            keys=np.empty(0, np.int64),
            dtype='',
            shape=(),
            embedding_dim=None,
            digest=error.digest,
            disagreement=error,
        )
        return head, FileTexts()


def write_numbers(
    files: Sequence[StoredFile],
    column: str,
    folder: str | os.PathLike[str],
    latents: schema.LatentsFrom,
) -> str:
    """Copies numbers next to the latents into a Parquet file in `folder`, and returns its path.

    The file has `key` and `column`, null for a row without a number. Raises a ValueError for a
    file of latents without the column, and for types that no common one holds.
    """

    def read_one(file: StoredFile) -> pa.Table:
        """Returns the keys and the numbers of one file."""
        with _open_head(file, folder, SourceOptions(latents)) as shard:
            names = shard.column_names()
            count = len(shard.keys)
            # Other files may have numbers in a column that is empty in this one.
            if not count or column in names.empty:
                numbers = pa.nulls(count)
            elif column in names.numbers:
                numbers = shard.number_column(column)
            else:
                raise ValueError(
                    f"{file.path}: has no numbers '{column}'; it has {list(names.numbers)}."
                )
            return pa.table({schema.PARQUET_KEY: pa.array(shard.keys), column: numbers})

    with ThreadPool(_HEADS_AT_ONCE) as threads:
        tables = list(threads.map(read_one, files))
    try:
        table = pa.concat_tables(tables, promote_options='permissive')
    except pa.ArrowException as error:
        raise ValueError(
            f"{files[0].path}: its numbers '{column}' and those of other files are of types that "
            f'cannot be combined ({error}). Write them with one type in all files.'
        ) from None
    # A sidecar with a repeated key would be refused; a build takes the first row, too.
    firsts, _ = keyed_values.order_by_key(table.column(0).to_numpy())
    path = os.path.join(folder, 'numbers-of-files.parquet')
    pq.write_table(table.take(firsts), path)
    return path


@contextlib.contextmanager
def _open_head(
    file: StoredFile, head_dir: str | os.PathLike[str], options: SourceOptions
) -> Iterator[LatentFile]:
    """Opens a file, of a remote one the head, which is removed at the end of the block."""
    path = formats.format_of(file).fetch_head(file, head_dir, check_crc=options.check_crc)
    try:
        # Not kept open: all files together are 300 GB of mapped memory.
        yield formats.open_file(file, path, options.latents)
    finally:
        if not file.local_path:
            os.remove(path)


def _read_texts(file: LatentFile, options: SourceOptions) -> FileTexts:
    """Returns the captions and labels of a file that the options ask for.

    Raises a ValueError if it does not have them.
    """
    # Neither texts nor labels can be missing where there are no rows.
    if not len(file.keys):
        return FileTexts()
    names = file.column_names()
    column = ''
    if options.captions is not None:
        column = _find_captions(file.path, names, options)
        key_column = options.latents.key_column
        if key_column not in ('', file.key_column):
            raise FieldError(
                'key_column', key_column, f'{file.path} has no such integers; set key_column.'
            )
    if options.labels and not names.labels:
        raise ValueError(f'{file.path}: has no labels; expected one of {", ".join(LABELS)}.')
    captions: tuple[str, pa.Array] | None = None
    if column in names.empty:
        captions = column, pa.nulls(len(file.keys), pa.large_binary())
    elif column:
        captions = column, file.text_column(column)
    # Without captions, the labels take their place as text.
    are_labels_captions = options.captions is not None and not column
    if not options.labels and not are_labels_captions:
        return FileTexts(captions)
    labels = _read_labels(file, names.labels)
    if are_labels_captions:
        captions = names.labels, labels.cast(pa.string()).cast(pa.large_binary())
    classes = labels.cast(pa.int64()).to_numpy()
    return FileTexts(captions, (names.labels, classes))


def _read_labels(file: LatentFile, name: str) -> pa.Array:
    """Reads the labels of a file; raises a ValueError if they cannot be numbers of classes."""
    labels = file.number_column(name)
    bounds = pc.min_max(labels).as_py()
    if labels.null_count or bounds['min'] < 0 or bounds['max'] >= _MAX_LABELS:
        raise ValueError(
            f'{file.path}: {name} are from {bounds["min"]} to {bounds["max"]}, '
            f'{labels.null_count} missing; expected 0 to {_MAX_LABELS - 1}.'
        )
    return labels


def _find_captions(path: str, names: ColumnNames, options: SourceOptions) -> str:
    """Returns the column of captions; '' if labels take their place."""
    is_default = options.captions == schema.DEFAULT_CAPTION_COLUMN
    usual_names: Sequence[str] = [options.captions or '']
    # By default, any of the usual names will do.
    if is_default:
        usual_names = schema.CAPTION_COLUMNS
    # A column without any text stands for one that has texts in other files.
    for columns in (names.texts, names.empty):
        column = find_first(usual_names, columns)
        if column:
            return column
    # By default, labels also serve.
    if is_default and names.labels:
        return ''
    # A column of the name with something else is worth another message.
    others = {**dict.fromkeys(names.numbers, 'numbers'), **names.others}
    column = find_first(usual_names, others)
    if column:
        raise ValueError(
            f'{path}: {column} holds {others[column]}, expected texts, one for each row; its texts '
            f'are {list(names.texts)}. Set caption_column.'
        )
    raise ValueError(
        f"{options.no_captions}: {path}: has no captions '{options.captions}'; its texts are "
        f'{list(names.texts)}. Set caption_column.'
    )


class TextTables:
    """Writes the captions and labels of files, in turn, into Parquet files with keys."""

    COLUMN = schema.CAPTION  # of the captions, whatever their name in the files

    def __init__(self, folder: str | os.PathLike[str]):
        self.captions = ''  # path of the captions, if any
        self.caption_column = ''  # their name in the files
        self.labels = ''  # path of the labels, a sidecar of tokens, if any
        self._folder = os.fspath(folder)
        self._writer: pq.ParquetWriter | None = None
        self._has_text = False  # whether a file before had any
        # Of the files with labels, each.
        self._label_keys: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []
        self._label_column = ''

    def add(self, path: str, keys: np.ndarray, file_texts: FileTexts) -> None:
        """Adds the rows of a file; raises a ValueError if its columns differ from those before."""
        if file_texts.captions:
            self._add_captions(path, keys, *file_texts.captions)
        if file_texts.labels:
            self._label_column, labels = file_texts.labels
            self._label_keys.append(keys)
            self._labels.append(labels)

    def _add_captions(self, path: str, keys: np.ndarray, name: str, texts: pa.Array) -> None:
        """Writes the captions of a file, which are in the column `name` of it."""
        if self._writer is None:
            self.captions = os.path.join(self._folder, 'captions-of-files.parquet')
            fields = [(schema.PARQUET_KEY, pa.int64()), (self.COLUMN, pa.large_binary())]
            self._writer = pq.ParquetWriter(
                self.captions, pa.schema(fields), write_page_checksum=True
            )
        # Where all rows are null, the name says nothing.
        has_text = texts.null_count < len(texts)
        if has_text and self._has_text and name != self.caption_column:
            raise ValueError(
                f"{path}: has captions '{name}', expected '{self.caption_column}' as in the "
                'files before it. Give the column one name in all files, or set caption_column '
                'to one that all of them have.'
            )
        if has_text or not self.caption_column:
            self.caption_column = name
        self._has_text |= has_text
        self._writer.write_table(pa.table([keys, texts], schema=self._writer.schema))

    def close(self) -> None:
        """Completes the files."""
        if self._writer:
            self._writer.close()
        if not self._labels:
            return
        all_keys = np.concatenate(self._label_keys)
        all_labels = np.concatenate(self._labels)
        # Each key once, as a sidecar has to have it; the build drops the other rows.
        firsts, _ = keyed_values.order_by_key(all_keys)
        keys = all_keys[firsts]
        labels = all_labels[firsts]
        header = sidecar.SidecarHeader(
            dim=1,
            encoder=schema.LABELS,
            revision='1',
            max_tokens=1,
            caption_column=self._label_column,
            captions_digest=schema.LABELS,
            vocabulary=int(labels.max(initial=0)) + 1,
        )
        tokens = labels.astype(np.int32)[:, None]
        self.labels = os.path.join(self._folder, 'labels-of-files.parquet')
        sidecar.write_sidecar(self.labels, keys, tokens, schema.TOKENS, header.to_metadata())


def _check_same_kind(heads: Sequence[tuple[str, FileHead]]) -> None:
    """Raises a ValueError unless all files, given with their paths, have latents of one kind."""
    first_path, first = heads[0]
    for path, head in heads:
        if (head.dtype, head.shape) != (first.dtype, first.shape):
            raise ValueError(
                f'{path}: latents are {head.dtype} {head.shape}, but those of {first_path} are '
                f'{first.dtype} {first.shape}; expected one kind. Make a source of each kind.'
            )


class SourceLatents:
    """The keys and properties of all files of latents."""

    def __init__(
        self,
        files: Sequence[StoredFile],
        heads: Sequence[FileHead],
        check_crc: bool,
        texts: TextTables,
    ):
        """Takes texts that are valid as long as the folder of heads exists."""
        self.files = tuple(files)
        self.texts = texts
        # Of all rows in the files' order, int64, with the index of each file's first row and, last,
        # the number of all rows.
        self.keys = np.concatenate([head.keys for head in heads])
        ends = np.cumsum([len(head.keys) for head in heads])
        self.starts = np.append(0, ends)
        self.digests = tuple(head.digest for head in heads)
        # The first row of each key is the one that counts.
        first_rows, _ = keyed_values.order_by_key(self.keys)
        self.duplicate = np.ones(len(self.keys), bool)
        self.duplicate[first_rows] = False
        versions = []
        # Files whose tensors disagree are left out, because keys cannot be assigned to rows.
        disagreeing_files = []
        disagreeing_keys = [np.empty(0, np.int64)]
        good: list[tuple[str, FileHead]] = []
        for file, head in zip(files, heads, strict=True):
            version = head.digest
            # A digest without checksums would not change with every change of the latents.
            if not (check_crc and file.path.endswith('.pt')):
                version = f'{head.digest} {file.version}'
            versions.append(version)
            if head.disagreement:
                disagreeing_files.append(file.path)
                disagreeing_keys.append(head.disagreement.keys)
            elif len(head.keys):
                good.append((file.path, head))
        self.versions = tuple(versions)
        self.disagreeing_files = tuple(disagreeing_files)
        self.disagreeing = np.concatenate(disagreeing_keys)
        if not good:
            others = ''
            # A dry run looks at some files of a source alone.
            if len(files) > 1:
                others = f', nor has any other of the {len(files):,} files that were opened'
            raise ValueError(f'{files[0].path}: has no rows{others}.')
        _check_same_kind(good)
        _, first = good[0]
        self.dtype = first.dtype
        self.shape = first.shape
        self.moments = first.moments
        self._embedding_dims = [(path, head.embedding_dim) for path, head in good]

    @classmethod
    def read(
        cls,
        files: Sequence[StoredFile],
        head_dir: str | os.PathLike[str],
        options: SourceOptions,
    ) -> 'SourceLatents':
        """Opens and checks every file.

        `head_dir` is an existing, empty folder for the heads of remote files, some MB each, and for
        captions and labels. Raises a ValueError for a damaged file, for files of different kinds
        and, unless `options.drop_bad`, for repeated keys and for tensors that disagree.
        """
        heads = []
        texts = TextTables(head_dir)
        read_one = functools.partial(_read_head, head_dir=head_dir, options=options)
        with (
            Progress('Checking the source', len(files), 'files') as progress,
            ThreadPool(_HEADS_AT_ONCE) as threads,
        ):
            # In the order of the files, whichever is read first: so the tables are always the same.
            for file, (head, file_texts) in zip(files, threads.map(read_one, files), strict=True):
                texts.add(file.path, head.keys, file_texts)
                heads.append(head)
                progress.add(1)
        texts.close()
        disagreements = []
        num_rows = 0
        for head in heads:
            num_rows += len(head.keys)
            if head.disagreement:
                disagreements.append(head.disagreement)
        # If no file is good, there is no kind of latents to go on with, whatever may be dropped.
        if disagreements and not num_rows:
            raise disagreements[0]
        for error in disagreements:
            logging.warning('left out: %s', error)
        latents = cls(files, heads, options.check_crc, texts)
        if not options.drop_bad:
            latents._check_unique()
        return latents

    @property
    def num_rows(self) -> int:
        """Number of rows in all files, including files that are left out."""
        return len(self.keys) + len(self.disagreeing)

    def files_of_key(self, row: int) -> list[str]:
        """Returns the paths of files that hold the key of this row, up to the row's own file."""
        rows = np.flatnonzero(self.keys[: row + 1] == self.keys[row])
        file_numbers = np.unique(self._file_of(rows))
        return [self.files[number].path for number in file_numbers.tolist()]

    def common_embedding_dim(self) -> int:
        """Returns the width of `embeddings`; raises a ValueError unless all files have the same."""
        # All files, also the first: any of them may lack its embeddings.
        first_path, first = self._embedding_dims[0]
        for path, dim in self._embedding_dims:
            if dim is None:
                raise ValueError(
                    f"{path}: lacks '{schema.PT_EMBEDDINGS}', which text_embeddings='pt' asks for. "
                    'Name a file made by coyo11m_tfds.embed_captions instead.'
                )
            if dim != first:
                raise ValueError(
                    f'{path}: {schema.PT_EMBEDDINGS} has {dim} numbers a row, but {first_path} '
                    f'has {first}; expected one width in all files.'
                )
        assert first is not None
        return first

    def _check_unique(self) -> None:
        """Raises a ValueError, which names two rows of one key, if a key occurs twice."""
        duplicates = np.flatnonzero(self.duplicate)
        if not duplicates.size:
            return
        # One example, of the first repeated key and the two first rows that have it.
        key = self.keys[duplicates[0]]
        rows = np.flatnonzero(self.keys == key)[:2]
        places = []
        for row, number in zip(rows, self._file_of(rows), strict=True):
            row_in_file = row - self.starts[number]
            places.append(f'{self.files[number].path}: row {row_in_file}')
        first, second = places
        repeating_rows = format_count(duplicates.size, 'row repeats', 'rows repeat')
        raise ValueError(
            f'{second} has key {key}, and so has {first}; expected every key once '
            f'({repeating_rows} a key). Remove the duplicate rows or files, or set bad_data to '
            '"drop".'
        )

    def _file_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the numbers of the files that hold some rows, int64 `(n,)`."""
        return np.searchsorted(self.starts, rows, side='right') - 1
