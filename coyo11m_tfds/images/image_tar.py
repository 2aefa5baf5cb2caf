"""A tar of images, as img2dataset and WebDataset write them: members with data of the same name."""

import collections
import contextlib
import functools
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from coyo11m_tfds.foreign import tar_members
from coyo11m_tfds.foreign.file_names import is_hidden
from coyo11m_tfds.images import image_texts
from coyo11m_tfds.images.source_image import ImagePart, ImageRow, Text, get_stem, make_left_row
from coyo11m_tfds.pictures import image_kinds
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import StoredFile

_HEAD = 1 << 20  # bytes of a remote tar that are read for its first keys
_MEMBERS_OF_SAMPLE = 4  # an image, its `.json`, its `.txt` and another

_Members = Mapping[str, tuple[int, int]]  # start and size in bytes, by name


class TarPart(ImagePart):
    """The images of a tar."""

    @contextlib.contextmanager
    def _open_rows(self, scratch: Scratch) -> Iterator[Iterable[Sequence[ImageRow]]]:
        """Yields all images of the tar as one group."""
        [(label, file)] = self.files.items()
        with scratch.hold(file) as path, open(path, 'rb') as stream:
            read = functools.partial(_read_from, stream)
            members = list(tar_members.list_members(file.path, file.size, read))
            rows = self._make_rows(members, read)
            if not rows:
                rows.append(make_left_row(label, 'tar without images'))
            # Within the `with` block, because the images are read from the open file.
            yield [rows]

    def _read_first_rows(self, count: int) -> Sequence[ImageRow]:
        """See `ImagePart`; of a remote tar, those whose data are in its head."""
        [file] = self.files.values()
        if not file.local_path:
            return self._read_rows(_read_head(file), count)
        with open(file.local_path, 'rb') as stream:
            read = functools.partial(_read_from, stream)
            return self._read_rows(read, count)

    def _read_rows(self, read: tar_members.ReadRange, count: int) -> list[ImageRow]:
        """Makes rows of some of the first images, for a look at keys before anything is encoded."""
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
    ) -> list[ImageRow]:
        """Returns the images among members of the tar, and what else looks like one."""
        [label] = self.files
        # As tar does when it unpacks, a later member replaces an earlier one of its name.
        members = dict[str, tuple[int, int]]()
        replaced_names = list[str]()
        for name, start, size in all_members:
            if name in members:
                replaced_names.append(name)
            members[name] = start, size
        reasons = _judge_members(members, read)
        taken_names = [name for name, reason in reasons.items() if not reason]
        data = _SampleData(members, taken_names)
        rows = list[ImageRow]()
        for name in taken_names:
            rows.append(self._make_member_row(f'{label}/{name}', name, members, data, read))
        for name, reason in reasons.items():
            if reason:
                rows.append(make_left_row(f'{label}/{name}', reason))
        for name in replaced_names:
            if name in reasons:
                rows.append(make_left_row(f'{label}/{name}', 'replaced by a later of its name'))
        unused_texts = data.find_unused(reasons)
        self.unused_texts = {f'{label}/{name}': reason for name, reason in unused_texts.items()}
        return rows

    def _make_member_row(
        self,
        path: str,
        name: str,
        members: _Members,
        data: '_SampleData',
        read: tar_members.ReadRange,
    ) -> ImageRow:
        """Returns the image of a member, with its data."""
        texts = dict[str, Text]()
        for suffix, text in data.find(name).items():
            start, size = members[text]
            read_text = functools.partial(read, start, size)
            texts[suffix] = (size, read_text)
        start, size = members[name]
        read_image = functools.partial(read, start, size)
        return self._make_row(path, size, read_image, {}, texts, data.has_own_key(name))


class _SampleData:
    """Which `.json` and `.txt` the images of a tar have.

    `photo.v2.jpg` has `photo.v2.json` or else `photo.json`, as a sample of WebDataset.
    """

    def __init__(self, names: Iterable[str], images: Sequence[str]):
        """Takes the names of all members, and those of the images that are taken."""
        self._texts = dict[tuple[str, str], str]()  # by stem and suffix
        self._suffixes = dict[str, str]()  # of all `.json` and `.txt`, by name
        self._others = dict[str, str]()  # suffixes of texts that are not read, by name
        for name in names:
            if is_hidden(name):
                continue
            suffix = image_kinds.get_suffix(name)
            kind = suffix.lower()
            if kind in image_texts.SUFFIXES:
                self._suffixes[name] = kind
                stem = name.removesuffix(suffix)
                same_text = self._texts.get((stem, kind), '')
                # Of suffixes that differ in case, one in small letters counts, as in a folder.
                self._texts[stem, kind] = max(name, same_text)
            elif kind in image_texts.OTHER_SUFFIXES:
                self._others[name] = kind
        # Images that differ only in what follows the last dot, or the first, share a `.json`.
        self._num_images = collections.Counter(map(get_stem, images))
        self._num_in_sample = collections.Counter(map(_get_sample, images))

    def find(self, image: str) -> dict[str, str]:
        """Returns the names of the members with the data of an image, by suffix."""
        names = dict[str, str]()
        for suffix in image_texts.SUFFIXES:
            # The whole name of the image comes last, because it counts.
            for stem in (_get_sample(image), get_stem(image)):
                if (stem, suffix) in self._texts:
                    names[suffix] = self._texts[stem, suffix]
        return names

    def find_unused(self, images: Iterable[str]) -> dict[str, str]:
        """Returns the names of texts that none of all images has, with the reason."""
        used_names = set[str]()
        for image in images:
            used_names.update(self.find(image).values())
        reasons = {}
        for name, suffix in self._others.items():
            reasons[name] = f'{suffix}, expected .txt or .json'
        for name, suffix in self._suffixes.items():
            if self._texts[get_stem(name), suffix] != name:
                reasons[name] = f'{suffix} beside another of its name'
            elif name not in used_names:
                reasons[name] = f"{suffix} of no image's name"
        return reasons

    def has_own_key(self, image: str) -> bool:
        """Whether the key in the `.json` is that of this image alone."""
        if (get_stem(image), '.json') in self._texts:
            return self._num_images[get_stem(image)] == 1
        return self._num_in_sample[_get_sample(image)] == 1


def _get_sample(name: str) -> str:
    """Returns a name up to the first dot of its last segment."""
    folder, slash, base = name.rpartition('/')
    return folder + slash + base.partition('.')[0]


def _judge_members(members: _Members, read: tar_members.ReadRange) -> dict[str, str]:
    """Returns the members of a tar that look like images, with '' or why they are not taken."""
    reasons = dict[str, str]()
    for name, (start, size) in members.items():
        reason = image_kinds.judge_name(name)
        # Only where the name does not tell: the head of a remote tar has few contents.
        if reason is None and image_kinds.may_be_image(name):
            head = read(start, min(image_kinds.HEAD_BYTES, size))
            reason = image_kinds.judge_head(head)
        if reason is not None:
            reasons[name] = 'hidden' if is_hidden(name) else reason
    return reasons


class _EndOfHeadError(Exception):
    """What is to be read does not lie in the head of a file."""


def _read_head(file: StoredFile) -> tar_members.ReadRange:
    """Reads the beginning of a file; returns a function that reads from it.

    This raises an `_EndOfHeadError` for what does not lie in the beginning.
    """
    head = file.read_range(0, min(file.size, _HEAD))

    def read(start: int, size: int) -> bytes:
        """Returns some bytes of the head."""
        if start + size > len(head):
            raise _EndOfHeadError
        return head[start : start + size]

    return read


def _read_from(stream: io.BufferedReader, start: int, size: int) -> bytes:
    """Reads some bytes of a file; threads may do so at once, because it does not seek."""
    return os.pread(stream.fileno(), size, start)
