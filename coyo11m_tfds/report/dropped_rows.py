"""Counts the rows that are dropped, and says when they are too many.

    dropped = Dropped(num_rows=1_000_000, max_bad_fraction=0.01)
    dropped.add(schema.NO_CAPTION, 17, keys[:10])
    dropped.check_bad('/data/x.parquet')    # raises if too many are bad
    dropped.counts                          # {'no_caption': 17, 'non_finite': 0, ...}

A row without a caption is common and only counted. A bad row (`BAD`) shows that something went
wrong when the source was made: a few are dropped, many stop the build.
"""

from collections.abc import Iterable, Mapping

from coyo11m_tfds import schema

BAD = (
    schema.DUPLICATE_KEY,
    schema.ROWS_DISAGREE,
    schema.NON_FINITE,
    schema.CAPTION_TOO_LONG,
    schema.DUPLICATE_CAPTION,
)

# If more of the source is dropped, its captions or embeddings belong to other latents.
MAX_DROPPED_FRACTION = 0.5


def num_latents(counts: Mapping[str, int]) -> int:
    """Rows of `.pt` files among these counts by reason: what the data set lacks of its source."""
    return sum(counts.values()) - counts.get(schema.DUPLICATE_CAPTION, 0)


class Dropped:
    """Rows that are dropped, by reason.

    Args:
        num_rows: of the source.
        max_bad_fraction: share of them that may be bad.

    Attributes:
        num_rows: of the source.
        counts: rows by reason, every reason of `schema.DROP_REASONS`.
        examples: some keys by reason, of reasons that occur.
    """

    MAX_EXAMPLES = 10

    def __init__(self, num_rows: int, max_bad_fraction: float):
        self.num_rows, self._max_bad_fraction = num_rows, max_bad_fraction
        self.counts = dict.fromkeys(schema.DROP_REASONS, 0)
        self.examples: dict[str, list[int]] = {}
        self._files: dict[str, str] = {}

    def add(self, reason: str, count: int, keys: Iterable[int], file: str = '') -> None:
        """Counts `count` rows; `keys` are some of theirs, and `file` holds the first of them."""
        if count:
            self._files.setdefault(reason, file)
            self.counts[reason] += count
            examples = self.examples.setdefault(reason, [])
            examples += [int(key) for key in keys][: self.MAX_EXAMPLES - len(examples)]

    def check_bad(self, file: str) -> None:
        """Raises a ValueError if more rows are bad than allowed.

        It names the file that the most frequent kind of bad rows was added with, else `file`.
        """
        num_bad = sum(self.counts[reason] for reason in BAD)
        if num_bad > self._max_bad_fraction * self.num_rows:
            commonest = max(BAD, key=self.counts.__getitem__)
            raise ValueError(
                f'{self._files[commonest] or file}: {num_bad:,} of {self.num_rows:,} rows of the '
                f'source are bad ({self._reasons(BAD)}; e.g. key {self.examples[commonest][0]}), '
                f'more than {self._max_bad_fraction:.2%}. Mend the source, or raise '
                'max_bad_fraction in the config.'
            )

    def check_all(self, captions: str) -> None:
        """Raises a ValueError that names the file of `captions` if half of the rows are lost."""
        total = num_latents(self.counts)
        if total > MAX_DROPPED_FRACTION * self.num_rows:
            raise ValueError(
                f'{captions}: {total:,} of {self.num_rows:,} rows would be dropped '
                f'({self._reasons(self.counts)}), more than {MAX_DROPPED_FRACTION:.0%}. Do the '
                'captions (and text embeddings) belong to these .pt files?'
            )

    def _reasons(self, reasons: Iterable[str]) -> str:
        return ', '.join(f'{name}: {self.counts[name]:,}' for name in reasons if self.counts[name])
