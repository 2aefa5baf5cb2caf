"""The folder of an encoding: its settings, its finished parts with their receipts, and its tars."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from coyo11m_tfds import schema, storage
from coyo11m_tfds.encoding import parts
from coyo11m_tfds.encoding.image_counts import ImageCounts
from coyo11m_tfds.encoding.parts import PartTars
from coyo11m_tfds.images.source_image import ImagePart
from coyo11m_tfds.process import errors
from coyo11m_tfds.process.sizes import format_count
from coyo11m_tfds.source.encoding_file import EncodedState, Encoding
from coyo11m_tfds.storage import file_state, json_digest
from coyo11m_tfds.storage.file_state import FileState
from coyo11m_tfds.storage.receipts import Receipt, Receipts
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import StoredFile

_RECEIPTS = '.encoded'  # sub-folder
# Of the origin of a part: digests of its images, and of what may change without the latents.
_FILES = 'files'
_TEXTS = 'texts'
_IMAGES = 'images'  # the setting that tells which images an encoding is of


class EncodingFolder:
    """The folder of an encoding, which several processes may fill at a time."""

    receipts: dict[int, Receipt]  # of finished parts, by number
    outdated: dict[int, Receipt]  # the same of those whose images have got other texts since
    counts: ImageCounts  # of the images of finished parts

    def __init__(self, out: str, settings: Mapping[str, Any]):
        """Reads the settings of what is finished; ValueError for other ones."""
        self._folder = storage.open_writable_folder(out)
        self._receipts = Receipts(self._folder, _RECEIPTS, ImageCounts.parse)
        self._settings = dict(settings)
        stored = self._read_settings()
        if stored is not None:
            stored.pop(_IMAGES, None)
            path = self._folder.path_of(schema.ENCODING_FILE)
            self._check_same(settings, stored, path)

    def begin(self, image_parts: Sequence[ImagePart], own_parts: Collection[int]) -> None:
        """Reads what is finished, and writes the settings; ValueError for other images.

        `own_parts` are the numbers of those of `image_parts` that this process makes.
        """
        self._parts = image_parts
        self._settings[_IMAGES] = _describe_images(image_parts)
        # Again: while the images were listed, another process may have written them.
        stored = self._read_settings()
        if stored is not None:
            path = self._folder.path_of(schema.ENCODING_FILE)
            self._check_same(self._settings, stored, path)
        self.read_receipts(own_parts)
        # Only now: the receipts of a folder without settings may be those of another encoding.
        if stored is None:
            self._write_encoding('')

    def _read_settings(self) -> dict[str, Any] | None:
        """Returns the stored settings; None if they cannot be read, in a folder for this command.

        Then the receipts of finished parts say whether these are of the same settings.
        """
        data = self._folder.read(schema.ENCODING_FILE)
        try:
            if data is not None:
                return dict(Encoding.parse(data).settings)
        except ValueError as error:
            path = self._folder.path_of(schema.ENCODING_FILE)
            logging.warning('%s: is damaged and written again (%s).', path, error)
        # Somebody's tars of images may have the names of parts, which would replace them.
        names = self._folder.sizes()
        tars = [name for name in names if name.endswith('.tar')]
        has_receipts = any(name.startswith(f'{_RECEIPTS}/') for name in names)
        if tars and not has_receipts:
            path = self._folder.path_of(min(tars))
            raise ValueError(f'{path}: is not of this command. Choose another folder for out.')
        return None

    def read_receipts(self, own_parts: Collection[int] = ()) -> None:
        """Reads the receipts of finished parts; ValueError for one of another encoding.

        The tars of `own_parts` must have their checksums, those of others at least their sizes.
        """
        numbers = {_name_part(number): number for number in range(len(self._parts))}
        receipts = self._receipts.read(numbers)
        # Before any tar is read, which takes long and would be in vain for another encoding.
        for name, receipt in receipts.items():
            self._check_origin(numbers[name], receipt, self._receipts.path_of(name))
        own_receipts = {}
        for name, receipt in receipts.items():
            if numbers[name] in own_parts:
                own_receipts[name] = receipt
        intact = self._receipts.check_files(own_receipts, 'Checking finished parts')
        listing = self._folder.list(deep=True)
        self.receipts = {}
        self.outdated = {}
        self.counts = ImageCounts()
        for name, receipt in receipts.items():
            number = numbers[name]
            # Whole tars are read only of own parts: each process reads those that it would make.
            is_damaged = name in own_receipts and name not in intact
            if is_damaged or not _are_listed(receipt.files, listing):
                continue
            if receipt.origin.get(_TEXTS) == self._parts[number].texts_digest:
                self._add_receipt(number, receipt)
            else:
                self.outdated[number] = receipt
        own_outdated = self.outdated.keys() & set(own_parts)
        if own_outdated:
            finished_parts = format_count(len(own_outdated), 'finished part')
            logging.info(f'The texts of {finished_parts} have changed, of which latents are kept.')

    def _check_origin(self, number: int, receipt: Receipt, path: str) -> None:
        """Raises a ValueError for a part of another encoding, or of other files."""
        part = self._parts[number]
        # Texts may have changed: then the latents are kept.
        settings = dict(receipt.origin)
        files_digest = settings.pop(_FILES, None)
        settings.pop(_TEXTS, None)
        self._check_same(self._settings, settings, path)
        if files_digest != part.digest:
            raise ValueError(
                f'{path}: some files of part {number}, which begin with {min(part.files)}, '
                'have changed since they were encoded. Remove this receipt to encode them again, '
                'or choose another folder.'
            )

    def _check_same(
        self, expected: Mapping[str, Any], stored: Mapping[str, Any], path: str
    ) -> None:
        """Raises a ValueError, which names `path`, if settings are not those of this command."""
        # Of the whole folder: without this file, the tars and the other receipts would be refused.
        advice = f'Choose another folder for out, or remove {self._folder.folder}.'
        errors.check_same_entries(expected, stored, path, 'is what this command makes', advice)

    def _add_receipt(self, number: int, receipt: Receipt) -> None:
        """Counts a part as finished."""
        self.receipts[number] = receipt
        self.counts.add(vars(receipt.facts))

    def read_latents(self, number: int, scratch: Scratch) -> dict[str, np.ndarray]:
        """Returns the latents that a part has from before its texts changed, by names of images."""
        latents = dict[str, np.ndarray]()
        if number in self.outdated:
            for name in self.outdated[number].files:
                file = storage.describe_file(self._folder.path_of(name))
                with scratch.hold(file) as path:
                    latents |= parts.read_latents(path)
        return latents

    def store_part(self, number: int, tars: PartTars) -> None:
        """Stores the tars of a part, and then its receipt."""
        states = {}
        has_sub_folders = len(self._settings['shapes']) > 1
        for shape, path in tars.paths.items():
            # With one shape, the folder itself is the source.
            sub_folder = shape if has_sub_folders else ''
            # Before the first tar, which without this file would look like one of images.
            encoding_name = os.path.join(sub_folder, schema.ENCODING_FILE)
            if self._folder.read(encoding_name) is None:
                self._write_encoding(sub_folder)
            name = os.path.join(sub_folder, f'{_name_part(number)}.tar')
            states[name] = EncodedState(*file_state.compute_state(path))
            self._folder.store(path, name, states[name].crc32c)
        # With other texts, all images of a shape may have become bad.
        if number in self.outdated:
            old_names = self.outdated[number].files.keys()
            self._folder.remove(old_names - states.keys())
        # Last, because it says that all of these are there.
        part = self._parts[number]
        origin = {**self._settings, _FILES: part.digest, _TEXTS: part.texts_digest}
        self._receipts.write(_name_part(number), origin, states, vars(tars.counts))
        self._add_receipt(number, Receipt(origin, states, tars.counts))

    def finish(self) -> None:
        """Names all tars, by which the sources are complete and can be built."""
        states = dict[str, FileState]()
        for receipt in self.receipts.values():
            states.update(receipt.files)
        # The folder itself is a source, too, where all tars lie in those of shapes.
        sub_folders = {os.path.dirname(name) for name in states}
        sub_folders.add('')
        in_order = sorted(sub_folders)
        for sub_folder in in_order:
            # The folder itself names all tars, a folder of a shape its own.
            prefix = f'{sub_folder}/' if sub_folder else ''
            files = {}
            for tar, state in states.items():
                if tar.startswith(prefix):
                    files[tar.removeprefix(prefix)] = EncodedState(*state)
            self._write_encoding(sub_folder, files)
        # Only now, when no process writes any more.
        for sub_folder in in_order:
            path = self._folder.path_of(sub_folder)
            storage.open_writable_folder(path).sweep()

    def _write_encoding(
        self, sub_folder: str, files: Mapping[str, EncodedState] | None = None
    ) -> None:
        """Writes the settings and, once they are complete, the tars of a folder."""
        name = os.path.join(sub_folder, schema.ENCODING_FILE)
        encoding = Encoding(self._settings, files)
        self._folder.write(name, encoding.to_bytes())


def _name_part(number: int) -> str:
    """Returns the name of a part, that of its receipt and, without suffix, of its tars."""
    return f'{number:05}'


def _are_listed(files: Mapping[str, FileState], listing: Mapping[str, StoredFile]) -> bool:
    """Whether a listing has all of some files, with their states as far as it tells."""
    for name, state in files.items():
        if name not in listing or not listing[name].state.agrees_with(state):
            return False
    return True


def _describe_images(image_parts: Sequence[ImagePart]) -> str:
    """Returns how many files there are, and a digest of their names and their division."""
    names = [sorted(part.files) for part in image_parts]
    num_files = sum(len(part.files) for part in image_parts)
    files = format_count(num_files, 'file')
    parts_of_images = format_count(len(names), 'part')
    digest = json_digest.sha256(names)[:16]
    return f'{files} in {parts_of_images}, digest {digest} of their names'
