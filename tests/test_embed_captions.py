"""The sidecar of text embeddings: its contents, what is refused, that nothing half-made stays."""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coyo11m_tfds import embed_captions, sample_data, schema
from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig
from coyo11m_tfds.process import progress
from coyo11m_tfds.source import sidecar
from coyo11m_tfds.text import words
from tests import joins, made_sources
from tests.checkout import COCO_SAMPLE
from tests.fakes.cloud import Fault


def make_source(folder: pathlib.Path, rows: dict, key_type=None, column='caption_llava'):
    """Writes a captions file with the given {key: caption} in this order."""
    folder.mkdir(exist_ok=True)
    table = pa.table(
        {column: pa.array(list(rows.values()), pa.string()), 'key': pa.array(list(rows), key_type)}
    )
    pq.write_table(table, folder / schema.CAPTIONS_FILE)
    return folder


def read_sidecar(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    table = pq.read_table(path)
    flat = table.column(schema.TEXT_EMBEDDING).combine_chunks().values.to_numpy()
    return table.column(schema.PARQUET_KEY).to_numpy(), flat.reshape(len(table), -1)


@pytest.fixture
def source(tmp_path):
    rows = {7: 'a cat', -3: 'two dogs', 2**40: None, 5: '  \n', 1: '', 90: 'a red circle'}
    return make_source(tmp_path / 'source', rows)


@pytest.fixture
def out(tmp_path):
    """A path in a folder that holds nothing else."""
    return tmp_path / 'sidecars' / 'hash.parquet'


# --- What is in it --------------------------------------------------------------------------


def test_every_caption_has_its_vector_under_its_key(source, out):
    report = embed_captions.embed(source, 'hash', out)
    keys, found = read_sidecar(out)
    assert keys.tolist() == [-3, 7, 90]
    expected = words.HashEncoder().encode(['two dogs', 'a cat', 'a red circle'])
    np.testing.assert_array_equal(found, expected.astype(np.float16))
    assert (report.num_captions, report.num_skipped, report.num_truncated) == (3, 3, 0)
    assert report.num_duplicates == 0
    assert '3 captions encoded by hash, 640 numbers each' in str(report)
    assert os.listdir(out.parent) == [out.name]


def test_the_file_says_what_it_is(source, out):
    embed_captions.embed(source, 'hash', out)
    columns = pq.read_schema(out)
    assert columns.field('key').type == pa.int64()
    assert columns.field('text_embedding').type == pa.list_(pa.float16(), 640)
    assert columns.metadata == {
        b'text_encoder': b'hash',
        b'text_encoder_revision': b'1',
        b'text_max_tokens': b'0',
        b'captions_digest': made_sources.captions_digest(source).encode(),
        b'text_embedding_dim': b'640',
        b'text_pooling': b'sum',
        b'text_dtype': b'float32',
        b'caption_column': b'caption_llava',
    }


def test_the_builder_reads_it(source, out, tmp_path):
    embed_captions.embed(source, 'hash', out)
    found = joins.of_values(out, tmp_path / 'joined', [90, 5, 7])
    digest = made_sources.captions_digest(source)
    header = sidecar.Header(640, 'hash', '1', 0, 'caption_llava', digest)
    assert sidecar.Header(**found.facts['header']) == header
    assert found.places.tolist() == [0, 2]
    expected = words.HashEncoder().encode(['a red circle', 'a cat']).astype(np.float16)
    np.testing.assert_array_equal(sidecar.read(found, found.places), expected)


@settings(deadline=None, max_examples=25)
@given(
    rows=st.dictionaries(
        st.integers(-(2**63), 2**63 - 1), st.none() | st.text('ab \U0001f98a', max_size=6)
    ),
    shuffle=st.randoms(use_true_random=False),
    batch_size=st.integers(1, 9),
)
def test_same_bytes_whatever_the_order_and_batches(tmp_path_factory, rows, shuffle, batch_size):
    rows[0] = 'a'  # a source without any caption is refused
    folder = tmp_path_factory.mktemp('same')
    embed_captions.embed(make_source(folder / 'first', rows), 'hash', folder / 'first.parquet')
    shuffled = dict(shuffle.sample(list(rows.items()), len(rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, '_ROWS_AT_ONCE', batch_size)
        second = make_source(folder / 'second', shuffled)
        embed_captions.embed(second, 'hash', folder / 'second.parquet')
    assert (folder / 'first.parquet').read_bytes() == (folder / 'second.parquet').read_bytes()


def test_many_row_groups(out, tmp_path):
    keys = random.Random(0).sample(range(10**6), 300)
    source = make_source(tmp_path / 'source', {key: f'number {key}' for key in keys})
    embed_captions.embed(source, 'hash', out, part_captions=64)
    assert pq.ParquetFile(out).metadata.num_row_groups == 5
    found_keys, found = read_sidecar(out)
    assert found_keys.tolist() == sorted(keys)
    expected = words.HashEncoder().encode([f'number {key}' for key in sorted(keys)])
    np.testing.assert_array_equal(found, expected.astype(np.float16))


def test_another_column_and_an_old_sidecar(tmp_path, out):
    source = make_source(tmp_path / 'source', {1: 'a cat'}, column='tags')
    out.parent.mkdir()
    out.write_bytes(b'an older one')
    embed_captions.embed(source, 'hash', out, caption_column='tags')
    assert sidecar.describe(str(out))['header']['caption_column'] == 'tags'


def test_progress_is_logged_where_there_is_no_terminal(source, out, monkeypatch, caplog):
    monkeypatch.setattr(progress, 'SECONDS_BETWEEN_LINES', 0)
    caplog.set_level('INFO')
    monkeypatch.setattr(words, '_ROWS_AT_ONCE', 2)
    embed_captions.embed(source, 'hash', out)
    lines = [record.message for record in caplog.records if 'Embedding' in record.message]
    assert re.match(
        r'Embedding: 67%, 2 of 3 captions, [\d,]+ tokens/s, [\d,]+ captions/s', lines[0]
    )
    assert re.search(r'captions/s, 0:00:\d\d left$', lines[0])
    assert lines[-1].startswith('Embedding: 100%, 3 of 3 captions, ')


def test_of_duplicate_keys_the_first_row_wins_if_asked(tmp_path, out):
    write_repeated_key(tmp_path / schema.CAPTIONS_FILE)
    report = embed_captions.embed(tmp_path, 'hash', out, drop_duplicates=True)
    keys, found = read_sidecar(out)
    assert keys.tolist() == [4, 9]
    expected = words.HashEncoder().encode(['a', 'b'])
    np.testing.assert_array_equal(found, expected.astype(np.float16))
    assert (report.num_captions, report.num_duplicates) == (2, 1)


def test_a_caption_that_is_too_long_gets_no_vector(tmp_path, out):
    source = make_source(tmp_path / 'source', {1: 'a', 2: 'b' * 70_000, 3: 'c', 4: None})
    report = embed_captions.embed(source, 'hash', out)
    assert read_sidecar(out)[0].tolist() == [1, 3]
    assert report.num_skipped == 2


# --- Whose captions they are ----------------------------------------------------------------


def build(source: pathlib.Path, sidecar: pathlib.Path, out: pathlib.Path, **fields) -> None:
    config = Coyo11mConfig(name='x', source=str(source), text_embeddings=str(sidecar), **fields)
    Builder(data_dir=out, config=config).download_and_prepare()


@pytest.fixture
def built(tmp_path):
    """A source with latents, and a sidecar of its captions."""
    source = made_sources.write_source(tmp_path / 'source', [range(30)])
    embed_captions.embed(source, 'hash', tmp_path / 'x.parquet')
    return source, tmp_path / 'x.parquet'


@pytest.mark.parametrize(
    'change',
    [{3: 'Caption of 4.'}, {3: 'caption of 3.'}, {3: None}, {99: 'more'}],
    ids=['another key', 'a letter', 'less', 'more'],
)
def test_a_sidecar_of_other_captions_is_refused(built, tmp_path, change):
    source, sidecar = built
    made_sources.write_captions(source, {k: f'Caption of {k}.' for k in range(30)} | change)
    message = (
        r"x\.parquet: its embeddings were made of other captions than column 'caption_llava' of "
    )
    with pytest.raises(ValueError, match=message) as error:
        build(source, sidecar, tmp_path / 'out')
    assert '\n' not in str(error.value)
    assert str(source / schema.CAPTIONS_FILE) in str(error.value)


def test_rows_in_another_order_or_without_captions_are_no_other_captions(built, tmp_path):
    source, sidecar = built
    captions = {key: f'Caption of {key}.' for key in range(29, -1, -1)}
    made_sources.write_captions(source, {50: None} | captions | {51: ' '})
    build(source, sidecar, tmp_path / 'out')


def test_captions_of_duplicate_keys_are_the_same_for_both(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(300)])
    keys, texts = [*range(300), 5], [*(f'Caption of {key}.' for key in range(300)), 'another']
    table = pa.table({'key': keys, 'caption_llava': texts})
    pq.write_table(table, source / schema.CAPTIONS_FILE)
    embed_captions.embed(source, 'hash', tmp_path / 'x.parquet', drop_duplicates=True)
    build(source, tmp_path / 'x.parquet', tmp_path / 'out')


# --- From a bucket --------------------------------------------------------------------------


def test_a_remote_source_gives_the_same_file(source, out, tmp_path, gcs):
    embed_captions.embed(source, 'hash', tmp_path / 'local.parquet')
    gcs.upload_folder(source, 'gs://bucket/source')
    gcs.inject(Fault('503'), Fault('cut', match='GET read'))
    embed_captions.embed('gs://bucket/source/', 'hash', out)
    assert out.read_bytes() == (tmp_path / 'local.parquet').read_bytes()
    assert os.listdir(out.parent) == [out.name]


def test_a_remote_source_that_is_missing_is_refused(out, gcs):
    gcs.put('bucket', 'source/other', b'')
    with pytest.raises(ValueError, match=r'gs://bucket/source/coyo11m-meta\.parquet is missing'):
        embed_captions.embed('gs://bucket/source', 'hash', out)
    assert not out.parent.exists()


# --- What is refused ------------------------------------------------------------------------


def write_repeated_key(path):
    table = pa.table({'key': [4, 9, 4], 'caption_llava': ['a', 'b', 'c']})
    pq.write_table(table, path)


def write_null_key(path):
    table = pa.table({'key': pa.array([4, None]), 'caption_llava': ['a', 'b']})
    pq.write_table(table, path)


def write_text_key(path):
    pq.write_table(pa.table({'key': ['4'], 'caption_llava': ['a']}), path)


def write_no_column(path):
    pq.write_table(pa.table({'key': [4], 'url': ['a'], 'tags': ['b']}), path)


def write_number_captions(path):
    pq.write_table(pa.table({'key': [4], 'caption_llava': [1.5]}), path)


def write_blank_captions(path):
    table = pa.table({'key': [4, 5], 'caption_llava': pa.array([None, ' '], pa.string())})
    pq.write_table(table, path)


@pytest.mark.parametrize(
    ('write', 'message'),
    [
        (write_repeated_key, r'meta\.parquet.*key 4'),
        (write_null_key, r'meta\.parquet.*null'),
        (write_text_key, r"meta\.parquet.*'key' is string.*int64"),
        (write_no_column, r"meta\.parquet.*no column 'caption_llava'.*key, url, tags"),
        (write_number_captions, r"meta\.parquet.*'caption_llava' is double.*text"),
        (write_blank_captions, r'meta\.parquet.*all 2 captions are null, blank or too long'),
        (lambda path: path.write_bytes(b'PAR?'), r'meta\.parquet.*not a Parquet file'),
        (lambda path: None, r'meta\.parquet is missing'),
    ],
)
def test_a_bad_source_is_refused_and_an_old_sidecar_stays(tmp_path, out, write, message):
    write(tmp_path / schema.CAPTIONS_FILE)
    out.parent.mkdir()
    out.write_bytes(b'an older one')
    with pytest.raises(ValueError, match=message):
        embed_captions.embed(tmp_path, 'hash', out)
    assert os.listdir(out.parent) == [out.name]
    assert out.read_bytes() == b'an older one'


def test_paths_that_cannot_be_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match=r'gs://bucket/out\.parquet is remote'):
        embed_captions.embed(source, 'hash', 'gs://bucket/out.parquet')
    (tmp_path / 'folder.parquet').mkdir()
    with pytest.raises(ValueError, match=r'folder\.parquet is a folder'):
        embed_captions.embed(source, 'hash', tmp_path / 'folder.parquet')
    (tmp_path / 'file').touch()
    with pytest.raises(ValueError, match=r'file is a file; expected a folder, or a name ending in'):
        embed_captions.embed(source, 'hash', tmp_path / 'file')
    with pytest.raises(ValueError, match=r'hf://datasets/a/b'):
        embed_captions.embed(source, 'hash', 'hf://datasets/a/b')
    with pytest.raises(ValueError, match='which one process makes, and this is one of 2'):
        embed_captions.embed(source, 'hash', tmp_path / 'x.parquet', share=(0, 2))
    with pytest.raises(ValueError, match=r'part 2 of 2: expected one of 0 to n - 1'):
        embed_captions.embed(source, 'hash', tmp_path / 'x', share=(2, 2))


class HugeEncoder(words.HashEncoder):
    """Makes a number for one caption that float16 cannot hold."""

    name, dim = 'huge', 2

    def encode_tokens(self, tokens, on_batch):
        return np.array([[1, 1e6 if 'cat' in words else 2] for words in tokens], np.float32)


def test_numbers_too_large_for_float16_are_refused(source, out):
    with pytest.raises(ValueError, match=r"huge.*float16.*'a cat'"):
        embed_captions.embed(source, HugeEncoder(), out)
    assert os.listdir(out.parent) == []


# --- Command line ---------------------------------------------------------------------------


def run(*arguments):
    return subprocess.run(
        [sys.executable, '-m', 'coyo11m_tfds.embed_captions', *map(str, arguments)],
        capture_output=True,
        text=True,
    )


def test_command_line(tmp_path, out):
    sample_data.make_sample(tmp_path / 'source', num_samples=200)
    result = run('--source', tmp_path / 'source', '--encoder', 'hash', '--out', out)
    assert result.returncode == 0, result.stderr
    keys, found = read_sidecar(out)
    assert f'{len(keys)} captions encoded by hash, 640 numbers each' in result.stdout
    assert found.shape == (len(keys), 640)
    assert 150 < len(keys) < 200
    np.testing.assert_allclose(np.linalg.norm(found.astype(np.float32), axis=1), 1, atol=1e-3)


def test_command_line_ends_with_one_message(source, out):
    for arguments, message in (
        (('--source', source, '--encoder', 'clip'), "error: unknown encoder 'clip'"),
        (('--source', source, '--caption_column', 'alt'), "has no column 'alt'"),
    ):
        result = run(*arguments, '--out', out)
        assert result.returncode == 1
        assert message in result.stderr
        assert 'Traceback' not in result.stderr
    assert not out.parent.exists()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_when_it_is_stopped(source, out, number):
    program = textwrap.dedent("""
        import signal, time
        from coyo11m_tfds import embed_captions
        from coyo11m_tfds.text import words
        signal.signal(signal.SIGINT, signal.default_int_handler)

        class SlowEncoder(words.HashEncoder):
            def encode_tokens(self, tokens, on_batch):
                print('encoding', flush=True)
                time.sleep(60)

        words.HashEncoder = SlowEncoder
        embed_captions.main()
    """)
    command = [sys.executable, '-c', program, '--source', str(source), '--out', str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b'encoding\n'
        assert os.listdir(out.parent) != []
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode != 0
    if number == signal.SIGKILL:
        assert os.listdir(out.parent) != []
        embed_captions.embed(source, 'hash', out)  # sweeps
        out.unlink()
    assert os.listdir(out.parent) == []


# --- Real data ------------------------------------------------------------------------------


@pytest.mark.skipif(not COCO_SAMPLE.is_dir(), reason=f'{COCO_SAMPLE} is not here')
def test_real_sample(out):
    report = embed_captions.embed(COCO_SAMPLE, 'hash', out)
    assert (report.num_captions, report.num_skipped) == (350, 6)
    _, found = read_sidecar(out)
    found = found.astype(np.float32)
    cosines = (found @ found.T)[np.triu_indices(len(found), 1)]
    assert 0 < cosines.mean() < 0.5


def test_tokens_are_reported_with_the_length_that_would_do(tmp_path):
    source = make_source(tmp_path / 'source', {1: 'a cat', 2: 'two dogs in a red boat', 3: 'a'})
    for out in ('one.parquet', 'parts'):
        report = embed_captions.embed(source, 'words', tmp_path / out, tokens_only=True)
        assert (report.longest, report.dim) == (6, 512)
        assert 'the longest has 6 tokens, so that --max_tokens=6 keeps all of' in str(report)
    for limit in (6, 5):
        out = tmp_path / f'{limit}.parquet'
        report = embed_captions.embed(source, 'words', out, tokens_only=True, max_tokens=limit)
        assert '--max_tokens' not in str(report)
    assert '1 truncated' in str(report)
    assert '--max_tokens' not in str(embed_captions.embed(source, 'hash', tmp_path / 'h.parquet'))


@pytest.mark.parametrize('num_workers', [1, 2])
@pytest.mark.parametrize('encoder', ['hsh', 'words', 'hf:/no/such/folder', 'jax:/no/such/folder'])
def test_a_wrong_encoder_is_noticed_before_captions_are_read(tmp_path, encoder, num_workers):
    source = make_source(tmp_path / 'source', {})
    raw = pa.array([b'a', b'not \xff UTF-8'])
    text = pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:])
    pq.write_table(pa.table({'key': [1, 2], 'caption_llava': text}), source / schema.CAPTIONS_FILE)
    with pytest.raises(ValueError, match=r'no such folder|unknown encoder'):
        embed_captions.embed(source, encoder, tmp_path / 'out', num_workers=num_workers)
    with pytest.raises(ValueError, match='key 2 is not UTF-8'):
        embed_captions.embed(source, 'hash', tmp_path / 'out', num_workers=num_workers)
