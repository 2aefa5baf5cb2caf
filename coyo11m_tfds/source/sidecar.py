"""Sorts embeddings, tokens and numbers of other files into the order of given keys.

A sidecar of `coyo11m_tfds.embed_captions` is a Parquet file with the columns `key` and
`text_embedding` or `tokens` (lists of a fixed size), and with the fields of `Header` in the
metadata of its schema. A sidecar may also be a folder of such files, `part-00000-of-00007.parquet`,
in which the column `text_embedding` is called `embedding`.
"""

import contextlib
import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset import columns
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.source import keyed_values
from coyo11m_tfds.source.keyed_parquet import KeyedFile
from coyo11m_tfds.storage.stored_file import StoredFile

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
    """Finds the parts in a local or remote folder, which may be missing.

    Returns the number of parts in the complete sidecar, 0 if none is there, and the existing parts.
    Raises a ValueError if the names of parts have different counts.
    """
    found: dict[int, dict[int, StoredFile]] = {}  # by count and number
    for name, file in storage.list_folder(folder, missing_ok=True).items():
        if match := _PART.fullmatch(name):
            found.setdefault(int(match[2]), {})[int(match[1])] = file
    if len(found) > 1:
        (first, some), (second, others) = sorted(found.items())[:2]
        raise ValueError(
            f'{min(f.path for f in some.values())} and {min(f.path for f in others.values())}: '
            f'parts of {first} and of {second}, expected those of one sidecar. Remove the others.'
        )
    count, parts = next(iter(found.items()), (0, {}))
    return count, dict(sorted(parts.items()))


def find_sidecar(place: str | os.PathLike[str]) -> list[StoredFile]:
    """Finds the file of a sidecar, local or remote, or all its parts in order if it is a folder.

    Raises a ValueError if the file or folder does not exist, or a part is missing.
    """
    text = os.fspath(place)
    if os.path.isfile(text) or (text.endswith('.parquet') and not os.path.isdir(text)):
        return [storage.describe_file(text)]
    folder = text.rstrip('/')
    count, parts = find_parts(folder)
    if not parts:
        storage.list_folder(folder)  # raises for a missing folder
        raise ValueError(f'{folder}: holds no part-NNNNN-of-MMMMM.parquet of embeddings.')
    missing = [part_name(number, count) for number in range(count) if number not in parts]
    if missing:
        raise ValueError(
            f'{folder}/{missing[0]} is missing ({len(missing)} of {count} parts are). Run the '
            'same command of coyo11m_tfds.embed_captions again: it makes what is missing.'
        )
    return list(parts.values())


@dataclasses.dataclass(frozen=True)
class Header:
    """Describes how the embeddings or tokens of a sidecar were made."""

    dim: int  # width of an embedding, or number of tokens of a caption with padding
    encoder: str
    revision: str  # of the encoder
    max_tokens: int  # length limit of captions; 0 for no limit
    caption_column: str
    captions_digest: str  # see `captions`
    vocabulary: int = 0  # all token ids are below this number; 0 for embeddings

    @property
    def feature(self) -> str:
        """Name of the values in a batch: `tokens` or `text_embedding`."""
        return schema.TOKENS if self.vocabulary else schema.TEXT_EMBEDDING

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, with `vocabulary` only for tokens."""
        fields = dataclasses.asdict(self)
        if not self.vocabulary:
            del fields['vocabulary']
        return fields


# Fields of `Header` and their entries in the schema's metadata.
_ENTRIES = {
    'encoder': schema.META_TEXT_ENCODER,
    'revision': schema.META_TEXT_REVISION,
    'max_tokens': schema.META_TEXT_MAX_TOKENS,
    'caption_column': schema.META_CAPTION_COLUMN,
    'captions_digest': schema.META_CAPTIONS_DIGEST,
}


def describe_values(path: str, column: str = '', name: str = '') -> dict[str, Any]:
    """Returns those facts of `join_values` that one file holds; `name` is its name in messages.

    Raises a ValueError if a column or an entry of the metadata is missing or of another type.
    """
    with KeyedFile(path, *([column] if column else _COLUMNS), name=name) as file:
        return _describe(file, column)


def check_same_entries(
    expected: Mapping[str, Any], found: Mapping[str, Any], name: str, of: str
) -> None:
    """Raises a ValueError if an entry of the file `name` differs from the one expected, `of`."""
    for entry in sorted(expected.keys() | found.keys()):
        if expected.get(entry) != found.get(entry):
            raise ValueError(
                f'{name}: {entry} is {found.get(entry)!r}, but {expected.get(entry)!r} {of}. '
                'Remove the file, or choose another folder.'
            )


def _describe(file: KeyedFile, column: str) -> dict[str, Any]:
    kind, is_list = file.kind, pa.types.is_fixed_size_list(file.kind)
    number, shape = (kind.value_type, [kind.list_size]) if is_list else (kind, [])
    if column:
        is_number = pa.types.is_integer(number) or pa.types.is_floating(number)
        nbytes = number.bit_width // 8 * math.prod(shape) if is_number else 0
        fits = 1 <= nbytes <= columns.MAX_ROW_NBYTES
        expected = (
            'integers, floats, or lists of a fixed size of these, at most '
            f'{columns.MAX_ROW_NBYTES:,} bytes a row.'
        )
    else:
        are_tokens = file.column == schema.TOKENS
        expected_number = pa.int32() if are_tokens else pa.float16()
        most = schema.MAX_TOKENS if are_tokens else schema.MAX_TEXT_DIM
        fits = is_list and number == expected_number and 1 <= kind.list_size <= most
        expected = (
            f'a fixed-size list of {"int32" if are_tokens else "float16"}, at most {most:,}, as '
            'coyo11m_tfds.embed_captions writes it.'
        )
    if not fits:
        raise ValueError(f"{file.name}: column '{file.column}' is {kind}, expected {expected}")
    facts = {'dtype': np.dtype(number.to_pandas_dtype()).name, 'shape': shape}
    return facts if column else facts | {'header': _header(file).to_json()}


def _header(file: KeyedFile) -> Header:
    are_tokens, fields = file.column == schema.TOKENS, dict[str, Any]()
    more = ('vocabulary', schema.META_TEXT_VOCABULARY), ('dim', schema.META_TEXT_DIM)
    for field, entry in [*_ENTRIES.items(), more[not are_tokens]]:
        said = fields[field] = file.metadata.get(entry, '')
        is_number = field in ('max_tokens', 'vocabulary', 'dim')
        if not said or (is_number and not said.isdecimal()):
            has = f'has {entry} {said!r}, expected a number' if said else f"lacks '{entry}'"
            raise ValueError(
                f"{file.name}: its schema's metadata {has}; make the file again with "
                'coyo11m_tfds.embed_captions.'
            )
        if is_number:
            fields[field] = int(said)
    width, said = file.kind.list_size, fields['max_tokens' if are_tokens else 'dim']
    if said != width:
        raise ValueError(
            f'{file.name}: its rows have {width} numbers, but its metadata says {said}. '
            'Make it again.'
        )
    return Header(**fields | {'dim': width})


def join_values(
    files: Sequence[StoredFile], folder: str, wanted: np.ndarray, *, hold: Hold, column: str = ''
) -> None:
    """Writes the values of some keys into a new folder, for `keyed_values.KeyedValues`.

    The facts are the `dtype` and the `shape` of a value, the `digest` of all keys and values and,
    for embeddings and tokens, the fields of the `header`.

    Of the distinct keys `wanted`, int64 `(n,)`, the i-th gets place i. `column` is one of integers,
    floats, or lists of one size, where a row with a null has no value; '' stands for embeddings or
    tokens of `embed_captions`. Raises the errors of `KeyedFile`, `describe_values` and
    `keyed_values.make`, and a ValueError if files differ in their headers or in the kind of values,
    two rows have the same key, or an embedding is null or not finite.
    """
    facts: dict[str, Any] = {}
    keyed_values.make(folder, _batches(files, wanted, hold, column, facts), facts)


def read(found: keyed_values.KeyedValues, places: np.ndarray) -> np.ndarray:
    """Returns the values of some places, int64 `(n,)`, ascending, as `(n, *shape)`."""
    values = np.frombuffer(b''.join(found.read(places)), found.facts['dtype'])
    return values.reshape(len(places), *found.facts['shape'])


def _batches(
    files: Sequence[StoredFile], wanted: np.ndarray, hold: Hold, column: str, facts: dict[str, Any]
) -> Iterator[keyed_values.Batch]:
    digest, all_keys = hashlib.sha256(), []
    of_keys = keyed_values.KeyPlaces(wanted)
    first: dict[str, Any] = {}
    names = [column] if column else _COLUMNS
    with Progress('Reading values', sum(file.size for file in files), 'B') as progress:
        for file in files:
            with hold(file) as path, KeyedFile(path, *names, name=file.path) as opened:
                found = _describe(opened, column)
                said = found
                if not column:  # what parts of one sidecar have in common
                    said = {x: y for x, y in opened.metadata.items() if x != schema.META_PART}
                first = first or said
                check_same_entries(first, said, file.path, f'in {files[0].path}')
                facts.update(found)
                keys = opened.keys()
                for rows, values in _values(opened, keys, found):
                    digest.update(values)
                    all_keys.append(keys[rows])
                    places, is_wanted = of_keys.of(keys[rows])
                    values = values[is_wanted]
                    nbytes = values.itemsize * values.shape[1]
                    buffers = [None, pa.py_buffer(values)]
                    raw = pa.Array.from_buffers(pa.binary(nbytes), len(values), buffers)
                    yield places[is_wanted], np.full(len(values), nbytes, np.int32), raw
                    progress.add(file.size * len(rows) // opened.num_rows)
    keys = np.concatenate(all_keys)
    name = files[0].path if len(files) == 1 else os.path.dirname(files[0].path)
    if not len(keys):
        raise ValueError(f"{name}: column '{column}' is null in every row.")
    _, duplicates = keyed_values.order_by_key(keys)
    keyed_values.check_unique_keys(len(duplicates), duplicates, name)
    digest = hashlib.sha256(digest.digest())
    digest.update(keys)
    facts['digest'] = digest.hexdigest()


def _values(
    file: KeyedFile, keys: np.ndarray, found: dict[str, Any]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields numbers of rows, int64 `(n,)`, and what they hold, `(n, width)`; without nulls."""
    width, done = math.prod(found['shape']), 0
    for values in file.values(row_bytes=_NUMBER_BYTES * width):
        is_there = values.is_valid().to_numpy(zero_copy_only=False, writable=True)
        values = values.drop_null()
        numbers = values.flatten() if pa.types.is_fixed_size_list(values.type) else values
        if numbers.null_count:
            whole = numbers.is_valid().to_numpy(zero_copy_only=False).reshape(-1, width).all(axis=1)
            is_there[is_there] = whole
            numbers = numbers.filter(pa.array(np.repeat(whole, width)))
        matrix = numbers.to_numpy(zero_copy_only=False).reshape(-1, width)
        rows = done + np.flatnonzero(is_there)
        if 'header' in found:
            if not is_there.all():
                raise ValueError(
                    f"{file.name}: column '{file.column}' has nulls, expected a value in every row."
                )
            _check(matrix, keys[rows], Header(**found['header']), file.name)
        yield rows, matrix
        done += len(is_there)


def _check(values: np.ndarray, keys: np.ndarray, header: Header, name: str) -> None:
    """Raises a ValueError for tokens out of the vocabulary, and for numbers that are not finite."""
    if header.vocabulary:
        bad = ((values < -1) | (values >= header.vocabulary)).any(axis=1)
    else:
        bad = ~np.isfinite(values).all(axis=1)
    if not bad.any():
        return
    at = bad.argmax()
    what = f'the embedding of key {keys[at]} is not finite. Embed it again.'
    if header.vocabulary:
        what = (
            f'key {keys[at]} has tokens {values[at].tolist()}, expected ids from 0 to '
            f'{header.vocabulary - 1}, padded with -1. Make it again.'
        )
    raise ValueError(f'{name}: {what}')
