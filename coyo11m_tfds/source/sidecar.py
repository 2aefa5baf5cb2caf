"""Sorts embeddings, tokens and numbers of other files into the order of requested keys.

A sidecar of `coyo11m_tfds.embed_captions` is a Parquet file, or a folder of them, with the column
`key`, lists of a fixed size, and the fields of `SidecarHeader` in the metadata of its schema.
"""

import contextlib
import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import columns, word_list
from coyo11m_tfds.process import errors
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.source import keyed_values
from coyo11m_tfds.source.keyed_parquet import KeyedFile
from coyo11m_tfds.source.keyed_values import KeyedValuesWriter, KeyPlaces
from coyo11m_tfds.storage import file_state
from coyo11m_tfds.storage.stored_file import StoredFile, common_path

# Gives the path of a file, which may have to be downloaded for it.
Hold = Callable[[StoredFile], contextlib.AbstractContextManager[str]]

_PART = re.compile(r'part-(\d{5,})-of-(\d{5,})\.parquet')
_COLUMNS = (schema.TOKENS, schema.PART_EMBEDDING, schema.TEXT_EMBEDDING)
# A number while it is read: the number itself and its levels in the Parquet file, twice.
_NUMBER_BYTES = 16


def part_name(number: int, count: int) -> str:
    """Returns the name of part `number` of `count`, counted from 0."""
    return f'part-{number:05}-of-{count:05}.parquet'


def find_parts(folder: str) -> tuple[int, dict[int, StoredFile]]:
    """Returns the number of parts of the complete sidecar, or 0, and the existing parts."""
    # A folder may hold parts of two sidecars, after a run with another number of parts.
    sidecars: dict[int, dict[int, StoredFile]] = {}  # by count and number
    for name, file in storage.list_folder(folder, missing_ok=True).items():
        match = _PART.fullmatch(name)
        if match:
            number = int(match[1])
            count = int(match[2])
            sidecars.setdefault(count, {})[number] = file
    if len(sidecars) > 1:
        # Two are enough to show the mistake.
        first_count, second_count = sorted(sidecars)[:2]
        first = min(file.path for file in sidecars[first_count].values())
        second = min(file.path for file in sidecars[second_count].values())
        raise ValueError(
            f'{first} and {second}: parts of {first_count} and of {second_count}, expected those '
            'of one sidecar. Remove the others.'
        )
    if not sidecars:
        return 0, {}
    [(count, parts)] = sidecars.items()
    # By number: by name, part-100000 comes before part-99999.
    return count, dict(sorted(parts.items()))


def find_sidecar_files(place: str | os.PathLike[str]) -> list[StoredFile]:
    """Finds the file of a sidecar, local or remote, or all its parts in order if it is a folder."""
    text = storage.expand_home(place)
    # The name decides where only a request could tell a file from a folder.
    if os.path.isfile(text) or (text.endswith('.parquet') and not os.path.isdir(text)):
        return [storage.describe_file(text)]
    folder = text.rstrip('/')
    count, parts = find_parts(folder)
    if not parts:
        # This raises another error for a folder that is missing.
        storage.list_folder(folder)
        raise ValueError(f'{folder}: holds no part-NNNNN-of-MMMMM.parquet of embeddings.')
    missing = []
    for number in range(count):
        if number not in parts:
            missing.append(part_name(number, count))
    if missing:
        are = 'is' if len(missing) == 1 else 'are'
        raise ValueError(
            f'{folder}/{missing[0]} is missing ({len(missing)} of {format_count(count, "part")} '
            f'{are}). Run the same command of coyo11m_tfds.embed_captions again: it makes what '
            'is missing.'
        )
    return list(parts.values())


@dataclasses.dataclass(frozen=True)
class SidecarHeader:
    """Describes how the embeddings or tokens of a sidecar were made."""

    dim: int  # width of an embedding, or number of tokens of a caption with padding
    encoder: str
    revision: str  # of the encoder
    max_tokens: int  # length limit of captions; 0 for no limit
    caption_column: str
    captions_digest: str  # see `captions`
    vocabulary: int = 0  # all token ids are below this number; 0 for embeddings
    words: str = ''  # of the encoder `words`, see `word_list`

    @property
    def feature(self) -> str:
        """Name of the values in a batch: `tokens` or `text_embedding`."""
        return schema.TOKENS if self.vocabulary else schema.TEXT_EMBEDDING

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, with `vocabulary` only for tokens, `words` only where there are."""
        fields = dataclasses.asdict(self)
        for name in ('vocabulary', 'words'):
            if not fields[name]:
                del fields[name]
        return fields

    def to_metadata(self) -> dict[str, str]:
        """Returns the entries for the metadata of a file's schema."""
        entries = _ENTRIES_OF_TOKENS if self.vocabulary else _ENTRIES_OF_EMBEDDINGS
        metadata = {entry: str(getattr(self, field)) for field, entry in entries.items()}
        if self.words:
            metadata[schema.META_TEXT_WORDS] = self.words
        return metadata

    @classmethod
    def of_file(cls, file: KeyedFile) -> 'SidecarHeader':
        """Reads the metadata of a file; raises a ValueError unless they fit its column."""
        fields: dict[str, Any] = {}
        are_tokens = file.column == schema.TOKENS
        entries = _ENTRIES_OF_TOKENS if are_tokens else _ENTRIES_OF_EMBEDDINGS
        for field, entry in entries.items():
            value = file.metadata.get(entry, '')
            is_number = field in ('max_tokens', 'vocabulary', 'dim')
            problem = ''
            if not value:
                problem = f"lacks '{entry}'"
            elif is_number and not value.isdecimal():
                problem = f'has {entry} {value!r}, expected a number'
            if problem:
                raise ValueError(
                    f"{file.name}: its schema's metadata {problem}; make the file again with "
                    'coyo11m_tfds.embed_captions.'
                )
            fields[field] = int(value) if is_number else value
        # The rows of tokens are padded to the limit.
        width = file.kind.list_size
        width_field = 'max_tokens' if are_tokens else 'dim'
        recorded = fields[width_field]
        if recorded != width:
            raise ValueError(
                f'{file.name}: its rows have {width} numbers, but its metadata says {recorded}. '
                'Make it again.'
            )
        # A damaged list would give other numbers to the words of captions.
        words = file.metadata.get(schema.META_TEXT_WORDS, '')
        if words and fields['revision'] != word_list.digest(words):
            raise ValueError(
                f'{file.name}: its list of words {words[:40]!r} is not the one that '
                f'{schema.META_TEXT_REVISION} {fields["revision"]!r} names. Make it again.'
            )
        # Of tokens, the width is no entry of its own.
        fields['dim'] = width
        fields['words'] = words
        return cls(**fields)


# Fields of `SidecarHeader` and their entries in the metadata of a schema.
_ENTRIES = {
    'encoder': schema.META_TEXT_ENCODER,
    'revision': schema.META_TEXT_REVISION,
    'max_tokens': schema.META_TEXT_MAX_TOKENS,
    'caption_column': schema.META_CAPTION_COLUMN,
    'captions_digest': schema.META_CAPTIONS_DIGEST,
}
_ENTRIES_OF_TOKENS = _ENTRIES | {'vocabulary': schema.META_TEXT_VOCABULARY}
_ENTRIES_OF_EMBEDDINGS = _ENTRIES | {'dim': schema.META_TEXT_DIM}


def write_sidecar(
    path: str, keys: np.ndarray, values: np.ndarray, column: str, metadata: Mapping[str, str]
) -> None:
    """Writes a file with values `(n, width)` of keys int64 `(n,)`, in one row group."""
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    fields = [
        pa.field(schema.PARQUET_KEY, pa.int64(), nullable=False),
        pa.field(column, lists.type, nullable=False),
    ]
    table = pa.Table.from_arrays([pa.array(keys), lists], schema=pa.schema(fields, dict(metadata)))
    with file_state.naming(path):
        pq.write_table(
            table,
            path,
            row_group_size=len(keys),
            compression='zstd',
            # For numbers that seldom repeat, a dictionary saves nothing.
            use_dictionary=False,
            write_page_checksum=True,
        )


def describe_values(path: str, column: str = '') -> dict[str, Any]:
    """Returns those facts of `join_values` that one file holds; {} of one without values."""
    with KeyedFile(path, *_value_columns(column)) as file:
        if _has_no_values(file, column):
            return {}
        return _describe_column(file, column)


def _value_columns(column: str) -> Sequence[str]:
    """Returns the columns of which the first that exists has the values."""
    return [column] if column else _COLUMNS


def _has_no_values(file: KeyedFile, column: str) -> bool:
    """Whether a file has no rows, or only nulls in a column that somebody chose."""
    return not file.num_rows or (bool(column) and pa.types.is_null(file.kind))


def _describe_column(file: KeyedFile, column: str) -> dict[str, Any]:
    """Returns dtype, shape and perhaps the header of the values; ValueError for other types."""
    kind = file.kind
    number = kind
    shape: list[int] = []
    if pa.types.is_fixed_size_list(kind):
        number = kind.value_type
        shape = [kind.list_size]
    if column:
        expected = _find_misfit_of_chosen(number, shape)
    else:
        expected = _find_misfit_of_sidecar(file.column, number, shape)
    if expected:
        raise ValueError(f"{file.name}: column '{file.column}' is {kind}, expected {expected}")
    facts = {'dtype': np.dtype(number.to_pandas_dtype()).name, 'shape': shape}
    if not column:
        facts['header'] = SidecarHeader.of_file(file).to_json()
    return facts


def _find_misfit_of_chosen(number: pa.DataType, shape: list[int]) -> str:
    """Returns what is expected in place of rows of this type; '' if any program can read them."""
    if pa.types.is_integer(number) or pa.types.is_floating(number):
        nbytes = number.bit_width // 8 * math.prod(shape)
        if 1 <= nbytes <= columns.MAX_ROW_NBYTES:
            return ''
    return (
        'integers, floats, or lists of a fixed size of these, at most '
        f'{columns.MAX_ROW_NBYTES:,} bytes a row.'
    )


def _find_misfit_of_sidecar(column: str, number: pa.DataType, shape: list[int]) -> str:
    """Returns what is expected in place of rows of this type; '' if `embed_captions` writes it."""
    expected_number = pa.float16()
    number_name = 'float16'
    limit = schema.MAX_TEXT_DIM
    if column == schema.TOKENS:
        expected_number = pa.int32()
        number_name = 'int32'
        limit = schema.MAX_TOKENS
    # A single number has no shape.
    if shape and number == expected_number and 1 <= shape[0] <= limit:
        return ''
    return (
        f'a fixed-size list of {number_name}, at most {limit:,}, as '
        'coyo11m_tfds.embed_captions writes it.'
    )


def join_values(
    files: Sequence[StoredFile],
    folder: str,
    requested_keys: np.ndarray,
    *,
    hold: Hold,
    column: str = '',
) -> None:
    """Writes the values of distinct keys, int64 `(n,)`, into a new folder of `KeyedValues`.

    The i-th key gets place i. `column` is one of integers, floats, or lists of one size, where a
    row with a null has no value; '' stands for what `embed_captions` writes, without nulls. The
    facts are `dtype`, `shape`, `digest` and, for `column=''`, `header`. Raises a ValueError for
    files that differ, hold no values or repeat a key.
    """
    writer = KeyedValuesWriter(folder)
    places = KeyPlaces(requested_keys)
    digest = hashlib.sha256()
    keys_of_batches = []
    facts: dict[str, Any] = {}  # the same of all files
    # Closed also after an error, so that no file stays open.
    with contextlib.closing(_read_files(files, hold, column)) as batches:
        for file_facts, batch_keys, values in batches:
            facts = file_facts
            # Of all values, requested or not: it stands for the files.
            digest.update(values)
            keys_of_batches.append(batch_keys)
            row_places, is_requested = places.find(batch_keys)
            _add_rows(writer, row_places[is_requested], values[is_requested])
    keys = np.concatenate(keys_of_batches)
    _, duplicate_keys = keyed_values.order_by_key(keys)
    keyed_values.check_unique_keys(len(duplicate_keys), duplicate_keys, common_path(files))
    # The keys after all values, so that the digest does not depend on the batches.
    digest = hashlib.sha256(digest.digest())
    digest.update(keys)
    writer.finish(facts | {'digest': digest.hexdigest()})


def _read_files(
    files: Sequence[StoredFile], hold: Hold, column: str
) -> Generator[tuple[dict[str, Any], np.ndarray, np.ndarray], None, None]:
    """Yields facts, keys, int64 `(n,)`, and values, `(n, width)`, of all rows that have a value.

    Raises a ValueError for files that differ, or hold no values.
    """
    common: Mapping[str, Any] = {}  # what all files have to have, as the first of them
    first_path = ''
    num_rows = 0
    num_values = 0
    with Progress('Reading values', sum(file.size for file in files), 'B') as progress:
        for file in files:
            with (
                hold(file) as path,
                KeyedFile(path, *_value_columns(column), name=file.path) as parquet,
            ):
                num_rows += parquet.num_rows
                if _has_no_values(parquet, column):
                    progress.add(file.size)
                    continue
                facts = _describe_column(parquet, column)
                entries = facts
                if not column:
                    # The files of a sidecar differ only in the number of the part.
                    entries = dict(parquet.metadata)
                    entries.pop(schema.META_PART, None)
                if not common:
                    common = entries
                    first_path = file.path
                errors.check_same_entries(common, entries, file.path, f'in {first_path}')
                keys = parquet.keys()
                for rows, values in _read_numbers(parquet, keys, facts):
                    yield facts, keys[rows], values
                    num_values += len(rows)
                    progress.add(file.size * len(rows) // parquet.num_rows)
    # Only now: that a file has no values is no error if another one has some.
    if not num_values:
        problem = 'has no rows'
        if num_rows:
            problem = f"column '{column}' is null in every row"
        raise ValueError(f'{common_path(files)}: {problem}.')


def _add_rows(writer: KeyedValuesWriter, places: np.ndarray, values: np.ndarray) -> None:
    """Adds rows of numbers, `(n, width)`, without a Python object for each."""
    nbytes = values.itemsize * values.shape[1]
    # Arrow takes the memory of the array as it is; None stands for no nulls.
    buffers = [None, pa.py_buffer(values)]
    raw = pa.Array.from_buffers(pa.binary(nbytes), len(values), buffers)
    sizes = np.full(len(values), nbytes, np.int32)
    writer.add(places, sizes, raw)


def _read_numbers(
    file: KeyedFile, keys: np.ndarray, facts: dict[str, Any]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields indices of rows, int64 `(n,)`, and what they hold, `(n, width)`; without nulls."""
    width = math.prod(facts['shape'])
    start = 0
    for values in file.values(row_bytes=_NUMBER_BYTES * width):
        has_value = values.is_valid().to_numpy(zero_copy_only=False, writable=True)
        numbers = values.drop_null()
        if pa.types.is_fixed_size_list(values.type):
            numbers = numbers.flatten()
        # A list with a null counts as null.
        if numbers.null_count:
            is_number = numbers.is_valid().to_numpy(zero_copy_only=False)
            is_whole = is_number.reshape(-1, width).all(axis=1)
            has_value[has_value] = is_whole
            numbers = numbers.filter(pa.array(np.repeat(is_whole, width)))
        matrix = numbers.to_numpy(zero_copy_only=False).reshape(-1, width)
        rows = start + np.flatnonzero(has_value)
        if 'header' in facts:
            if not has_value.all():
                raise ValueError(
                    f"{file.name}: column '{file.column}' has nulls, expected a value in every row."
                )
            _check_numbers(matrix, keys[rows], SidecarHeader(**facts['header']), file.name)
        yield rows, matrix
        start += len(has_value)


def _check_numbers(values: np.ndarray, keys: np.ndarray, header: SidecarHeader, name: str) -> None:
    """Raises a ValueError for ids out of range, or embeddings that are not finite."""
    if header.vocabulary:
        bad = ((values < -1) | (values >= header.vocabulary)).any(axis=1)
    else:
        bad = ~np.isfinite(values).all(axis=1)
    if not bad.any():
        return
    # The first bad row is the example.
    row = bad.argmax()
    if header.vocabulary:
        problem = (
            f'key {keys[row]} has tokens {values[row].tolist()}, expected ids from 0 to '
            f'{header.vocabulary - 1}, padded with -1. Make it again.'
        )
    else:
        problem = f'the embedding of key {keys[row]} is not finite. Embed it again.'
    raise ValueError(f'{name}: {problem}')
