"""The inputs of a shard besides latents: its rows, and their captions and embeddings.

    inputs = JoinedInputs(rows, keys, places, captions=folder, sidecar='')
    opened = inputs.open()
    opened.rows, opened.keys                 # int32 (n,), int64 (n,)
    opened.captions                          # list of UTF-8 bytes
    opened.embeddings                        # float16 (n, text_dim)

On one machine all shards read the files that `source.joined` made (`JoinedInputs`). A worker on
another machine has no such file: for it, `pack` puts what one shard needs into bytes of its own,
some MB, and `PackedInputs` reads them from wherever they were put.
"""

import dataclasses
import functools
import io
import os
import zipfile

import numpy as np
from etils import epath

from coyo11m_tfds.source import sidecar
from coyo11m_tfds.source.joined import Joined
from coyo11m_tfds.storage import retry


@dataclasses.dataclass(frozen=True)
class OpenInputs:
    """The inputs of the writer of a shard.

    Attributes:
        rows: rows of the `.pt` file in the order of the records, int32 `(n,)`.
        keys: their keys, int64 `(n,)`.
        captions: as UTF-8.
        embeddings: of a sidecar, float16 `(n, text_dim)`, or tokens, int32; None without one.
    """

    rows: np.ndarray
    keys: np.ndarray
    captions: list[bytes]
    embeddings: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class JoinedInputs:
    """Inputs on this machine.

    Attributes:
        rows: rows of the `.pt` file, int32 `(n,)`.
        keys: their keys, int64 `(n,)`.
        places: of their captions and embeddings, int64 `(n,)`, ascending.
        captions: folder of a `Joined`.
        sidecar: folder of a `Joined` that `sidecar.join` made; '' without a sidecar.
    """

    rows: np.ndarray
    keys: np.ndarray
    places: np.ndarray
    captions: str
    sidecar: str = ''

    def open(self) -> OpenInputs:
        """Reads all of it, some MB."""
        captions = _open(self.captions).read(self.places)
        embeddings = sidecar.read(_open(self.sidecar), self.places) if self.sidecar else None
        return OpenInputs(self.rows, self.keys, captions, embeddings)


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
            return _unpack(epath.Path(self.path).read_bytes())
        except (zipfile.BadZipFile, EOFError) as error:
            raise retry.Corrupted(f'{self.path}: {error}') from error


def _open(folder: str) -> Joined:
    return _open_made(folder, os.stat(folder).st_mtime_ns)


# Of a file of 11 million rows it takes 40 ms, a fifth of the time for a shard.
@functools.lru_cache(maxsize=2)
def _open_made(folder: str, time: int) -> Joined:
    """Opens a folder that was made at a time."""
    del time
    return Joined(folder)


def pack(inputs: JoinedInputs) -> bytes:
    """Packs rows, keys, captions and embeddings of one shard into bytes."""
    opened = inputs.open()
    arrays = {
        'rows': opened.rows,
        'keys': opened.keys,
        'caption_lengths': np.array([len(text) for text in opened.captions], np.int64),
        'caption_text': np.frombuffer(b''.join(opened.captions), np.uint8),
    }
    if opened.embeddings is not None:
        arrays['embeddings'] = opened.embeddings
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # NumPy types its own keywords alone
    return file.getvalue()


def _unpack(packed: bytes) -> OpenInputs:
    # Zip archives carry a checksum of each array, so damage is an error and not a caption.
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        ends = np.cumsum(arrays['caption_lengths'])
        bounds = zip((ends - arrays['caption_lengths']).tolist(), ends.tolist(), strict=True)
        text = arrays['caption_text'].tobytes()
        captions = [text[start:end] for start, end in bounds]
        return OpenInputs(arrays['rows'], arrays['keys'], captions, arrays.get('embeddings'))
