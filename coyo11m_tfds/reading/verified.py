"""Which records are compared with their CRC-32C, and the result.

    checks = Checks('once', num_records)
    good = checks.check(memory, numbers, begin, end)       # bool (n,)

TensorFlow compares the checksum of every record that it reads. Rows are gathered without looking at
the rest of a record, so here it is a choice: `once` compares each record when this process first
reads it, `always` each time, `never` not at all.
"""

import google_crc32c
import numpy as np

from coyo11m_tfds.reading import framing
from coyo11m_tfds.reading.mapped_files import Memory

ONCE, ALWAYS, NEVER = MODES = ('once', 'always', 'never')


class Checks:
    """The checksums of the records of one split, of which one bit a record is kept."""

    def __init__(self, mode: str, num_records: int):
        """Nothing is checked yet.

        Raises:
            ValueError: there is no such mode.
        """
        if mode not in MODES:
            raise ValueError(f'verify={mode!r} is none of {", ".join(map(repr, MODES))}')
        self._mode = mode
        self._done = np.zeros(-(-num_records // 8) if mode == ONCE else 0, np.uint8)

    def check(
        self, memory: Memory, number: np.ndarray, begin: np.ndarray, end: np.ndarray
    ) -> np.ndarray:
        """True if records are as they were written, as far as the mode asks; bool `(n,)`.

        Args:
            memory: that they lie in.
            number: of each record in its split.
            begin, end: addresses of the serialized records; 0 of those that are not there.
        """
        good = begin > 0
        if self._mode == NEVER:
            return good
        bit = np.left_shift(1, number & 7).astype(np.uint8)
        unchecked = good.copy()
        if self._mode == ONCE:
            unchecked &= (self._done[number >> 3] & bit) == 0
        todo = np.flatnonzero(unchecked)
        if len(todo):
            good[todo] = matches(memory, begin[todo], end[todo])
            if self._mode == ONCE:
                passed = todo[good[todo]]
                np.bitwise_or.at(self._done, number[passed] >> 3, bit[passed])
        return good


def matches(memory: Memory, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """True if serialized records have the checksums that stand behind them; bool `(n,)`."""
    crcs = [
        google_crc32c.value(memory.view(first, last))
        for first, last in zip(begin.tolist(), end.tolist(), strict=True)
    ]
    stored = memory.gather(end, framing.TRAILER).view('<u4')
    return framing.masked(np.array(crcs, np.uint32)) == stored
