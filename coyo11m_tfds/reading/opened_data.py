"""A data set that several functions read, opened once.

data = opened_data.open_data('gs://bucket/coyo11m_tfds/latents/1.0.0')
data.stored.latent_dtype, data.split('train').index
"""

import functools
import os
from typing import TYPE_CHECKING, Union

from coyo11m_tfds import schema
from coyo11m_tfds.columns import Column
from coyo11m_tfds.reading import stored_dataset
from coyo11m_tfds.reading.indexed_split import IndexedSplit
from coyo11m_tfds.reading.stored_dataset import StoredDataset
from coyo11m_tfds.storage import source_files

if TYPE_CHECKING:
    from coyo11m_tfds.reading import dataset


class OpenedData:
    """Metadata and chunk indexes of a data set, each read when it is first asked for.

    Attributes:
        source: the folder or the builder.
        folder: of the data set.
    """

    def __init__(self, source: 'dataset.Data'):
        """Reads nothing."""
        self.source = source
        self.folder = os.fspath(
            source if isinstance(source, str | os.PathLike) else source.data_dir
        )
        self._splits: dict[str, IndexedSplit | None] = {}

    @property
    def is_remote(self) -> bool:
        """True if it lies on gs://, or the latents of its records do."""
        if source_files.is_remote(self.folder) or self.stored is None:
            return source_files.is_remote(self.folder)
        latents = self.stored.columns.get(schema.LATENTS)
        return isinstance(latents, Column) and latents.is_remote

    @functools.cached_property
    def stored(self) -> StoredDataset | None:
        """The metadata; None if there is no data set in the folder.

        Raises:
            ValueError: a file is damaged.
            OSError: a file cannot be read.
        """
        return stored_dataset.read(self.folder)

    def split(self, name: str) -> IndexedSplit | None:
        """A split with a chunk index; None where there is none.

        Raises:
            ValueError, OSError: as of `StoredDataset.open_split`, and of `stored`.
        """
        if name not in self._splits:
            self._splits[name] = self.stored.open_split(name) if self.stored else None
        return self._splits[name]


def open_data(data: Union['dataset.Data', OpenedData]) -> OpenedData:
    """The data set in a folder, or of a builder; itself if it is opened already."""
    return data if isinstance(data, OpenedData) else OpenedData(data)
