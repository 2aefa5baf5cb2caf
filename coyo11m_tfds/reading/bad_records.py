"""Policies for damaged records: stop at the first, or at too many of them.

    bad = BadRecords(SKIP, max_fraction=0.001, num_records=10**7)
    bad.add('OUT/coyo11m_tfds-train.tfrecord-00003-of-00100', 3, [17], 'its checksum is wrong')

A bad record is one whose bytes are there but wrong. A file that cannot be read is an error under
either policy.
"""

import contextlib
from collections.abc import Iterator, Sequence

from absl import logging

from coyo11m_tfds.dataset.manifest import DamagedError
from coyo11m_tfds.reading.counter import ReadCounter

STOP, SKIP = 'stop', 'skip'

DEFAULT_MAX_FRACTION = 0.001

# What is wrong with a record.
TOO_SHORT = 'the file is shorter than its chunk index says'
DAMAGED_ROW = 'its checksum is wrong'
DAMAGED = 'its checksum is wrong, or its file has other records than its chunk index says'

# So many never stop a run: a damaged length costs the rest of a chunk, even in a small data set.
ALWAYS_ALLOWED = 64


@contextlib.contextmanager
def naming_damage() -> Iterator[None]:
    """Gives errors about the content of a file their type."""
    try:
        yield
    except ValueError as error:
        raise DamagedError(*error.args) from error


class BadRecords:
    """The bad records of a split that one reader has met.

    Each is counted once, however many epochs meet it again, so that their share is one of the
    split's records.
    """

    def __init__(
        self,
        policy: str,
        max_fraction: float,
        num_records: int,
        counter: ReadCounter | None = None,
    ):
        """Takes what is allowed.

        Args:
            policy: 'stop' or 'skip'.
            max_fraction: with 'skip', the share of the split's records that may be bad.
            num_records: of the split.
            counter: is told of every bad record in every epoch.

        Raises:
            ValueError: the policy is neither, or the fraction is not in [0, 1].
        """
        if policy not in (STOP, SKIP):
            raise ValueError(f'on_bad_records={policy!r} is neither {STOP!r} nor {SKIP!r}')
        if not 0 <= max_fraction <= 1:
            raise ValueError(f'max_bad_fraction={max_fraction} is not in [0, 1]')
        self._stops = policy == STOP
        self._max_fraction = max_fraction
        self._num_records = num_records
        self._counter = counter
        self._found: set[tuple[int, int]] = set()  # (shard, record)
        self._told: set[str] = set()  # files that a bad record was reported of

    def add(
        self, path: str, shard: int, numbers: Sequence[int], problem: str, place: str = ''
    ) -> None:
        """Counts records of a file, and warns once a file.

        Args:
            path: of the file.
            shard: its number.
            numbers: of the records within the shard.
            problem: what is wrong with them.
            place: of the first one in the file, if that is not its record.

        Raises:
            DamagedError: the policy is 'stop', or there are too many by now.
        """
        what = f'{path}: {place or f"record {numbers[0]}"} cannot be read: {problem}.'
        if self._stops:
            raise DamagedError(
                f'{what} Restore the file or build the data set again, or set on_bad_records='
                f"'{SKIP}' to continue without such records."
            )
        self._found.update((shard, number) for number in numbers)
        if self._counter:
            self._counter.add_bad(len(numbers))
        if len(self._found) > max(ALWAYS_ALLOWED, self._max_fraction * self._num_records):
            raise DamagedError(
                f'{what} With it, {len(self._found)} of {self._num_records} records are bad, more '
                f'than max_bad_fraction={self._max_fraction:g} (and more than {ALWAYS_ALLOWED}). '
                'Restore the files (python -m coyo11m_tfds.verify DATA_DIR names those that are '
                'damaged) or raise max_bad_fraction.'
            )
        if path not in self._told:
            self._told.add(path)
            logging.warning('%s It is left out, with what else is bad in this file.', what)
