"""A Parquet file of images, in the forms that others give them, with texts and numbers."""

import base64
import binascii
import contextlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from coyo11m_tfds import schema
from coyo11m_tfds.foreign import arrow_texts, foreign_text
from coyo11m_tfds.images.source_image import (
    READS_AT_ONCE,
    ImagePart,
    ImageRow,
    Read,
    make_left_row,
    raising,
)
from coyo11m_tfds.pictures.pixels import BadImageError
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.source import keyed_parquet
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import RangeReader, StoredFile

IMAGE = 'image'  # name of the column

# How files of images begin in base64.
_BASE64_HEADS = '/9j/', 'iVBORw0KGgo', 'UklGR'
_BASE64_HEADS_AS_BYTES = tuple(head.encode() for head in _BASE64_HEADS)
_DATA_URL = re.compile(r'data:[\w/+.-]*;base64,')
_URL = re.compile(r'[a-zA-Z][\w+.-]*://')
# Reasons of texts that say where an image is.
_PLACES = 'URL in place of an image', 'path or other text in place of an image'
# Rows of which the first that is not empty tells what a column of texts holds.
_FIRST_TEXTS = 100


def find_tables_of_images(tables: Mapping[str, StoredFile]) -> list[str]:
    """Returns the names of the Parquet files that have images in a column `image`.

    Raises a ValueError for a file that has images in columns of other names alone.
    """

    def look(file: StoredFile) -> tuple[pa.Schema, bool]:
        """Returns the schema of a file, and whether it has images in the column."""
        arrow = keyed_parquet.read_schema(file)
        return arrow, _holds_images(file, arrow)

    with ThreadPool(READS_AT_ONCE) as threads:
        looks = list(threads.map(look, tables.values()))
    names = []
    for name, (arrow, has_images) in zip(tables, looks, strict=True):
        if has_images:
            names.append(name)
            continue
        # Else its images would be left out without a word.
        others = [field.name for field in arrow if keyed_parquet.holds_images(field)]
        if others:
            raise ValueError(
                f'{tables[name].path}: has images in its columns {others}, expected '
                f'{IMAGE!r}. Rename one of them, or move the file elsewhere.'
            )
    return names


def _holds_images(file: StoredFile, arrow: pa.Schema) -> bool:
    """Whether a file has a column `image` that holds images, and not paths or URLs of images."""
    kinds = dict(zip(arrow.names, arrow.types, strict=True))
    if IMAGE not in kinds:
        return False
    # The type alone does not tell images in base64 from paths, as tables of captions have them.
    if not _is_short_text(kinds[IMAGE]):
        return True
    opened = file.local_path or RangeReader(file)
    with keyed_parquet.naming_damage(file.path), keyed_parquet.open_parquet(opened) as table:
        batches = table.iter_batches(1, columns=[IMAGE], use_threads=False)
        for batch in itertools.islice(batches, _FIRST_TEXTS):
            try:
                if _read_image(batch.column(0)[0]):
                    break
            except BadImageError as error:
                return error.reason not in _PLACES
    return True


class ParquetPart(ImagePart):
    """The images of a Parquet file."""

    @contextlib.contextmanager
    def _open_rows(self, scratch: Scratch) -> Iterator[Iterable[Sequence[ImageRow]]]:
        """Yields a group for each row, whose image alone is in memory."""
        [(label, file)] = self.files.items()
        with scratch.hold(file) as path:
            yield self._read_rows(path, label, file.path)

    def _read_first_rows(self, count: int) -> Sequence[ImageRow]:
        """Returns the first rows with their keys, or one if all keys are hashes."""
        [(label, file)] = self.files.items()
        # Of a remote file, only the keys are fetched.
        opened = file.local_path or RangeReader(file)
        with keyed_parquet.naming_damage(file.path), keyed_parquet.open_parquet(opened) as table:
            # Before any file is encoded: the last one may have something else than images.
            if table.metadata.num_rows:
                _find_columns(table.schema_arrow, file.path, self._columns)
            kinds = dict(zip(table.schema_arrow.names, table.schema_arrow.types, strict=True))
            kind = kinds.get(schema.KEY, pa.null())
            is_text = _is_short_text(kind)
            captions = [column for column in self._columns if column in kinds]
            fields: dict[str, Any] = dict.fromkeys(captions, '')
            # Hashes do not repeat.
            if not (is_text or pa.types.is_integer(kind)):
                return [ImageRow(label, 0, fields, bytes)]
            rows = list[ImageRow]()
            for batch in table.iter_batches(count, columns=[schema.KEY], use_threads=False):
                column = batch.column(0)
                keys = _read_texts(column) if is_text else column.to_pylist()
                for number, key in enumerate(keys):
                    # Nobody reads the images of these rows, so that any function does.
                    rows.append(ImageRow(f'{label}/{number}', 0, fields | {schema.KEY: key}, bytes))
                # The first batch has at most `count` rows; a file without rows has none.
                break
            return rows

    def _read_rows(self, path: str, label: str, name: str) -> Iterator[list[ImageRow]]:
        """Yields the rows one by one, or why there are none."""
        has_rows = False
        for number, image in enumerate(read_images(path, name, self._columns)):
            # The row hands its bytes over, and does not keep them while it waits to be encoded.
            read: Read = [image.data].pop
            if image.error:
                read = raising(image.error)
            yield [self._make_row(f'{label}/{number}', len(image.data), read, image.fields)]
            has_rows = True
        if not has_rows:
            yield [make_left_row(label, 'Parquet file without rows')]


class ParquetImage(NamedTuple):
    """An image of a row."""

    data: bytes
    error: BadImageError | None  # if the row has something else in place of an image
    fields: dict[str, Any]  # texts and numbers, '' and NaN where they are null


def read_images(path: str, name: str, caption_columns: Sequence[str]) -> Iterator[ParquetImage]:
    """Yields the images of a local file, which is called `name` in messages, with their fields.

    Raises a ValueError for a file without a column of images, or of which a column that should hold
    captions holds something else than texts, and for damage.
    """
    with keyed_parquet.naming_damage(name), keyed_parquet.open_parquet(path) as table:
        # The caller counts such a file as one that is not taken, whatever its columns are.
        if not table.metadata.num_rows:
            return
        texts, numbers = _find_columns(table.schema_arrow, name, caption_columns)
        columns = [IMAGE, *numbers, *texts]
        # One at a time, in 0.2 ms, because few rows may be large.
        for batch in table.iter_batches(1, columns=columns, use_threads=False):
            fields: dict[str, Any] = {}
            for column in numbers:
                number = batch.column(column)[0].as_py()
                # As numbers in all rows, whether the first of a tar has them or not.
                fields[column] = math.nan if number is None else number
            for column in texts:
                [fields[column]] = _read_texts(batch.column(column))
            data = b''
            problem: BadImageError | None = None
            try:
                data = _read_image(batch.column(IMAGE)[0])
            except BadImageError as error:
                problem = error
            yield ParquetImage(data, problem, fields)


def _find_columns(
    arrow: pa.Schema, name: str, caption_columns: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Returns the names of the columns of texts and of numbers."""
    kinds = dict(zip(arrow.names, arrow.types, strict=True))
    if IMAGE not in kinds:
        raise ValueError(f'{name}: has no column {IMAGE!r}; it has {arrow.names}.')
    if len(kinds) < len(arrow.names):
        raise ValueError(f'{name}: its columns are {arrow.names}, expected different names.')
    if not _can_be_images(kinds[IMAGE]):
        raise ValueError(
            f'{name}: column {IMAGE!r} is {kinds[IMAGE]}, expected the bytes of files of images, '
            "or structs with such 'bytes'. Write them so."
        )
    texts = []
    numbers = []
    for column, kind in kinds.items():
        if column == IMAGE:
            continue
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            # A number under such a name, such as that of captions, would be taken for a caption.
            if column not in caption_columns:
                numbers.append(column)
        elif column in caption_columns or _is_short_text(kind):
            texts.append(column)
    captions = [column for column in caption_columns if column in kinds]
    # Others of these names, such as a list of scores, are no captions.
    texts = [column for column in texts if arrow_texts.holds_text(kinds[column])]
    has_caption_of_text = any(arrow_texts.holds_text(kinds[column]) for column in captions)
    if captions and not has_caption_of_text:
        first = captions[0]
        raise ValueError(
            f'{name}: column {first!r} is {kinds[first]}, expected texts. Set caption_column.'
        )
    return texts, numbers


def _read_texts(column: pa.Array) -> list[str]:
    """Returns the texts of a column, '' for a null."""
    texts = arrow_texts.read_texts(column).to_pylist()
    # Not by Arrow, for which one text that is no UTF-8 is the end of the file.
    return [foreign_text.decode_utf8(text or b'') for text in texts]


def _is_short_text(kind: pa.DataType) -> bool:
    """Whether a column is of texts, and not of bytes, which may be those of another image."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return arrow_texts.is_text(kind)


def _can_be_images(kind: pa.DataType) -> bool:
    """Whether `_read_image` may find images in a column of a type."""
    # Such as that of images in the library datasets.
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_struct(kind):
        return any(field.name in ('bytes', 'path') for field in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return kind.value_type == pa.uint8()
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return (
        arrow_texts.is_flat(kind) or pa.types.is_fixed_size_binary(kind) or pa.types.is_null(kind)
    )


def _read_image(value: pa.Scalar) -> bytes:
    """Returns the bytes of an image, b'' without one; a BadImageError for something else."""
    if not value.is_valid:
        return b''
    if isinstance(value, pa.ExtensionScalar | pa.DictionaryScalar):
        return _read_image(value.value)
    # As the library datasets has it: the bytes, or else where they were.
    if isinstance(value, pa.StructScalar):
        data = _read_image(value['bytes']) if 'bytes' in value else b''
        if not data and 'path' in value:
            data = _read_image(value['path'])
        return data
    if isinstance(value, pa.ListScalar) and value.type.value_type == pa.uint8():
        return value.values.to_numpy(zero_copy_only=False).tobytes()
    if not isinstance(value, pa.BinaryScalar):
        raise BadImageError('no bytes of an image', f'but {value.type}')
    data = value.as_buffer().to_pybytes()
    # Some writers have texts of base64 in columns of bytes.
    if data.startswith(_BASE64_HEADS_AS_BYTES):
        return _read_image_of_text(data.decode('latin-1'))
    # Others have bytes in columns of texts.
    if data and arrow_texts.is_text(value.type):
        text = foreign_text.decode_utf8(data)
        if foreign_text.is_readable(text):
            return _read_image_of_text(text)
    return data


def _read_image_of_text(text: str) -> bytes:
    """Returns the bytes that a text is in base64."""
    stripped = text.strip()
    encoded = _DATA_URL.sub('', stripped, count=1)
    is_data_url = encoded != stripped
    # What a data URL holds need not begin like one of the usual kinds.
    if is_data_url or encoded.startswith(_BASE64_HEADS):
        try:
            # Also as URLs have it, in lines and without the padding.
            encoded = ''.join(encoded.split())
            encoded = encoded.translate(str.maketrans('-_', '+/')).rstrip('=')
            padding = '=' * (-len(encoded) % 4)
            return base64.b64decode(encoded + padding, validate=True)
        except binascii.Error:
            raise BadImageError('damaged base64') from None
    url, path = _PLACES
    # Nothing is downloaded at the wish of a file.
    if _URL.match(text):
        raise BadImageError(url, text[:100])
    raise BadImageError(path, text[:100])
