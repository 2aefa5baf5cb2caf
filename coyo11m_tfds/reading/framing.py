"""Locates the records of TFRecord files in memory, and compares their checksums.

The chunk index says where a run of records begins. From there the lengths lead from record to
record. The digest of the checksums behind the records, see `chunk_index.run_digests`, shows whether
they are the right ones.
"""

import struct

import google_crc32c
import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import records
from coyo11m_tfds.reading.files import HeldFiles

_HEADER = np.dtype([('length', 'V8'), ('crc', '<u4')])

# So many are located one after the other. A step of Python takes 0.2 us for each record, a step of
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
    is_valid = count > 0
    # The runs are many, and each has few records: a step of NumPy for each number in a run.
    for number in range(int(count.max(initial=0))):
        is_valid &= (number < count) & (header_start + records.HEADER_NBYTES <= limit)
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


def stored_crcs(files: HeldFiles, end: np.ndarray) -> np.ndarray:
    """Returns the masked checksums behind the ends of records; uint32, same shape."""
    return files.gather(end.ravel(), records.TRAILER_NBYTES).view('<u4').reshape(end.shape)


def match_crcs(files: HeldFiles, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns True where records and their lengths match the checksums behind them; bool `(n,)`."""
    headers = files.gather(begin - records.HEADER_NBYTES, records.HEADER_NBYTES).view(_HEADER)
    lengths = map(google_crc32c.value, headers['length'].tolist())
    is_good = records.mask_crc32c(np.fromiter(lengths, np.uint32, len(begin))) == headers['crc']
    return is_good & (records.mask_crc32c(files.crc32c(begin, end)) == stored_crcs(files, end))


def _locate_run_by_run(
    files: HeldFiles, start: np.ndarray, count: np.ndarray, limit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    begin = np.zeros((len(start), schema.CHUNK_STRIDE), np.int64)
    end = np.zeros_like(begin)
    for row, run in enumerate(files.views(start, limit)):
        begins, ends = _locate_in_run(memoryview(run), int(count[row]))
        begin[row, : len(begins)] = start[row] + np.array(begins, np.int64)
        end[row, : len(ends)] = start[row] + np.array(ends, np.int64)
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
        if length > records.MAX_RECORD_NBYTES or end + records.TRAILER_NBYTES > len(run):
            break
        begins.append(begin)
        ends.append(end)
        header_start = end + records.TRAILER_NBYTES
    return begins, ends
