"""The page of a data set with decoded pictures: what it shows, and what is refused."""

import base64
import io
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import input_pipeline
from coyo11m_tfds import add_column, show
from coyo11m_tfds.pictures import vae_decoder
from coyo11m_tfds.pictures.latent_rgb import latents_to_rgb
from tests import small_vae
from tests.fakes.cloud import Fault
from tests.reading import small_dataset

SPLITS = 'train', 'validation'
REPORT = 'report-3f9a1c20.json'


def pictures_of(page: str) -> list[np.ndarray]:
    found = re.findall('base64,([^"]*)"', page)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(png)))) for png in found]


def test_the_page_is_that_of_the_build_with_decoded_pictures(mini_dataset, tmp_path, command):
    vae, out = small_vae.make(tmp_path), tmp_path / 'page.html'
    options = [f'--vae={vae}', f'--out={out}', '--num_pictures=5']
    status, told, _ = command(show, mini_dataset, *options)
    assert (status, told) == (0, f'page: {out}\n')
    page = out.read_text(encoding='utf-8')
    features = 'key', 'latents', 'caption'
    records = input_pipeline.records(mini_dataset, 'train', features, crop=0)
    some = records[[number * len(records) // 5 for number in range(5)]]
    expected = vae_decoder.load_decoder(str(vae))(some['latents'])
    assert expected.shape == (5, 64, 64, 3)
    np.testing.assert_array_equal(pictures_of(page), expected)
    assert re.findall(r'<code>(\d+)</code></figcaption>', page) == [str(x) for x in some['key']]
    assert f'decoded by <code>{tmp_path.name}</code>' in page
    built = mini_dataset.joinpath(REPORT.replace('json', 'html')).read_text(encoding='utf-8')
    sections = [text.partition('<h2>Samples')[::2] for text in (built, page)]
    assert len({before for before, _ in sections}) == 1
    assert len({after[after.index('<h2>Length of') :] for _, after in sections}) == 1
    assert 'python -m coyo11m_tfds.show' in built
    assert 'python -m coyo11m_tfds.show' not in page


def test_data_and_page_may_lie_in_a_bucket(mini_dataset, tmp_path, gcs, command):
    gcs.upload_folder(mini_dataset, 'gs://bucket/d/1.0.0')
    vae, out = small_vae.make(tmp_path), 'gs://bucket/page.html'
    status, *told = command(show, 'gs://bucket/d/1.0.0', f'--vae={vae}', f'--out={out}')
    assert (status, told) == (0, [f'page: {out}\n', ''])
    assert gcs.objects('bucket')['page.html'].decode() == show.show(mini_dataset, str(vae))


UNWRITABLE = {
    'an object that may not be written': (
        'gs://bucket/x/page.html',
        'writing to gs://bucket/x/.*: access was refused',
    ),
    'no bucket': (
        'gs://no-such-bucket/x.html',
        'gs://no-such-bucket: there is no such bucket',
    ),
    'the hub': (
        'hf://datasets/owner/name/x.html',
        'hf://datasets/owner/name/x.html: expected a local path or gs',
    ),
    'a local folder': ('TMP', r'\S+: is a folder; expected the path of a file'),
    'a folder in a bucket': ('gs://bucket/x/', 'gs://bucket/x/: is a folder; expected'),
}


@pytest.mark.parametrize(('out', 'problem'), UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_place_that_cannot_be_written_is_told_before_the_work(
    mini_dataset, tmp_path, bucket, command, out, problem
):
    bucket.inject(Fault('403', count=None, match='upload bucket'))
    out = out.replace('TMP', str(tmp_path))
    status, told, error = command(show, mini_dataset, '--vae=/nonesuch', f'--out={out}')
    assert (status, told, error.count('\n')) == (1, '', 1)
    assert re.match(f'error: {problem}', error)


def test_a_full_disk_is_told_with_the_file(mini_dataset, tmp_path, command):
    (tmp_path / 'x.png').symlink_to('/dev/full')
    key = input_pipeline.records(mini_dataset, 'validation', ('key',))[0]['key']
    status, _, error = command(show, mini_dataset, f'--key={key}', f'--out={tmp_path}/x.png')
    assert (status, error.partition(':')[0]) == (1, 'error')
    assert error.startswith(f'error: {tmp_path}/x.png: No space left on device: free some space')


@pytest.mark.parametrize('split', ['train', 'validation'])
def test_one_record_is_printed_and_drawn(mini_dataset, tmp_path, command, monkeypatch, split):
    monkeypatch.chdir(tmp_path)
    features = 'key', 'latents', 'caption', 'text_embedding'
    record = input_pipeline.records(mini_dataset, split, features)[7]
    status, told, _ = command(show, mini_dataset, f'--key={record["key"]}')
    assert status == 0
    lines = told.splitlines()
    assert lines[0] == f'record 7 of split {split}'
    assert lines[-1] == f'picture         {record["key"]}.png'
    values = dict(line.split(maxsplit=1) for line in lines[1:-1])
    assert values['key'] == str(record['key'])
    assert values['caption'] == record['caption'].decode()
    text = record['text_embedding']
    assert values['text_embedding'].startswith(f'float16 {text.shape}, {text.min():.4g} to ')
    picture = np.asarray(Image.open(f'{record["key"]}.png'))
    np.testing.assert_array_equal(picture, np.hstack(latents_to_rgb(record['latents'])))
    vae = small_vae.make(tmp_path)
    status, told, _ = command(
        show, mini_dataset, f'--key={record["key"]}', f'--vae={vae}', '--out=x.png'
    )
    decoded = vae_decoder.load_decoder(str(vae))(record['latents'])
    np.testing.assert_array_equal(np.asarray(Image.open('x.png')), np.hstack(decoded))
    status, _, told = command(show, mini_dataset, '--key=5')
    assert (status, 'no record has key 5' in told) == (1, True)


def test_a_record_is_found_beside_an_empty_split(tmp_path):
    path = tmp_path / 'd' / '1.0.0'
    keys = small_dataset.write(path, {'train': (3, 2), 'validation': (0,)})
    lines, _ = show.show_record(path, keys['train'][4])
    assert lines[:2] == ['record 4 of split train', f'key             {keys["train"][4]}']
    with pytest.raises(ValueError, match='no record has key 7'):
        show.show_record(path, 7)


def test_the_value_of_a_long_name_stands_apart(copy, tmp_path, command):
    keys = [x['key'] for split in SPLITS for x in input_pipeline.records(copy, split, ('key',))]
    pq.write_table(pa.table({'key': keys, 'x': range(len(keys))}), tmp_path / 'x.parquet')
    add_column.add(copy, 'aesthetic_score_v2', parquet=tmp_path / 'x.parquet', column='x')
    _, told, _ = command(show, copy, f'--key={keys[5]}', f'--out={tmp_path}/x.png')
    assert 'aesthetic_score_v2 5' in told.splitlines()
    assert f'key             {keys[5]}' in told.splitlines()


def test_a_vae_of_other_latents_is_refused(mini_dataset, tmp_path):
    vae = str(small_vae.make(tmp_path, channels=16))
    with pytest.raises(ValueError, match=r'the VAE .* decodes latents of 16 channels, expected 4'):
        show.show(mini_dataset, vae)


@pytest.mark.parametrize('content', [b'{}', b'[]', b'{', b'{"splits": {"train": 3}}', None])
def test_a_damaged_report_is_named_and_nothing_is_written(copy, tmp_path, command, content):
    (copy / REPORT).unlink()
    if content is not None:
        (copy / REPORT).write_bytes(content)
    vae, out = small_vae.make(tmp_path), tmp_path / 'page.html'
    status, _, told = command(show, copy, f'--vae={vae}', f'--out={out}')
    assert status == 1
    kind = 'is missing' if content is None else 'is not the report of a build'
    assert re.fullmatch(rf'error: .*{REPORT}:? {kind}.*\n', told), told
    assert not out.exists()
