"""The files next to images that hold their texts: a `.json` or `.txt` of the same name."""

import collections
import functools
from collections.abc import Collection, Mapping, Sequence

from absl import logging

from coyo11m_tfds.foreign.file_names import list_names, normalize_path
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.storage.stored_file import StoredFile

SUFFIXES = '.json', '.txt'
# In which others have texts or classes of images.
OTHER_SUFFIXES = '.caption', '.captions', '.cls', '.jsn', '.text', '.transcript'


class TextFiles:
    """The `.json` and the `.txt` of a folder of images.

    One whose name is that of no image is that of the only image with a similar name. Of several
    that differ in the case of their suffixes, one in small letters counts.
    """

    def __init__(self, files: Mapping[str, StoredFile], stems: Collection[str]):
        """Takes all files by name, and the names of images without their suffixes."""
        self._files = files
        self._stems = stems
        self._names = dict[tuple[str, str], str]()  # by stem and suffix
        # Of texts of no image, by normal stem and suffix.
        self._similar_names = collections.defaultdict[tuple[str, str], list[str]](list)
        # In this order small letters come first, whatever the order of the listing.
        for name in sorted(files, reverse=True):
            stem, dot, suffix = name.rpartition('.')
            kind = f'{dot}{suffix}'.lower()
            if kind in SUFFIXES and stem in stems:
                self._names.setdefault((stem, kind), name)
            elif kind in SUFFIXES:
                self._similar_names[normalize_path(stem), kind].append(name)

    def find(self, stem: str) -> dict[str, str]:
        """Returns the names of the files of an image, by their suffixes in small letters."""
        names = dict[str, str]()
        for kind in SUFFIXES:
            if (stem, kind) in self._names:
                names[kind] = self._names[stem, kind]
            # To normalize a path takes time, and few folders have such names.
            elif self._similar_names:
                normal_stem = normalize_path(stem)
                similar_names = self._similar_names.get((normal_stem, kind), [])
                # Of several texts or images, each may be the one that is meant.
                if len(similar_names) == 1 and self._num_of_normal_stem[normal_stem] == 1:
                    names[kind] = similar_names[0]
        return names

    @functools.cached_property
    def _num_of_normal_stem(self) -> Mapping[str, int]:
        """The number of images with each normal name; computed only where a text has one."""
        return collections.Counter(map(normalize_path, self._stems))

    def tell_unused(self, used_names: Collection[str], images_without: Sequence[str]) -> None:
        """Logs the files that may be those of images without any, by name."""
        unused_paths = []
        for name in sorted(self._files.keys() - used_names):
            if name.lower().endswith(SUFFIXES + OTHER_SUFFIXES):
                unused_paths.append(self._files[name].path)
        # Only where both are left, one may be meant for the other.
        if unused_paths and images_without:
            images = format_count(len(images_without), 'image has', 'images have')
            unused_files = format_count(len(unused_paths), 'file is', 'files are')
            logging.warning(
                f'{images} neither a .json or .txt nor a table: {list_names(images_without)}. '
                f'{unused_files} not used: {list_names(unused_paths)}. Captions are in files with '
                'the name of their image, metadata.jsonl or metadata.csv.'
            )
