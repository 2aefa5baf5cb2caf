"""Finds images with their captions and numbers: in a folder, in tars, or in Parquet files.

    parts, left = image_files.find_images('gs://bucket/photos', '', divide)
    with parts[0].open(scratch) as images:
        for image in images:
            image.caption, image.read()

The listing of a source alone decides its parts: a run of images of a folder, one tar, or one
Parquet file. docs/images.md says where each of them has captions, numbers and keys. Whatever looks
like an image and is not taken has a reason: in `left`, or as an image whose `read` raises it.
"""

import collections
import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from coyo11m_tfds import schema, storage
from coyo11m_tfds.foreign.file_names import is_hidden
from coyo11m_tfds.images import image_tables
from coyo11m_tfds.images.image_folder import FolderPart, ImageFolder
from coyo11m_tfds.images.image_tar import TarPart
from coyo11m_tfds.images.source_image import READS_AT_ONCE, ImagePart, folders_above
from coyo11m_tfds.pictures import image_kinds
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.process.threads import ThreadPool
from coyo11m_tfds.source.encoding_file import Encoding
from coyo11m_tfds.storage.stored_file import FileChanged, StoredFile

_MAX_HEADS = 100  # of remote files with one suffix
# Keys that are compared before anything is encoded: of so many images of each part, or so many of
# all, in 0.1 ms each.
_LEAST_KEYS = 100
_MANY_KEYS = 20_000


class FoundImages(NamedTuple):
    """The images of a folder."""

    parts: list[ImagePart]
    left: dict[str, str]  # names of files that look like images and are in no part, and why


def find_images(
    root: str | os.PathLike[str],
    caption_column: str,
    divide: Callable[[Sequence[int]], Iterable[slice]],
    *,
    has_keys_of_paths: bool = False,
) -> FoundImages:
    """Lists the images in a folder, local or remote, and divides them into parts.

    Args:
        root: The folder.
        caption_column: Field or column of captions; '' for the first of the usual names that an
            image has.
        divide: Makes parts of images that are files, of their sizes in bytes.
        has_keys_of_paths: Whether all keys are hashes of paths.

    Raises:
        ValueError: For a folder that is missing, or has no images; for a Parquet file with images
            in a column of another name.
        OSError: If the storage is out of reach.
    """
    listing, broken_names = _list_folder(root)
    files = dict[str, StoredFile]()
    hidden_names = []
    for name, file in listing.items():
        if is_hidden(name):
            hidden_names.append(name)
        else:
            files[name] = file
    left = _find_left(files, hidden_names, broken_names)
    images = [name for name in sorted(files) if image_kinds.judge_name(name) == '']
    tars = []
    encoded_folders = _find_encodings(files)
    for name in _names_with('.tar', files):
        # The output of an earlier command may be below the images.
        if next(folders_above(name)) not in encoded_folders:
            tars.append(name)
    tables = _find_tables(files, has_other_images=bool(images or tars))
    parts = list[ImagePart]()
    if images:
        image_folder = ImageFolder(files, images, caption_column)
        sizes = [files[name].size for name in images]
        for run in divide(sizes):
            parts.append(FolderPart(image_folder, images[run], caption_column, has_keys_of_paths))
    for name in tars:
        parts.append(TarPart({name: files[name]}, caption_column, has_keys_of_paths))
    if tables:
        # Here, because images in folders and tars are read where pyarrow is not installed.
        from coyo11m_tfds.images.image_parquet import ParquetPart

        for name in tables:
            parts.append(ParquetPart({name: files[name]}, caption_column, has_keys_of_paths))
    if not parts:
        usual_suffixes = ', '.join(image_kinds.USUAL_SUFFIXES)
        raise ValueError(
            f'{root}: has no images, expected {usual_suffixes}, or .tar '
            f'(uncompressed) or .parquet with such files in them.{describe_left(left)}'
        )
    # At the end, because parts decide which tables they use.
    used_names = set[str]()
    for part in parts:
        used_names.update(part.files, part.text_files)
    image_tables.tell_unread(files, used_names)
    return FoundImages(parts, left)


def _list_folder(
    root: str | os.PathLike[str],
) -> tuple[Mapping[str, StoredFile], Collection[str]]:
    """Returns all files of a folder by name, and the names of links to no file.

    Raises a ValueError for a folder that is missing.
    """
    folder = storage.open_folder(root)
    listing: Mapping[str, StoredFile] = {}
    broken_names: Collection[str] = ()
    with contextlib.suppress(FileNotFoundError):
        # With the commit of a folder on a hub, so that all files are of one version.
        listing, broken_names = folder.pin().list_all()
    # A folder that is there but empty has the error of one without images.
    if not listing and not folder.exists():
        raise ValueError(f'{root}: there is no such folder, expected one of images.')
    return listing, broken_names


def _find_tables(files: Mapping[str, StoredFile], has_other_images: bool) -> list[str]:
    """Returns the names of the Parquet files that are parts."""
    tables = _names_with('.parquet', files)
    is_alone = len(tables) == 1 and not has_other_images
    if not tables or is_alone:
        # One alone is meant to have images, and an error says so if it has none.
        return tables
    from coyo11m_tfds.images import image_parquet

    tables_by_name = {name: files[name] for name in tables}
    # Next to images, Parquet files without images hold captions.
    with_images = image_parquet.find_tables_of_images(tables_by_name)
    # Several without anything else: the error of the first says that it has no images.
    if not with_images and not has_other_images:
        return tables
    return with_images


def check_first_images(parts: Sequence[ImagePart]) -> None:
    """Looks at the first images of all parts, before hours go into any.

    Where some have captions, parts without any are no error. Raises a ValueError if two have the
    same key, as those of two runs of img2dataset, and for a Parquet file with other columns.
    """
    names = dict[int, str]()  # of the first image with each key
    count = max(_LEAST_KEYS, _MANY_KEYS // len(parts))
    has_captions = False
    with ThreadPool(READS_AT_ONCE) as threads:
        for images in threads.map(lambda part: part.read_first(count), parts):
            has_captions = has_captions or images.has_captions
            for key, name in images.keys:
                other_name = names.setdefault(key, name)
                if other_name != name:
                    raise ValueError(
                        f'{other_name} and {name} have the same key, {key}, as images of two runs '
                        'of img2dataset have. Take the keys of their paths (--keys=path), or '
                        'encode the runs one by one.'
                    )
    if has_captions:
        for part in parts:
            part.needs_captions = False


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
    unknown_names = collections.defaultdict[str, list[str]](list)  # by suffix
    for name in files:
        reason = image_kinds.judge_name(name)
        if reason:
            left[name] = reason
        elif image_kinds.may_be_image(name):
            unknown_names[image_kinds.get_suffix(name)].append(name)
    with ThreadPool(READS_AT_ONCE) as threads:
        for names in unknown_names.values():
            left |= _judge_heads({name: files[name] for name in names}, threads)
    return left


def _judge_heads(files: Mapping[str, StoredFile], threads: ThreadPool) -> dict[str, str]:
    """Returns which files of one suffix begin like images, with the reason why they are left."""

    def judge(name: str) -> str | None:
        """Returns why a file is left by its first bytes; None if it is no image."""
        size = min(image_kinds.HEAD_BYTES, files[name].size)
        head = files[name].read_range(0, size)
        return image_kinds.judge_head(head)

    def judge_all(names: Collection[str]) -> dict[str, str]:
        """Returns those of some files that begin like images, with the reason."""
        reasons = {}
        for name, reason in zip(names, threads.map(judge, names), strict=True):
            if reason:
                reasons[name] = reason
        return reasons

    first_names = [name for name, file in files.items() if file.local_path]
    # Of remote files some: a request for each of a million would take an hour.
    if not first_names:
        first_names = sorted(files)[:_MAX_HEADS]
    reasons = judge_all(first_names)
    # Where some of a suffix are images, all of them are looked at.
    if reasons and len(first_names) < len(files):
        reasons = judge_all(files)
    return reasons


def describe_left(left: Mapping[str, str]) -> str:
    """Says how many files are not taken, with an example and what to do; '' without any."""
    if not left:
        return ''
    name, reason = min(left.items())
    files = format_count(len(left), 'file')
    return f' Not taken: {files} such as {name} ({reason}). {image_kinds.ADVICE}.'


def _names_with(suffix: str, files: Mapping[str, StoredFile]) -> list[str]:
    """Returns the names that end with a suffix, in whatever case, in order."""
    return [name for name in sorted(files) if name.lower().endswith(suffix)]


def _find_encodings(files: Mapping[str, StoredFile]) -> set[str]:
    """Returns the folders of latents that `encode_images` has written, each with a slash."""
    folders = set[str]()
    for name, file in files.items():
        folder = next(folders_above(name))
        if name != folder + schema.ENCODING_FILE:
            continue
        try:
            Encoding.parse(file.read())
        except FileChanged:
            # Another process of the same job has just written it.
            pass
        except ValueError:
            # Of another program: next to it, tars may be those of images.
            continue
        folders.add(folder)
    return folders
