"""The chunk index against the files that it describes."""

import io
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coyo11m_tfds.dataset import chunk_index
from coyo11m_tfds.dataset.chunk_index import ChunkIndex
from coyo11m_tfds.dataset.manifest import DamagedError, SmallFiles

RECORD_SIZES = st.lists(st.integers(1, 50), max_size=150)  # a shard may be empty


def make_index(shards: list[list[int]]) -> ChunkIndex:
    flat = []
    for sizes in shards:
        starts = np.cumsum([0, *sizes])
        flat += [len(sizes), *starts[:-1:32], starts[-1]]
    return ChunkIndex(np.array(flat, np.int64))


@given(st.lists(RECORD_SIZES, min_size=1, max_size=4).filter(any), st.data())
def test_byte_range_covers_exactly_the_records(shards, data):
    index = make_index(shards)
    np.testing.assert_array_equal(index.shard_lengths, [len(sizes) for sizes in shards])
    shard = data.draw(st.sampled_from([n for n, sizes in enumerate(shards) if sizes]))
    sizes = shards[shard]
    first = 32 * data.draw(st.integers(0, (len(sizes) - 1) // 32))
    ends = {*range(first + 32, len(sizes) + 1, 32), len(sizes)}
    end = data.draw(st.sampled_from(sorted(ends)))
    offset, nbytes = index.byte_range(shard, first, end - first)
    assert offset == sum(sizes[:first])
    assert nbytes == sum(sizes[first:end])


def load(folder: pathlib.Path, split: str) -> ChunkIndex | None:
    return SmallFiles(str(folder)).read(chunk_index.index_file_name(split), ChunkIndex.parse)


def test_what_is_saved_is_loaded(tmp_path):
    chunk_index.write_chunk_index(
        tmp_path,
        'train',
        shard_lengths=[33, 1],
        entries=[chunk_index.make_entries([0, 320], bytes(range(132))), [0]],
        shard_sizes=[330, 7],
    )
    assert load(tmp_path, 'validation') is None
    index = load(tmp_path, 'train')
    np.testing.assert_array_equal(index.shard_lengths, [33, 1])
    assert index.byte_range(1, 0, 1) == (0, 7)
    offset, nbytes = index.byte_range([0, 1], [32, 0], 1)
    assert index.shard_lengths.dtype == offset.dtype == nbytes.dtype == np.int64
    flat = np.load(tmp_path / 'chunk_index-train.npy')
    np.testing.assert_array_equal(flat & (1 << 43) - 1, [33, 0, 320, 330, 1, 0, 7])
    checksums = np.zeros((2, 32), np.uint32)
    checksums.ravel()[:33] = np.frombuffer(bytes(range(132)), np.uint32)
    digests = index.digests(np.array([0, 0]), np.array([0, 32]))
    np.testing.assert_array_equal(digests, chunk_index.run_digests(checksums))
    assert len({*digests.tolist(), 0}) == 3 and digests.max() < 1 << 20


def test_runs_with_other_checksums_have_other_digests():
    runs = np.random.default_rng(0).integers(0, 2**32, (1000, 32), np.uint32)
    swapped, changed, moved = runs.copy(), runs.copy(), np.roll(runs, 1, axis=1)
    swapped[:, [3, 31]] = runs[:, [31, 3]]
    changed[:, 31] ^= 1
    whole, *others = (chunk_index.run_digests(x) for x in (runs, swapped, changed, moved, runs[1:]))
    for digests in others:
        assert (digests != whole[: len(digests)]).all()


def saved(content: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, content)
    return file.getvalue()


WHOLE = saved(np.array([1, 0, 7]))
ARRAYS = [
    np.array([33, 0, 320], np.int64),  # the size is missing
    np.array([-1, 0, 0], np.int64),  # less than nothing
    np.array([33, 0, 320, 300], np.int64),  # offsets go back
    np.array([33, 0, 320, 330, 64, 0, 9, 9], np.int64),  # of the second shard
    np.array([1, -7, 7], np.int64),  # before the file
    np.array([33, 0, 2**62, 2**63 - 1], np.int64),  # no file is so large
    np.array([1, 0, -1], np.int64),
    np.array([1, 0, 2**43 + 7, 1, 0, 7], np.int64),
    np.array([1.0, 0.0, 7.0]),
    np.array([1, 0, 7], np.uint64),
    np.array([[1], [0], [7]], np.int64),
    np.array([1, None], object),
]
FILES = [
    b'',
    WHOLE[:60],  # within the header
    WHOLE[:-4],
    WHOLE + bytes(8),
    WHOLE.replace(b'(3,), }' + 12 * b' ', b'(3000000000000,), }'),
    WHOLE.replace(b" 'fortran_order'", b"b'fortran_order'"),
]


@pytest.mark.parametrize('content', [*map(saved, ARRAYS), *FILES], ids=range(len(ARRAYS + FILES)))
def test_a_damaged_index_is_refused_by_name(tmp_path, content):
    assert content != WHOLE
    (tmp_path / 'chunk_index-train.npy').write_bytes(content)
    with pytest.raises(DamagedError, match=r'chunk_index-train\.npy: is damaged'):
        load(tmp_path, 'train')


@pytest.mark.filterwarnings('ignore')  # NumPy warns of some headers that it then refuses
def test_a_flipped_bit_is_refused_by_name_or_changes_one_number(tmp_path):
    """No other error may come of it, and a number is only read if the shards stay two."""
    path = tmp_path / 'chunk_index-train.npy'
    chunk_index.write_chunk_index(tmp_path, 'train', [33, 1], [[0, 320], [0]], [330, 7])
    whole = path.read_bytes()
    changed = 0
    for bit in range(0, 8 * len(whole), 3):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            index = load(tmp_path, 'train')
        except ValueError as error:
            assert str(error).startswith(f'{path}: is damaged')
            continue
        np.testing.assert_array_equal(-(-index.shard_lengths // 32), [2, 1])
        changed += 1
    assert 0 < changed < 8 * 8 * 3
