"""Folders with the data of a Parquet file by key: built once, then opened by many processes.

    made_from = keyed_store.MadeFrom('captions', path, 'caption_llava', version)
    store = keyed_store.prepare(cache_dir, made_from, build)
    rows = store.find(keys)              # -1: no such key
    KeyedStore(store.folder)             # how another process opens it

`build(folder)` writes the files, `keys` among them (see `write_keys`), and returns the facts that
are kept with them. They go into `store.json` together with the sizes of all files and the origin of
the store. A folder gets its name when it is complete and safely on the disk, so a store exists as a
whole or not at all. Later damage is noticed when it is opened; it is then built again.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import urllib.parse
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging

from coyo11m_tfds.source import keyed_parquet
from coyo11m_tfds.storage import json_digest, source_files
from coyo11m_tfds.storage.file_lock import FileLock
from coyo11m_tfds.storage.file_state import naming

FORMAT = 3  # of the files of all stores; another number has them built again

MAX_EXAMPLES = 10

_META, _KEYS = 'store.json', 'keys'

# What a missing file, a wrong size and garbage in `store.json` raise. No other OSError: a store
# that cannot be opened for lack of permission or handles must not be deleted.
_DAMAGED = (
    FileNotFoundError,
    NotADirectoryError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
)


class UnusableStoreError(ValueError):
    """A folder holds no store, or a damaged one."""


@dataclasses.dataclass(frozen=True)
class MadeFrom:
    """The origin of a store; stores that differ in anything have different folders.

    A new store takes the place of older ones that differ from it in the version only.

    Attributes:
        kind: of the store, e.g. 'captions'.
        source: path or URL of the file; the commit in a URL of the hub does not count.
        column: that was read.
        version: of the file; changes when its content does.
    """

    kind: str
    source: str
    column: str
    version: str

    @property
    def group(self) -> str:
        """The prefix of the folders of all versions."""
        if source_files.is_remote(self.source):
            source = re.sub('@[0-9a-f]{40}/', '/', self.source)
        else:
            source = os.path.abspath(self.source)
        column = urllib.parse.quote(self.column, safe='')[:100]
        return f'{self.kind}-{column}-{json_digest.sha256([source, self.column])[:8]}-'

    @property
    def folder_name(self) -> str:
        """A name within `cache_dir`."""
        return self.group + json_digest.sha256([FORMAT, self.version])[:16]


class KeyedStore:
    """The keys of a store, and its facts; subclasses add what belongs to the keys.

    Attributes:
        folder: where it lies.
        facts: those that `build` returned.
        digest: hex digest of the content.
        keys: each once, int64 `(n,)`, ascending, memory-mapped.
        num_duplicates: rows of the source left out because an earlier row has the same key.
        duplicate_keys: up to 10 of the keys of such rows, int64, ascending.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """Opens a store.

        Raises:
            UnusableStoreError: there is none, or a file of it is missing or has a wrong size.
            OSError: it cannot be opened.
        """
        self.folder = os.fspath(folder)
        self._open_files = contextlib.ExitStack()
        weakref.finalize(self, self._open_files.close)
        try:
            # As long as this is open, no other process removes the store (see `_remove_unused`).
            meta_file = self.open_file(_META)
            fcntl.flock(meta_file, fcntl.LOCK_SH)
            meta = _read_meta(self.folder)
            self.facts: dict[str, Any] = meta['facts']
            self.keys = self.map_int64(_KEYS)
        except _DAMAGED as error:
            raise UnusableStoreError(
                f'{self.folder}: holds no usable store ({error!r}). Prepare it again.'
            ) from error
        self.digest: str = self.facts['digest']
        self.num_duplicates: int = self.facts['num_duplicates']
        self.duplicate_keys = np.array(self.facts['duplicate_keys'], np.int64)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the row of each key in this store, int64 `(n,)`, -1 where there is none."""
        return keyed_parquet.find(self.keys, keys)

    def check_unique(self, name: str) -> None:
        """Raises ValueError, with the `name` of the source, if rows of it repeat a key."""
        if self.num_duplicates:
            raise ValueError(
                f'{name}: {self.num_duplicates} rows repeat the key of another, e.g. key '
                f'{self.duplicate_keys[0]}; expected one row a key. Remove '
                'the duplicates, or take the first of each key: --drop_duplicates of '
                'embed_captions, bad_data="drop" of a build.'
            )

    def map_int64(self, name: str) -> np.ndarray:
        """Maps a file of the store into memory, int64 `(n,)`, read-only."""
        # Without the subclass, which makes every small operation slower.
        return np.asarray(np.memmap(os.path.join(self.folder, name), np.int64, mode='r'))

    def open_file(self, name: str) -> int:
        """Opens a file of the store for reading as long as the store lives; returns the handle."""
        handle = os.open(os.path.join(self.folder, name), os.O_RDONLY)
        self._open_files.callback(os.close, handle)
        return handle


def prepare(
    cache_dir: str | os.PathLike[str], made_from: MadeFrom, build: Callable[[str], dict[str, Any]]
) -> KeyedStore:
    """Opens the store in `cache_dir` that was made from `made_from`, or builds it.

    Of several processes that want one store the first builds it, the others wait. Older stores of
    the same file and column are removed, unless a process has them open.

    Args:
        cache_dir: made where there is none.
        made_from: names the store.
        build: fills an empty folder and returns the facts about it, JSON, see `write_keys`.

    Raises:
        OSError: the store cannot be written, e.g. because the disk is full.
    """
    cache_dir = os.path.abspath(cache_dir)
    folder = os.path.join(cache_dir, made_from.folder_name)
    with contextlib.suppress(UnusableStoreError):
        return KeyedStore(folder)
    os.makedirs(cache_dir, exist_ok=True)
    with _lock(os.path.join(cache_dir, f'.{made_from.group}lock')):
        # Another process may have built it by now.
        with contextlib.suppress(UnusableStoreError):
            return KeyedStore(folder)
        _remove_leftovers(cache_dir, made_from)
        building = f'.{made_from.folder_name}'
        try:
            os.mkdir(os.path.join(cache_dir, building))
            facts = build(os.path.join(cache_dir, building))
            _write_meta(os.path.join(cache_dir, building), made_from, facts)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(os.path.join(cache_dir, building), folder)
        finally:
            shutil.rmtree(os.path.join(cache_dir, building), ignore_errors=True)
        return KeyedStore(folder)


def write(folder: str, name: str, values: np.ndarray) -> None:
    """Writes an array as it is in memory."""
    path = os.path.join(folder, name)
    with naming(path), open(path, 'wb') as file:
        file.write(values)


def write_keys(folder: str, keys: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """Writes the keys of a source's rows, int64 `(n,)`, each once and ascending.

    Returns:
        `(rows, facts)`: the row of each key that was written, int64, the first that has it; and
        the facts of every store, except its digest.
    """
    rows, duplicates = keyed_parquet.order_by_key(keys)
    write(folder, _KEYS, keys[rows])
    examples = np.unique(duplicates)[:MAX_EXAMPLES].tolist()
    return rows, {'num_duplicates': len(duplicates), 'duplicate_keys': examples}


def _write_meta(folder: str, made_from: MadeFrom, facts: dict[str, Any]) -> None:
    meta = {
        'format': FORMAT,
        'made_from': dataclasses.asdict(made_from),
        'sizes': {entry.name: entry.stat().st_size for entry in os.scandir(folder)},
        'facts': facts,
    }
    text = json.dumps(meta | {'checksum': json_digest.sha256(meta)}, indent=1)
    write(folder, _META, np.frombuffer(text.encode(), np.uint8))


def _read_meta(folder: str) -> dict[str, Any]:
    """Reads and checks `store.json`, and the sizes in it."""
    with open(os.path.join(folder, _META), encoding='utf-8') as file:
        meta = json.load(file)
    if meta.pop('checksum') != json_digest.sha256(meta) or meta['format'] != FORMAT:
        raise ValueError(f'{_META} is damaged or of another format')
    for name, size in meta['sizes'].items():
        found = os.stat(os.path.join(folder, name)).st_size
        if found != size:
            raise ValueError(f'{name} has {found} bytes, expected {size}')
    return meta


def _lock(path: str) -> FileLock:
    try:
        return FileLock(path, wait=False)
    except BlockingIOError:
        logging.info('%s: another process builds the same store; waiting for it.', path)
        return FileLock(path)


def _remove_leftovers(cache_dir: str, made_from: MadeFrom) -> None:
    """Removes stores of the same group, and what killed builders of them left."""
    store = re.compile(rf'\.?{re.escape(made_from.group)}[0-9a-f]{{16}}')
    for entry in list(os.scandir(cache_dir)):
        if not (entry.is_dir(follow_symlinks=False) and store.fullmatch(entry.name)):
            continue
        if entry.name == made_from.folder_name:
            logging.warning('%s is damaged and built again.', entry.path)
            shutil.rmtree(entry.path)
        else:
            _remove_unused(entry.path)


def _remove_unused(folder: str) -> None:
    """Removes a store unless it is open somewhere: builds of an older source may still run."""
    meta = os.path.join(folder, _META)
    try:
        lock = FileLock(meta, wait=False)
    except BlockingIOError:
        return
    with lock:
        os.remove(meta)
    shutil.rmtree(folder)
