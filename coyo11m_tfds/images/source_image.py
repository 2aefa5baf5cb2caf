"""An image of a source, and a part: the images that are encoded together.

Whatever is wrong with an image is raised when it is read, so that one bad image is a reason among
the counts, and no end of the run.
"""

import abc
import contextlib
import itertools
import math
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.keyed_random import name_hash
from coyo11m_tfds.foreign import foreign_text
from coyo11m_tfds.pictures import image_kinds
from coyo11m_tfds.pictures.pixels import BadImageError, OtherImageError
from coyo11m_tfds.process.errors import describe_type
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import StoredFile

# Where the keys of images come from.
KEY_OF_DATA = 'their data'
KEY_OF_NAME = 'the numbers that are their names'
KEY_OF_HASH = 'hashes of their names'

READS_AT_ONCE = 8  # small files, such as texts, of a part

_MAX_IMAGE = 64 << 20  # bytes
_MAX_TEXT = 1 << 20  # bytes of a `.json` or `.txt`
_MAX_FIELDS = 256  # in the data of an image
_MAX_KEY = 20  # digits
_TOO_LONG = 'too long caption'
# What an encoding says itself; the width in the data may be that of another version of the image.
_MEASURED = {schema.KEY, 'width', 'height'}

Read = Callable[[], bytes]
Text = tuple[int, Read]  # size in bytes and content of a `.json` or a `.txt`
Fields = dict[str, Any]


class SourceImage(NamedTuple):
    """An image that has not been read yet."""

    name: str  # path within the source; of a Parquet file with the number of the row
    size: int  # in bytes
    key: int
    key_rule: str  # one of the three above
    caption: str  # '' without one
    numbers: dict[str, int | float]  # with the same names in a whole part; NaN where it has none
    read_bytes: Read

    def read(self) -> bytes:
        """Reads the image, once; a BadImageError if it is too large, or its data are damaged."""
        if self.size > _MAX_IMAGE:
            raise BadImageError('too many bytes', f'{self.size:,}')
        return self.read_bytes()


class ImageRow(NamedTuple):
    """An image with the fields of its data."""

    name: str  # see `SourceImage`
    size: int
    fields: Fields
    read_bytes: Read


class FirstImages(NamedTuple):
    """What is known of a part before it is encoded."""

    keys: list[tuple[int, str]]  # those that are no hashes, with the names of their images
    has_captions: bool  # whether an image has a field or column of captions, perhaps an empty one


class ImagePart(abc.ABC):
    """Images that are encoded together."""

    _is_numbered = False  # whether the names of the images are their keys

    text_files: Mapping[str, StoredFile] = types.MappingProxyType({})  # next to the images
    texts_digest = ''  # digest of what these say of the images
    # Whether images that have texts, but not in the column that was chosen, are an error.
    needs_captions = True

    def __init__(
        self, files: Mapping[str, StoredFile], caption_column: str, has_keys_of_paths: bool
    ):
        """Takes the files that hold the images, by their names within the source.

        See `image_files.find_images` for the other arguments.
        """
        self.files = files
        # Texts within its files that belong to no image, and why; known when the images are.
        self.unused_texts = dict[str, str]()
        self._columns = find_caption_columns(caption_column)
        self._has_keys_of_paths = has_keys_of_paths

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files.values())

    @property
    def digest(self) -> str:
        """Digest of names, sizes and, where the storage keeps them, checksums of `files`."""
        # Not of times, which differ between copies of a source.
        listing = []
        for name, file in sorted(self.files.items()):
            listing.append([name, file.size, file.checksum])
        return json_digest.sha256(listing)

    @contextlib.contextmanager
    def open(self, scratch: Scratch) -> Iterator[Iterator[SourceImage]]:
        """Yields the images in order, to be read within the `with` block."""
        with self._open_rows(scratch) as groups:
            yield itertools.chain.from_iterable(map(self._describe, groups))

    def read_first(self, count: int) -> FirstImages:
        """Looks at some of the first `count` images.

        Of a remote file this is no more than a look. In a folder of files, keys are also those of
        later images whose keys may repeat.
        """
        keys = list[tuple[int, str]]()
        has_captions = False
        for row in self._read_first_rows(count):
            key, rule = self._find_key(row)
            if rule != KEY_OF_HASH:
                keys.append((key, row.name))
            if not row.fields.keys().isdisjoint(self._columns):
                has_captions = True
        return FirstImages(keys, has_captions)

    @abc.abstractmethod
    def _read_first_rows(self, count: int) -> Sequence[ImageRow]:
        """Returns some of the first `count` images, at least with keys and names of captions."""

    @abc.abstractmethod
    def _open_rows(
        self, scratch: Scratch
    ) -> contextlib.AbstractContextManager[Iterable[Sequence[ImageRow]]]:
        """Yields groups of images; those of a group get numbers of the same names."""

    def _describe(self, rows: Sequence[ImageRow]) -> Iterator[SourceImage]:
        """Yields the images of a group, with key, caption and numbers chosen among their fields."""
        self._check_captions_exist(rows)
        # All rows get the same names: of a tar of latents, the first sample stands for all, and
        # numbers that it lacks would be lost.
        names_of_numbers = sorted(_find_names(rows, _is_number) - _MEASURED)
        for row in rows:
            key, rule = self._find_key(row)
            caption = self._find_caption(row)
            problem = _find_problem(caption)
            numbers = dict[str, int | float]()
            for name in names_of_numbers:
                number = row.fields.get(name)
                numbers[name] = number if _is_number(number) else math.nan
            read_bytes = row.read_bytes
            # A build would drop the record: better now, with the name of the image.
            if problem:
                caption = ''
                read_bytes = raising(problem)
            yield SourceImage(
                name=row.name,
                size=row.size,
                key=key,
                key_rule=rule,
                caption=caption,
                numbers=numbers,
                read_bytes=read_bytes,
            )

    def _check_captions_exist(self, rows: Sequence[ImageRow]) -> None:
        """Raises a ValueError if the images have texts, but none in the column that was chosen."""
        # Only of a whole group: images without any text, such as one of the page about a data set,
        # may lie with others.
        names = _find_names(rows, _is_text)
        is_chosen = self.needs_captions and len(self._columns) == 1
        if is_chosen and names and self._columns[0] not in names:
            raise ValueError(
                f'{rows[0].name}: neither it nor another image has {self._columns[0]!r}, expected '
                f'one of their texts {sorted(names)}. Set caption_column.'
            )

    def _find_caption(self, row: ImageRow) -> str:
        """Returns the first caption that is not blank; '' without one."""
        for column in self._columns:
            text = row.fields.get(column)
            if isinstance(text, str) and text.strip():
                return text
        return ''

    def _find_key(self, row: ImageRow) -> tuple[int, str]:
        """Returns the key of an image, and where it is from."""
        if not self._has_keys_of_paths:
            # In a `.json` or a table, it may be a text of digits.
            key = schema.parse_integer(row.fields.get(schema.KEY))
            if key is not None:
                return key, KEY_OF_DATA
            if self._is_numbered:
                base = os.path.basename(get_stem(row.name))
                return int(base), KEY_OF_NAME
        # Of 63 bits, so that no key is negative.
        return name_hash(row.name) >> 1, KEY_OF_HASH

    def _make_row(
        self,
        name: str,
        size: int,
        read: Read,
        fields: Fields,
        texts: Mapping[str, Text] = {},
        has_own_key: bool = True,
    ) -> ImageRow:
        """Adds to the fields of an image what its `.json` and `.txt` say, which come by suffix.

        Without `has_own_key` the `.json` is that of other images, too.
        """
        try:
            fields_of_texts = _read_fields(texts)
            # Only this key: a row of a table, whose fields came before, is of one image.
            if not has_own_key:
                fields_of_texts.pop(schema.KEY, None)
            fields = fields | fields_of_texts
            if len(fields) > _MAX_FIELDS:
                raise BadImageError('too many fields', f'{len(fields):,}')
        except BadImageError as error:
            # Raised when the image is read, as what is wrong with the image itself.
            fields = {}
            read = raising(error)
        values: Fields = {}
        for column, value in fields.items():
            # All rows of a part are in memory: of other texts than captions a key is enough.
            if column in self._columns:
                text = foreign_text.find_text(value)
                # The image has the column, if no caption.
                if text is None and (value is None or isinstance(value, list)):
                    text = ''
                max_length = schema.MAX_CAPTION_BYTES + 1
            else:
                text = value
                max_length = _MAX_KEY
            if isinstance(text, str):
                values[column] = text[:max_length]
            elif _is_number(value):
                values[column] = value
        return ImageRow(name, size, values, read)


def find_caption_columns(caption_column: str) -> Sequence[str]:
    """Returns the names of captions, by preference: that which was chosen, or the usual ones."""
    if caption_column:
        return (caption_column,)
    return schema.CAPTION_COLUMNS


def make_left_row(name: str, reason: str) -> ImageRow:
    """Makes the row of an image that is not taken: to read it raises the reason."""
    return ImageRow(name, 0, {}, raising(OtherImageError(reason)))


def raising(error: BadImageError) -> Read:
    """Returns a function that raises the error."""

    def read() -> bytes:
        """Raises the error."""
        raise error

    return read


def get_stem(name: str) -> str:
    """Returns a name without the suffix of its last segment."""
    return name.removesuffix(image_kinds.get_suffix(name))


def folders_above(name: str) -> Iterator[str]:
    """Yields the folders that hold a file, the closest first, each with a slash at its end."""
    # By slashes: the name of an object may begin with one, and have several at once.
    end = len(name)
    while end >= 0:
        end = name.rfind('/', 0, end)
        yield name[: end + 1]


def _find_names(rows: Sequence[ImageRow], is_wanted: Callable[[object], bool]) -> set[str]:
    """Returns the names of the fields that hold such a value in one of the rows."""
    names = set[str]()
    for row in rows:
        for name, value in row.fields.items():
            if is_wanted(value):
                names.add(name)
    return names


def _is_text(value: object) -> bool:
    """Whether a value is a text."""
    return isinstance(value, str)


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that a tar of latents can hold: NaN, but no infinity."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) is float and not math.isinf(value)


def _read_fields(texts: Mapping[str, Text]) -> Fields:
    """Returns what the `.json` and the `.txt` of an image say; a BadImageError if they cannot."""
    fields: Fields = {}
    if '.json' in texts:
        num_bytes, read = texts['.json']
        if num_bytes > _MAX_TEXT:
            raise BadImageError('too large .json', f'{num_bytes:,} bytes')
        try:
            value = foreign_text.parse_json(read())
        except (ValueError, RecursionError) as error:
            raise BadImageError('damaged .json', str(error)) from None
        if not isinstance(value, dict):
            raise BadImageError('.json without names of fields', describe_type(value))
        fields |= value
    # After the `.json`, whose field `txt` it replaces.
    if '.txt' in texts:
        num_bytes, read = texts['.txt']
        if num_bytes > _MAX_TEXT:
            raise BadImageError(_TOO_LONG, f'{num_bytes:,} bytes')
        fields['txt'] = foreign_text.decode_caption(read())
    return fields


def _find_problem(caption: str) -> BadImageError | None:
    """Returns why a build would not take a caption."""
    if not foreign_text.is_readable(caption):
        return BadImageError('caption that is no UTF-8', repr(caption[:100]))
    if len(caption.encode()) > schema.MAX_CAPTION_BYTES:
        return BadImageError(_TOO_LONG)
    return None
