"""A folder of images that are files, with the tables, `.json` and `.txt` next to them."""

import collections
import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from coyo11m_tfds import schema
from coyo11m_tfds.images import image_tables
from coyo11m_tfds.images.image_tables import ImageTables
from coyo11m_tfds.images.image_texts import TextFiles
from coyo11m_tfds.images.source_image import (
    READS_AT_ONCE,
    Fields,
    ImagePart,
    ImageRow,
    Text,
    find_caption_columns,
    folders_above,
    get_stem,
)
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import ChecksumScan, StoredFile

_TABLE = 'table'  # in place of a suffix
_REMOTE_KEYS = 4  # looked at in a remote part, whose images have a `.json` each: a request
_REPEATED_NAMES = 200  # images whose keys are looked at because their names repeat


class ImageFolder:
    """All files of a folder of images.

    Attributes:
        files: All files by name, also those that are no images.
        data_files: For each image the names of its `.json`, its `.txt` and its table, by suffix.
        tables: The tables of the folder.
        num_of_stem: The number of images of each name without its suffix.
        is_numbered: Whether the names of the images are different numbers: their keys.
        of_repeated_names: Some images whose names occur in several folders: their keys may
            repeat, too.
    """

    def __init__(self, files: Mapping[str, StoredFile], images: Sequence[str], caption_column: str):
        """Takes all files by name, the names of the images, and what `find_images` takes."""
        self.files = files
        self._table_names = dict[tuple[str, str], str]()  # by folder, and name in small letters
        # In this order, because of names that differ in case one in small letters counts.
        for name in sorted(files, reverse=True):
            folder = next(folders_above(name))
            base = name.removeprefix(folder).lower()
            if base in image_tables.NAMES:
                self._table_names.setdefault((folder, base), name)
        self.num_of_stem = collections.Counter(map(get_stem, images))
        self._texts = TextFiles(files, self.num_of_stem.keys())
        self.data_files = {image: self._find_data_files(image) for image in images}
        tables = {image: names.get(_TABLE, '') for image, names in self.data_files.items()}
        self.tables = ImageTables(files, tables, find_caption_columns(caption_column))
        self._tell_unused_texts()
        names = [os.path.basename(get_stem(image)) for image in images]
        self.is_numbered = _are_different_numbers(names)
        self.of_repeated_names = _find_repeated(images, names)

    def _find_data_files(self, image: str) -> dict[str, str]:
        """Returns the names of the files with the data of an image, see `data_files`."""
        names = self._texts.find(get_stem(image))
        table = self._find_table(image)
        if table:
            names[_TABLE] = table
        return names

    def _find_table(self, image: str) -> str:
        """Returns the closest table above an image; '' without one."""
        for folder in folders_above(image):
            for name in image_tables.NAMES:
                if (folder, name) in self._table_names:
                    return self._table_names[folder, name]
        return ''

    def _tell_unused_texts(self) -> None:
        """Logs the texts of no image, if there are images without any."""
        used_names = set[str]()
        images_without = list[str]()
        for image, names in self.data_files.items():
            used_names.update(names.values())
            if not names:
                images_without.append(image)
        self._texts.tell_unused(used_names, images_without)


def _are_different_numbers(names: Sequence[str]) -> bool:
    """Whether all names are keys, and different ones."""
    # 7.jpg and 007.jpg would have one key.
    keys = set(map(schema.parse_integer, names))
    return None not in keys and len(keys) == len(names)


def _find_repeated(images: Sequence[str], names: Sequence[str]) -> set[str]:
    """Returns the first images, by name, whose name is that of another image, too."""
    counts = collections.Counter(names)
    repeated = list[tuple[str, str]]()
    for name, image in zip(names, images, strict=True):
        if counts[name] > 1:
            repeated.append((name, image))
    # By name, so that images of one name are looked at together.
    repeated.sort()
    return {image for _, image in repeated[:_REPEATED_NAMES]}


class FolderPart(ImagePart):
    """A run of images of a folder."""

    def __init__(
        self,
        folder: ImageFolder,
        images: Sequence[str],
        caption_column: str,
        has_keys_of_paths: bool,
    ):
        """Takes the names of the images; see `image_files.find_images` for the last arguments."""
        files = {name: folder.files[name] for name in images}
        super().__init__(files, caption_column, has_keys_of_paths)
        self._folder = folder
        self._is_numbered = folder.is_numbered
        self._data = {name: folder.data_files[name] for name in images}
        # Each once: many images may have one table.
        names = set[str]()
        for data_files in self._data.values():
            names.update(data_files.values())
        # In one order, on which the digest of their contents depends.
        self.text_files = {name: folder.files[name] for name in sorted(names)}

    @functools.cached_property
    def texts_digest(self) -> str:  # type: ignore[override]  # of other parts it is known at once
        """Digest of what the files next to the images say of them; reads local files."""
        tables = self._read_tables(self._data)
        texts = [file for name, file in self.text_files.items() if name not in tables]
        with ThreadPool(READS_AT_ONCE) as threads:
            contents = list(threads.map(_identify_content, texts))
        # Of a table only the rows of these images: others may change without them.
        rows = {name: self._get_row(name, tables) for name in self._data}
        return json_digest.sha256([self._data, contents, rows])

    @contextlib.contextmanager
    def _open_rows(self, scratch: Scratch) -> Iterator[Iterable[Sequence[ImageRow]]]:
        """Yields all images as one group."""
        # Before the texts are read: to one that changes from now on, the digest of the next run is
        # another one.
        _ = self.texts_digest
        yield [self._read_rows(list(self._data))]

    def _read_first_rows(self, count: int) -> Sequence[ImageRow]:
        """See `ImagePart`; also returns later images whose keys may repeat."""
        images = list(self._data)
        first_file = self.files[images[0]]
        if not first_file.local_path:
            count = min(count, _REMOTE_KEYS)
        chosen = images[:count]
        for image in images[count:]:
            if image in self._folder.of_repeated_names:
                chosen.append(image)
        return self._read_rows(chosen)

    def _read_rows(self, images: Sequence[str]) -> list[ImageRow]:
        """Returns images with what their files next to them say."""
        tables = self._read_tables(images)

        def read_row(image: str) -> ImageRow:
            """Returns one image, whose small files are read now."""
            texts = dict[str, Text]()
            for suffix, name in self._data[image].items():
                text = self.text_files[name]
                texts[suffix] = text.size, text.read
            file = self.files[image]
            fields = self._get_row(image, tables)
            # Images that differ in their suffixes alone share a `.json`.
            has_own_key = self._folder.num_of_stem[get_stem(image)] == 1
            return self._make_row(image, file.size, file.read, fields, texts, has_own_key)

        # In threads, because a remote text is a request; images themselves are read later.
        with ThreadPool(READS_AT_ONCE) as threads:
            return list(threads.map(read_row, images))

    def _read_tables(self, images: Iterable[str]) -> Mapping[str, Mapping[str, Fields]]:
        """Reads the tables of images; returns their rows by the names of tables and images."""
        names = set[str]()
        for image in images:
            table = self._data[image].get(_TABLE)
            if table:
                names.add(table)
        return {name: self._folder.tables.read(name) for name in sorted(names)}

    def _get_row(self, image: str, tables: Mapping[str, Mapping[str, Fields]]) -> Fields:
        """Returns the row of an image in its table; {} without one."""
        table = self._data[image].get(_TABLE)
        if not table:
            return {}
        return tables[table].get(image, {})


def _identify_content(file: StoredFile) -> str:
    """Returns a checksum of a small file, that of its storage if there is one."""
    return file.checksum or f'{file.scan(ChecksumScan).crc32c:08x}'
