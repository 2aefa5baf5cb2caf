"""Decides which rows of a source become one shard.

    groups = group_files(file_bytes, shard_bytes=128 << 20)   # [range(0, 1), range(1, 540), ...]
    cuts = cut(rows, row_bytes, file_starts, groups, shard_bytes=128 << 20)

A large file is cut into shards of its own. Small ones share a shard with their neighbours, whole:
so a file is read for one group of shards only, and fetched once.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Cut:
    """The rows of one shard.

    Attributes:
        group: number of the group of files that they come from.
        rows: ascending, numbered over all files, int64 `(n,)`.
        num_bytes: their expected size.
    """

    group: int
    rows: np.ndarray
    num_bytes: int


def group_files(file_bytes: np.ndarray, shard_bytes: int) -> list[range]:
    """Groups consecutive files, each either a large one alone or several small ones.

    Groups of small files have half of `shard_bytes` to twice as much, wherever as many small files
    follow each other.

    Args:
        file_bytes: what each file contributes, int64 `(files,)`.
        shard_bytes: files with more are large.
    """
    groups: list[range] = []
    for is_large, run in itertools.groupby(
        range(len(file_bytes)), lambda file: file_bytes[file] > shard_bytes
    ):
        files = list(run)
        if is_large:
            groups += [range(file, file + 1) for file in files]
        else:
            groups += _group_small(range(files[0], files[-1] + 1), file_bytes, shard_bytes)
    return groups


def _group_small(files: range, file_bytes: np.ndarray, shard_bytes: int) -> list[range]:
    firsts, total = [files.start], 0
    for file in files:
        num_bytes = int(file_bytes[file])
        if total + num_bytes > shard_bytes and 2 * total >= shard_bytes:
            firsts.append(file)
            total = 0
        total += num_bytes
    if len(firsts) > 1 and 2 * total < shard_bytes:
        del firsts[-1]  # the rest is too little for a shard of its own
    return [range(first, end) for first, end in itertools.pairwise([*firsts, files.stop])]


def cut(
    rows: np.ndarray,
    row_bytes: np.ndarray,
    file_starts: np.ndarray,
    groups: Sequence[range],
    shard_bytes: int,
) -> list[Cut]:
    """Cuts the rows of one split into shards.

    The rows of a group of several files are one shard; those of one file are the fewest shards of
    at most about `shard_bytes`, nearly equal.

    Args:
        rows: ascending, numbered over all files, int64 `(n,)`.
        row_bytes: expected size of the record of each, int64 `(n,)`.
        file_starts: row at which each file starts, and the number of rows, int64 `(files + 1,)`.
        groups: those of `group_files`.
        shard_bytes: of a shard.
    """
    cuts = []
    borders = np.searchsorted(rows, file_starts)
    for number, files in enumerate(groups):
        start, end = int(borders[files.start]), int(borders[files.stop])
        if start == end:
            continue
        num_bytes = int(row_bytes[start:end].sum())
        num_shards = 1 if len(files) > 1 else min(-(-num_bytes // shard_bytes), end - start)
        parts = zip(
            np.array_split(rows[start:end], num_shards),
            np.array_split(row_bytes[start:end], num_shards),
            strict=True,
        )
        cuts += [Cut(number, part, int(part_bytes.sum())) for part, part_bytes in parts]
    return cuts
