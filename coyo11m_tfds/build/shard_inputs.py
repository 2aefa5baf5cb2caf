"""The inputs of a shard besides latents: its rows, and their captions and embeddings.

    inputs = StoreInputs(rows, keys, captions_store, sidecar_store='')
    opened = inputs.open()
    opened.rows, opened.keys                 # int32 (n,), int64 (n,)
    opened.captions(slice(0, 256))           # list of UTF-8 bytes
    opened.embeddings(slice(0, 256))         # float16 (256, text_dim)

On one machine all shards read the same memory-mapped stores (`StoreInputs`). A worker on another
machine has no such store: for it, `pack` puts what one shard needs into bytes of its own, some MB,
and `PackedInputs` reads them from wherever they were put.
"""

import dataclasses
import io
import zipfile
from typing import Protocol

import numpy as np
from etils import epath

from coyo11m_tfds.source import caption_store, embedding_store
from coyo11m_tfds.storage import retry


class OpenInputs(Protocol):
    """The inputs of the writer of a shard; `part` is a range of the shard's rows.

    Attributes:
        rows: rows of the `.pt` file in the order of the records, int32 `(n,)`.
        keys: their keys, int64 `(n,)`.
    """

    rows: np.ndarray
    keys: np.ndarray

    def captions(self, part: slice) -> list[bytes]:
        """Captions as UTF-8."""

    def embeddings(self, part: slice) -> np.ndarray:
        """Text embeddings of a sidecar, float16 `(len(part), text_dim)`, or tokens, int32."""


@dataclasses.dataclass(frozen=True)
class StoreInputs:
    """Inputs from the stores of captions and embeddings on this machine.

    Attributes:
        rows: rows of the `.pt` file, int32 `(n,)`.
        keys: their keys, int64 `(n,)`.
        captions_store: folder of a `caption_store.CaptionStore`.
        sidecar_store: folder of an `embedding_store.EmbeddingStore`; '' without a sidecar.
    """

    rows: np.ndarray
    keys: np.ndarray
    captions_store: str
    sidecar_store: str = ''

    def open(self) -> OpenInputs:
        """Opens the stores."""
        return _FromStores(self)


@dataclasses.dataclass(frozen=True)
class PackedInputs:
    """Inputs that `pack` has made, at a local or `gs://` path."""

    path: str

    def open(self) -> OpenInputs:
        """Reads all of it, some MB.

        Raises:
            OSError: it cannot be read, or arrives damaged again and again.
        """
        return retry.call(self._read, self.path)

    def _read(self) -> OpenInputs:
        try:
            return _Packed(epath.Path(self.path).read_bytes())
        except (zipfile.BadZipFile, EOFError) as error:
            raise retry.Corrupted(f'{self.path}: {error}') from error


def pack(inputs: StoreInputs) -> bytes:
    """Packs rows, keys, captions and embeddings of one shard into bytes."""
    opened, whole = inputs.open(), slice(None)
    texts = opened.captions(whole)
    arrays = {
        'rows': opened.rows,
        'keys': opened.keys,
        'caption_lengths': np.array([len(text) for text in texts], np.int64),
        'caption_text': np.frombuffer(b''.join(texts), np.uint8),
    }
    if inputs.sidecar_store:
        arrays['embeddings'] = opened.embeddings(whole)
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # NumPy types its own keywords alone
    return file.getvalue()


class _FromStores:
    def __init__(self, inputs: StoreInputs):
        self.rows, self.keys = inputs.rows, inputs.keys
        self._captions = caption_store.CaptionStore(inputs.captions_store)
        if inputs.sidecar_store:
            self._embeddings = embedding_store.EmbeddingStore(inputs.sidecar_store)

    def captions(self, part: slice) -> list[bytes]:
        return self._captions.texts(self._captions.find(self.keys[part]))

    def embeddings(self, part: slice) -> np.ndarray:
        return self._embeddings.read(self._embeddings.find(self.keys[part]))


class _Packed:
    def __init__(self, packed: bytes):
        # Zip archives carry a checksum of each array, so damage is an error and not a caption.
        with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
            self.rows, self.keys = arrays['rows'], arrays['keys']
            self._ends = np.cumsum(arrays['caption_lengths'])
            self._starts = self._ends - arrays['caption_lengths']
            self._text = arrays['caption_text'].tobytes()
            self._embeddings = arrays.get('embeddings')

    def captions(self, part: slice) -> list[bytes]:
        bounds = zip(self._starts[part].tolist(), self._ends[part].tolist(), strict=True)
        return [self._text[start:end] for start, end in bounds]

    def embeddings(self, part: slice) -> np.ndarray:
        return self._embeddings[part]
