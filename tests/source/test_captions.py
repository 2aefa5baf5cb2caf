"""Captions by key: what is found, and what of a file is refused."""

import base64
import contextlib
import os
import pathlib
import shutil
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
from packaging.version import Version

from coyo11m_tfds import schema, storage
from coyo11m_tfds.source import captions, keyed_values, sidecar
from coyo11m_tfds.source.keyed_parquet import KeyedFile, RemoteColumns
from coyo11m_tfds.source.keyed_values import KeyedValues
from coyo11m_tfds.storage.scratch import Scratch
from coyo11m_tfds.storage.stored_file import StoredFile
from tests import made_sources
from tests.checkout import CHECKOUT

KEYS = st.integers(-(2**63), 2**63 - 1)
FEW_KEYS = st.integers(-3, 3)
CAPTIONS = st.none() | st.text(max_size=40) | st.sampled_from(['', ' ', '\n\t ', '\u2003', 'ä b'])


def join(path: pathlib.Path, wanted: Iterable[int] | None = None) -> KeyedValues:
    folder = path.parent / 'joined'
    shutil.rmtree(folder, ignore_errors=True)
    keys = None if wanted is None else np.array(list(wanted), np.int64)
    captions.join_texts({str(path): str(path)}, 'caption_llava', str(folder), keys)
    return KeyedValues(str(folder))


def texts_of(path: pathlib.Path, *keys: int) -> list[bytes]:
    """The captions of some keys, which all have a row."""
    found = join(path, keys)
    assert found.places.tolist() == list(range(len(keys)))
    return [text or b'' for text in found.read(found.places)]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(KEYS | FEW_KEYS, CAPTIONS), min_size=1, max_size=60),
    st.lists(KEYS | FEW_KEYS),
    st.integers(1, 20),
    st.booleans(),
)
def test_captions_are_found_as_in_a_dict(rows, others, row_group_size, all_keys):
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
    assert found.places.tolist() == ([wanted[place] for place in held] if all_keys else held)
    for place, size, text in zip(held, found.sizes.tolist(), texts, strict=True):
        caption = expected[wanted[place]] or ''
        assert (text or b'') == (caption.encode() if caption.strip() else b'')
        assert size == len(text or b'')
    assert found.facts['duplicates'] == len(keys) - len(expected)
    repeated = {key for key in keys if keys.count(key) > 1}
    assert found.facts['duplicate_keys'] == sorted(repeated)[:10]
    if repeated:
        count = len(keys) - len(expected)
        with pytest.raises(ValueError, match=f'^x: {count} rows? repeats? the'):
            captions.check_unique_captions(found, 'x')


def test_a_column_comes_before_an_index_of_its_name(tmp_path):
    frame = pd.DataFrame({'key': [30, 10], 'caption_llava': ['a', 'b']})
    frame.index = pd.RangeIndex(2, name='key')
    frame.to_parquet(tmp_path / 'x.parquet')
    assert texts_of(tmp_path / 'x.parquet', 10, 30) == [b'b', b'a']


def test_text_may_have_any_of_arrows_types_and_encodings(tmp_path):
    path = tmp_path / 'x.parquet'
    for kind in (
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.binary()),
        pa.dictionary(pa.uint32(), pa.large_string()),  # as Polars
    ):
        text = pa.array(['b', None, ' ', 'b'], pa.string()).cast(kind)
        keys = pa.array([4, 3, 2, 1], pa.uint32())
        pq.write_table(pa.table({'key': keys, 'caption_llava': text}), path)
        assert texts_of(path, 1, 2, 3, 4) == [b'b', b'', b'', b'b']
    lists = [['', None, 'b', 'c'], None, [], ['b']]
    list_kinds = [pa.list_(pa.string()), pa.large_list(pa.binary())]
    if Version(pa.__version__) >= Version('25'):  # 21 writes no list views
        list_kinds.append(pa.list_view(pa.string_view()))
    for kind in list_kinds:
        pq.write_table(pa.table({'key': keys, 'caption_llava': pa.array(lists, kind)}), path)
        assert texts_of(path, 1, 2, 3, 4) == [b'b', b'', b'', b'b']
    texts = ['', *(f'the same {number}' for number in range(3_000))]
    for encoding in ('DELTA_BYTE_ARRAY', 'DELTA_LENGTH_BYTE_ARRAY'):
        options = {'use_dictionary': False, 'column_encoding': {'caption_llava': encoding}}
        write_texts(path, texts, **options)
        assert texts_of(path, 2_999, 0) == [b'the same 2998', b'']


def test_metadata_may_hold_any_bytes(tmp_path):
    table = pa.table({'key': [1], 'caption_llava': ['a']}).replace_schema_metadata({'x': b'\xff'})
    pq.write_table(table, tmp_path / 'x.parquet')
    assert texts_of(tmp_path / 'x.parquet', 1) == [b'a']


def test_it_is_known_whether_pages_have_checksums(tmp_path):
    for number in range(8):
        has_checksums, version = bool(number & 1), ('1.0', '2.0')[number >> 1 & 1]
        options = {'write_page_checksum': has_checksums, 'data_page_version': version}
        texts = ['a b'] * 50_000
        write_texts(tmp_path / 'x.parquet', texts, use_dictionary=number > 3, **options)
        assert join(tmp_path / 'x.parquet', [1]).facts['has_checksums'] == has_checksums


def test_the_digest_is_that_of_captions_by_key(tmp_path):
    def digest(rows: dict, kind: pa.DataType | None = None, **options) -> str:
        text = pa.array(list(rows.values()), pa.string()).cast(kind or pa.string())
        table = pa.table({'key': list(rows), 'caption_llava': text})
        pq.write_table(table, tmp_path / 'x.parquet', **options)
        return join(tmp_path / 'x.parquet').facts['digest']

    rows = {key: str(key) for key in range(20_000)} | {-1: '', -2: 'z'}
    same = [
        digest(rows),
        digest(rows | {-1: None}, pa.string_view(), row_group_size=777, compression='zstd'),
        digest(rows | {-1: ' \n'}, pa.dictionary(pa.int32(), pa.string())),
        digest({key: rows[key] for key in sorted(rows)}),
        digest({-3: None, **{key: text for key, text in rows.items() if text}}),
    ]
    assert len(set(same)) == 1
    others = [rows | {-2: 'y'}, rows | {-3: 'new'}, {1: 'a', 2: 'b'}, {1: 'ab'}, {2: 'ab'}]
    digests = {digest(other) for other in others}
    assert len(digests - set(same)) == len(others)


def test_captions_that_are_too_long_are_not_kept(tmp_path):
    texts = ['a' * 65_536, 'b', 'ä' * 40_000, None, 'c', ' ' * 70_000, 'd' * 65_537]
    write_texts(tmp_path / 'x.parquet', texts + ['e'] * 20)
    found = join(tmp_path / 'x.parquet', range(8))
    assert found.sizes.tolist() == [65_536, 1, captions.TOO_LONG, 0, 1, -1, -1, 1]
    kept = [text.encode() if text and len(text) in (1, 65_536) else None for text in texts]
    assert found.read(found.places) == [*kept, b'e']


def repeated_column(name: str) -> pa.Table:
    return pa.table([[1], ['a'], [2]], names=['key', 'caption_llava', name])


BAD = {
    'no captions of this name': (
        pa.table({'key': [1], 'caption': ['a']}),
        "no column 'caption_llava'; its columns are key, caption",
    ),
    'no keys': (pa.table({'id': [1], 'caption_llava': ['a']}), "no column 'key'"),
    'keys with a point': (
        pa.table({'key': [1.0], 'caption_llava': ['a']}),
        "'key' is double, expected integers, or texts",
    ),
    'a key that is a word': (
        pa.table({'key': ['a'], 'caption_llava': ['a']}),
        "'key' has 'a', expected integers of 64 bits, or texts of their decimal digits",
    ),
    'a text of a key beyond int64': (
        pa.table({'key': [str(2**63)], 'caption_llava': ['a']}),
        "'key' does not fit int64",
    ),
    'a key that is null': (
        pa.table({'key': [1, None], 'caption_llava': ['a', 'b']}),
        "'key' has nulls",
    ),
    'no rows': (
        pa.table({'key': pa.array([], pa.int64()), 'caption_llava': pa.array([], pa.string())}),
        'no rows',
    ),
    'a key beyond int64': (
        pa.table({'key': pa.array([2**63], pa.uint64()), 'caption_llava': ['a']}),
        'not fit int64',
    ),
    'two columns of captions': (
        repeated_column('caption_llava'),
        "has 2 columns 'caption_llava'; its",
    ),
    'two columns of keys': (repeated_column('key'), "has 2 columns 'key'; its"),
}


TEXTS_OF_KEYS = ['5', '007', '-5', '-0', f'{7:030d}', str(-(2**63)), str(2**63 - 1)]
NO_KEYS = [
    '0x10',
    '0XF',
    '+5',
    ' 5',
    '5\n',
    '1_000',
    '1.0',
    '',
    '-',
    '--5',
    '\u0663',
    '\u00b2',
    '9' * 19,
]


def test_the_texts_that_are_keys_are_the_same_in_parquet_and_in_other_files(tmp_path):
    path = tmp_path / 'x.parquet'
    for kind in (pa.string(), pa.string_view()):
        texts = pa.array(TEXTS_OF_KEYS).cast(kind)
        pq.write_table(pa.table([texts, texts], ['key', 'text']), path)
        with KeyedFile(str(path), 'text') as file:
            keys = [schema.parse_integer(text) for text in TEXTS_OF_KEYS]
            assert file.keys().tolist() == keys == list(map(int, TEXTS_OF_KEYS))
    for text in NO_KEYS:
        assert schema.parse_integer(text) is None
        pq.write_table(pa.table([['1', text]] * 2, ['key', 'text']), path)
        with (
            KeyedFile(str(path), 'text') as file,
            pytest.raises(ValueError, match=r"x\.parquet: column 'key' (has|does not fit)"),
        ):
            file.keys()


@pytest.mark.parametrize(('table', 'message'), BAD.values(), ids=BAD)
def test_a_bad_captions_file_is_refused_by_name(tmp_path, table, message):
    pq.write_table(table, tmp_path / 'x.parquet')
    with pytest.raises(ValueError, match=message) as error:
        join(tmp_path / 'x.parquet')
    assert str(tmp_path / 'x.parquet') in str(error.value)


def test_a_file_that_gets_more_rows_between_its_keys_and_captions_is_named(tmp_path, monkeypatch):
    path = tmp_path / 'x.parquet'
    pq.write_table(pa.table({'key': [1], 'caption_llava': ['a']}), path)
    files = captions.CaptionFiles([storage.describe_file(path)], 'key', 'caption_llava')
    order_by_key = keyed_values.order_by_key

    def write_more_first(keys):
        pq.write_table(pa.table({'key': [1, 2], 'caption_llava': ['a', 'b']}), path)
        return order_by_key(keys)

    monkeypatch.setattr(keyed_values, 'order_by_key', write_more_first)
    with pytest.raises(OSError, match=r'x\.parquet has changed since it was listed'):
        files.join(str(tmp_path / 'joined'), Scratch(tmp_path / 'scratch'))


def test_a_path_that_is_no_utf8_is_not_called_damage(tmp_path):
    path = tmp_path / os.fsdecode(b'caf\xe9.parquet')
    path.write_bytes(b'')
    with pytest.raises(ValueError, match=r'\.parquet: Arrow opens no file whose path is not UTF-8'):
        join(path)


def test_keys_that_the_metadata_describes_wrongly_are_refused(tmp_path):
    path = tmp_path / 'x.parquet'
    index = pd.RangeIndex(2, name='key')
    pd.DataFrame({'caption_llava': ['a', 'b']}, index=index).to_parquet(path)
    table = pq.read_table(path)
    metadata = {k: v.replace(b'"stop": 2', b'"stop": 1') for k, v in table.schema.metadata.items()}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    message = r'x\.parquet: has 2 rows, but its metadata describes 1 key\.'
    with pytest.raises(ValueError, match=message):
        join(path)
    metadata[b'pandas'] = metadata[b'pandas'].replace(b'"stop": 1', b'"stop": 1' + b'0' * 40)
    pq.write_table(table.replace_schema_metadata(metadata), path)
    with pytest.raises(ValueError, match=r'x\.parquet: is damaged or not a Parquet file'):
        join(path)


def test_columns_of_a_remote_file_may_have_dots_in_their_names(tmp_path):
    path = tmp_path / 'x.parquet'
    texts = [f'{number} {"long" * 100}' for number in range(500)]
    pq.write_table(pa.table({'a.b': texts, 'key': range(500), 'a': texts}), path)
    copy = str(tmp_path / 'copy.parquet')
    RemoteColumns(storage.describe_file(path), ['key', 'a.b']).fetch(copy)
    with KeyedFile(copy, 'a.b') as file:
        assert pa.chunked_array(file.values()).to_pylist() == texts


class NoKeys(encryption.KmsClient):
    """Wraps keys in nothing."""

    def wrap_key(self, key_bytes, master_key_identifier):
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key, master_key_identifier):
        return base64.b64decode(wrapped_key)


@pytest.mark.parametrize(
    ('plain_footer', 'columns'), [(True, ['caption_llava']), (False, ['key', 'caption_llava'])]
)
def test_an_encrypted_file_is_refused_by_name(tmp_path, plain_footer, columns):
    path = tmp_path / 'x.parquet'
    how = encryption.EncryptionConfiguration(
        footer_key='f', column_keys={'c': columns}, plaintext_footer=plain_footer
    )
    factory = encryption.CryptoFactory(lambda _: NoKeys())
    secrets = factory.file_encryption_properties(encryption.KmsConnectionConfig(), how)
    table = pa.table({'key': [1, 2], 'caption_llava': ['a', 'b']})
    with pq.ParquetWriter(path, table.schema, encryption_properties=secrets) as writer:
        writer.write_table(table)
    program = """
        try:
            captions.join_texts({path: path}, 'caption_llava', path + '.joined')
        except ValueError as error:
            print(error)
    """
    said = run_with_little_memory(program, path)  # in this process Arrow could abort it
    assert said == f'{path}: is encrypted. Write it without encryption.\n'


def test_messages_name_the_file_that_a_copy_stands_for(tmp_path):
    copy, file = tmp_path / 'copy.parquet', StoredFile('gs://b/x', 0, '1', None)

    def of_captions(folder: str) -> None:
        captions.join_texts({file.path: str(copy)}, 'caption_llava', folder)

    def of_embeddings(folder: str) -> None:
        sidecar.join_values(
            [file], folder, np.array([1]), hold=lambda _: contextlib.nullcontext(str(copy))
        )

    for content in ({'key': [1]}, {'id': [1]}, b'PAR?'):
        if isinstance(content, bytes):
            copy.write_bytes(content)
        else:
            pq.write_table(pa.table(content), copy)
        for join_copy in (of_captions, of_embeddings):
            shutil.rmtree(tmp_path / 'joined', ignore_errors=True)
            with pytest.raises(ValueError, match=r'gs://b/x: ') as error:
                join_copy(str(tmp_path / 'joined'))
            assert 'copy' not in str(error.value).replace('Copy or download it again', '')


def write_texts(path: pathlib.Path, texts: list[str | None], **options) -> None:
    table = pa.table({'key': range(len(texts)), 'caption_llava': texts})
    pq.write_table(table, path, compression='zstd', **options)


@pytest.mark.parametrize(('size', 'count'), [(100_000, 16_384), (60_000, 4_000)])
def test_texts_that_are_large_only_in_memory_take_little_of_it(tmp_path, size, count):
    """As any Parquet writer with dictionaries writes them."""
    path = tmp_path / 'x.parquet'
    texts = pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), ['x' * size])
    table = pa.table({'key': range(count), 'caption_llava': texts})
    pq.write_table(table, path, compression='zstd', store_schema=False)
    assert path.stat().st_size < 100_000
    program = """
        captions.join_texts({path: path}, 'caption_llava', path + '.joined')
        print((keyed_values.KeyedValues(path + '.joined').sizes > 0).sum())
    """
    kept = 0 if size > captions.schema.MAX_CAPTION_BYTES else count
    assert run_with_little_memory(program, path) == f'{kept}\n'


@pytest.mark.slow
def test_embeddings_are_read_a_few_at_a_time_if_they_are_wide(tmp_path):
    rows = {key: np.ones(4096) for key in range(12_000)}  # 96 MB
    made_sources.write_sidecar(tmp_path / 'x.parquet', rows)
    program = """
        files = sidecar.find_sidecar_files(path)
        hold = lambda file: contextlib.nullcontext(file.path)
        sidecar.join_values(files, path + '.joined', np.arange(12_000), hold=hold)
        print(len(keyed_values.KeyedValues(path + '.joined').places))
    """
    assert run_with_little_memory(program, tmp_path / 'x.parquet') == '12000\n'


@pytest.mark.slow
def test_a_row_group_of_more_than_2_gb_takes_little_memory(tmp_path):
    path = tmp_path / 'x.parquet'
    part = pa.array([f'{number:04d} {"text " * 400}' for number in range(10_000)], pa.string())
    table = pa.table({'key': range(1_100_000), 'caption_llava': pa.chunked_array([part] * 110)})
    options = {'use_dictionary': False, 'compression': 'none'}
    pq.write_table(table, path, row_group_size=1_100_000, **options)
    assert pq.read_metadata(path).row_group(0).column(1).total_uncompressed_size > 2**31
    run_with_little_memory(
        "captions.join_texts({path: path}, 'caption_llava', path + '.joined')", path
    )
    expected = [part[3].as_py().encode(), part[-1].as_py().encode()]
    assert KeyedValues(f'{path}.joined').read(np.array([3, 1_099_999])) == expected


def run_with_little_memory(program: str, path: pathlib.Path) -> str:
    """Runs a program in a process of its own, in which its memory may grow by 900 MB.

    More than half of that is what may be sorted in memory.
    """
    program = f"""
import contextlib, re, sys
import numpy as np
from coyo11m_tfds.source import captions, keyed_values, sidecar
path = sys.argv[1]
def peak():
    with open('/proc/self/status') as status:
        return int(re.search('VmHWM:(.*)kB', status.read())[1])
before = peak()
{textwrap.dedent(program)}
assert peak() - before < 900_000, peak() - before
"""
    command = [sys.executable, '-c', program, path]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, timeout=200)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
