"""The chunk index against the files that it describes."""

import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coyo11m_tfds import chunk_index
from coyo11m_tfds.chunk_index import ChunkIndex

RECORD_SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=150)


def make_index(shards: list[list[int]]) -> ChunkIndex:
    flat = []
    for sizes in shards:
        starts = np.cumsum([0, *sizes])
        flat += [len(sizes), *starts[:-1:32], starts[-1]]
    return ChunkIndex(np.array(flat, np.int64))


@given(st.lists(RECORD_SIZES, min_size=1, max_size=4), st.data())
def test_byte_range_covers_exactly_the_records(shards: list[list[int]], data: st.DataObject):
    index = make_index(shards)
    np.testing.assert_array_equal(index.shard_lengths, [len(sizes) for sizes in shards])
    shard = data.draw(st.integers(0, len(shards) - 1))
    sizes = shards[shard]
    first = 32 * data.draw(st.integers(0, (len(sizes) - 1) // 32))
    ends = {*range(first + 32, len(sizes) + 1, 32), len(sizes)}
    end = data.draw(st.sampled_from(sorted(ends)))

    offset, nbytes = index.byte_range(shard, first, end - first)

    assert offset == sum(sizes[:first])
    assert nbytes == sum(sizes[first:end])


def test_byte_range_takes_arrays():
    index = make_index([[10] * 100, [20] * 40])
    offset, nbytes = index.byte_range(np.array([0, 0, 1]), np.array([0, 64, 32]), [64, 36, 8])
    np.testing.assert_array_equal(offset, [0, 640, 640])
    np.testing.assert_array_equal(nbytes, [640, 360, 160])
    assert offset.dtype == nbytes.dtype == np.int64


@pytest.mark.parametrize(
    ('shard', 'first', 'count', 'message'),
    [
        (0, 1, 31, r'\[1, 32\) of shard 0'),
        (0, 0, 33, r'\[0, 33\)'),
        (0, 96, 5, r'\[96, 101\)'),
        (0, 0, 128, r'\[0, 128\)'),
        (0, 0, 0, r'\[0, 0\)'),
        (0, -32, 64, r'\[-32, 32\)'),
        (1, 0, 32, 'no such shard'),
        ([0, 0], [0, 32], [32, 31], r'\[32, 63\)'),
    ],
)
def test_a_range_without_an_offset_is_refused(shard, first, count, message: str):
    index = make_index([[10] * 100])
    with pytest.raises(ValueError, match=message):
        index.byte_range(np.array(shard), np.array(first), np.array(count))


def test_what_is_saved_is_loaded(tmp_path: pathlib.Path):
    chunk_index.save(
        tmp_path,
        'train',
        shard_lengths=[33, 1],
        offsets=[np.array([0, 320]), np.array([0])],
        shard_sizes=[330, 7],
    )
    assert ChunkIndex.load(tmp_path, 'validation') is None
    index = ChunkIndex.load(str(tmp_path), 'train')
    np.testing.assert_array_equal(index.shard_lengths, [33, 1])
    assert index.byte_range(1, 0, 1) == (0, 7)
    flat = np.load(tmp_path / 'chunk_index-train.npy')
    np.testing.assert_array_equal(flat, [33, 0, 320, 330, 1, 0, 7])


@pytest.mark.parametrize(
    'content',
    [
        np.array([33, 0, 320], np.int64),  # the size is missing
        np.array([0, 0], np.int64),  # an empty shard
        np.array([33, 0, 320, 300], np.int64),  # offsets go back
        np.array([1.0, 0.0, 7.0]),
        np.array([[1, 0, 7]], np.int64),
        np.array([1, None], object),
    ],
)
def test_a_damaged_index_is_refused_by_name(tmp_path: pathlib.Path, content: np.ndarray):
    np.save(tmp_path / 'chunk_index-train.npy', content)
    with pytest.raises(ValueError, match=r'chunk_index-train\.npy: is not a chunk index'):
        ChunkIndex.load(tmp_path, 'train')


def test_a_truncated_index_is_refused_by_name(tmp_path: pathlib.Path):
    path = tmp_path / 'chunk_index-train.npy'
    chunk_index.save(tmp_path, 'train', [1], [np.array([0])], [7])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r'chunk_index-train\.npy: is not a chunk index'):
        ChunkIndex.load(tmp_path, 'train')
    path.write_bytes(b'')
    with pytest.raises(ValueError, match=r'chunk_index-train\.npy: is not a chunk index'):
        ChunkIndex.load(tmp_path, 'train')
