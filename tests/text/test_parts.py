"""A sidecar in parts: the same bytes whoever makes it, resumed, shared out, and never mixed up."""

import pathlib
import random
import shutil
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from coyo11m_tfds import embed_captions
from coyo11m_tfds.process import job
from coyo11m_tfds.source import sidecar
from coyo11m_tfds.text import text_encoders
from tests import made_sources
from tests.built import files_of
from tests.checkout import CHECKOUT
from tests.fakes.cloud import Fault
from tests.text.test_text_encoders import WORDS, save_model, save_tokenizer

PART_CAPTIONS = 100


def make_captions(count: int) -> dict[int, str | None]:
    """Of `count` rows some have no caption, and some the same one."""
    random_ = random.Random(0)
    keys = random_.sample(range(10 * count), count)
    captions = {key: ' '.join(random_.choices(WORDS, k=random_.randint(1, 12))) for key in keys}
    return captions | dict.fromkeys(keys[::7], 'a red circle') | dict.fromkeys(keys[::31], None)


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp('source')
    made_sources.write_captions(folder, make_captions(1000))
    return folder


@pytest.fixture(scope='module')
def expected(source, tmp_path_factory):
    """The files that one undisturbed process makes."""
    out = tmp_path_factory.mktemp('expected') / 'parts'
    report = embed(source, out)
    assert (report.num_captions, report.num_kept, report.missing_parts) == (967, 0, ())
    return files_of(out)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    """The folder of a tiny model."""
    folder = tmp_path_factory.mktemp('models') / 'bert'
    save_model(folder, 'bert')
    save_tokenizer(folder, ends=True, pad_token='[PAD]')
    return folder


def embed(source, out, encoder='hash', share=(0, 1), **fields) -> embed_captions.EmbeddingReport:
    settings = embed_captions.EmbedSettings(**{'part_captions': PART_CAPTIONS} | fields)
    return embed_captions.embed(source, encoder, out, settings, share=share)


def read(folder: pathlib.Path, column: str) -> tuple[np.ndarray, np.ndarray]:
    tables = [pq.read_table(file.path) for file in sidecar.find_sidecar_files(folder)]
    values = [table.column(column).combine_chunks().flatten().to_numpy() for table in tables]
    keys = np.concatenate([table.column('key').to_numpy() for table in tables])
    return keys, np.concatenate(values).reshape(len(keys), -1)


def test_parts_are_ranges_of_keys(source, expected, tmp_path):
    assert list(sorted(expected)) == [sidecar.part_name(number, 10) for number in range(10)]
    embed(source, tmp_path / 'parts')
    embed(source, tmp_path / 'one', part_captions=10_000)
    keys, embeddings = read(tmp_path / 'parts', 'embedding')
    assert np.all(np.diff(keys) > 0)
    for found, whole in zip((keys, embeddings), read(tmp_path / 'one', 'embedding'), strict=True):
        np.testing.assert_array_equal(found, whole)


def test_a_part_says_what_it_is(source, expected, tmp_path):
    path = tmp_path / 'x.parquet'
    path.write_bytes(expected[sidecar.part_name(3, 10)])
    columns = pq.read_schema(path)
    assert {name.decode(): value.decode() for name, value in columns.metadata.items()} == {
        'text_encoder': 'hash',
        'text_encoder_revision': '1',
        'text_max_tokens': '0',
        'text_embedding_dim': '640',
        'text_pooling': 'sum',
        'text_dtype': 'float32',
        'caption_column': 'caption_llava',
        'captions_digest': made_sources.captions_digest(source),
        'part': '3 of 10',
    }
    assert str(columns.field('embedding').type) == 'fixed_size_list<element: halffloat>[640]'


class CountingEncoder(text_encoders.HashEncoder):
    """Keeps what it is given."""

    def __init__(self):
        self.given = []

    def encode_tokens(self, tokens, on_batch):
        self.given += [' '.join(words) for words in tokens]
        return super().encode_tokens(tokens, on_batch)


def test_equal_captions_of_a_part_are_encoded_once(source, tmp_path):
    encoder = CountingEncoder()
    report = embed(source, tmp_path / 'parts', encoder, part_captions=10_000)
    assert len(encoder.given) == len(set(encoder.given)) < report.num_captions - 100


def test_token_ids_are_those_of_the_tokenizer(source, model, tmp_path):
    spec = f'hf:{model}'
    report = embed(source, tmp_path / 'parts', spec, tokens_only=True, max_tokens=8)
    keys, tokens = read(tmp_path / 'parts', 'tokens')
    assert (tokens.dtype, tokens.shape, report.dim) == (np.int32, (967, 8), 8)
    tokenizer = text_encoders.make_tokenizer(spec, 8)
    captions = make_captions(1000)
    for key, row in zip(keys.tolist(), tokens.tolist(), strict=True):
        [ids] = tokenizer.tokenize([captions[key]])
        assert row == ids + [-1] * (8 - len(ids))
    assert report.num_truncated > 100
    metadata = pq.read_schema(tmp_path / 'parts' / sidecar.part_name(0, 10)).metadata
    assert metadata[b'text_vocabulary'] == str(tokenizer.vocabulary).encode()
    assert metadata[b'text_max_tokens'] == b'8'


def test_resumed_parts_of_a_model_are_the_same_bytes(model, tmp_path):
    source, options = tmp_path / 'source', {'max_tokens': 12, 'part_captions': 20}
    source.mkdir()
    made_sources.write_captions(source, make_captions(60))
    embed(source, tmp_path / 'once', f'hf:{model}', **options)
    embed(source, tmp_path / 'twice', f'hf:{model}', share=(1, 3), **options)
    embed(source, tmp_path / 'twice', f'hf:{model}', **options)
    assert files_of(tmp_path / 'once') == files_of(tmp_path / 'twice')


def test_hosts_share_the_parts_and_whoever_comes_makes_those_of_a_dead_one(
    source, expected, tmp_path
):
    out = tmp_path / 'parts'
    report = embed(source, out, share=(1, 3))
    assert sorted(files_of(out)) == [sidecar.part_name(number, 10) for number in (1, 4, 7)]
    assert len(report.missing_parts) == 7
    assert '7 parts are missing, such as part-00000-of-00010.parquet' in str(report)
    with pytest.raises(ValueError, match=r'part-00000-of-00010\.parquet is missing \(7 of 10'):
        sidecar.find_sidecar_files(out)
    embed(source, out, share=(2, 3))
    report = embed(source, out)
    assert report.num_captions + report.num_kept == 967
    assert report.missing_parts == ()
    assert files_of(out) == expected


def test_a_job_tells_each_process_its_share(monkeypatch):
    assert job.index_and_count() == (0, 1)
    for rank, size in (
        ('RANK', 'WORLD_SIZE'),
        ('SLURM_PROCID', 'SLURM_NTASKS'),
        ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(rank, '2')
            for wrong in ('', '2', 'x'):
                patch.setenv(size, wrong)
                with pytest.raises(ValueError, match=f'{rank}=2 and {size}={wrong}: expected'):
                    job.index_and_count()
            patch.setenv(size, '5')
            assert job.index_and_count() == (2, 5)
    assert job.index_on_machine() == 0
    for name in ('LOCAL_RANK', 'SLURM_LOCALID', 'OMPI_COMM_WORLD_LOCAL_RANK'):
        with monkeypatch.context() as patch:
            patch.setenv(name, '3')
            assert job.index_on_machine() == 3


def test_a_bucket_holds_the_same(source, expected, tmp_path, gcs):
    gcs.inject(Fault('503'), Fault('503', match='GET read'))
    embed(source, 'gs://bucket/parts', share=(0, 2))
    report = embed(source, 'gs://bucket/parts/')
    assert report.num_kept > 0
    gcs.download_folder('gs://bucket/parts', tmp_path / 'got')
    assert files_of(tmp_path / 'got') == expected


def test_parts_of_something_else_are_refused_by_name_and_stay(source, model, tmp_path):
    out = tmp_path / 'parts'
    embed(source, out, share=(2, 10))
    before = files_of(out)
    other = shutil.copytree(source, tmp_path / 'other')
    made_sources.write_captions(other, make_captions(1000) | {5: 'one more'})
    for options, message in (
        ({'encoder': f'hf:{model}'}, 'text_.* is .*, but .* is what this command makes'),
        ({'source': other}, 'captions_digest is'),
        ({'part_captions': 300}, 'is one of 10 parts, but these captions make 4 parts here'),
        ({'encoder': RevisedEncoder()}, "text_encoder_revision is '1', but '2'"),
        (
            {'encoder': 'words', 'tokens_only': True},
            "text_encoder is 'hash', but 'words'",
        ),
    ):
        with pytest.raises(ValueError, match=r'part-00002-of-00010\.parquet: ' + message) as error:
            embed(**{'source': source, 'out': out} | options)
        assert '\n' not in str(error.value)
        assert files_of(out) == before


class RevisedEncoder(text_encoders.HashEncoder):
    revision = '2'


def test_a_damaged_part_is_refused_by_name(source, tmp_path):
    out = tmp_path / 'parts'
    embed(source, out)
    path = out / sidecar.part_name(4, 10)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r'part-00004-of-00010\.parquet: is damaged'):
        embed(source, out)


def kill_when_begun(source, out, options, random_: random.Random) -> None:
    """Kills a run some time after it has made a part more."""
    had = len(list(out.glob('part-*')))
    command = [sys.executable, '-m', 'coyo11m_tfds.embed_captions', f'--source={source}']
    command += [f'--out={out}', f'--part_captions={PART_CAPTIONS}', *options]
    process = subprocess.Popen(command, cwd=CHECKOUT)
    wanted = had + random_.randint(0, 3)
    while process.poll() is None and len(list(out.glob('part-*'))) < wanted:
        time.sleep(0.002)
    time.sleep(random_.random() * 0.05)
    process.kill()
    process.wait(60)


@pytest.mark.parametrize(
    ('encoder', 'tokens_only', 'kills'),
    [
        ('hash', False, 1),
        *(
            pytest.param(*x, 20, marks=pytest.mark.slow)
            for x in (('hash', False), ('words', True), ('hf', True), ('hf', False))
        ),
    ],
)
def test_killed_and_started_again_it_makes_the_same_bytes(
    source, model, tmp_path, encoder, tokens_only, kills
):
    encoder, out = f'hf:{model}' if encoder == 'hf' else encoder, tmp_path / 'parts'
    embed(source, tmp_path / 'expected', encoder, tokens_only=tokens_only, max_tokens=8)
    expected = files_of(tmp_path / 'expected')
    options = [f'--encoder={encoder}', *['--tokens_only'] * tokens_only, '--max_tokens=8']
    random_ = random.Random(1)
    for _ in range(kills):
        kill_when_begun(source, out, options, random_)
        parts = sorted(out.glob('part-*'))
        for path in parts:
            assert path.read_bytes() == expected[path.name]  # as a whole or not at all
        for path in random_.sample(parts, 6 if len(parts) > 7 else 0):
            path.unlink()
    embed(source, out, encoder, tokens_only=tokens_only, max_tokens=8)
    assert files_of(out) == expected
