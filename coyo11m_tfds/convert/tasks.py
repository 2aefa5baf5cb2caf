"""The tasks of a build, one for each shard, with their inputs and results.

A worker on another machine reads `PackedInputs`, a copy of the `JoinedInputs` that a plan has.
"""

import dataclasses
import functools
import io
import itertools
import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import coyo11m_tfds
from coyo11m_tfds import schema, storage
from coyo11m_tfds.dataset.columns import InPlaceFile
from coyo11m_tfds.pictures import latent_rgb
from coyo11m_tfds.report.statistics import ShardStatistics
from coyo11m_tfds.source import sidecar
from coyo11m_tfds.source.encoding_file import how_to_encode
from coyo11m_tfds.source.keyed_values import KeyedValues
from coyo11m_tfds.source.npy_folders import NpyFolder
from coyo11m_tfds.storage.stored_file import StoredFile

if TYPE_CHECKING:  # a data set is also read where torch is not installed
    from coyo11m_tfds.source.latent_file import LatentFile

# The package that this process runs: a plan names it for its workers, and results record it.
THIS_WRITER = f'{schema.NAME} {coyo11m_tfds.__version__}, records of format {schema.RECORD_FORMAT}'


class OpenInputs(NamedTuple):
    """The inputs of a shard except the latents, in the order of its records."""

    rows: np.ndarray  # of the files of latents, int32 (n,)
    keys: np.ndarray  # int64 (n,)
    captions: list[bytes]  # UTF-8
    text: np.ndarray | None  # of a sidecar, float16 (n, dim), or int32 for tokens


@dataclasses.dataclass(frozen=True)
class JoinedInputs:
    """Inputs in local files of `source.keyed_values`."""

    rows: np.ndarray  # see `OpenInputs`
    keys: np.ndarray
    places: np.ndarray  # of the captions and texts in their `KeyedValues`, int64 (n,), ascending
    captions: str  # folder of the `KeyedValues` captions
    texts: str = ''  # folder of the `KeyedValues` of `sidecar.join_values`; '' without one

    def open(self) -> OpenInputs:
        """Returns all inputs, with captions and texts read from their files."""
        captions = _open_values(self.captions).read(self.places)
        text = None
        if self.texts:
            text = _open_values(self.texts).read_array(self.places)
        return OpenInputs(self.rows, self.keys, captions, text)

    def pack(self) -> bytes:
        """Returns the content of the file of a `PackedInputs`."""
        inputs = self.open()
        arrays: dict[str, Any] = {
            'rows': inputs.rows,
            'keys': inputs.keys,
            'lengths': np.array([len(caption) for caption in inputs.captions], np.int64),
            'captions': np.frombuffer(b''.join(inputs.captions), np.uint8),
        }
        if inputs.text is not None:
            arrays['text'] = inputs.text
        file = io.BytesIO()
        np.savez(file, **arrays)
        return file.getvalue()


@dataclasses.dataclass(frozen=True)
class PackedInputs:
    """Inputs in a file at a local or `gs://` path."""

    path: str

    def open(self) -> OpenInputs:
        """Returns all inputs, some MB; OSError if they arrive damaged at every attempt."""
        packed = storage.describe_file(self.path).read()
        # Zip archives carry a checksum of each array, so damage is an error and not a caption.
        with np.load(io.BytesIO(packed)) as arrays:
            all_captions = arrays['captions'].tobytes()
            captions = []
            start = 0
            for length in arrays['lengths'].tolist():
                captions.append(all_captions[start : start + length])
                start += length
            return OpenInputs(arrays['rows'], arrays['keys'], captions, arrays.get('text'))


def _open_values(folder: str) -> KeyedValues:
    """Returns the joined values in a folder, opened once for several shards of a thread."""
    # The time tells a folder from a later one of the same name, such as of another test.
    mtime_ns = os.stat(folder).st_mtime_ns
    # Arrow does not promise that several threads may use a reader of Parquet files at once.
    return _open_values_once(folder, mtime_ns, threading.get_ident())


# For captions and texts, in each of two threads. To open a file of 11 million rows takes 40 ms, a
# fifth of the time for a shard.
@functools.lru_cache(maxsize=4)
def _open_values_once(folder: str, mtime_ns: int, thread: int) -> KeyedValues:
    del mtime_ns, thread
    return KeyedValues(folder)


@dataclasses.dataclass(frozen=True)
class ShardSegment:
    """The records of a shard that come from one file."""

    file: StoredFile
    digest: str  # that of the `LatentFile`
    records: slice  # within the shard
    # Rows of the file of whose latents the middle crop is read, for statistics, int64 (m,); None if
    # all latents are read.
    sampled_rows: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class ShardTask:
    """What a worker needs to write one shard."""

    split: str
    index: int
    filename: str
    group: int  # number of the group of tasks that read the same files
    segments: tuple[ShardSegment, ...]
    inputs: JoinedInputs | PackedInputs
    text: sidecar.SidecarHeader | None  # in the records; of the `.pt` files if the inputs have none
    drop_bad: bool  # whether records that are not finite are left out, and no error
    check_crc: bool
    num_bytes: int  # expected size of the shard, within 1%
    fingerprint: str  # hex digest of all that decides the shard's bytes
    in_place: bool = False
    channels: int = 4  # of the latents, also where they are recorded as moments
    moments: str = ''  # one of `schema.MOMENTS`; '' for latents
    latent_scale: latent_rgb.Scale | None = None  # of previews; see `latent_rgb.find_scale`
    latents_from: schema.LatentsFrom = schema.ANY_LATENTS
    writer: str = THIS_WRITER  # no other version of the package may write the shard

    @property
    def reads_heads(self) -> bool:
        """Whether only heads of the files are read, and some rows."""
        return self.segments[0].sampled_rows is not None

    @property
    def source(self) -> str:
        """Names the file or files of the task in messages."""
        first_path = self.segments[0].file.path
        if len(self.segments) == 1:
            return first_path
        last_file = self.segments[-1].file
        return f'{first_path} to {last_file.name} ({len(self.segments)} files)'


def group_tasks(tasks: Iterable[ShardTask]) -> list[list[ShardTask]]:
    """Returns the tasks of each group, in their order; those of one group must be neighbours."""
    groups = []
    for _, group in itertools.groupby(tasks, lambda task: task.group):
        groups.append(list(group))
    return groups


@dataclasses.dataclass(frozen=True)
class ShardResult:
    """A shard that has been written."""

    split: str
    index: int
    num_records: int
    num_bytes: int
    crc32c: int
    index_entries: list[int]  # of the shard in its chunk index
    statistics: ShardStatistics
    writer: str  # version of the package
    read: tuple[str, ...]  # digests of the source files of the shard
    # Of latents in place: each file with row and CRC-32C for each of its records, uint32 (n, 2);
    # the CRC-32C is 0 where only heads were read.
    sources: tuple[tuple[InPlaceFile, np.ndarray], ...] = ()

    def to_json(self) -> dict:
        """Returns the result as JSON values, without a loss."""
        sources = [(dataclasses.asdict(file), rows.tolist()) for file, rows in self.sources]
        return vars(self) | {'statistics': self.statistics.to_json(), 'sources': sources}

    @classmethod
    def from_json(cls, fields: dict) -> 'ShardResult':
        """The inverse of `to_json`; raises a KeyError, TypeError or ValueError for other values."""
        sources = []
        for file_fields, rows in fields['sources']:
            # JSON has a list here, which no key of a dict can hold; files become such keys.
            starts = tuple(file_fields['starts'])
            file = InPlaceFile(**file_fields | {'starts': starts})
            # Of a file without rows, the list does not tell how many columns there are.
            sources.append((file, np.array(rows, '<u4').reshape(-1, 2)))
        objects = {
            'statistics': ShardStatistics.from_json(fields['statistics']),
            'read': tuple(fields['read']),
            'sources': tuple(sources),
        }
        return cls(**fields | objects)


# --- Latents in place ---------------------------------------------------------------------------


def make_column_file(file: StoredFile, latents: 'LatentFile') -> InPlaceFile:
    """Describes a file of latents; raises a ValueError if these cannot be read in place."""
    layout = latents.layout
    if layout is None:
        raise ValueError(
            f'{file.path}: its {schema.PT_LATENTS} are not contiguous and cannot be read in place. '
            "Save them again with .contiguous(), or set latents='records'."
        )
    version = '' if file.local_path else file.version
    path = storage.make_absolute(file.path)
    return InPlaceFile(path, version, latents.digest, layout.starts, layout.stride)


def check_within_reach(file: StoredFile, final: str) -> None:
    """Raises a ValueError if readers of a data set in `final` could not read a file of a source."""
    if file.path.endswith('.parquet'):
        raise ValueError(
            f"{file.path}: latents='in_place' reads rows where they lie, and those of a Parquet "
            "file are encoded in pages. Set latents='records'. "
            f'{how_to_encode(os.path.dirname(file.path))}.'
        )
    is_local_set = storage.local_path(final) is not None
    is_out_of_reach = bool(file.local_path) and not is_local_set
    # The files of such a folder are read as one tar, which only a copy of it is.
    if not is_out_of_reach and not isinstance(file, NpyFolder):
        return
    place = 'a file on gs:// or hf://, as the data set is not local'
    if is_local_set:
        place = 'a file, local, on gs:// or on hf://'
    raise ValueError(
        f"{file.path}: latents='in_place' reads this in training, so it must be {place}. "
        "Mirror the source first (python -m coyo11m_tfds.mirror), or set latents='records'."
    )
