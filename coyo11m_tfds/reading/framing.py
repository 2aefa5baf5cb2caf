"""Framing: where the records of a TFRecord file begin and end in memory.

The chunk index says where a run of `CHUNK_STRIDE` records begins, and from there the lengths lead
from record to record: a record is a header with its length, its bytes, and a trailer with their
checksum. A *place* is the number of a byte in memory, see `HeldFiles`.
"""

import struct

import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import records
from coyo11m_tfds.memory.files import HeldFiles

# So many runs are located one by one. A step of Python takes 0.2 us for each record, a step of
# NumPy 12 us for all runs.
_FEW_RUNS = 64


def locate_records(
    files: HeldFiles, start: np.ndarray, count: np.ndarray, limit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the serialized records of runs begin and end, int64 `(n, CHUNK_STRIDE)`.

    They lie between the `start` of their run and its `limit`, whatever bytes are there. Both
    results are 0 beyond the run, and from the first incomplete record on.
    """
    if len(start) <= _FEW_RUNS:
        return _locate_run_by_run(files, start, count, limit)
    begin = np.zeros((len(start), schema.CHUNK_STRIDE), np.int64)
    end = np.zeros_like(begin)
    header_start = start.copy()
    # Of each run, whether the next record is there: without its length, no later one has a place.
    is_valid = count > 0
    # The runs are many, and each has few records: a step of NumPy for each number in a run.
    for number in range(int(count.max(initial=0))):
        is_valid &= number < count
        is_valid &= header_start + records.HEADER_NBYTES <= limit
        # Zeros lie at place 0: they stand for what is not there, and may be read.
        length = files.gather(np.where(is_valid, header_start, 0), 8).view('<u8')
        # A damaged length may be any number.
        is_valid &= length <= records.MAX_RECORD_NBYTES
        record_start = header_start + records.HEADER_NBYTES
        record_end = record_start + np.where(is_valid, length, 0).astype(np.int64)
        is_valid &= record_end + records.TRAILER_NBYTES <= limit
        begin[is_valid, number] = record_start[is_valid]
        end[is_valid, number] = record_end[is_valid]
        header_start = record_end + records.TRAILER_NBYTES
    return begin, end


def _locate_run_by_run(
    files: HeldFiles, start: np.ndarray, count: np.ndarray, limit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `locate_records` returns, by plain Python: for few runs that is faster."""
    begin = np.zeros((len(start), schema.CHUNK_STRIDE), np.int64)
    end = np.zeros_like(begin)
    for row, run in enumerate(files.views(start, limit)):
        begins, ends = _locate_in_run(memoryview(run), int(count[row]))
        begin[row, : len(begins)] = begins
        end[row, : len(ends)] = ends
    # From offsets in the runs to places, but for the records that are not there.
    is_whole = end > 0
    begin += is_whole * start[:, None]
    end += is_whole * start[:, None]
    return begin, end


def _locate_in_run(run: memoryview, count: int) -> tuple[list[int], list[int]]:
    """Returns where the first `count` records begin and end, up to the first incomplete one."""
    begins: list[int] = []
    ends: list[int] = []
    header_start = 0
    while len(begins) < count:
        begin = header_start + records.HEADER_NBYTES
        if begin > len(run):
            break
        (length,) = struct.unpack_from('<Q', run, header_start)
        end = begin + length
        # A damaged length may be any number.
        if length > records.MAX_RECORD_NBYTES or end + records.TRAILER_NBYTES > len(run):
            break
        begins.append(begin)
        ends.append(end)
        header_start = end + records.TRAILER_NBYTES
    return begins, ends
