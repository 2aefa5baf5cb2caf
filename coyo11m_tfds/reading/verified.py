"""Which records are compared with their CRC-32C, and the result.

    checks = Checks('once', num_records)
    good = checks.check(there, numbers, matches)       # bool (n,)

A record is compared with all that is read with it: its own bytes, and its rows of columns.
Rows are gathered without looking at the rest of a record, so it is a choice: `once` compares each
record when this process first reads it, `always` each time, `never` not at all.
"""

from collections.abc import Callable

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
        self, there: np.ndarray, number: np.ndarray, matches: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """True if records are as they were written, as far as the mode asks; bool `(n,)`.

        Args:
            there: which of some records there are, bool `(n,)`.
            number: of each record in its split.
            matches: compares all checksums of some of them, given by their indices here.
        """
        good = there.copy()
        if self._mode == NEVER:
            return good
        bit = np.left_shift(1, number & 7).astype(np.uint8)
        unchecked = good.copy()
        if self._mode == ONCE:
            unchecked &= (self._done[number >> 3] & bit) == 0
        todo = np.flatnonzero(unchecked)
        if len(todo):
            good[todo] = matches(todo)
            if self._mode == ONCE:
                passed = todo[good[todo]]
                np.bitwise_or.at(self._done, number[passed] >> 3, bit[passed])
        return good


def matches(memory: Memory, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """True if serialized records have the checksums that stand behind them; bool `(n,)`."""
    stored = memory.gather(end, framing.TRAILER).view('<u4')
    return framing.masked(checksums(memory, begin, end)) == stored


def checksums(memory: Memory, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The CRC-32C of the bytes from each address to another; uint32 `(n,)`."""
    crcs = [
        google_crc32c.value(memory.view(first, last))
        for first, last in zip(begin.tolist(), end.tolist(), strict=True)
    ]
    return np.array(crcs, np.uint32)
