"""Locates the records of TFRecord files in memory, many at once, and compares their checksums.

From the offsets in the chunk index NumPy follows the lengths, in all runs at once. The digest of
the checksums behind the records, see `chunk_index.run_digests`, shows whether they are right.
"""

import google_crc32c
import numpy as np

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import records
from coyo11m_tfds.reading import raw_memory

_HEADER = np.dtype([('length', 'V8'), ('crc', '<u4')])


def locate_records(
    start: np.ndarray, count: np.ndarray, limit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the serialized records of runs begin and end, int64 `(n, CHUNK_STRIDE)`.

    Reads nothing outside of the memory from each `start` to its `limit`, whatever it holds. Both
    results are 0 beyond the run, and from the first incomplete record on.
    """
    begin = np.zeros((len(start), schema.CHUNK_STRIDE), np.int64)
    end = np.zeros_like(begin)
    header_start, is_valid = start.copy(), count > 0
    # The runs are many, and each has few records: a step of NumPy for each number in a run.
    for number in range(int(count.max(initial=0))):
        is_valid &= (number < count) & (header_start + records.HEADER_NBYTES <= limit)
        # Behind the limit there may be no memory.
        header = np.where(is_valid, header_start, raw_memory.ZEROS)
        length = raw_memory.gather(header, 8).view('<u8')
        # A damaged length may be any number.
        is_valid &= length <= records.MAX_RECORD_NBYTES
        record_start = header_start + records.HEADER_NBYTES
        record_end = record_start + np.where(is_valid, length, 0).astype(np.int64)
        is_valid &= record_end + records.TRAILER_NBYTES <= limit
        begin[is_valid, number] = record_start[is_valid]
        end[is_valid, number] = record_end[is_valid]
        header_start = record_end + records.TRAILER_NBYTES
    return begin, end


def stored_crcs(end: np.ndarray) -> np.ndarray:
    """Returns the masked checksums behind the ends of records; uint32, same shape."""
    return raw_memory.gather(end.ravel(), records.TRAILER_NBYTES).view('<u4').reshape(end.shape)


def match_crcs(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns True where records and their lengths match the checksums behind them; bool `(n,)`."""
    headers = raw_memory.gather(begin - records.HEADER_NBYTES, records.HEADER_NBYTES).view(_HEADER)
    lengths = map(google_crc32c.value, headers['length'].tolist())
    good = records.mask_crc32c(np.fromiter(lengths, np.uint32, len(begin))) == headers['crc']
    return good & (records.mask_crc32c(raw_memory.crc32c(begin, end)) == stored_crcs(end))
