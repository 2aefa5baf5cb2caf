"""Values made elsewhere, in the order of the keys that are wanted: embeddings, tokens, numbers.

    files = part_files.find(place)
    header = sidecar.read_header(files[0].path)     # what embed_captions says of what it made
    sidecar.join(files, folder, keys, hold=scratch.hold)
    sidecar.join(files, folder, keys, hold=scratch.hold, column='aesthetic')   # of any Parquet file
    found = joined.Joined(folder)
    sidecar.read(found, found.places[:256])         # float16 (256, header.dim)

What `coyo11m_tfds.embed_captions` makes is a Parquet file with the columns `key` and
`text_embedding` or `tokens`, lists of a fixed size, and in its schema's metadata what `Header` has;
or a folder of such files, whose column is called `embedding` (see `part_files`).
"""

import contextlib
import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import columns
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.source import joined, keyed_parquet
from coyo11m_tfds.source.joined import Joined
from coyo11m_tfds.source.keyed_parquet import KeyedFile
from coyo11m_tfds.storage.source_files import SourceFile

# Gives the path of a file, which may have to be downloaded for it.
Hold = Callable[[SourceFile], contextlib.AbstractContextManager[str]]

_COLUMNS = (schema.TOKENS, schema.PART_EMBEDDING, schema.TEXT_EMBEDDING)

# Of the schema's metadata.
_ENTRIES = (
    schema.META_TEXT_ENCODER,
    schema.META_TEXT_REVISION,
    schema.META_TEXT_MAX_TOKENS,
    schema.META_CAPTION_COLUMN,
    schema.META_CAPTIONS_DIGEST,
)

# Of a number while it is read: the number itself and its levels in the Parquet file, twice.
_NUMBER_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Header:
    """What embeddings or tokens say of their making.

    Attributes:
        dim: numbers an embedding, or tokens a caption with their padding.
        encoder: name of what made them.
        revision: of the encoder.
        max_tokens: captions were cut to so many tokens; 0 for no limit.
        caption_column: that they were made from.
        captions_digest: of the captions that they were made from, see `captions.join`.
        vocabulary: ids of tokens are less than this; 0 for embeddings.
    """

    dim: int
    encoder: str
    revision: str
    max_tokens: int
    caption_column: str
    captions_digest: str
    vocabulary: int = 0

    @property
    def feature(self) -> str:
        """Of a batch that the values are: `tokens` or `text_embedding`."""
        return schema.TOKENS if self.vocabulary else schema.TEXT_EMBEDDING

    def to_json(self) -> dict[str, Any]:
        """The fields; `vocabulary` only of tokens."""
        fields = dataclasses.asdict(self)
        if not self.vocabulary:
            del fields['vocabulary']
        return fields


def read_header(path: str, name: str = '') -> Header:
    """Reads and checks what a file says about itself; raises as `describe`."""
    return Header(**describe(path, name=name)['header'])


def describe(path: str, column: str = '', name: str = '') -> dict[str, Any]:
    """Returns the facts of `join` that one file tells; `name` stands for it in messages.

    Raises:
        ValueError: a column or an entry of the metadata is missing or of an unexpected type.
    """
    with KeyedFile(path, *([column] if column else _COLUMNS), name=name) as file:
        return _numbers(file) if column else _embeddings(file)


def join(
    files: Sequence[SourceFile],
    folder: str,
    wanted: np.ndarray,
    *,
    hold: Hold,
    column: str = '',
) -> None:
    """Writes the values of some keys into a new folder, for `joined.Joined`.

    The facts are `dtype` and `shape` of a value, the `digest` of all keys and values, and of
    embeddings and tokens the fields of their `header`.

    Args:
        files: that have them, in their order.
        folder: see `joined.make`.
        wanted: keys, each once, int64 `(n,)`; place i is that of `wanted[i]`.
        hold: gives the path of a file while it is read.
        column: of integers, floats, or lists of these of one size; a row with a null has no value.
            '' for embeddings or tokens that `embed_captions` made.

    Raises:
        ValueError: see `KeyedFile` and `read_header`; files differ in what made them or in what
            they hold; two rows have the same key; or an embedding is null or not finite.
        OSError: a file cannot be read, or the folder cannot be written.
    """
    facts: dict[str, Any] = {}
    joined.make(folder, _rows(files, wanted, hold, column, facts), facts)


def read(found: Joined, places: np.ndarray) -> np.ndarray:
    """Returns the values of some places, int64 `(n,)`, ascending, as `(n, *shape)`."""
    values = np.frombuffer(b''.join(found.read(places)), found.facts['dtype'])
    return values.reshape(len(places), *found.facts['shape'])


def check_same(expected: Mapping[str, Any], found: Mapping[str, Any], name: str, of: str) -> None:
    """Raises a ValueError if a file, `name`, says else of itself than what is expected, `of`."""
    for entry in sorted(expected.keys() | found.keys()):
        if expected.get(entry) != found.get(entry):
            raise ValueError(
                f'{name}: {entry} is {found.get(entry)!r}, but {expected.get(entry)!r} {of}. '
                'Remove the file, or choose another folder.'
            )


def _rows(
    files: Sequence[SourceFile],
    wanted: np.ndarray,
    hold: Hold,
    column: str,
    facts: dict[str, Any],
) -> Iterator[pa.RecordBatch]:
    digest, all_keys = hashlib.sha256(), []
    of_keys = keyed_parquet.Places(wanted)
    first: dict[str, Any] = {}
    with Progress('Reading values', len(files), 'files') as progress:
        for file in files:
            with (
                hold(file) as path,
                KeyedFile(path, *([column] if column else _COLUMNS), name=file.path) as opened,
            ):
                found = _numbers(opened) if column else _embeddings(opened)
                said = found if column else _entries(opened)
                first = first or said
                check_same(first, said, file.path, f'in {files[0].path}')
                facts.update(found)
                keys = opened.keys()
                for rows, values in _values(opened, found, quiet=len(files) > 1):
                    digest.update(values)
                    all_keys.append(keys[rows])
                    places, is_wanted = of_keys.of(keys[rows])
                    yield joined.batch(places[is_wanted], values[is_wanted])
            progress.add(1)
    keys = np.concatenate(all_keys)
    name = files[0].path if len(files) == 1 else os.path.dirname(files[0].path)
    if not len(keys):
        raise ValueError(f"{name}: column '{column}' is null in every row.")
    _, duplicates = keyed_parquet.order_by_key(keys)
    if len(duplicates):
        raise ValueError(
            f'{name}: {len(duplicates)} rows repeat the key of another, e.g. key {duplicates[0]}; '
            'expected one row a key. Remove the others.'
        )
    digest = hashlib.sha256(digest.digest())
    digest.update(keys)
    facts['digest'] = digest.hexdigest()


def _values(
    file: KeyedFile, found: dict[str, Any], quiet: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields numbers of rows, int64 `(n,)`, and what they hold, `(n, width)`; without nulls."""
    width, done = math.prod(found['shape']), 0
    header = found.get('header')
    for values in file.values(row_bytes=_NUMBER_BYTES * width, quiet=quiet):
        is_there = values.is_valid().to_numpy(zero_copy_only=False, writable=True)
        values = values.drop_null()
        numbers = values.flatten() if pa.types.is_fixed_size_list(values.type) else values
        if numbers.null_count:
            whole = numbers.is_valid().to_numpy(zero_copy_only=False).reshape(-1, width).all(axis=1)
            is_there[is_there] = whole
            numbers = numbers.filter(pa.array(np.repeat(whole, width)))
        matrix = numbers.to_numpy(zero_copy_only=False).reshape(-1, width)
        rows = done + np.flatnonzero(is_there)
        if header:
            _check(file, Header(**header), matrix, rows)
            if not is_there.all():
                raise ValueError(f"{file.name}: column '{file.column}' has nulls.")
        yield rows, matrix
        done += len(is_there)


def _check(file: KeyedFile, header: Header, values: np.ndarray, rows: np.ndarray) -> None:
    """Raises a ValueError for tokens out of the vocabulary, and for numbers that are not finite."""
    if header.vocabulary:
        bad = ((values < -1) | (values >= header.vocabulary)).any(axis=1)
        expected = f'ids from 0 to {header.vocabulary - 1}, padded with -1. Make it again.'
    else:
        bad, expected = ~np.isfinite(values).all(axis=1), 'is not finite. Embed it again.'
    if not bad.any():
        return
    key = file.keys()[rows[bad.argmax()]]
    if header.vocabulary:
        found = values[bad.argmax()].tolist()
        raise ValueError(f'{file.name}: key {key} has tokens {found}, expected {expected}')
    raise ValueError(f'{file.name}: the embedding of key {key} {expected}')


def _numbers(file: KeyedFile) -> dict[str, Any]:
    """The `dtype` and the `shape` of the values of a column of numbers."""
    kind = file.kind
    is_list = pa.types.is_fixed_size_list(kind)
    number, shape = (kind.value_type, [kind.list_size]) if is_list else (kind, [])
    is_number = pa.types.is_integer(number) or pa.types.is_floating(number)
    nbytes = number.bit_width // 8 * math.prod(shape) if is_number else 0
    if not 1 <= nbytes <= columns.MAX_ROW_NBYTES:
        raise ValueError(
            f"{file.name}: column '{file.column}' is {kind}, expected integers, floats, or lists "
            f'of a fixed size of these, at most {columns.MAX_ROW_NBYTES:,} bytes a row.'
        )
    return {'dtype': np.dtype(number.to_pandas_dtype()).name, 'shape': shape}


def _embeddings(file: KeyedFile) -> dict[str, Any]:
    header = _header(file)
    dtype = schema.TEXT_DTYPES[header.feature]
    return {'dtype': dtype, 'shape': [header.dim], 'header': header.to_json()}


def _entries(file: KeyedFile) -> dict[str, str]:
    """What parts of one sidecar have in common."""
    return {name: entry for name, entry in file.metadata.items() if name != schema.META_PART}


def _header(file: KeyedFile) -> Header:
    kind, found = file.kind, file.metadata
    are_tokens = file.column == schema.TOKENS
    number, most = ('int32', schema.MAX_TOKENS) if are_tokens else ('half', schema.MAX_TEXT_DIM)
    is_vector = pa.types.is_fixed_size_list(kind) and str(kind.value_type).startswith(number)
    if not is_vector or not 1 <= kind.list_size <= most:
        raise ValueError(
            f"{file.name}: column '{file.column}' is {kind}, expected a fixed-size list of "
            f'{"int32" if are_tokens else "float16"}, at most {most:,}, as '
            'coyo11m_tfds.embed_captions writes it.'
        )
    size = schema.META_TEXT_MAX_TOKENS if are_tokens else schema.META_TEXT_DIM
    for entry in (*_ENTRIES, schema.META_TEXT_VOCABULARY if are_tokens else size):
        if not found.get(entry):
            raise ValueError(
                f"{file.name}: its schema's metadata lacks '{entry}'; make the file again with "
                'coyo11m_tfds.embed_captions.'
            )
    for entry in {schema.META_TEXT_MAX_TOKENS, schema.META_TEXT_VOCABULARY} & found.keys():
        if not found[entry].isdecimal():
            raise ValueError(
                f'{file.name}: its metadata has {entry} {found[entry]!r}, expected a number. Make '
                'it again.'
            )
    if found[size] != str(kind.list_size):
        raise ValueError(
            f'{file.name}: its embeddings have {kind.list_size} numbers, but its metadata says '
            f'{found[size]}. Make it again.'
        )
    return Header(
        dim=kind.list_size,
        encoder=found[schema.META_TEXT_ENCODER],
        revision=found[schema.META_TEXT_REVISION],
        max_tokens=int(found[schema.META_TEXT_MAX_TOKENS]),
        caption_column=found[schema.META_CAPTION_COLUMN],
        captions_digest=found[schema.META_CAPTIONS_DIGEST],
        vocabulary=int(found[schema.META_TEXT_VOCABULARY]) if are_tokens else 0,
    )
