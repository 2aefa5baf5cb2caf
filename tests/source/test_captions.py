"""Captions and text embeddings by key: what is found, and what of a file is refused."""

import base64
import contextlib
import pathlib
import random
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coyo11m_tfds import embed_captions
from coyo11m_tfds.source import captions, sidecar
from coyo11m_tfds.source.joined import Joined
from coyo11m_tfds.storage.source_files import SourceFile
from tests import joins, made_sources
from tests.checkout import CHECKOUT

KEYS = st.integers(-(2**63), 2**63 - 1)
FEW_KEYS = st.integers(-3, 3)
CAPTIONS = st.none() | st.text(max_size=40) | st.sampled_from(['', ' ', '\n\t ', '\u2003', 'ä b'])


def join(path: pathlib.Path, wanted: Iterable[int] | None = None) -> Joined:
    """Joins the captions of a file, in a new folder beside it."""
    return joins.of_captions(path, new_folder(path), wanted)


def join_embeddings(path: pathlib.Path, wanted: Iterable[int] = (1, 2)) -> Joined:
    return joins.of_values(path, new_folder(path), wanted)


def new_folder(path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(tempfile.mkdtemp(dir=path.parent)) / 'joined'


def texts_of(path: pathlib.Path, *keys: int) -> list[bytes]:
    """The captions of some keys, which all have a row."""
    found = join(path, keys)
    assert found.places.tolist() == list(range(len(keys)))
    return [text or b'' for text in found.read(found.places)]


# --- What is found ---------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(KEYS | FEW_KEYS, CAPTIONS), min_size=1, max_size=60),
    st.lists(KEYS | FEW_KEYS),
    st.integers(1, 20),
    st.booleans(),
)
def test_captions_are_found_as_in_a_dict(
    rows: list[tuple[int, str | None]], others: list[int], row_group_size: int, all_keys: bool
):
    expected: dict[int, str | None] = {}
    for key, text in rows:
        expected.setdefault(key, text)
    keys = [key for key, _ in rows]
    wanted = sorted(expected) if all_keys else list(dict.fromkeys([*others, *keys[::2]]))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / 'x.parquet'
        text = pa.array([text for _, text in rows], pa.string())
        table = pa.table({'key': pa.array(keys, pa.int64()), 'caption_llava': text})
        pq.write_table(table, path, row_group_size=row_group_size)
        found = join(path, None if all_keys else wanted)
        texts = found.read(found.places)
    held = [place for place, key in enumerate(wanted) if key in expected]
    places = [wanted[place] for place in held] if all_keys else held
    assert found.places.tolist() == places
    for place, size, text in zip(held, found.sizes.tolist(), texts, strict=True):
        caption = expected[wanted[place]] or ''
        assert (text or b'') == (caption.encode() if caption.strip() else b'')
        assert size == len(text or b'')
    assert found.facts['duplicates'] == len(keys) - len(expected)
    repeated = {key for key in keys if keys.count(key) > 1}
    assert found.facts['duplicate_keys'] == sorted(repeated)[:10]
    if repeated:
        with pytest.raises(ValueError, match=f'^x: {len(keys) - len(expected)} rows repeat the'):
            captions.check_unique(found, 'x')


@pytest.mark.parametrize('as_index', [True, False])
@pytest.mark.parametrize('keys', [(5, 3, 8), range(9, 0, -3)], ids=['index', 'range'])
def test_the_key_may_be_the_pandas_index(tmp_path: pathlib.Path, keys, as_index: bool):
    frame = pd.DataFrame({'caption_llava': ['a', 'b', 'c']}, index=pd.Index(keys, name='key'))
    (frame if as_index else frame.reset_index()).to_parquet(tmp_path / 'x.parquet')
    assert texts_of(tmp_path / 'x.parquet', *keys) == [b'a', b'b', b'c']


@pytest.mark.parametrize(
    'kind',
    [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_text_may_have_any_of_arrows_types(tmp_path: pathlib.Path, kind: pa.DataType):
    text = pa.array(['b', None, ' ', 'b'], pa.string()).cast(kind)
    table = pa.table({'key': pa.array([4, 3, 2, 1], pa.uint32()), 'caption_llava': text})
    pq.write_table(table, tmp_path / 'x.parquet')
    assert texts_of(tmp_path / 'x.parquet', 1, 2, 3, 4) == [b'b', b'', b'', b'b']


def test_a_file_of_several_batches_is_joined_correctly(tmp_path: pathlib.Path):
    keys = np.random.default_rng(0).permutation(40_000)
    text = [f'caption {key} ' * (key % 8) for key in keys]
    table = pa.table({'key': keys, 'caption_llava': text})
    pq.write_table(table, tmp_path / 'x.parquet', row_group_size=9_000)
    for wanted in ([39_999, 0, 20_000, 17], keys.tolist()):
        expected = [f'caption {k} '.encode() * (k % 8) for k in wanted]
        assert texts_of(tmp_path / 'x.parquet', *wanted) == expected
    found = join(tmp_path / 'x.parquet', keys)
    for some in (slice(8_000, 8_200), slice(0, 40_000, 997), slice(39_999, None), slice(0, 0)):
        read = [text or b'' for text in found.read(found.places[some])]
        assert read == [f'caption {k} '.encode() * (k % 8) for k in keys[some]]


def test_a_column_comes_before_an_index_of_its_name(tmp_path: pathlib.Path):
    frame = pd.DataFrame({'key': [30, 10], 'caption_llava': ['a', 'b']})
    frame.index = pd.RangeIndex(2, name='key')
    frame.to_parquet(tmp_path / 'x.parquet')
    assert texts_of(tmp_path / 'x.parquet', 10, 30) == [b'b', b'a']
    assert len(join(tmp_path / 'x.parquet', [0, 1]).places) == 0


@pytest.mark.parametrize('encoding', ['DELTA_BYTE_ARRAY', 'DELTA_LENGTH_BYTE_ARRAY'])
def test_texts_may_be_stored_as_differences(tmp_path: pathlib.Path, encoding: str):
    texts = ['', *(f'the same {number}' for number in range(3_000))]
    options = {'use_dictionary': False, 'column_encoding': {'caption_llava': encoding}}
    table = pa.table({'key': range(len(texts)), 'caption_llava': texts})
    pq.write_table(table, tmp_path / 'x.parquet', **options)
    assert texts_of(tmp_path / 'x.parquet', 2_999, 0) == [b'the same 2998', b'']


@pytest.mark.parametrize('has_checksums', [True, False])
@pytest.mark.parametrize('dictionary', [True, False])
def test_it_is_known_whether_pages_have_checksums(
    tmp_path: pathlib.Path, has_checksums: bool, dictionary: bool
):
    path = tmp_path / 'x.parquet'
    table = pa.table({'key': range(50_000), 'caption_llava': ['a b'] * 50_000})
    for version in ('1.0', '2.0'):
        pq.write_table(
            table,
            path,
            write_page_checksum=has_checksums,
            use_dictionary=dictionary,
            data_page_version=version,
        )
        assert join(path, [1]).facts['has_checksums'] == has_checksums


def test_an_index_that_is_a_range_may_span_several_batches(tmp_path: pathlib.Path):
    text = [f'caption {i}' for i in range(40_000)]
    index = pd.RangeIndex(100, 100 + len(text), name='key')
    pd.DataFrame({'caption_llava': text}, index=index).to_parquet(tmp_path / 'x.parquet')
    assert texts_of(tmp_path / 'x.parquet', 100, 40_099) == [b'caption 0', b'caption 39999']


def test_only_the_columns_that_are_needed_are_read(tmp_path: pathlib.Path):
    path = tmp_path / 'x.parquet'
    rows = range(1000)
    other = [f'https://{i}' for i in rows]
    pq.write_table(pa.table({'url': other, 'key': rows, 'caption_llava': map(str, rows)}), path)
    place = pq.read_metadata(path).row_group(0).column(0)
    content = bytearray(path.read_bytes())
    start, size = place.dictionary_page_offset, place.total_compressed_size
    content[start : start + size] = bytes(size)
    path.write_bytes(content)
    with pytest.raises((pa.ArrowException, OSError)):
        pq.read_table(path)
    assert texts_of(path, 999) == [b'999']


def test_the_digest_is_that_of_captions_by_key(tmp_path: pathlib.Path):
    def digest(rows: dict, kind: pa.DataType, **options) -> str:
        path = tmp_path / f'{len(list(tmp_path.iterdir()))}.parquet'
        text = pa.array(list(rows.values()), pa.string()).cast(kind)
        pq.write_table(pa.table({'key': list(rows), 'caption_llava': text}), path, **options)
        return join(path).facts['digest']

    rows = {key: str(key) for key in range(20_000)} | {-1: '', -2: 'z'}
    same = [
        digest(rows, pa.string()),
        digest(rows, pa.large_string(), row_group_size=777, compression='zstd'),
        digest(rows | {-1: None}, pa.string_view(), row_group_size=20_001),
        digest(rows | {-1: ' \n'}, pa.dictionary(pa.int32(), pa.string())),
        digest({key: rows[key] for key in sorted(rows)}, pa.string()),
        digest({-3: None, **rows}, pa.string()),
        digest({key: text for key, text in rows.items() if text}, pa.string()),
    ]
    assert len(set(same)) == 1
    others = [
        rows | {-2: 'y'},
        {key: text for key, text in rows.items() if key != 1},
        rows | {-3: 'new'},
        {1: 'a', 2: 'b'},
        {1: 'ab', 2: ''},
        {1: '', 2: 'ab'},
        {1: 'a', 3: 'b'},
        {1: ' ', 2: ' a', 3: ''},
        {1: ' ', 2: 'a', 3: ' '},
    ]
    digests = {digest(other, pa.string()) for other in others}
    assert len(digests - set(same)) == len(others)


# --- What is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('columns', 'message'),
    [
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
        join(tmp_path / 'x.parquet')
    assert str(tmp_path / 'x.parquet') in str(error.value)


def test_a_column_that_comes_twice_is_refused_by_name(tmp_path: pathlib.Path):
    path = tmp_path / 'x.parquet'
    for names in (['key', 'caption_llava', 'caption_llava'], ['key', 'caption_llava', 'key']):
        columns = [pa.array([1]), pa.array(['a']), pa.array([2])]
        pq.write_table(pa.Table.from_arrays(columns, names=names), path)
        with pytest.raises(ValueError, match=rf"x\.parquet: has 2 columns '{names[2]}'; its"):
            join(path)


class NoKeys(encryption.KmsClient):
    """Wraps keys in nothing."""

    def wrap_key(self, key_bytes, master_key_identifier):
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key, master_key_identifier):
        return base64.b64decode(wrapped_key)


@pytest.mark.parametrize('plain_footer', [True, False])
@pytest.mark.parametrize('columns', [['caption_llava'], ['key', 'caption_llava']])
def test_an_encrypted_file_is_refused_by_name(tmp_path: pathlib.Path, plain_footer, columns):
    path = tmp_path / 'x.parquet'
    how = encryption.EncryptionConfiguration(
        footer_key='f', column_keys={'c': columns}, plaintext_footer=plain_footer
    )
    factory = encryption.CryptoFactory(lambda _: NoKeys())
    secrets = factory.file_encryption_properties(encryption.KmsConnectionConfig(), how)
    table = pa.table({'key': [1, 2], 'caption_llava': ['a', 'b']})
    with pq.ParquetWriter(path, table.schema, encryption_properties=secrets) as writer:
        writer.write_table(table)
    program = (
        'import sys; from coyo11m_tfds.source import captions\n'
        'try:\n    captions.join(sys.argv[1], "caption_llava", sys.argv[1] + ".joined")\n'
        'except ValueError as error:\n    print(error)'
    )
    ended = subprocess.run(  # Arrow could abort the process
        [sys.executable, '-c', program, path], capture_output=True, text=True, cwd=CHECKOUT
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f'{path}: is encrypted. Write it without encryption.\n'


def test_text_that_is_not_utf8_is_refused_by_key(tmp_path: pathlib.Path):
    raw = pa.array([None, 'ä'.encode(), b'a \xff b', b'c'], pa.binary())
    text = pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:], raw.buffers()[0])
    pq.write_table(pa.table({'key': [1, 2, 3, 4], 'caption_llava': text}), tmp_path / 'x.parquet')
    with pytest.raises(ValueError, match=r'x\.parquet: the text of key 3 is not UTF-8'):
        join(tmp_path / 'x.parquet')


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path: pathlib.Path):
    table = pa.table({'key': range(1000), 'caption_llava': [f'text {i}' for i in range(1000)]})
    path = tmp_path / 'x.parquet'
    pq.write_table(table, path)
    whole = path.read_bytes()
    for content in (whole[:-100], b'', b'not a Parquet file', bytes(400) + whole[400:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r'x\.parquet: .* damaged'):
            join(path)


def write_with_pandas(path: pathlib.Path) -> None:
    frame = pd.DataFrame({'caption_llava': [f'caption {i} ' * 3 for i in range(50)]})
    frame.index = pd.RangeIndex(50, name='key')
    frame.to_parquet(path)


def write_embedded(path: pathlib.Path) -> None:
    source = path.parent / 'source'
    source.mkdir()
    made_sources.write_captions(source, {key: f'caption {key}' for key in range(50)})
    embed_captions.embed(source, 'hash', path)


@pytest.mark.parametrize(
    ('write', 'join_file'),
    [(write_with_pandas, join), (write_embedded, join_embeddings)],
    ids=['captions', 'embeddings'],
)
def test_whatever_is_damaged_the_error_names_the_file(tmp_path: pathlib.Path, write, join_file):
    path, random_ = tmp_path / 'x.parquet', random.Random(0)
    write(path)
    whole = path.read_bytes()
    refused = 0
    for _ in range(150):
        at = random_.randrange(
            len(whole) - min(len(whole), random_.choice([3000, 10**9])), len(whole)
        )
        change = random_.choice([b'', bytes(8), random_.randbytes(1)])
        path.write_bytes(whole[:at] + change + whole[at + len(change) :] if change else whole[:at])
        try:
            join_file(path)
        except ValueError as error:
            assert str(error).startswith(f'{path}: '), repr(error)
            refused += 1
    assert 50 < refused < 150


def test_damaged_embeddings_of_a_sidecar_are_refused(tmp_path: pathlib.Path):
    path = tmp_path / 'x.parquet'
    write_embedded(path)
    column = pq.read_metadata(path).row_group(0).column(1)
    whole, start = path.read_bytes(), column.data_page_offset
    for at in range(start, start + column.total_compressed_size, 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r'x\.parquet: is damaged'):
            join_embeddings(path)


def test_messages_name_the_file_that_a_copy_stands_for(tmp_path: pathlib.Path):
    copy = tmp_path / 'copy.parquet'
    file = SourceFile('gs://b/x', 0, '1', None)

    def of_captions() -> None:
        joins.of_captions(copy, new_folder(copy), name=file.path)

    def of_embeddings() -> None:
        folder, wanted = str(new_folder(copy)), np.array([1])
        sidecar.join([file], folder, wanted, hold=lambda _: contextlib.nullcontext(str(copy)))

    for content in ({'key': [1]}, {'key': [1], 'caption_llava': [2]}, {'id': [1]}, b'PAR?'):
        if isinstance(content, bytes):
            copy.write_bytes(content)
        else:
            pq.write_table(pa.table(content), copy)
        for join_copy in (of_captions, of_embeddings):
            with pytest.raises(ValueError, match=r'gs://b/x: ') as error:
                join_copy()
            assert 'copy' not in str(error.value).replace('Copy or download it again', '')


# --- Text embeddings -----------------------------------------------------------------------------


def test_embeddings_are_found_by_key(tmp_path: pathlib.Path):
    rng = np.random.default_rng(0)
    wanted = {int(key): rng.normal(size=6).astype(np.float16) for key in rng.permutation(30_000)}
    path = made_sources.write_sidecar(tmp_path / 'x.parquet', wanted)
    found = join_embeddings(path, [*range(29_000), -8, 40_000])
    header = sidecar.Header(**found.facts['header'])
    assert header == sidecar.Header(6, 'made-up', '1', 0, 'caption_llava', 'made-up')
    assert header.to_json() == sidecar.describe(str(path))['header']
    assert found.places.tolist() == list(range(29_000))
    for places in (np.arange(29_000), np.array([7]), np.array([], np.int64)):
        read = sidecar.read(found, places)
        assert (read.dtype, read.shape) == (np.float16, (len(places), 6))
        for row, key in zip(read, places.tolist(), strict=True):
            np.testing.assert_array_equal(row, wanted[key])


def test_the_digest_of_embeddings_is_that_of_keys_and_vectors(tmp_path: pathlib.Path):
    digests = set()
    for number, rows in enumerate(
        ({1: [1, 2], 2: [3, 4]}, {1: [1, 2], 2: [3, 5]}, {1: [1, 2], 3: [3, 4]}, {1: [1, 2]})
    ):
        rows = {key: np.array(vector, np.float16) for key, vector in rows.items()}
        path = made_sources.write_sidecar(tmp_path / f'{number}.parquet', rows)
        digests.add(join_embeddings(path).facts['digest'])
    assert len(digests) == 4


@pytest.mark.parametrize(
    ('value', 'metadata', 'message'),
    [
        (np.nan, {}, 'embedding of key 4 is not finite'),
        (1.0, {'text_encoder': None}, "metadata lacks 'text_encoder'"),
        (1.0, {'text_embedding_dim': None}, "metadata lacks 'text_embedding_dim'"),
        (1.0, {'caption_column': ''}, "metadata lacks 'caption_column'; make the file again"),
        (1.0, {'captions_digest': None}, "metadata lacks 'captions_digest'; make the file again"),
        (1.0, {'text_encoder_revision': None}, "lacks 'text_encoder_revision'"),
        (1.0, {'text_max_tokens': None}, "lacks 'text_max_tokens'"),
        (1.0, {'text_max_tokens': '-1'}, "text_max_tokens '-1', expected a number"),
        (1.0, {'text_embedding_dim': '3'}, 'have 2 numbers, but its metadata says 3'),
    ],
)
def test_a_bad_sidecar_is_refused_by_name(
    tmp_path: pathlib.Path, value: float, metadata: dict, message: str
):
    rows = {3: np.ones(2), 4: np.array([1.0, value])}
    path = made_sources.write_sidecar(tmp_path / 'x.parquet', rows, **metadata)
    with pytest.raises(ValueError, match=rf'x\.parquet: .*{message}'):
        join_embeddings(path)


def test_a_sidecar_of_another_type_is_refused_by_name(tmp_path: pathlib.Path):
    for values in (pa.array([[1.0, 2.0]]), pa.array([[1.0]], pa.list_(pa.float32(), 1))):
        path = tmp_path / 'x.parquet'
        pq.write_table(pa.table({'key': [1], 'text_embedding': values}), path)
        with pytest.raises(
            ValueError, match=r'x\.parquet: .*expected a fixed-size list of float16'
        ):
            join_embeddings(path)


def test_a_sidecar_with_nulls_or_duplicate_keys_is_refused_by_name(tmp_path: pathlib.Path):
    path = made_sources.write_sidecar(tmp_path / 'x.parquet', {1: np.ones(2), 2: np.zeros(2)})
    table = pq.read_table(path)
    rows = table.to_pydict()
    for change, message in (
        ({'key': [5, 5]}, 'repeat the key of another, e.g. key 5'),
        # Arrow cannot even read nulls in lists of a fixed size.
        ({'text_embedding': [None, rows['text_embedding'][1]]}, 'has nulls|is damaged'),
    ):
        pq.write_table(pa.Table.from_pydict(rows | change, schema=table.schema), path)
        with pytest.raises(ValueError, match=rf'x\.parquet: .*({message})'):
            join_embeddings(path)


# --- Bombs ----------------------------------------------------------------------------------


def write_texts(path: pathlib.Path, texts: list[str | None], **options) -> None:
    table = pa.table({'key': range(len(texts)), 'caption_llava': texts})
    pq.write_table(table, path, compression='zstd', **options)


def write_repeated(path: pathlib.Path, text: str, count: int) -> None:
    """As any Parquet writer with dictionaries does, without so much memory."""
    texts = pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), [text])
    table = pa.table({'key': range(count), 'caption_llava': texts})
    pq.write_table(table, path, compression='zstd', store_schema=False)


def write_wide_embeddings(path: pathlib.Path) -> None:
    made_sources.write_sidecar(path, {key: np.ones(4096) for key in range(12_000)})


BOMBS = {
    'repeated and too long': (lambda path: write_repeated(path, 'x' * 100_000, 16_384), 0),
    'repeated': (lambda path: write_repeated(path, 'x' * 60_000, 4_000), 4_000),
    'plain': (
        lambda path: write_texts(path, ['x' * 50_000] * 4_000, use_dictionary=False),
        4_000,
    ),
}


@pytest.mark.parametrize('kind', BOMBS)
def test_texts_that_are_large_only_in_memory_take_little_of_it(tmp_path: pathlib.Path, kind: str):
    write, num_captions = BOMBS[kind]
    write(tmp_path / 'x.parquet')
    assert (tmp_path / 'x.parquet').stat().st_size < 100_000
    program = """
        captions.join(path, 'caption_llava', path + '.joined')
        print((joined.Joined(path + '.joined').sizes > 0).sum())
    """
    assert run_with_little_memory(program, tmp_path / 'x.parquet') == f'{num_captions}\n'


def test_embeddings_are_read_a_few_at_a_time_if_they_are_wide(tmp_path: pathlib.Path):
    write_wide_embeddings(tmp_path / 'x.parquet')  # 96 MB
    program = """
        files = sidecar.find(path)
        hold = lambda file: contextlib.nullcontext(file.path)
        sidecar.join(files, path + '.joined', np.arange(12_000), hold=hold)
        print(len(joined.Joined(path + '.joined').places))
    """
    assert run_with_little_memory(program, tmp_path / 'x.parquet') == '12000\n'


def run_with_little_memory(program: str, path: pathlib.Path) -> str:
    """Runs a program in a process of its own, in which its memory may grow by 900 MB.

    More than half of that is what may be sorted in memory.
    """
    program = f"""
import contextlib, re, sys
import numpy as np
from coyo11m_tfds.source import captions, joined, sidecar
path = sys.argv[1]
def peak():
    with open('/proc/self/status') as status:
        return int(re.search('VmHWM:(.*)kB', status.read())[1])
before = peak()
{textwrap.dedent(program)}
assert peak() - before < 900_000, peak() - before
"""
    command = [sys.executable, '-c', program, path]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_column_of_books_is_refused_by_name(tmp_path: pathlib.Path):
    path = tmp_path / 'x.parquet'
    write_texts(path, ['x' * 70_000] * 200, use_dictionary=False)
    message = (
        r"x\.parquet: column 'caption_llava' has 70,\d{3} bytes a row, expected at most 65,536"
    )
    with pytest.raises(ValueError, match=message):
        join(path)


def test_embeddings_that_are_too_wide_are_refused_by_name(tmp_path: pathlib.Path):
    path = made_sources.write_sidecar(tmp_path / 'x.parquet', {1: np.ones(16_385)})
    with pytest.raises(ValueError, match=r'x\.parquet: .*list of float16, at most 16,384'):
        join_embeddings(path)


def test_captions_that_are_too_long_are_not_kept(tmp_path: pathlib.Path):
    texts = ['a' * 65_536, 'b', 'ä' * 40_000, None, 'c', ' ' * 70_000, 'd' * 65_537]
    write_texts(tmp_path / 'x.parquet', texts + ['e'] * 20)
    found = join(tmp_path / 'x.parquet', range(8))
    assert found.sizes.tolist() == [65_536, 1, captions.TOO_LONG, 0, 1, -1, -1, 1]
    kept = [text.encode() if text and len(text) in (1, 65_536) else None for text in texts]
    assert found.read(found.places) == [*kept, b'e']


def test_keys_that_the_metadata_describes_wrongly_are_refused(tmp_path: pathlib.Path):
    index = pd.RangeIndex(2, name='key')
    path = tmp_path / 'x.parquet'
    pd.DataFrame({'caption_llava': ['a', 'b']}, index=index).to_parquet(path)
    table = pq.read_table(path)
    metadata = {k: v.replace(b'"stop": 2', b'"stop": 1') for k, v in table.schema.metadata.items()}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    with pytest.raises(
        ValueError, match=r'x\.parquet: has 2 rows, but its metadata describes 1 keys'
    ):
        join(path)


# --- Size -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_row_group_of_more_than_2_gb_takes_little_memory(tmp_path: pathlib.Path):
    path = tmp_path / 'x.parquet'
    part = pa.array([f'{number:04d} {"text " * 400}' for number in range(10_000)], pa.string())
    num_rows = 1_100_000
    table = pa.table(
        {
            'key': range(num_rows),
            'caption_llava': pa.chunked_array([part] * (num_rows // len(part))),
        }
    )
    pq.write_table(table, path, row_group_size=num_rows, use_dictionary=False, compression='none')
    assert pq.read_metadata(path).row_group(0).column(1).total_uncompressed_size > 2**31
    program = (
        'import re, sys; from coyo11m_tfds.source import captions\n'
        "captions.join(sys.argv[1], 'caption_llava', sys.argv[2])\n"
        "status = open('/proc/self/status').read()\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1])"
    )
    command = [sys.executable, '-c', program, path, tmp_path / 'joined']
    result = subprocess.run(command, capture_output=True, check=True)
    assert int(result.stdout) < 1_200_000
    found = Joined(str(tmp_path / 'joined'))
    expected = [part[3].as_py().encode(), part[-1].as_py().encode()]
    assert found.read(np.array([3, num_rows - 1])) == expected
