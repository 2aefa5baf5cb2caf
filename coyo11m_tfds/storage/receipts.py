"""Receipts of finished files: what these were made of, and their state when they were complete.

A receipt is a small JSON file in a sub-folder. It is written after the files that it names, so a
process that is killed leaves files without a receipt. Anybody may damage or copy a receipt. One
that cannot be read does not count, and what it was about is made again.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from absl import logging

from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.base import WritableFolder
from coyo11m_tfds.storage.file_state import FileState

_SUFFIX = '.json'


class Receipt(NamedTuple):
    """What is known about finished files."""

    origin: Any  # identity of what they were made of, in plain values
    files: Mapping[str, FileState]  # by their names in the folder
    facts: Any  # what else is worth keeping


class Receipts:
    """The receipts of files in a folder, in a sub-folder of it."""

    def __init__(
        self,
        folder: WritableFolder,
        sub_folder: str,
        parse_facts: Callable[[Any], Any] = lambda x: x,
    ):
        """Does not touch the storage.

        `parse_facts` makes the facts of plain values; its KeyErrors, TypeErrors and ValueErrors
        show that a receipt is damaged.
        """
        self.folder = folder
        self._sub_folder = sub_folder
        self._parse_facts = parse_facts

    def path_of(self, name: str) -> str:
        """Returns the path or URL of a receipt."""
        return self.folder.path_of(self._file_of(name))

    def write(self, name: str, origin: Any, files: Mapping[str, FileState], facts: Any) -> None:
        """Writes the receipt of complete files; origin and facts are plain values."""
        states = {file: state.to_json() for file, state in files.items()}
        # With its name, because a copy under another name is no receipt.
        content = {'name': name, 'origin': origin, 'files': states, 'facts': facts}
        self.folder.write(self._file_of(name), json_digest.seal(content))

    def read(self, names: Collection[str] | None = None) -> dict[str, Receipt]:
        """Returns all receipts by name, or those of `names` that exist; leaves out damaged ones."""
        chosen = None
        if names is not None:
            chosen = [f'{name}{_SUFFIX}' for name in names]
        receipts = {}
        damaged = []
        # A build has a receipt for each of its tasks, so they are read several at a time.
        for file, data in self.folder.read_all(self._sub_folder, chosen).items():
            name = file.removesuffix(_SUFFIX)
            try:
                receipts[name] = self._parse(name, data)
            except (AttributeError, LookupError, TypeError, ValueError):
                damaged.append(name)
        # One line for all: what they were about is made again, and that is all there is to do.
        if damaged:
            path = self.path_of(damaged[0])
            others = ''
            if len(damaged) > 1:
                others = f' and {len(damaged) - 1:,} more'
            logging.warning('%s%s: damaged, so it does not count as finished work.', path, others)
        return receipts

    def check_files(self, receipts: Mapping[str, Receipt], title: str) -> dict[str, Receipt]:
        """Returns the receipts whose files are all in place and unchanged; reads local files.

        `title` is that of the progress.
        """
        states: dict[str, FileState] = {}
        for receipt in receipts.values():
            states.update(receipt.files)
        if not states:
            return {}
        num_bytes = 0
        # A bucket lists checksums; on a disk, all files have to be read.
        if not self.folder.keeps_checksums:
            num_bytes = sum(state.size for state in states.values())
        with Progress(title, num_bytes, 'B') as progress:
            present = self.folder.inventory('', progress.add, states, deep=True)
        unchanged = {}
        for name, receipt in receipts.items():
            # All of its files are there, each in its state.
            if receipt.files.items() <= present.items():
                unchanged[name] = receipt
        return unchanged

    def _file_of(self, name: str) -> str:
        return f'{self._sub_folder}/{name}{_SUFFIX}'

    def _parse(self, name: str, data: bytes) -> Receipt:
        """Returns the receipt of a name; raises an error for JSON of another structure."""
        content = json_digest.unseal(data)
        if content['name'] != name:
            raise ValueError(f'it is the receipt of {content["name"]!r}')
        files = {}
        for file, state in content['files'].items():
            files[file] = FileState.from_json(state)
        facts = self._parse_facts(content['facts'])
        return Receipt(content['origin'], files, facts)
