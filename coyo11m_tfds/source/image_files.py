"""Finds images with their captions and numbers: in a folder, in tars, or in Parquet files.

    parts, left = image_files.find_images('gs://bucket/photos', '', divide)
    with parts[0].open(scratch) as images:
        for image in images:
            image.caption, image.read()

The listing of a source alone decides its parts: a run of images of a folder, one tar, or one
Parquet file. docs/images.md says where each of them has captions, numbers and keys. Whatever looks
like an image and is not taken has a reason: in `left`, or as an image whose `read` raises it.
"""

import abc
import collections
import concurrent.futures
import contextlib
import functools
import io
import itertools
import math
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import google_crc32c

from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset.keyed_random import name_hash
from coyo11m_tfds.pictures import image_kinds
from coyo11m_tfds.pictures.pixels import BadImageError, OtherImageError
from coyo11m_tfds.process.errors import describe_type
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.source import foreign_text, image_tables, image_texts, tar_members
from coyo11m_tfds.source.file_names import is_hidden
from coyo11m_tfds.source.image_tables import ImageTables
from coyo11m_tfds.source.image_texts import TextFiles
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import RangeReader, StoredFile

# Where the keys of images come from.
KEY_OF_DATA = 'their data'
KEY_OF_NAME = 'the numbers that are their names'
KEY_OF_HASH = 'hashes of their names'

_TABLE = 'table'  # in place of a suffix
_MAX_IMAGE = 64 << 20  # bytes
_MAX_TEXT = 1 << 20  # bytes of a `.json` or `.txt`
_MAX_FIELDS, _MAX_KEY = 256, 20  # in the data of an image; digits
_TOO_LONG = 'too long caption'
_READS_AT_ONCE = 8
_MAX_HEADS = 100  # of remote files with one suffix
# Keys that are compared before anything is encoded: of so many images of each part, or so many of
# all, in 0.1 ms each.
_LEAST_KEYS, _MANY_KEYS = 100, 20_000
_REMOTE_KEYS = 4  # of a part whose images have a `.json` each, which is a request
_TAR_HEAD = 1 << 20  # bytes of a remote tar that are read for its first keys
_MEMBERS_OF_SAMPLE = 4
# What an encoding says itself; the width in the data may be that of another version of the image.
_MEASURED = {schema.KEY, 'width', 'height'}

_Read = Callable[[], bytes]
_Text = tuple[int, _Read]  # size and content of a `.json` or a `.txt`
_Fields = dict[str, Any]


class SourceImage(NamedTuple):
    """An image that has not been read yet."""

    name: str  # path within the source; of a Parquet file with the number of the row
    size: int  # in bytes
    key: int
    key_rule: str  # one of the three above
    caption: str  # '' without one
    numbers: dict[str, int | float]  # with the same names in a whole part; NaN where it has none
    read_bytes: _Read

    def read(self) -> bytes:
        """Reads the image, once; a BadImageError if it is too large, or its data are damaged."""
        if self.size > _MAX_IMAGE:
            raise BadImageError('too many bytes', f'{self.size:,}')
        return self.read_bytes()


class _Row(NamedTuple):
    """An image with the fields of its data."""

    name: str
    size: int
    fields: _Fields
    read_bytes: _Read


class FoundImages(NamedTuple):
    """The images of a folder."""

    parts: list['ImagePart']
    left: dict[str, str]  # names of files that look like images and are in no part, and why


class ImagePart(abc.ABC):
    """Images that are encoded together."""

    _is_numbered = False  # whether the names of the images are their keys

    text_files: Mapping[str, StoredFile] = types.MappingProxyType({})  # next to the images
    texts_digest = ''  # digest of what these say of the images

    def __init__(
        self, files: Mapping[str, StoredFile], caption_column: str, has_keys_of_paths: bool
    ):
        """Takes the files that hold the images, by their names within the source."""
        self.files, self._has_keys_of_paths = files, has_keys_of_paths
        # Texts within its files that belong to no image, and why; known when the images are.
        self.unused_texts = dict[str, str]()
        self._columns = (caption_column,) if caption_column else schema.CAPTION_COLUMNS

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files.values())

    @property
    def digest(self) -> str:
        """Digest of names, sizes and, where the storage keeps them, checksums of `files`."""
        # Not of times, which differ between copies of a source.
        return json_digest.sha256([[n, x.size, x.checksum] for n, x in sorted(self.files.items())])

    @contextlib.contextmanager
    def open(self, scratch: Scratch) -> Iterator[Iterator[SourceImage]]:
        """Yields the images in order, to be read within the `with` block."""
        with self._open_rows(scratch) as groups:
            yield itertools.chain.from_iterable(map(self._describe, groups))

    def read_first_keys(self, count: int) -> list[tuple[int, str]]:
        """Returns keys that are no hashes, with the names of their images.

        These are some of the first `count` images, without more than a look at a remote file.
        """
        keys = list[tuple[int, str]]()
        for row in self._read_first_rows(count):
            key, rule = self._find_key(row)
            if rule != KEY_OF_HASH:
                keys.append((key, row.name))
        return keys

    @abc.abstractmethod
    def _read_first_rows(self, count: int) -> Sequence[_Row]: ...

    @abc.abstractmethod
    def _open_rows(
        self, scratch: Scratch
    ) -> contextlib.AbstractContextManager[Iterable[Sequence[_Row]]]: ...

    def _describe(self, rows: Sequence[_Row]) -> Iterator[SourceImage]:
        names = {n for row in rows for n, x in row.fields.items() if isinstance(x, str)}
        # Images without any text, such as one of the page about a data set, may lie beside others.
        if len(self._columns) == 1 and names and self._columns[0] not in names:
            raise ValueError(
                f'{rows[0].name}: neither it nor another image has {self._columns[0]!r}, expected '
                f'one of their texts {sorted(names)}. Set caption_column.'
            )
        # The first sample of a tar of latents stands for all: what it lacks would be lost.
        names = {n for row in rows for n, x in row.fields.items() if _is_number(x)} - _MEASURED
        for row in rows:
            key, rule = self._find_key(row)
            texts = [x for x in map(row.fields.get, self._columns) if isinstance(x, str)]
            caption = next(filter(str.strip, texts), '')
            problem = _find_problem(caption)
            numbers = {name: row.fields.get(name, math.nan) for name in sorted(names)}
            yield SourceImage(
                name=row.name,
                size=row.size,
                key=key,
                key_rule=rule,
                caption='' if problem else caption,
                numbers={name: x if _is_number(x) else math.nan for name, x in numbers.items()},
                read_bytes=_raising(problem) if problem else row.read_bytes,
            )

    def _find_key(self, row: _Row) -> tuple[int, str]:
        """Returns the key of an image, and where it is from."""
        if not self._has_keys_of_paths:
            key = row.fields.get(schema.KEY)
            if schema.is_key(key):
                return int(str(key)), KEY_OF_DATA
            if self._is_numbered:
                return int(os.path.basename(_get_stem(row.name))), KEY_OF_NAME
        return name_hash(row.name) >> 1, KEY_OF_HASH

    def _make_row(
        self,
        name: str,
        size: int,
        read: _Read,
        fields: _Fields,
        texts: Mapping[str, _Text] = {},
        has_own_key: bool = True,
    ) -> _Row:
        """Adds to the fields of an image what its `.json` and `.txt` say, which come by suffix.

        Without `has_own_key` the `.json` is that of other images, too.
        """
        try:
            fields = fields | _read_fields(texts)
            if len(fields) > _MAX_FIELDS:
                raise BadImageError('too many fields', f'{len(fields):,}')
        except BadImageError as error:
            read, fields = _raising(error), {}
        values = {n: x for n, x in fields.items() if _is_number(x)}
        for column, value in fields.items():
            # All rows of a part are in memory: of other texts than captions a key is enough.
            text, max_length = value, _MAX_KEY
            if column in self._columns:
                text, max_length = foreign_text.find_text(value), schema.MAX_CAPTION_BYTES + 1
            if isinstance(text, str):
                values[column] = text[:max_length]
        if not has_own_key:
            values.pop(schema.KEY, None)
        return _Row(name, size, values, read)


def find_images(
    root: str | os.PathLike[str],
    caption_column: str,
    divide: Callable[[Sequence[int]], Iterable[slice]],
    *,
    has_keys_of_paths: bool = False,
) -> FoundImages:
    """Lists the images in a folder, local or remote, and divides them into parts.

    `caption_column` is the field or column of captions, '' the first of the usual names that an
    image has. `divide` makes parts of images that are files, of their sizes in bytes. With
    `has_keys_of_paths`, all keys are hashes of paths.
    """
    folder = storage.open_folder(root)
    try:
        listing, broken_names = folder.pin().list_all()
    except FileNotFoundError:
        listing, broken_names = {}, ()
    if not listing and not folder.exists():
        raise ValueError(f'{root}: there is no such folder, expected one of images.')
    files = {name: file for name, file in listing.items() if not is_hidden(name)}
    left = _find_left(files, listing.keys() - files.keys(), broken_names)
    images = [name for name in sorted(files) if image_kinds.judge_name(name) == '']
    tars = [name for name in _names_with('.tar', files) if not _is_encoded(name, files)]
    tables = _names_with('.parquet', files)
    if images or tars or len(tables) > 1:
        # Next to images, Parquet files without images hold captions.
        with_images = _with_images({name: files[name] for name in tables})
        if images or tars or with_images:
            tables = with_images
    parts, options = list[ImagePart](), (caption_column, has_keys_of_paths)
    if images:
        caption_columns = (caption_column,) if caption_column else schema.CAPTION_COLUMNS
        all_images = _ImageFolder(files, images, caption_columns)
        for run in divide([files[name].size for name in images]):
            parts.append(_FolderPart(all_images, images[run], *options))
    parts += [_TarPart({name: files[name]}, *options) for name in tars]
    parts += [_ParquetPart({name: files[name]}, *options) for name in tables]
    if not parts:
        raise ValueError(
            f'{root}: has no images, expected {", ".join(image_kinds.USUAL_SUFFIXES)}, or .tar '
            f'(uncompressed) or .parquet with such files in them.{describe_left(left)}'
        )
    used_names = itertools.chain.from_iterable([*part.files, *part.text_files] for part in parts)
    image_tables.tell_unread(files, {*used_names})
    return FoundImages(parts, left)


def check_keys(parts: Sequence[ImagePart]) -> None:
    """Raises a ValueError if two of the first images of all parts have the same key.

    So two runs of img2dataset are found before hours go into both.
    """
    names, count = dict[int, str](), max(_LEAST_KEYS, _MANY_KEYS // len(parts))
    with concurrent.futures.ThreadPoolExecutor(_READS_AT_ONCE) as threads:
        for keys in threads.map(lambda part: part.read_first_keys(count), parts):
            for key, name in keys:
                other_name = names.setdefault(key, name)
                if other_name != name:
                    raise ValueError(
                        f'{other_name} and {name} have the same key, {key}, as images of two runs '
                        'of img2dataset have. Take the keys of their paths (--keys=path), or '
                        'encode the runs one by one.'
                    )


def _find_left(
    files: Mapping[str, StoredFile], hidden_names: Iterable[str], broken_names: Iterable[str]
) -> dict[str, str]:
    """Returns the files that look like images and are not taken, with the reason."""
    left = dict[str, str]()
    for name in hidden_names:
        if image_kinds.judge_name(name) is not None:
            left[name] = 'hidden'
    for name in broken_names:
        # It may have been an image, or the captions of many.
        left[name] = 'link to no file'
    unknown = collections.defaultdict[str, list[str]](list)
    for name in files:
        if reason := image_kinds.judge_name(name):
            left[name] = reason
        elif image_kinds.may_be_image(name):
            unknown[image_kinds.get_suffix(name)].append(name)

    def judge(name: str) -> str | None:
        size = min(image_kinds.HEAD_BYTES, files[name].size)
        return image_kinds.judge_head(files[name].read_range(0, size))

    with concurrent.futures.ThreadPoolExecutor(_READS_AT_ONCE) as threads:
        for names in unknown.values():
            # A request for each of a million files would take an hour.
            first_names = [x for x in names if files[x].local_path] or sorted(names)[:_MAX_HEADS]
            reasons = dict(zip(first_names, threads.map(judge, first_names), strict=True))
            if len(first_names) < len(names) and any(reasons.values()):
                reasons = dict(zip(names, threads.map(judge, names), strict=True))
            left |= {name: reason for name, reason in reasons.items() if reason}
    return left


def describe_left(left: Mapping[str, str]) -> str:
    """Says how many files are not taken, with an example and what to do; '' without any."""
    if not left:
        return ''
    name, reason = min(left.items())
    files = format_count(len(left), 'file')
    return f' Not taken: {files} such as {name} ({reason}). {image_kinds.ADVICE}.'


def _names_with(suffix: str, files: Mapping[str, StoredFile]) -> list[str]:
    return [name for name in sorted(files) if name.lower().endswith(suffix)]


def _is_encoded(tar: str, files: Mapping[str, StoredFile]) -> bool:
    """Whether a tar holds latents that `encode_images` has written."""
    return next(_folders_above(tar)) + schema.ENCODING_FILE in files


def _with_images(tables: Mapping[str, StoredFile]) -> list[str]:
    """Names of the Parquet files that have a column `image`."""
    if not tables:
        return []
    # Here, because images in folders and tars are read where pyarrow is not installed.
    from coyo11m_tfds.source import image_parquet, keyed_parquet

    name_of_images = image_parquet.IMAGE
    with concurrent.futures.ThreadPoolExecutor(_READS_AT_ONCE) as threads:
        schemas = threads.map(keyed_parquet.read_schema, tables.values())
        columns = dict(zip(tables, schemas, strict=True))
    for name, arrow in columns.items():
        others = [x.name for x in arrow if keyed_parquet.holds_images(x)]
        if others and name_of_images not in arrow.names:
            raise ValueError(
                f'{tables[name].path}: has images in its columns {others}, expected '
                f'{name_of_images!r}. Rename one of them, or move the file elsewhere.'
            )
    return [name for name, arrow in columns.items() if name_of_images in arrow.names]


def _folders_above(name: str) -> Iterator[str]:
    """Yields the folders that hold a file, the closest first, each with a slash at its end."""
    # By slashes: the name of an object may begin with one, and have several at once.
    end = len(name)
    while end >= 0:
        end = name.rfind('/', 0, end)
        yield name[: end + 1]


def _left_row(name: str, reason: str) -> _Row:
    """Makes the row of an image that is not taken."""
    return _Row(name, 0, {}, _raising(OtherImageError(reason)))


def _is_number(value: object) -> bool:
    is_integer = type(value) is int and -(2**63) <= value < 2**63
    return is_integer or (type(value) is float and not math.isinf(value))


def _get_stem(name: str) -> str:
    return name.removesuffix(image_kinds.get_suffix(name))


def _read_fields(texts: Mapping[str, _Text]) -> _Fields:
    """Returns what the `.json` and the `.txt` of an image say; a BadImageError if they cannot."""
    fields: _Fields = {}
    if '.json' in texts:
        nbytes, read = texts['.json']
        if nbytes > _MAX_TEXT:
            raise BadImageError('too large .json', f'{nbytes:,} bytes')
        try:
            value = foreign_text.parse_json(read())
        except (ValueError, RecursionError) as error:
            raise BadImageError('damaged .json', str(error)) from None
        if not isinstance(value, dict):
            raise BadImageError('.json without names of fields', describe_type(value))
        fields |= value
    if '.txt' in texts:
        nbytes, read = texts['.txt']
        if nbytes > _MAX_TEXT:
            raise BadImageError(_TOO_LONG, f'{nbytes:,} bytes')
        fields['txt'] = foreign_text.decode_caption(read())
    return fields


def _find_problem(caption: str) -> BadImageError | None:
    """Returns why a build would not take a caption."""
    if not foreign_text.is_readable(caption):
        return BadImageError('caption that is no UTF-8', repr(caption[:100]))
    if len(caption.encode()) > schema.MAX_CAPTION_BYTES:
        return BadImageError(_TOO_LONG)
    return None


def _raising(error: BadImageError) -> _Read:
    def read() -> bytes:
        raise error

    return read


# --- Folders of images --------------------------------------------------------------------------


class _ImageFolder:
    """All files of a folder of images."""

    def __init__(
        self,
        files: Mapping[str, StoredFile],
        images: Sequence[str],
        caption_columns: Sequence[str],
    ):
        self.files = files
        self._table_names = dict[tuple[str, str], str]()  # by folder, and name in small letters
        # In this order, because of names that differ in case one in small letters counts.
        for name in sorted(files, reverse=True):
            folder = next(_folders_above(name))
            base = name.removeprefix(folder).lower()
            if base in image_tables.NAMES:
                self._table_names.setdefault((folder, base), name)
        self._texts = TextFiles(files, {*map(_get_stem, images)})
        # For each image the names of its `.json`, its `.txt` and its table, by these suffixes.
        self.data_files = {image: self._find_data_files(image) for image in images}
        tables = {image: names.get(_TABLE, '') for image, names in self.data_files.items()}
        self.tables = ImageTables(files, tables, caption_columns)
        used_names = itertools.chain.from_iterable(x.values() for x in self.data_files.values())
        images_without = [image for image, names in self.data_files.items() if not names]
        self._texts.tell_unused({*used_names}, images_without)
        self.num_of_stem = collections.Counter(map(_get_stem, images))
        stems = [os.path.basename(_get_stem(name)) for name in images]
        self.is_numbered = all(map(schema.is_key, stems)) and len({*map(int, stems)}) == len(stems)
        # Their keys may repeat, too.
        counts = collections.Counter(stems)
        repeated = [(stem, x) for stem, x in zip(stems, images, strict=True) if counts[stem] > 1]
        self.of_repeated_names = {name for _, name in sorted(repeated)[: 2 * _LEAST_KEYS]}

    def _find_data_files(self, image: str) -> dict[str, str]:
        names = self._texts.find(_get_stem(image))
        if table := self._find_table(image):
            names[_TABLE] = table
        return names

    def _find_table(self, image: str) -> str:
        """Returns the closest table above an image; '' without one."""
        for folder in _folders_above(image):
            for name in image_tables.NAMES:
                if (folder, name) in self._table_names:
                    return self._table_names[folder, name]
        return ''


class _FolderPart(ImagePart):
    """A run of images of a folder."""

    def __init__(
        self,
        folder: _ImageFolder,
        images: Sequence[str],
        caption_column: str,
        has_keys_of_paths: bool,
    ):
        self._data = {name: folder.data_files[name] for name in images}
        files = {name: folder.files[name] for name in images}
        super().__init__(files, caption_column, has_keys_of_paths)
        names = {*itertools.chain.from_iterable(x.values() for x in self._data.values())}
        self.text_files = {name: folder.files[name] for name in sorted(names)}
        self._folder, self._is_numbered = folder, folder.is_numbered

    @functools.cached_property
    def texts_digest(self) -> str:  # type: ignore[override]  # of other parts it is known at once
        """Digest of what the files next to the images say of them; reads local files."""
        tables = self._read_tables(self._data)
        files = [x for name, x in self.text_files.items() if name not in tables]
        with concurrent.futures.ThreadPoolExecutor(_READS_AT_ONCE) as threads:
            contents = list(threads.map(_identify_content, files))
        # Of a table only the rows of these images.
        rows = {name: self._get_row(name, tables) for name in self._data}
        return json_digest.sha256([self._data, contents, rows])

    @contextlib.contextmanager
    def _open_rows(self, scratch: Scratch) -> Iterator[Iterable[Sequence[_Row]]]:
        yield [self._read_rows(list(self._data))]

    def _read_first_rows(self, count: int) -> Sequence[_Row]:
        images = list(self._data)
        if not self.files[images[0]].local_path:
            count = min(count, _REMOTE_KEYS)
        of_repeated_names = [x for x in images[count:] if x in self._folder.of_repeated_names]
        return self._read_rows(images[:count] + of_repeated_names)

    def _read_rows(self, images: Sequence[str]) -> list[_Row]:
        tables = self._read_tables(images)

        def read_row(image: str) -> _Row:
            file, fields, texts = self.files[image], self._get_row(image, tables), {}
            for suffix, name in self._data[image].items():
                text = self.text_files[name]
                texts[suffix] = text.size, text.read
            has_own_key = self._folder.num_of_stem[_get_stem(image)] == 1
            return self._make_row(image, file.size, file.read, fields, texts, has_own_key)

        with concurrent.futures.ThreadPoolExecutor(_READS_AT_ONCE) as threads:
            return list(threads.map(read_row, images))

    def _read_tables(self, images: Iterable[str]) -> Mapping[str, Mapping[str, _Fields]]:
        """Reads the tables of images; returns their rows by the names of tables and images."""
        names = {x[_TABLE] for x in map(self._data.__getitem__, images) if _TABLE in x}
        return {name: self._folder.tables.read(name) for name in sorted(names)}

    def _get_row(self, image: str, tables: Mapping[str, Mapping[str, _Fields]]) -> _Fields:
        """Returns the row of an image in its table; {} without one."""
        table = self._data[image].get(_TABLE)
        return tables[table].get(image, {}) if table else {}


def _identify_content(file: StoredFile) -> str:
    """Returns a checksum of a small file, that of its storage if there is one."""
    return file.checksum or f'{google_crc32c.value(file.read()):08x}'


# --- Tars and Parquet files ---------------------------------------------------------------------


def _read_from(stream: io.BufferedReader, start: int, size: int) -> bytes:
    return os.pread(stream.fileno(), size, start)


class _EndOfHeadError(Exception):
    """What is to be read does not lie in the head of a file."""


def _read_head(file: StoredFile) -> tar_members.ReadRange:
    """Reads the beginning of a file; returns a function that reads from it."""
    head = file.read_range(0, min(file.size, _TAR_HEAD))

    def read(start: int, size: int) -> bytes:
        if start + size > len(head):
            raise _EndOfHeadError
        return head[start : start + size]

    return read


class _TarPart(ImagePart):
    """The images of a tar."""

    @contextlib.contextmanager
    def _open_rows(self, scratch: Scratch) -> Iterator[Iterable[Sequence[_Row]]]:
        [(label, file)] = self.files.items()
        with scratch.hold(file) as path, open(path, 'rb') as stream:
            read = functools.partial(_read_from, stream)
            members = list(tar_members.list_members(file.path, file.size, read))
            yield [self._make_rows(members, read) or [_left_row(label, 'tar without images')]]

    def _read_first_rows(self, count: int) -> Sequence[_Row]:
        [file] = self.files.values()
        if not file.local_path:
            return self._read_rows(_read_head(file), count)
        with open(file.local_path, 'rb') as stream:
            return self._read_rows(functools.partial(_read_from, stream), count)

    def _read_rows(self, read: tar_members.ReadRange, count: int) -> list[_Row]:
        """Makes the rows of the first images, as far as they can be read."""
        [file] = self.files.values()
        members = list[tuple[str, int, int]]()
        with contextlib.suppress(_EndOfHeadError):
            for name, start, size in tar_members.list_members(file.path, file.size, read):
                # It raises the error if the contents are not in the head.
                read(start + size, 0)
                members.append((name, start, size))
                if len(members) == count * _MEMBERS_OF_SAMPLE:
                    break
        return self._make_rows(members, read)

    def _make_rows(
        self, all_members: Iterable[tuple[str, int, int]], read: tar_members.ReadRange
    ) -> list[_Row]:
        [label] = self.files
        members, replaced_names = dict[str, tuple[int, int]](), list[str]()
        for name, start, size in all_members:
            if name in members:
                replaced_names.append(name)
            members[name] = start, size
        reasons = _judge_members(members, read)
        taken_names = [name for name, reason in reasons.items() if not reason]
        data = _SampleData(members, taken_names)
        rows = [
            self._make_tar_row(f'{label}/{name}', name, members, data, read) for name in taken_names
        ]
        for name, reason in reasons.items():
            if reason:
                rows.append(_left_row(f'{label}/{name}', reason))
        for name in replaced_names:
            if name in reasons:
                rows.append(_left_row(f'{label}/{name}', 'replaced by a later of its name'))
        unused_texts = data.find_unused(reasons)
        self.unused_texts = {f'{label}/{name}': x for name, x in unused_texts.items()}
        return rows

    def _make_tar_row(
        self,
        path: str,
        name: str,
        members: Mapping[str, tuple[int, int]],
        data: '_SampleData',
        read: tar_members.ReadRange,
    ) -> _Row:
        texts = dict[str, _Text]()
        for suffix, text in data.find(name).items():
            start, size = members[text]
            texts[suffix] = size, functools.partial(read, start, size)
        start, size = members[name]
        read_image = functools.partial(read, start, size)
        return self._make_row(path, size, read_image, {}, texts, data.has_own_key(name))


def _judge_members(
    members: Mapping[str, tuple[int, int]], read: tar_members.ReadRange
) -> dict[str, str]:
    """Returns the members of a tar that look like images, with '' or why they are not taken."""
    reasons = dict[str, str]()
    for name, (start, size) in members.items():
        reason = image_kinds.judge_name(name)
        if reason is None and image_kinds.may_be_image(name):
            reason = image_kinds.judge_head(read(start, min(image_kinds.HEAD_BYTES, size)))
        if reason is not None:
            reasons[name] = 'hidden' if is_hidden(name) else reason
    return reasons


class _SampleData:
    """Which `.json` and `.txt` the images of a tar have.

    `photo.v2.jpg` has `photo.v2.json` or else `photo.json`, as a sample of WebDataset.
    """

    def __init__(self, names: Iterable[str], images: Sequence[str]):
        self._texts = dict[tuple[str, str], str]()  # by stem and suffix
        self._others = dict[str, str]()  # suffixes of texts that are not read, by name
        for name in names:
            suffix = image_kinds.get_suffix(name)
            if is_hidden(name):
                continue
            if suffix.lower() in image_texts.SUFFIXES:
                self._texts[name.removesuffix(suffix), suffix.lower()] = name
            elif suffix.lower() in image_texts.OTHER_SUFFIXES:
                self._others[name] = suffix.lower()
        self._num_images = collections.Counter(map(_get_stem, images))
        self._num_in_sample = collections.Counter(map(_get_sample, images))

    def find(self, image: str) -> dict[str, str]:
        """Returns the names of the members with the data of an image, by suffix."""
        names = dict[str, str]()
        for suffix in image_texts.SUFFIXES:
            for stem in (_get_sample(image), _get_stem(image)):
                if (stem, suffix) in self._texts:
                    names[suffix] = self._texts[stem, suffix]
        return names

    def find_unused(self, images: Iterable[str]) -> dict[str, str]:
        """Returns the names of texts that none of all images has, with the reason."""
        reasons = {x: f'{suffix}, expected .txt or .json' for x, suffix in self._others.items()}
        used_names = {name for image in images for name in self.find(image).values()}
        for (_, suffix), name in self._texts.items():
            if name not in used_names:
                reasons[name] = f"{suffix} of no image's name"
        return reasons

    def has_own_key(self, image: str) -> bool:
        """Whether the key in the `.json` is that of this image alone."""
        if (_get_stem(image), '.json') in self._texts:
            return self._num_images[_get_stem(image)] == 1
        return self._num_in_sample[_get_sample(image)] == 1


def _get_sample(name: str) -> str:
    """Returns a name up to the first dot of its last segment."""
    folder, slash, base = name.rpartition('/')
    return folder + slash + base.partition('.')[0]


class _ParquetPart(ImagePart):
    """The images of a Parquet file."""

    @contextlib.contextmanager
    def _open_rows(self, scratch: Scratch) -> Iterator[Iterable[Sequence[_Row]]]:
        [(label, file)] = self.files.items()
        with scratch.hold(file) as path:
            yield self._read_rows(path, label, file.path)

    def _read_first_rows(self, count: int) -> Sequence[_Row]:
        from coyo11m_tfds.source import keyed_parquet

        [(label, file)] = self.files.items()
        opened = file.local_path or RangeReader(file)
        with keyed_parquet.naming_damage(file.path), keyed_parquet.open_parquet(opened) as table:
            rows = list[_Row]()
            if schema.KEY in table.schema_arrow.names:
                for batch in table.iter_batches(count, columns=[schema.KEY], use_threads=False):
                    for number, key in enumerate(batch.column(0).to_pylist()):
                        rows.append(_Row(f'{label}/{number}', 0, {schema.KEY: key}, bytes))
                    break
            return rows

    def _read_rows(self, path: str, label: str, name: str) -> Iterator[list[_Row]]:
        # Here, because images in folders and tars are read where pyarrow is not installed.
        from coyo11m_tfds.source import image_parquet

        has_rows = False
        for number, image in enumerate(image_parquet.read_images(path, name, self._columns)):
            # The row hands its bytes over, and does not keep them while it waits to be encoded.
            read = _raising(image.error) if image.error else [image.data].pop
            yield [self._make_row(f'{label}/{number}', len(image.data), read, image.fields)]
            has_rows = True
        if not has_rows:
            yield [_left_row(label, 'Parquet file without rows')]
