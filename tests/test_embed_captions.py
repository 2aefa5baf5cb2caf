"""The sidecar of text embeddings: its contents, what is refused, that nothing half-made stays."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coyo11m_tfds import embed_captions, schema
from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig
from coyo11m_tfds.embed_captions import EmbedSettings
from coyo11m_tfds.source import sidecar
from coyo11m_tfds.text import text_encoders
from tests import made_sources
from tests.built import files_of
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
    table = pq.read_table(path / sidecar.part_name(0, 1))
    flat = table.column(schema.PART_EMBEDDING).combine_chunks().values.to_numpy()
    return table.column(schema.PARQUET_KEY).to_numpy(), flat.reshape(len(table), -1)


@pytest.fixture
def source(tmp_path):
    rows = {7: 'a cat', -3: 'two dogs', 2**40: None, 5: '  \n', 1: '', 90: 'a red circle'}
    rows[8] = 'b' * 70_000  # too long
    return make_source(tmp_path / 'source', rows)


@pytest.fixture
def out(tmp_path):
    """A path in a folder that holds nothing else."""
    return tmp_path / 'sidecars' / 'hash'


def test_every_caption_has_its_vector_under_its_key(source, out):
    report = embed_captions.embed(source, 'hash', out)
    keys, found = read_sidecar(out)
    assert keys.tolist() == [-3, 7, 90]
    expected = text_encoders.HashEncoder().encode(['two dogs', 'a cat', 'a red circle'])
    np.testing.assert_array_equal(found, expected.astype(np.float16))
    assert (report.num_captions, report.num_skipped, report.num_truncated) == (3, 4, 0)
    assert report.num_duplicates == 0
    assert '3 captions encoded by hash, 640 numbers each' in str(report)
    assert os.listdir(out.parent) == [out.name]


def test_same_bytes_whatever_the_order_and_batches(tmp_path, monkeypatch):
    rows = {0: 'a', -(2**63): 'b \U0001f98a', 2**63 - 1: '', 5: None, 7: 'a b a', -1: 'b'}
    embed_captions.embed(make_source(tmp_path / 'first', rows), 'hash', tmp_path / 'x')
    for batch_size in (1, 3):
        monkeypatch.setattr(text_encoders, '_ROWS_AT_ONCE', batch_size)
        shuffled = dict(random.Random(batch_size).sample(list(rows.items()), len(rows)))
        second = make_source(tmp_path / f'{batch_size}', shuffled)
        embed_captions.embed(second, 'hash', tmp_path / f'y{batch_size}')
        assert files_of(tmp_path / f'y{batch_size}') == files_of(tmp_path / 'x')


def test_of_duplicate_keys_the_first_row_wins_if_asked(tmp_path, out):
    pq.write_table(pa.table(REPEATED), tmp_path / schema.CAPTIONS_FILE)
    report = embed_captions.embed(tmp_path, 'hash', out, EmbedSettings(drop_duplicates=True))
    keys, found = read_sidecar(out)
    assert keys.tolist() == [4, 9]
    expected = text_encoders.HashEncoder().encode(['a', 'b'])
    np.testing.assert_array_equal(found, expected.astype(np.float16))
    assert (report.num_captions, report.num_duplicates) == (2, 1)


def build(source: pathlib.Path, sidecar: pathlib.Path, out: pathlib.Path, **fields) -> None:
    config = Coyo11mConfig(name='x', source=str(source), text_embeddings=str(sidecar), **fields)
    Builder(data_dir=out, config=config).download_and_prepare()


def test_a_sidecar_of_other_captions_is_refused(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [range(30)])
    sidecar = tmp_path / 'x'
    embed_captions.embed(source, 'hash', sidecar)
    build(source, sidecar, tmp_path / 'good')
    captions = {k: f'Caption of {k}.' for k in range(30)}
    made_sources.write_captions(source, captions | {3: 'caption of 3.'})
    message = r'x: its embeddings come from other captions than those in column '
    with pytest.raises(ValueError, match=message) as error:
        build(source, sidecar, tmp_path / 'out')
    assert '\n' not in str(error.value)
    assert str(source / schema.CAPTIONS_FILE) in str(error.value)


def test_a_remote_source_gives_the_same_file(source, out, tmp_path, gcs):
    embed_captions.embed(source, 'hash', tmp_path / 'local')
    gcs.upload_folder(source, 'gs://bucket/source')
    gcs.inject(Fault('503'), Fault('cut', match='GET read'))
    embed_captions.embed('gs://bucket/source/', 'hash', out)
    assert files_of(out) == files_of(tmp_path / 'local')
    assert os.listdir(out.parent) == [out.name]
    # A bucket that cannot be written to is refused before captions are read.
    pq.write_table(pa.table(REPEATED), source / schema.CAPTIONS_FILE)
    gcs.inject(Fault('403', count=None, action='upload'))
    with pytest.raises(PermissionError, match='bucket/out'):
        embed_captions.embed(source, 'hash', 'gs://bucket/out')


REPEATED = {'key': [4, 9, 4], 'caption_llava': ['a', 'b', 'c']}


BAD = {
    'a key that comes twice': (REPEATED, r'meta\.parquet.*key 4'),
    'no caption at all': (
        {'key': [4, 5], 'caption_llava': ['', ' ']},
        r'parquet.*all captions \(2\) are null',
    ),
}


@pytest.mark.parametrize(('table', 'message'), BAD.values(), ids=BAD)
def test_a_bad_source_is_refused(tmp_path, out, table, message):
    pq.write_table(pa.table(table), tmp_path / schema.CAPTIONS_FILE)
    with pytest.raises(ValueError, match=message):
        embed_captions.embed(tmp_path, 'hash', out)
    assert not out.exists()


REFUSED = {
    'a file in the place of a folder': ('file', {}, r'file is a file; expected a folder'),
    'a folder on the hub': ('hf://datasets/a/b', {}, r'hf://datasets/a/b'),
    'a part after the last': (
        'x',
        {'share': (2, 2)},
        r'part 2/2: expected I/N with I from 0 to N - 1',
    ),
    'classes, which are tokens already': (
        'x',
        {'encoder': 'labels', 'settings': EmbedSettings(tokens_only=True)},
        'a build makes its tokens, with "text_embeddings": "labels"',
    ),
}


@pytest.mark.parametrize(('name', 'options', 'message'), REFUSED.values(), ids=REFUSED)
def test_arguments_that_cannot_be_are_refused(source, tmp_path, name, options, message):
    (tmp_path / 'file').touch()
    place = name if '://' in name else tmp_path / name
    with pytest.raises(ValueError, match=message):
        embed_captions.embed(source, out=place, **{'encoder': 'hash'} | options)


@pytest.mark.parametrize('part', ['3', '1/x', '1/2/3', '-1/2'])
def test_a_part_of_another_form_is_refused_with_the_form(command, part):
    status, _, errors = command(
        embed_captions, '--source=x', '--out=y', '--encoder=hash', f'--part={part}'
    )
    assert status == 2
    assert f"argument --part: '{part}': expected I/N with I from 0 to N - 1; " in errors


def test_a_part_of_no_captions_is_refused():
    with pytest.raises(ValueError, match='part_captions=-5: expected at least 1'):
        EmbedSettings(part_captions=-5)
    with pytest.raises(ValueError, match='batch_tokens=0: expected at least 1'):
        EmbedSettings(batch_tokens=0)
    with pytest.raises(ValueError, match=r'part_captions=2\.5: expected a whole number'):
        EmbedSettings(part_captions=2.5)
    with pytest.raises(ValueError, match='batch_tokens=True: expected a whole number or None'):
        EmbedSettings(batch_tokens=True)


class HugeEncoder(text_encoders.HashEncoder):
    """Makes a number for one caption that float16 cannot hold."""

    name, dim = 'huge', 2

    def encode_tokens(self, tokens, on_batch):
        return np.array([[1, 1e6 if 'cat' in words else 2] for words in tokens], np.float32)


def test_numbers_too_large_for_float16_are_refused(source, out):
    with pytest.raises(ValueError, match=r"huge: .*'a cat' .*float16"):
        embed_captions.embed(source, HugeEncoder(), out)
    assert not out.exists()


def test_command_line(command, source, out):
    flags = f'--source={source}', f'--out={out}', '--tokens_only'
    status, _, errors = command(embed_captions, *flags, '--encoder=hash')
    assert status == 1 and "error: the encoder 'hash' has no token ids: use words" in errors
    assert not out.exists()
    status, output, errors = command(embed_captions, *flags, '--encoder=words', '--max_tokens=2')
    assert status == 0 and '3 captions encoded by words, 2 numbers each' in output, errors


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_when_it_is_stopped(source, out, number):
    program = textwrap.dedent("""
        import signal, time
        from coyo11m_tfds import embed_captions
        from coyo11m_tfds.text import text_encoders
        signal.signal(signal.SIGINT, signal.default_int_handler)

        class SlowEncoder(text_encoders.HashEncoder):
            def encode_tokens(self, tokens, on_batch):
                print('encoding', flush=True)
                time.sleep(60)

        text_encoders.HashEncoder = SlowEncoder
        embed_captions.main()
    """)
    command = [sys.executable, '-c', program, '--source', str(source), '--out', str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b'encoding\n'
        assert os.listdir(out) != []
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode != 0
    if number == signal.SIGKILL:
        assert os.listdir(out) != []
        embed_captions.embed(source, 'hash', out)  # sweeps
        assert os.listdir(out) == [sidecar.part_name(0, 1)]
    else:
        assert not out.exists()


def test_tokens_are_reported_with_the_length_that_would_do(tmp_path):
    source = make_source(tmp_path / 'source', {1: 'a cat', 2: 'two dogs in a red boat', 3: 'a'})
    settings = EmbedSettings(tokens_only=True, max_tokens=16)
    report = embed_captions.embed(source, 'words', tmp_path / 'parts', settings)
    assert (report.longest, report.dim) == (6, 16)
    assert 'the longest has 6 tokens, so that --max_tokens=6 keeps all of' in str(report)
    for limit in (6, 5):
        out = tmp_path / f'{limit}'
        settings = EmbedSettings(tokens_only=True, max_tokens=limit)
        report = embed_captions.embed(source, 'words', out, settings)
        assert '--max_tokens' not in str(report)
    assert '1 truncated' in str(report)
    assert '--max_tokens' not in str(embed_captions.embed(source, 'hash', tmp_path / 'h'))


def test_words_have_the_room_that_the_longest_caption_takes(tmp_path, monkeypatch):
    source = make_source(tmp_path / 'source', {1: 'a cat', 2: 'two dogs in a red boat', 3: 'a'})
    settings = EmbedSettings(tokens_only=True)
    report = embed_captions.embed(source, 'words', tmp_path / 'words', settings)
    assert report.dim == 6 and 'max_tokens' not in str(report)
    shorter = make_source(tmp_path / 'shorter', {1: 'a cat'})
    with_its_words = f'words:{tmp_path}/words'
    # The current folder is neither used nor, because it is empty, removed.
    (tmp_path / 'here').mkdir()
    monkeypatch.chdir(tmp_path / 'here')
    report = embed_captions.embed(shorter, with_its_words, 'other', settings)
    assert report.dim == 2


def test_words_are_numbered_alike_in_all_parts_whoever_makes_them(tmp_path):
    source = make_source(tmp_path / 'source', {n: f'a cat number{n}' for n in range(10)})
    settings = EmbedSettings(tokens_only=True, max_tokens=3, part_captions=4)
    embed_captions.embed(source, 'words', tmp_path / 'alone', settings)
    for share in (1, 0):
        embed_captions.embed(source, 'words', tmp_path / 'shared', settings, share=(share, 2))
    assert files_of(tmp_path / 'shared') == files_of(tmp_path / 'alone')
    paths = sorted((tmp_path / 'alone').iterdir())
    [words] = {pq.read_schema(path).metadata[b'text_words'].decode() for path in paths}
    assert words.startswith('a:10 cat:10 number0:1 number1:1 ') and len(words.split()) == 12
    # Another caption column, or another source, by the numbers of this one.
    other = make_source(tmp_path / 'other', {1: 'two cat a'})
    embed_captions.embed(other, f'words:{tmp_path}/alone', tmp_path / 'others', settings)
    table = pq.read_table(tmp_path / 'others' / sidecar.part_name(0, 1))
    assert table.column('tokens').to_pylist() == [[0, 2, 1]]
    # Or by those of both, most frequent first.
    embed_captions.embed(other, 'words', tmp_path / 'x,y', settings)
    encoder = f'words:{tmp_path}/alone,words:{tmp_path}/x,y'
    embed_captions.embed(other, encoder, tmp_path / 'both', settings)
    table = pq.read_table(tmp_path / 'both' / sidecar.part_name(0, 1))
    assert table.column('tokens').to_pylist() == [[13, 2, 1]]
    assert b'a:11 cat:11 number0:1 ' in table.schema.metadata[b'text_words']
    embed_captions.embed(other, 'hash', tmp_path / 'hash')
    with pytest.raises(ValueError, match=f'^{tmp_path}/hash: holds no list of words'):
        embed_captions.embed(other, f'words:{tmp_path}/hash', tmp_path / 'none', settings)
    # Nor is a list taken that is not the one of the ids.
    metadata = pq.read_schema(paths[0]).metadata | {b'text_words': b'cat:10 a:10'}
    pq.write_table(pq.read_table(paths[0]).replace_schema_metadata(metadata), paths[0])
    with pytest.raises(ValueError, match=f"^{paths[0]}: its list of words 'cat:10 a:10' is not"):
        embed_captions.embed(other, f'words:{tmp_path}/alone', tmp_path / 'none', settings)


@pytest.mark.parametrize('encoder', ['words', 'hf:/no/such/folder'])
def test_a_wrong_encoder_is_noticed_before_captions_are_read(tmp_path, encoder):
    source = make_source(tmp_path / 'source', {})
    table = pa.table({'key': [1, 1], 'caption_llava': ['a', 'b']})
    pq.write_table(table, source / schema.CAPTIONS_FILE)
    with pytest.raises(ValueError, match=r'no such folder|unknown encoder'):
        embed_captions.embed(source, encoder, tmp_path / 'out')
    with pytest.raises(ValueError, match='row repeats the key of another'):
        embed_captions.embed(source, 'hash', tmp_path / 'out')
    # Nor does it end after them because of what is there already.
    embed_captions.embed(make_source(tmp_path / 'good', {1: 'a'}), 'hash', tmp_path / 'out')
    message = r"part-00000.*: text_encoder is 'hash', but 'words' is what this command makes"
    with pytest.raises(ValueError, match=message):
        embed_captions.embed(source, 'words', tmp_path / 'out', EmbedSettings(tokens_only=True))
    part = tmp_path / 'out' / sidecar.part_name(0, 1)
    pq.write_table(pq.read_table(part).replace_schema_metadata({b'\xff': b'\xff'}), part)
    with pytest.raises(ValueError, match=r"part-00000.*: text_encoder is None, but 'hash' is"):
        embed_captions.embed(source, 'hash', tmp_path / 'out')
