"""Captions and text vectors by key."""

import pathlib
import tempfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coyo11m_tfds import captions, vectors
from tests import made_sources

KEYS = st.integers(-(2**63), 2**63 - 1)
CAPTIONS = st.none() | st.text(max_size=40) | st.sampled_from(['', ' ', '\n\t ', '\u2003', 'ä b'])


def build(path: pathlib.Path, folder: pathlib.Path, column: str = 'caption_llava'):
    captions.build_store(str(path), column, folder)
    return captions.CaptionStore(folder)


@given(st.dictionaries(KEYS, CAPTIONS, min_size=1, max_size=60), st.lists(KEYS), st.integers(1, 20))
def test_the_store_answers_like_a_dict(
    rows: dict[int, str | None], others: list[int], row_group_size: int
):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        table = pa.table(
            {
                'key': pa.array(list(rows), pa.int64()),
                'caption_llava': pa.array(list(rows.values()), pa.string()),
            }
        )
        pq.write_table(table, folder / 'x.parquet', row_group_size=row_group_size)
        store = build(folder / 'x.parquet', folder)

    wanted = np.array([*rows, *others], np.int64)
    found = store.find(wanted)
    np.testing.assert_array_equal(found >= 0, [key in rows for key in wanted.tolist()])
    held = wanted[found >= 0].tolist()
    lengths = store.lengths(found[found >= 0])
    np.testing.assert_array_equal(lengths > 0, [bool((rows[k] or '').strip()) for k in held])
    texts = store.texts(found[found >= 0])
    for key, length, text in zip(held, lengths, texts, strict=True):
        assert text == (rows[key].encode() if length else b'')
        assert len(text) == length
    np.testing.assert_array_equal(store.keys, sorted(rows))


@pytest.mark.parametrize('as_index', [True, False])
@pytest.mark.parametrize('keys', [(5, 3, 8), range(9, 0, -3)], ids=['index', 'range'])
def test_the_key_may_be_the_pandas_index(tmp_path: pathlib.Path, keys, as_index: bool):
    frame = pd.DataFrame({'caption_llava': ['a', 'b', 'c']}, index=pd.Index(keys, name='key'))
    (frame if as_index else frame.reset_index()).to_parquet(tmp_path / 'x.parquet')
    store = build(tmp_path / 'x.parquet', tmp_path)
    assert store.texts(store.find(np.array(keys))) == [b'a', b'b', b'c']


@pytest.mark.parametrize(
    'kind',
    [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_text_may_have_any_of_arrows_types(tmp_path: pathlib.Path, kind: pa.DataType):
    text = pa.array(['b', None, ' ', 'b'], pa.string()).cast(kind)
    table = pa.table({'key': pa.array([4, 3, 2, 1], pa.uint32()), 'caption_llava': text})
    pq.write_table(table, tmp_path / 'x.parquet')
    store = build(tmp_path / 'x.parquet', tmp_path)
    assert store.texts(store.find(np.array([1, 2, 3, 4]))) == [b'b', b'', b'', b'b']


def test_a_file_of_several_batches_is_joined_correctly(tmp_path: pathlib.Path):
    keys = np.random.default_rng(0).permutation(40_000)
    text = [f'caption {key}' * (key % 3) for key in keys]
    table = pa.table({'key': keys, 'caption_llava': text})
    pq.write_table(table, tmp_path / 'x.parquet', row_group_size=9_000)
    store = build(tmp_path / 'x.parquet', tmp_path)
    wanted = np.array([39_999, 0, 20_000, 17])
    assert store.texts(store.find(wanted)) == [f'caption {k}'.encode() * (k % 3) for k in wanted]


def test_an_index_that_is_a_range_may_span_several_batches(tmp_path: pathlib.Path):
    text = [f'caption {i}' for i in range(40_000)]
    index = pd.RangeIndex(100, 100 + len(text), name='key')
    pd.DataFrame({'caption_llava': text}, index=index).to_parquet(tmp_path / 'x.parquet')
    store = build(tmp_path / 'x.parquet', tmp_path)
    assert store.texts(store.find(np.array([100, 40_099]))) == [b'caption 0', b'caption 39999']


def test_the_digest_depends_on_keys_and_captions(tmp_path: pathlib.Path):
    digests = set()
    for rows in ({1: 'a', 2: 'b'}, {1: 'a', 2: 'c'}, {1: 'a', 3: 'b'}, {1: 'ab', 2: ''}):
        made_sources.write_captions(tmp_path, rows)
        path = str(tmp_path / 'coyo11m-meta.parquet')
        digests.add(captions.build_store(path, 'caption_llava', tmp_path))
    assert len(digests) == 4


@pytest.mark.parametrize(
    ('columns', 'message'),
    [
        ({'key': [1, 1], 'caption_llava': ['a', 'b']}, 'repeat the key of another, e.g. key 1'),
        ({'key': [1], 'caption': ['a']}, "no column 'caption_llava'; its columns are key, caption"),
        ({'id': [1], 'caption_llava': ['a']}, "no column 'key'"),
        ({'key': ['1'], 'caption_llava': ['a']}, "'key' is string, expected int64"),
        ({'key': [1, None], 'caption_llava': ['a', 'b']}, "'key' has nulls"),
        ({'key': [1], 'caption_llava': [1.5]}, "'caption_llava' is double, expected text"),
        ({'key': pa.array([], pa.int64()), 'caption_llava': pa.array([], pa.string())}, 'no rows'),
        ({'key': pa.array([2**63], pa.uint64()), 'caption_llava': ['a']}, 'not fit int64'),
    ],
)
def test_a_bad_captions_file_is_refused_by_name(tmp_path: pathlib.Path, columns, message: str):
    pq.write_table(pa.table(columns), tmp_path / 'x.parquet')
    with pytest.raises(ValueError, match=message) as error:
        build(tmp_path / 'x.parquet', tmp_path)
    assert str(tmp_path / 'x.parquet') in str(error.value)


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path: pathlib.Path):
    table = pa.table({'key': range(1000), 'caption_llava': [f'text {i}' for i in range(1000)]})
    path = tmp_path / 'x.parquet'
    pq.write_table(table, path)
    whole = path.read_bytes()
    for content in (whole[:-100], b'', b'not a Parquet file', bytes(400) + whole[400:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r'x\.parquet: .* damaged'):
            build(path, tmp_path)


def test_vectors_are_found_by_key(tmp_path: pathlib.Path):
    rng = np.random.default_rng(0)
    wanted = {key: rng.normal(size=6).astype(np.float16) for key in (7, -3, 2**40)}
    path = str(made_sources.write_sidecar(tmp_path / 'x.parquet', wanted))
    header = vectors.read_header(path)
    assert (header.dim, header.encoder, header.caption_column) == (6, 'made-up', 'caption_llava')

    vectors.build_store(path, tmp_path)
    store = vectors.VectorStore(tmp_path, header.dim)

    np.testing.assert_array_equal(store.find(np.array([8, -3])) >= 0, [False, True])
    read = store.read(store.find(np.array(list(wanted))))
    assert read.dtype == np.float16
    np.testing.assert_array_equal(read, np.stack(list(wanted.values())))


@pytest.mark.parametrize(
    ('value', 'metadata', 'message'),
    [
        (np.nan, {}, 'vector of key 4 is not finite'),
        (1.0, {'text_encoder': None}, "metadata lacks 'text_encoder'"),
        (1.0, {'text_embedding_dim': None}, "metadata lacks 'text_embedding_dim'"),
        (1.0, {'caption_column': ''}, "metadata lacks 'caption_column'"),
        (1.0, {'text_embedding_dim': '3'}, 'have 2 numbers, but its metadata says 3'),
    ],
)
def test_a_bad_sidecar_is_refused_by_name(
    tmp_path: pathlib.Path, value: float, metadata: dict, message: str
):
    rows = {3: np.ones(2), 4: np.array([1.0, value])}
    path = made_sources.write_sidecar(tmp_path / 'x.parquet', rows, **metadata)
    with pytest.raises(ValueError, match=rf'x\.parquet: .*{message}'):
        vectors.build_store(str(path), tmp_path)


def test_a_sidecar_of_another_type_is_refused_by_name(tmp_path: pathlib.Path):
    for values in (pa.array([[1.0, 2.0]]), pa.array([[1.0]], pa.list_(pa.float32(), 1))):
        path = tmp_path / 'x.parquet'
        pq.write_table(pa.table({'key': [1], 'text_embedding': values}), path)
        with pytest.raises(
            ValueError, match=r'x\.parquet: .*expected a fixed-size list of float16'
        ):
            vectors.build_store(str(path), tmp_path)
