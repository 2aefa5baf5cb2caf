"""Captions and texts, joined by key to the rows of latents.

Joined values lie in a cache, where a build that is resumed finds them.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from coyo11m_tfds import storage
from coyo11m_tfds.convert.build_settings import EMBEDDINGS_IN_PT, BuildSettings
from coyo11m_tfds.convert.source_contents import SourceContents, check_sidecar
from coyo11m_tfds.dataset.keyed_random import splitmix64
from coyo11m_tfds.source import captions, keyed_values, sidecar
from coyo11m_tfds.source.keyed_values import KeyedValues
from coyo11m_tfds.source.sidecar import SidecarHeader
from coyo11m_tfds.source.source_latents import SourceLatents, TextTables
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import StoredFile, common_path

NO_ROW = -2  # size of the value of a key that has none
_NO_PLACE = -1  # place of a row that repeats a key

# Opens values that an earlier build has joined, or joins them: from what decides them, and from
# what writes them into a folder.
_Keep = Callable[[list[Any], Callable[[str], None]], KeyedValues]


@dataclasses.dataclass(frozen=True)
class JoinedContents:
    """Captions and texts of the rows of latents, by place: split by split, without duplicates."""

    places: np.ndarray  # of each row of latents, int64 `(n,)`; -1 of one that repeats a key
    captions: KeyedValues
    texts: KeyedValues | None  # of a sidecar or of labels
    text: SidecarHeader | None  # also of embeddings in `.pt` files, which are not joined

    @property
    def digests(self) -> list[str]:
        """Digests of the captions and of the texts; '' without texts."""
        texts_digest = ''
        if self.texts:
            texts_digest = self.texts.facts['digest']
        elif self.text:
            # The digests of the `.pt` files are those of the embeddings in them, too.
            texts_digest = EMBEDDINGS_IN_PT
        return [self.captions.facts['digest'], texts_digest]

    def sizes_by_row(self, values: KeyedValues) -> np.ndarray:
        """Returns the size of the joined value of each row of latents, int `(n,)`.

        It is `NO_ROW` of a row without a value, and of one that repeats a key.
        """
        sizes = np.full(len(self.places) + 1, NO_ROW, values.sizes.dtype)
        sizes[values.places] = values.sizes
        # The place of a row that repeats a key, -1, is the last, which no value has.
        return sizes[self.places]


def unit_hash(keys: np.ndarray) -> np.ndarray:
    """Maps int64 keys to float64 in [0, 1) evenly: the upper 53 bits of their splitmix64."""
    hashes = splitmix64(keys.astype(np.uint64))
    # So many bits a float64 holds without rounding, which could give 1.
    return (hashes >> np.uint64(11)) * 2.0**-53


def find_validation(keys: np.ndarray, settings: BuildSettings) -> np.ndarray:
    """Returns for each key whether its record is for validation, bool `(n,)`."""
    return unit_hash(keys) < settings.validation_fraction


def join_contents(
    contents: SourceContents, settings: BuildSettings, scratch: Scratch, cache_dir: str
) -> JoinedContents:
    """Joins captions and texts to the rows of latents, or opens what an earlier build joined.

    Raises a ValueError for captions whose keys repeat, unless they are dropped, and for a sidecar
    of other captions.
    """
    latents = contents.latents
    places, rows = _order_by_split(latents, settings)
    keys = latents.keys[rows]
    keys_digest = array_sha256(keys)

    def keep(origin: list[Any], join: Callable[[str], None]) -> KeyedValues:
        """See `_Keep`; the keys decide the values of each kind, too."""
        return keyed_values.open_or_make(cache_dir, [*origin, keys_digest], join)

    joined_captions = _join_captions(contents, settings, scratch, keys, keep)
    text = None
    texts = None
    if settings.text_embeddings == EMBEDDINGS_IN_PT:
        # These are read with the latents, so that nothing has to be joined.
        text = SidecarHeader(latents.common_embedding_dim(), EMBEDDINGS_IN_PT, '', 0, '', '')
    elif contents.sidecar_files:
        texts = _join_sidecar(contents.sidecar_files, scratch, keys, keep)
        text = SidecarHeader(**texts.facts['header'])
        # `examine_source` could not do this: only joined captions have a digest.
        digest = joined_captions.facts['digest']
        captions_path = contents.folder.captions_path
        check_sidecar(settings, text, contents.caption_column, captions_path, digest)
        logging.info('The text embeddings of %s are ready', settings.text_embeddings)
    elif latents.texts.labels:
        # A class without a sidecar is a text of one token.
        texts = _join_labels(latents, scratch, keys, keep)
        text = SidecarHeader(**texts.facts['header'])
    # At the end: what this build needs is open now, and only the values of other builds go.
    keyed_values.remove_unused(cache_dir)
    return JoinedContents(places, joined_captions, texts, text)


def _order_by_split(
    latents: SourceLatents, settings: BuildSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the place of each row, int64 `(n,)`, and the row of each place, int64 `(m,)`.

    Places follow the order of the shards: rows split by split. So the captions of a shard are
    neighbours in the joined file, and a worker reads them in one piece.
    """
    is_validation = find_validation(latents.keys, settings)
    is_first = ~latents.duplicate
    train = np.flatnonzero(is_first & ~is_validation)
    validation = np.flatnonzero(is_first & is_validation)
    rows = np.concatenate([train, validation])
    places = np.full(len(latents.keys), _NO_PLACE)
    places[rows] = np.arange(len(rows))
    return places, rows


def _join_captions(
    contents: SourceContents,
    settings: BuildSettings,
    scratch: Scratch,
    keys: np.ndarray,
    keep: _Keep,
) -> KeyedValues:
    """Joins the captions of Parquet files, or those that lie with the latents."""
    tables = contents.captions
    latents = contents.latents
    if tables.files:
        values = keep(
            ['captions', *tables.origin],
            lambda folder: tables.join(folder, scratch, keys, by_columns=settings.reads_heads),
        )
        _check_captions(values, tables.files, settings)
        return values
    files = {contents.folder.captions_path: latents.texts.captions}
    return keep(
        ['captions of files', _find_origin(latents), contents.caption_column],
        lambda folder: captions.join_texts(files, TextTables.COLUMN, folder, keys),
    )


def _join_sidecar(
    files: list[StoredFile], scratch: Scratch, keys: np.ndarray, keep: _Keep
) -> KeyedValues:
    """Joins the embeddings or tokens of a sidecar."""
    # Parts may be hundreds, and the log would show each download.
    hold = functools.partial(scratch.hold, shows=len(files) == 1)
    origin: list[Any] = ['sidecar']
    for file in files:
        origin.append([file.path, file.version])
    return keep(origin, lambda folder: sidecar.join_values(files, folder, keys, hold=hold))


def _join_labels(
    latents: SourceLatents, scratch: Scratch, keys: np.ndarray, keep: _Keep
) -> KeyedValues:
    """Joins the labels that lie with the latents."""
    labels = [storage.describe_file(latents.texts.labels)]
    return keep(
        ['labels of files', _find_origin(latents)],
        lambda folder: sidecar.join_values(labels, folder, keys, hold=scratch.hold),
    )


def _find_origin(latents: SourceLatents) -> str:
    """Returns a digest of what decides the texts in files of latents: the files themselves."""
    paths = [file.path for file in latents.files]
    return json_digest.sha256(list(latents.versions) + paths)


def _check_captions(
    joined_captions: KeyedValues, files: Sequence[StoredFile], settings: BuildSettings
) -> None:
    """Raises a ValueError for repeated keys unless they are dropped; warns without checksums."""
    place = common_path(files)
    if not settings.drop_bad:
        captions.check_unique_captions(joined_captions, place)
    has_checksums_of_files = all(file.recorded or file.checksum for file in files)
    has_checksums_of_pages = joined_captions.facts['has_checksums']
    if not has_checksums_of_files and not has_checksums_of_pages:
        logging.warning(
            f'{place}: its pages have no checksums, so damage to it may go unnoticed. Write it '
            'with write_page_checksum=True, or copy it with coyo11m_tfds.mirror while it is intact.'
        )
    logging.info('The captions of %s are ready', place)


def array_sha256(array: np.ndarray) -> str:
    """Returns the hex SHA-256 of the bytes of a contiguous array."""
    return hashlib.sha256(array).hexdigest()
