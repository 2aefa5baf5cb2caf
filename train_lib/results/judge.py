"""Judges drawn pictures by true ones: is the true picture nearest to a drawn one its own?

    judge = Judge(mean_areas(true_pictures), is_known)
    verdicts = judge.compare(mean_areas(drawn), own)       # own[i]: the number of that for drawn[i]
    verdicts.exact.mean()

Pictures are compared by the means of their 32 x 32 areas. This suits captions that leave little
open: a picture that is shifted, or has another background, counts as another one.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

AREAS = 32  # along each side
_FIRST = 5
_ROWS_AT_ONCE = 512  # of a matrix of distances


class Verdicts(NamedTuple):
    """What true pictures say of drawn ones, `(n,)` each."""

    nearest: np.ndarray  # int64: the number of the nearest true picture
    exact: np.ndarray  # bool: it is the drawn picture's own, or equal to that
    first_five: np.ndarray  # bool: its own is among the five different ones that are nearest
    distance: np.ndarray  # float64: root mean square of the difference from its own, 0 to 255


class Judge:
    """Compares pictures with true ones, which are numbered."""

    def __init__(self, areas: np.ndarray, is_known: np.ndarray):
        """Takes the true pictures.

        Args:
            areas: Their `mean_areas`, float32 `(N, 3072)`.
            is_known: bool `(N,)`, says which of them the model has seen; of these is the floor.
        """
        self._areas = areas
        self._known = np.flatnonzero(is_known)
        # Equal pictures are one, the first of them: two captions may have the same picture.
        _, first, inverse = np.unique(areas, axis=0, return_index=True, return_inverse=True)
        # NumPy 2.0.0 returns it with an axis more than other versions.
        number_of_first = inverse.reshape(-1)
        self._first_equal = first[number_of_first]

    def compare(self, areas: np.ndarray, own: np.ndarray) -> Verdicts:
        """Compares drawn pictures with the true ones.

        Args:
            areas: `mean_areas` of the drawn pictures, float32 `(n, 3072)`.
            own: Numbers of the true pictures that they should be, int `(n,)`.
        """
        blocks = [self._compare_block(areas[rows], own[rows]) for rows in _split(len(own))]
        # The fields of all blocks, and not all fields of a block.
        columns = zip(*blocks, strict=True)
        return Verdicts(*map(np.concatenate, columns))

    def _compare_block(self, areas: np.ndarray, own: np.ndarray) -> Verdicts:
        """Compares a few pictures."""
        squares = _mean_squares(areas, self._areas)
        nearest = squares.argmin(axis=1)
        own_squares = squares[np.arange(len(own)), own]
        own_pictures = self._first_equal[own]
        # How many different true pictures are nearer than the own one.
        num_nearer = []
        for row, own_square, own_picture in zip(squares, own_squares, own_pictures, strict=True):
            nearer_pictures = np.unique(self._first_equal[row < own_square])
            # By rounding, one that is equal to the own one may be nearer.
            others = nearer_pictures[nearer_pictures != own_picture]
            num_nearer.append(len(others))
        return Verdicts(
            nearest=nearest,
            exact=self._first_equal[nearest] == own_pictures,
            first_five=np.array(num_nearer) < _FIRST,
            distance=np.sqrt(own_squares),
        )

    def find_floor(self, own: np.ndarray) -> Verdicts | None:
        """Returns the verdicts of who draws, of what the model has seen, the nearest to the truth.

        None if it has seen none of the true pictures.
        """
        if not len(self._known):
            return None
        known_areas = self._areas[self._known]
        # To each true picture, the known one that is most similar.
        nearest = []
        for rows in _split(len(own)):
            true_areas = self._areas[own[rows]]
            squares = _mean_squares(true_areas, known_areas)
            nearest.append(squares.argmin(axis=1))
        drawn_areas = known_areas[np.concatenate(nearest)]
        return self.compare(drawn_areas, own)


def mean_areas(pictures: np.ndarray) -> np.ndarray:
    """Returns the means of 32 x 32 areas of uint8 pictures `(n, H, W, 3)`, float32 `(n, 3072)`.

    Raises a ValueError for sides that are no multiples of 32 pixels.
    """
    count, height, width, channels = pictures.shape
    if height % AREAS or width % AREAS:
        problem = f'pictures of {height} x {width} pixels cannot be compared'
        raise ValueError(f'{problem}, expected multiples of {AREAS}')
    # The rows of areas, the rows in each, the columns of areas, the columns in each.
    cells = pictures.reshape(count, AREAS, height // AREAS, AREAS, width // AREAS, channels)
    means = cells.mean(axis=(2, 4), dtype=np.float32)
    return means.reshape(count, -1)


def list_columns(verdicts: Verdicts) -> dict[str, np.ndarray]:
    """Returns the columns of a row of `write_table`, `(n,)` each."""
    return {
        'exact': verdicts.exact,
        'first five': verdicts.first_five,
        'distance': verdicts.distance,
    }


def write_table(rows: Mapping[str, Mapping[str, np.ndarray]]) -> list[str]:
    """Returns a line of names and a line of means for each row; bools are shares in percent.

    All rows have the same columns. Names are on the left, numbers on the right of their columns.
    """
    # The names of the columns; above those of the rows stands nothing.
    header = ['']
    first_row = next(iter(rows.values()))
    header += first_row.keys()
    table = [header]
    for name, columns in rows.items():
        cells = [name]
        cells += map(_write_mean, columns.values())
        table.append(cells)
    # A column is as wide as its longest cell.
    name_width, *widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for name, *cells in table:
        parts = [name.ljust(name_width)]
        for cell, width in zip(cells, widths, strict=True):
            parts.append(cell.rjust(width))
        lines.append('  '.join(parts))
    return lines


def _write_mean(values: np.ndarray) -> str:
    """Returns a mean with one decimal; that of bools in percent."""
    if values.dtype == bool:
        return f'{100 * values.mean():.1f}%'
    return f'{values.mean():.1f}'


def _split(count: int) -> list[slice]:
    """Returns slices of `range(count)`, so that few rows of distances are in memory at a time."""
    starts = range(0, count, _ROWS_AT_ONCE)
    return [slice(start, start + _ROWS_AT_ONCE) for start in starts]


def _mean_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns mean squared differences of all pairs of rows, float64 `(len(x), len(y))`."""
    # In float64, because these are small differences of large sums.
    x = x.astype(np.float64)
    y = y.astype(np.float64)
    # |a - b|^2 = |a|^2 + |b|^2 - 2 a b, which needs no array of all differences.
    x_squares = np.square(x).sum(axis=1)[:, None]
    y_squares = np.square(y).sum(axis=1)
    sums = x_squares + y_squares - 2 * x @ y.T
    # Rounding can make that of two equal rows negative.
    return np.maximum(sums, 0) / x.shape[1]
