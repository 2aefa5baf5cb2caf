"""Images become sources of latents, the same from every kind of source and after every stop."""

import ast
import concurrent.futures
import contextlib
import io
import json
import os
import pathlib
import re
import resource
import shlex
import tarfile
import tracemalloc

import numpy as np
import pytest
from absl import logging

import input_pipeline
from coyo11m_tfds import add_column, dry_run, encode_images, mirror, schema, show, storage
from coyo11m_tfds.convert.build_settings import BuildSettings, choose_validation_fraction
from coyo11m_tfds.encoding import decoders, parts
from coyo11m_tfds.encoding.image_counts import ImageCounts
from coyo11m_tfds.encoding.settings import EncodingSettings
from coyo11m_tfds.foreign import tar_members
from coyo11m_tfds.pictures import latent_rgb, pixels
from coyo11m_tfds.pictures.vae_encoder import VaeEncoder
from coyo11m_tfds.process import progress, workers
from coyo11m_tfds.report import statistics
from coyo11m_tfds.source import source_folder
from coyo11m_tfds.storage import json_digest, model_files
from coyo11m_tfds.storage.disk import Disk
from tests import built, damages, made_images, small_vae
from tests.checkout import CHECKOUT
from tests.made_images import MadeImage

SIZE = 16
IMAGES = made_images.make_images(22)


@pytest.fixture(scope='module')
def encoder(tmp_path_factory) -> VaeEncoder:
    folder = tmp_path_factory.mktemp('vaes') / 'small-vae'
    return VaeEncoder(str(small_vae.make_kl_encoder(folder)))


class Threads(concurrent.futures.ThreadPoolExecutor):
    """In place of worker processes: they start at once."""

    close = concurrent.futures.ThreadPoolExecutor.shutdown


@pytest.fixture(autouse=True)
def workers_are_threads(request, monkeypatch):
    if 'processes' not in request.fixturenames:
        monkeypatch.setattr(workers, 'open_pool', lambda n: contextlib.closing(Threads(n)))


@pytest.fixture
def processes():
    """Has a test decode in processes."""


@pytest.fixture(scope='module')
def source(tmp_path_factory) -> pathlib.Path:
    return made_images.write(tmp_path_factory.mktemp('source') / 'images', 'json', IMAGES)


@pytest.fixture(scope='module')
def expected(source, encoder, tmp_path_factory) -> dict[str, bytes]:
    """The files that one undisturbed run makes in worker processes."""
    out = tmp_path_factory.mktemp('expected') / 'out'
    encode(source, encoder, out)
    return files_of(str(out))


def encode(images, encoder, out, share=(0, 1), **fields) -> encode_images.EncodingReport:
    fields = {'size': SIZE, 'part_images': 8, 'num_workers': 2} | fields
    return encode_images.encode(images, encoder, out, EncodingSettings(**fields), share=share)


def rows_of(out: pathlib.Path) -> dict[str, tuple[dict, np.ndarray]]:
    """The `.json` and the latents of each image, by its caption."""
    rows = {}
    for path in sorted(out.glob('*.tar')):
        with tarfile.open(path) as tar:
            data = {x.name: tar.extractfile(x).read() for x in tar.getmembers()}
        for name in data:
            if name.endswith('.json'):
                fields = json.loads(data[name])
                latents = np.load(io.BytesIO(data[name.replace('.json', '.npy')]))
                rows[fields['caption']] = fields, latents
    return rows


def files_of(out: str) -> dict[str, bytes]:
    """All files of an encoding."""
    folder = storage.open_folder(out)
    return {name: folder.read(name) for name in folder.sizes()}


def expected_latents(encoder, image: MadeImage, **options) -> np.ndarray:
    target = pixels.Target(((SIZE, SIZE),), **options)
    mean, _ = encoder.encode(pixels.read_pixels(image.data, target).crops)
    return mean.astype(np.float16)


def check_latents(actual: np.ndarray, expected: np.ndarray) -> None:
    """Compares latents of an image in a batch with those of the image alone.

    On some processors, the place of an image in its batch changes the last bits.
    """
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(actual, expected, rtol=2**-10, atol=1e-5)


@pytest.mark.parametrize('kind', ['txt', 'json', 'jsonl', 'csv', 'tar', 'parquet'])
def test_every_kind_of_source_gives_its_latents_captions_and_numbers(encoder, tmp_path, kind):
    source = made_images.write(tmp_path / 'images', kind, IMAGES)
    report = encode(source, encoder, tmp_path / 'out')
    rows = rows_of(tmp_path / 'out')
    assert len(rows) == len(IMAGES) == report.num_encoded == report.counts.shapes['16x16']
    for number, image in enumerate(IMAGES):
        fields, latents = rows[image.fields['caption']]
        check_latents(latents, expected_latents(encoder, image)[0])
        size = (20, 30) if number % 2 == 0 else (17, 40) if number % 4 == 3 else (40, 17)
        assert (fields['width'], fields['height']) == size
        if kind != 'txt':
            assert (fields['key'], fields['score']) == (1000 + number, number / 2)
    assert len({fields['key'] for fields, _ in rows.values()}) == len(IMAGES)
    rule = 'hashes of their names' if kind == 'txt' else 'their data'
    assert report.counts.key_rules == {rule: len(IMAGES)}


def test_parts_of_two_processes_are_those_of_one(source, expected, encoder, tmp_path):
    out = tmp_path / 'out'
    report = encode(source, encoder, out, share=(1, 2))
    assert report.missing_parts == (0, 2) and '2 parts are missing, such as 0' in str(report)
    with pytest.raises(ValueError, match=r'encoding\.json: not all images are encoded'):
        source_folder.find_source(out)
    report = encode(source, encoder, out, share=(0, 2))
    assert report.num_encoded == 14 and report.counts.shapes.total() == 22
    assert files_of(str(out)) == expected
    (out / '00001.tar').unlink()
    for num_encoded in (8, 0):
        report = encode(source, encoder, out)
        assert report.num_encoded == num_encoded and report.counts.shapes.total() == 22
        assert files_of(str(out)) == expected


def write_files(out: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    for name, data in files.items():
        storage.open_writable_folder(out).write(name, data)
    return out


@pytest.mark.parametrize('name', [schema.ENCODING_FILE, '.encoded/00001.json'])
def test_a_record_that_cannot_be_read_is_made_again(source, expected, encoder, tmp_path, name):
    out = write_files(tmp_path / 'out', expected)
    num_encoded = 8 if name.startswith('.encoded') else 0
    copy = expected['.encoded/00000.json']
    for content in [*damages.record_damages(expected[name]), copy]:
        (out / name).write_bytes(content)
        assert encode(source, encoder, out).num_encoded == num_encoded
        assert files_of(str(out)) == expected
    (out / name).unlink()
    (out / name).mkdir()
    assert encode(source, encoder, out).num_encoded == num_encoded
    assert files_of(str(out)) == expected


def test_receipts_of_other_names_are_left_alone(source, expected, encoder, tmp_path):
    others = {name: b'{}' for name in ('notes.json', '.DS_Store', '00000.json.bak', '1.json')}
    others |= dict.fromkeys(['00003.json', '99999.json'], expected['.encoded/00000.json'])
    others |= {b'\xff.json'.decode('utf-8', 'surrogateescape'): b''}
    files = expected | {f'.encoded/{name}': data for name, data in others.items()}
    out = write_files(tmp_path / 'out', files)
    assert encode(source, encoder, out).num_encoded == 0
    assert files_of(str(out)) == files


def test_without_its_description_an_encoding_is_known_by_its_receipts(
    source, expected, encoder, tmp_path
):
    out = write_files(tmp_path / 'out', expected | {schema.ENCODING_FILE: b'{}'})
    with pytest.raises(ValueError, match=r'encoding\.json: is damaged .* of encode_images again'):
        source_folder.find_source(out)
    before = files_of(str(out))
    for content in (b'{}', None):
        if content is None:
            (out / schema.ENCODING_FILE).unlink()
        with pytest.raises(ValueError, match=r'\.encoded/00000\.json: crops is 1, but 3 is what'):
            encode(source, encoder, out, crops=3)
    assert files_of(str(out)) == {x: y for x, y in before.items() if x != schema.ENCODING_FILE}
    assert encode(source, encoder, out).num_encoded == 0
    assert files_of(str(out)) == expected
    # Nothing tells whose tars these are.
    for path in (out / '.encoded').iterdir():
        path.unlink()
    (out / schema.ENCODING_FILE).write_bytes(b'{}')
    with pytest.raises(ValueError, match=r'00000\.tar: is not of this command'):
        encode(source, encoder, out)


def test_an_image_is_done_when_it_is_written(source, encoder, tmp_path, monkeypatch, caplog):
    start = encoder.start

    def start_and_tell(images: np.ndarray):
        wait = start(images)

        def tell_and_wait():
            logging.info('It waits for a batch.')
            return wait()

        return tell_and_wait

    monkeypatch.setattr(encoder, 'start', start_and_tell)
    monkeypatch.setattr(progress, '_SECONDS_BETWEEN_LINES', 0)
    with caplog.at_level('INFO', logger='absl'):
        encode(source, encoder, tmp_path / 'out', part_images=22)
    *earlier, last = ''.join(f'{line}\n' for line in caplog.messages).split('It waits for a batch.')
    shares = [int(share) for share in re.findall(r'Encoding images: (\d+)%', ''.join(earlier))]
    assert len(earlier) == 3 and 0 < max(shares) < 80
    assert re.search(r'Encoding images: 100%, 1 of 1 part, [\d.]+ images/s', last)


@pytest.mark.parametrize(
    ('sizes', 'options', 'expected'),
    [
        ([30_000] * 3250, {}, [32] * 101 + [18]),
        ([30_000] * 3250, {'num_shapes': 3}, [96] * 33 + [82]),
        ([30_000] * 100, {'num_pixels': 3 * 1024**2}, [1] * 100),
        ([30_000] * 100, {'num_pixels': 512**2}, [8] * 12 + [4]),
        ([30_000] * 100_000, {}, [390] * 256 + [160]),
        ([3_000] * 2_000_000, {}, [4096] * 488 + [1152]),
        ([30_000] * 100, {'most': 60}, [60, 40]),
        ([100 << 20] * 5, {}, [2, 2, 1]),
        ([300 << 20, 300 << 20, 1], {}, [1, 1, 1]),
        ([10 << 20] * 10_000, {}, [39] * 256 + [16]),
        ([7], {}, [1]),
    ],
)
def test_parts_have_limited_work(sizes, options, expected):
    slices = list(parts.divide_images(sizes, **{'num_pixels': 256**2} | options))
    assert [part.stop - part.start for part in slices] == expected
    assert [part.start for part in slices[1:]] == [part.stop for part in slices[:-1]]
    assert (slices[0].start, slices[-1].stop) == (0, len(sizes))


class Stop(Exception):
    """Ends a run in the middle."""


def test_stopped_at_any_moment_it_goes_on_to_the_same_files(
    source, expected, encoder, tmp_path, monkeypatch
):
    """Before and after each file that it stores, and while it encodes."""
    number = 0

    def stop_at(method, moment):
        def call(*arguments):
            nonlocal number
            if number == moment:
                raise Stop
            number += 1
            return method(*arguments)

        return call

    for moment in range(100):
        number, out = 0, tmp_path / str(moment)
        with monkeypatch.context() as patch:
            for owner, name in ((Disk, 'store'), (Disk, 'write'), (encoder, 'start')):
                patch.setattr(owner, name, stop_at(getattr(owner, name), moment))
            try:
                encode(source, encoder, out)
                break
            except Stop:
                pass
        assert {n: x for n, x in files_of(str(out)).items() if n.endswith('.tar')}.items() <= (
            expected.items()
        )
        encode(source, encoder, out)
        assert files_of(str(out)) == expected
    assert moment > 10


def test_a_bucket_gets_the_same_files(source, expected, encoder, bucket):
    bucket.upload_folder(source, 'gs://images/photos')
    encode('gs://images/photos', encoder, 'gs://latents/out/', share=(0, 2))
    encode('gs://images/photos/', encoder, 'gs://latents/out')
    files = files_of('gs://latents/out')
    tars = {name for name in expected if name.endswith('.tar')}
    assert files.keys() == expected.keys() and len(tars) == 3
    assert {name: files[name] for name in tars} == {name: expected[name] for name in tars}


def test_images_on_the_hub_and_names_that_are_numbers(encoder, hub, tmp_path):
    files = {f'photos/{n}/{n:03}.JPG': x.data for n, x in enumerate(IMAGES[:10]) if n % 3 == 0}
    hub.commit(files | {'photos/.hidden.jpg': b'', 'photos/0/000.txt': b'One.', 'README.md': b''})
    report = encode('hf://datasets/owner/name/photos', encoder, tmp_path / 'out')
    assert report.counts.key_rules == {'the numbers that are their names': 4}
    assert report.counts.num_without_caption == 3
    fields, latents = rows_of(tmp_path / 'out')['One.']
    assert (fields['key'], fields['file']) == (0, '0/000.JPG')
    check_latents(latents, expected_latents(encoder, IMAGES[0])[0])


def test_objects_may_have_any_slashes(encoder, bucket, tmp_path):
    folder = storage.open_folder('gs://images')
    names = ['photos//x.jpg', 'photos/a///y.jpg', '/z.jpg', '/photos/z.jpg']
    for name, image in zip(names, IMAGES, strict=False):
        folder.write(name, image.data)
        folder.write(name.replace('.jpg', '.txt'), f'By {name}'.encode())
    folder.write('/metadata.jsonl', b'{"file_name": "z.jpg", "n": 7}')
    for url, files in (
        ('gs://images//photos', ['z.jpg']),
        ('gs://images/photos', ['/x.jpg', 'a///y.jpg']),
        ('gs://images/', names),
    ):
        encode(url, encoder, tmp_path / str(len(files)))
        rows = rows_of(tmp_path / str(len(files)))
        assert sorted(fields['file'] for fields, _ in rows.values()) == sorted(files)
    assert rows['By /z.jpg'][0]['n'] == 7


def test_two_runs_with_the_same_keys_need_keys_of_paths(encoder, tmp_path):
    for run in ('1', '2'):
        made_images.write(tmp_path / 'runs' / run, 'tar', IMAGES[:6])
    out = tmp_path / 'out'
    with pytest.raises(ValueError, match=r'1/00000\.tar/0000\.jpg and 2/.* the same key, 1000'):
        encode(tmp_path / 'runs', encoder, out)
    assert not out.exists()
    report = encode(tmp_path / 'runs', encoder, out, keys='path')
    assert report.counts.key_rules == {'hashes of their names': 12}
    keys = set()
    for path in out.glob('*.tar'):
        with tarfile.open(path) as tar:
            members = [x for x in tar.getmembers() if x.name.endswith('.json')]
            keys |= {json.load(tar.extractfile(x))['key'] for x in members}
    assert len(keys) == 12


def test_the_name_of_a_vae_can_be_recorded_whatever_bytes_its_folder_has():
    assert model_files.public_name(os.fsdecode(b'/vaes/caf\xe9')) == 'caf\N{REPLACEMENT CHARACTER}'


def test_names_that_are_no_utf8_can_be_reported(encoder, tmp_path):
    images = {b'good\xff.jpg': IMAGES[0].data, b'bad\xfe.jpg': b'x', b'\xe9.heic': b''}
    source = write_with_bad(tmp_path / 'images', {os.fsdecode(n): x for n, x in images.items()})
    for _ in range(2):
        report = encode(source, encoder, tmp_path / 'out', max_bad=0.1)
        assert r'1 x not an image (bad\udcfe.jpg)' in str(report).encode().decode()
        assert report.counts.shapes.total() == 1 + len(IMAGES)


@pytest.fixture(scope='module')
def first_half(source, encoder, tmp_path_factory) -> dict[str, bytes]:
    """The files of an encoding of which the second of two processes has done nothing."""
    out = tmp_path_factory.mktemp('half') / 'out'
    encode(source, encoder, out, share=(0, 2))
    return files_of(str(out))


OTHER_SETTINGS = {
    'another size': ({'size': 8}, r"shapes is \['16x16'\], but \['8x8'\] is what"),
    'more crops': ({'crops': 3}, 'crops is 1, but 3'),
    'moments': ({'moments': True}, 'moments is False, but True'),
    'another dtype': ({'dtype': 'float32'}, "dtype is 'float16', but 'float32'"),
    'other keys': ({'keys': 'path'}, "keys is 'data', but 'path'"),
    'smaller parts': (
        {'part_images': 5},
        "images is '22 files in 3 parts, .*', but '22 files in 5 parts",
    ),
}


@pytest.mark.parametrize(('options', 'message'), OTHER_SETTINGS.values(), ids=OTHER_SETTINGS)
def test_an_encoding_of_other_settings_is_refused_by_what_differs(
    source, first_half, encoder, tmp_path, options, message
):
    out = write_files(tmp_path / 'out', first_half)
    # What the images do not decide is checked before they are listed.
    images = source if 'part_images' in options else tmp_path / 'nope'
    with pytest.raises(ValueError, match=rf'{out}/encoding\.json: {message}.* or remove {out}\.$'):
        encode(images, encoder, out, **options)
    assert files_of(str(out)) == first_half


OTHER_IMAGES = {
    'one of a finished part has changed': (
        f'0/{IMAGES[0].name}',
        {},
        r'00000\.json: .* part 0, which begin with 0/img\.0000\.jpg, have changed',
    ),
    'one is new': ('0/new.jpg', {}, r"encoding\.json: images is '22 files .* but '23 files in 3"),
    'one is new, and keys are others': (
        '0/new.jpg',
        {'keys': 'path'},
        r"encoding\.json: keys is 'data', but 'path'",
    ),
}


@pytest.mark.parametrize(('name', 'options', 'message'), OTHER_IMAGES.values(), ids=OTHER_IMAGES)
def test_an_encoding_of_other_images_is_refused(
    first_half, encoder, tmp_path, name, options, message
):
    out = write_files(tmp_path / 'out', first_half)
    images = made_images.write(tmp_path / 'images', 'json', IMAGES)
    (images / name).write_bytes(b'')
    with pytest.raises(ValueError, match=message):
        encode(images, encoder, out, **options)
    assert files_of(str(out)) == first_half


@pytest.mark.parametrize('kind', ['txt', 'csv'])
def test_new_captions_of_finished_parts_need_no_encoder(encoder, tmp_path, monkeypatch, kind):
    images, out = list(IMAGES[:9]), tmp_path / 'out'
    encode(made_images.write(tmp_path / 'images', kind, images), encoder, out, part_images=3)
    before = files_of(str(out))
    caption = images[4].fields['caption']
    for number, new in enumerate(('X' * len(caption.encode()), 'Another caption.')):
        images[4] = images[4]._replace(fields={**images[4].fields, 'caption': new})
        source = made_images.write(tmp_path / f'images{number}', kind, images)
        encode(source, encoder, tmp_path / f'expected{number}', part_images=3)
        with monkeypatch.context() as patch:
            patch.setattr(encoder, 'start', None)
            for _ in range(2):
                report = encode(source, encoder, out, part_images=3)
                assert report.num_encoded == 0 and report.counts.shapes.total() == 9
                assert files_of(str(out)) == files_of(str(tmp_path / f'expected{number}'))
        tars = [x for x, data in before.items() if files_of(str(out))[x] != data]
        assert sum(name.endswith('.tar') for name in tars) == 1


def test_a_caption_may_be_added_and_another_make_its_image_bad(encoder, tmp_path, monkeypatch):
    source, out = made_images.write(tmp_path / 'images', 'txt', IMAGES[:3]), tmp_path / 'out'
    first, second, _ = sorted(source.rglob('*.txt'))
    caption = first.read_text()
    first.unlink()
    options = {'part_images': 1, 'max_bad': 0.5}
    assert encode(source, encoder, out, **options).counts.num_without_caption == 1
    first.write_text(caption)
    second.write_bytes(bytes(2 << 20))
    with monkeypatch.context() as patch:
        patch.setattr(encoder, 'start', None)
        counts = encode(source, encoder, out, **options).counts
    assert (counts.num_without_caption, counts.bad) == (0, {'too long caption': 1})
    # The tar of the part without an image is gone.
    assert len(rows_of(out)) == len(list(out.glob('*.tar'))) == 2
    source_folder.find_source(out)


def test_a_full_disk_is_named_and_the_same_command_goes_on(source, expected, encoder, tmp_path):
    out = tmp_path / 'out'
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf'File too large: .*{out}/'):
            encode(source, encoder, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(out.glob('*.tar'))
    encode(source, encoder, out)
    assert files_of(str(out)) == expected


def test_tars_that_it_has_not_made_are_not_replaced(encoder, tmp_path):
    images = made_images.write(tmp_path / 'images', 'tar', IMAGES)
    before = files_of(str(images))
    with pytest.raises(ValueError, match=r'images/\S+\.tar: is not of this command'):
        encode(images, encoder, images)
    assert files_of(str(images)) == before


def test_moments_and_crops_are_rows_of_their_own_shapes(source, encoder, tmp_path):
    encode(source, encoder, tmp_path / 'moments', moments=True, dtype='float32')
    encode(source, encoder, tmp_path / 'crops', crops=3)
    moments, crops = rows_of(tmp_path / 'moments'), rows_of(tmp_path / 'crops')
    for image in IMAGES:
        caption, target = image.fields['caption'], pixels.Target(((SIZE, SIZE),))
        mean, deviation = encoder.encode(pixels.read_pixels(image.data, target).crops)
        check_latents(moments[caption][1], np.concatenate([mean[0], deviation[0]]))
        check_latents(crops[caption][1], expected_latents(encoder, image, crops=3))
    assert crops[caption][1].shape == (3, 4, 8, 8)

    tiny = str(small_vae.make(tmp_path / 'tiny'))
    with pytest.raises(ValueError, match=r'moments=True: .*tiny has none, expected an Autoencoder'):
        encode(source, tiny, tmp_path / 'none', moments=True)
    assert not (tmp_path / 'none').exists()


def write_with_bad(folder: pathlib.Path, bad: dict[str, bytes]) -> pathlib.Path:
    made_images.write(folder, 'json', IMAGES)
    for name, data in bad.items():
        (folder / name).write_bytes(data)
    return folder


BAD = {'empty.jpg': b'', 'page.png': b'<!DOCTYPE html>', 'page2.jpg': b'<html>', 'x.webp': b'RIFF'}


def test_bad_images_are_counted_and_named(encoder, tmp_path, monkeypatch, caplog):
    source = write_with_bad(tmp_path / 'images', BAD)
    (source / '0' / 'img.0000.json').write_text('{"caption": ')
    monkeypatch.setattr('coyo11m_tfds.images.source_image._MAX_IMAGE', 4000)
    (source / 'big.png').write_bytes(bytes(5000))
    small = made_images.make_images(1, [(12, 30)])[0]
    (source / 'small.jpg').write_bytes(small.data)
    with pytest.raises(ValueError, match=r'6 of 28 images are bad, more than max_bad=0\.01: .*'):
        encode(source, encoder, tmp_path / 'out')
    report = encode(source, encoder, tmp_path / 'out', max_bad=0.3)
    assert report.num_encoded == 0 and report.counts.shapes.total() == 21
    assert report.counts.bad == {
        'empty': 1,
        'not an image': 3,
        'damaged .json': 1,
        'too many bytes': 1,
    }
    assert report.counts.small == {'too small': 1}
    assert 'not an image (page.png, page2.jpg, x.webp)' in str(report)
    assert '1 without a caption' not in str(report)
    assert (
        str(report).splitlines()[-2] == '28 found = 21 encoded + 1 left out + 6 bad + 0 not taken'
    )
    (source / 'x.heic').write_bytes(b'')
    report = encode(source, encoder, tmp_path / 'out', max_bad=0.3)
    # Before the work, too.
    assert 'Not taken: 1 file such as x.heic (HEIC). ImageMagick converts ' in caplog.text
    assert '1 not taken: 1 x HEIC (x.heic)' in str(report)
    assert '\nWhat is not taken: ImageMagick converts ' in str(report)
    assert (
        str(report).splitlines()[-2] == '29 found = 21 encoded + 1 left out + 6 bad + 1 not taken'
    )


def test_one_of_a_kind_is_told_as_one(encoder, tmp_path):
    source = made_images.write(tmp_path / 'images', 'txt', IMAGES[:1])
    (source / 'page.png').write_bytes(b'<html>')
    (source / 'gone.jpg').symlink_to('nowhere')
    with pytest.raises(ValueError, match=r'^1 of 2 images is bad, more than max_bad=0.0: 1 x not'):
        encode(source, encoder, tmp_path / 'out', max_bad=0)
    (tmp_path / 'out' / '00000.tar').unlink()
    report = str(encode(source, encoder, tmp_path / 'out', max_bad=1))
    assert '1 not taken: 1 x link to no file (gone.jpg)' in report
    assert '\n1 of them was encoded now by ' in report


def test_texts_of_no_image_are_counted_and_named(encoder, tmp_path):
    source = made_images.write(tmp_path / 'images', 'tar', IMAGES[:3])
    with tarfile.open(source / '00001.tar', 'a') as tar:
        for name in ('gone.txt', '0001.cls', '0002.cls', '0003.cls', '0004.cls'):
            tar_members.add_member(tar, name, b'x')
    for _ in range(2):
        report = encode(source, encoder, tmp_path / 'out')
        texts, sums, _ = str(report).splitlines()[-3:]
        assert texts == (
            '5 texts not used: 4 x .cls, expected .txt or .json (00001.tar/0001.cls, '
            "00001.tar/0002.cls, 00001.tar/0003.cls, ...); 1 x .txt of no image's name "
            '(00001.tar/gone.txt)'
        )
        assert sums == '3 found = 3 encoded + 0 left out + 0 bad + 0 not taken'


def test_few_of_many_large_images_are_in_memory(encoder, tmp_path, monkeypatch):
    megabyte = 1 << 20
    images = [x._replace(data=x.data + bytes(megabyte)) for x in made_images.make_images(24)]
    source = made_images.write(tmp_path / 'images', 'parquet', images)
    monkeypatch.setattr(decoders, '_BYTES_AHEAD', 4 * megabyte)
    tracemalloc.start()
    try:
        report = encode(source, encoder, tmp_path / 'out')
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.num_encoded == 24
    assert peak < 12 * megabyte


def test_it_says_which_options_take_images_that_are_left_out(encoder, tmp_path):
    sizes = [(40, 17), (14, 30), (30, 15), (7, 9), (1, 90)]
    images = [*made_images.make_images(4, [(14, 30)]), *made_images.make_images(5, sizes)]
    images = [
        x._replace(name=f'{n}-{x.name}', fields=x.fields | {'key': n}) for n, x in enumerate(images)
    ]
    report = encode(made_images.write(tmp_path / 'images', 'json', images), encoder, tmp_path / 'o')
    assert '8 left out: 8 x too small (' in str(report)
    advice = 'Of those that are too small, --size=14 would take 6 and --size=6 would take 7.'
    assert advice in str(report).splitlines()
    # Also if another run has counted them.
    report = encode(tmp_path / 'images', encoder, tmp_path / 'o')
    assert advice in str(report).splitlines()


@pytest.mark.parametrize(
    ('size', 'images', 'lines'),
    [
        (512, [(400, 600)] * 2, ['Of those that are too small, --size=448 would take 2.']),
        (
            256,
            [(200, 300), (900, 200)],
            [
                '1 is too small for any buckets, but not without --buckets.',
                'Without --buckets, those that are too narrow would be cropped.',
            ],
        ),
    ],
)
def test_it_says_which_buckets_take_images(encoder, tmp_path, size, images, lines):
    source = made_images.write(tmp_path / 'images', 'json', made_images.make_images(2, images))
    with pytest.raises(ValueError, match='no image is left') as error:
        encode(source, encoder, tmp_path / 'out', size=size, buckets=True)
    assert [x for x in str(error.value).splitlines() if x in lines] == lines


def test_too_many_bad_images_end_a_long_run_early(encoder, tmp_path, monkeypatch):
    source = write_with_bad(tmp_path / 'images', {f'0/{n}': data for n, data in BAD.items()})
    # The images of one process of four are too few to tell.
    assert encode(source, encoder, tmp_path / 'share', share=(0, 4)).counts.bad == {'empty': 1}
    monkeypatch.setattr(encode_images, '_MANY_IMAGES', 8)
    with pytest.raises(ValueError, match='of 8 images'):
        encode(source, encoder, tmp_path / 'out')
    assert len(list((tmp_path / 'out').glob('*.tar'))) == 1


def test_an_image_that_ends_its_worker_is_dropped_and_no_other(
    encoder, tmp_path, monkeypatch, processes
):
    source = write_with_bad(tmp_path / 'images', {'0/img.0005.png': made_images.END})
    monkeypatch.setattr(pixels, 'read_pixels', made_images.read_or_end)
    report = encode(source, encoder, tmp_path / 'out', max_bad=0.1)
    assert report.counts.bad == {'ends its decoder': 1}
    assert report.counts.shapes.total() == len(IMAGES)


def test_a_build_takes_an_encoding_as_it_is(source, encoder, tmp_path, caplog):
    out = tmp_path / 'out'
    encode(source, encoder, out)
    for latents in ('records', 'in_place'):
        data_set = built.build(out, '', tmp_path / latents, latents=latents)
        data = input_pipeline.open_data(data_set)
        assert data.metadata['vae'] == 'small-vae'
        assert data.metadata['latent_scale'] == [0.18215, 0.0]
        built.build(out, '', tmp_path / latents, latents=latents)  # is the one that is there
        assert ' of 22 records are for validation, too few ' in caplog.text
        columns = {name: name for name in ('score', 'width')}
        for name in columns:
            add_column.add(data_set, name, source=out, column=name)
        names = (schema.KEY, schema.LATENTS, schema.CAPTION, *columns)
        for batch in input_pipeline.eval_batches(data_set, batch_size=8, features=names):
            for key, latent, caption, score, width in zip(
                *(batch[name][batch['mask']] for name in names), strict=True
            ):
                image = IMAGES[int(key) - 1000]
                assert caption.decode() == image.fields['caption'] and score == (key - 1000) / 2
                check_latents(latent, expected_latents(encoder, image)[0])
                assert width in (20, 40, 17)
    encode(source, encoder, tmp_path / 'moments', moments=True)
    data_set = built.build(tmp_path / 'moments', '', tmp_path / 'moments-data')
    data = input_pipeline.open_data(data_set)
    assert (data.metadata['moments'], data.stats().latents_shape) == ('deviation', (1, 4, 8, 8))


def test_the_report_takes_the_scale_of_the_vae_into_account(source, tmp_path):
    vae = small_vae.make(tmp_path / 'tiny')
    config = vae / 'config.json'
    scale = {'scaling_factor': 3.0, 'shift_factor': 0.25}
    config.write_text(json.dumps(json.loads(config.read_text()) | scale))
    encode(source, str(vae), tmp_path / 'out')
    data_set = built.build(tmp_path / 'out', '', tmp_path / 'data')
    assert input_pipeline.open_data(data_set).metadata['latent_scale'] == [3.0, 0.25]
    mix = input_pipeline.open_mix([{'dir': data_set}, {'dir': data_set, 'seed': 1}])
    assert input_pipeline.mix_stats(mix, '').latent_scale == [3.0, 0.25]
    [page] = pathlib.Path(data_set).glob('report-*.html')
    html = page.read_text()
    assert 'It is given the latents minus 0.25 times 3, which is the scale of tiny.' in html
    record = input_pipeline.records(data_set, features=('key', 'latents'))[0]
    expected = latent_rgb.latents_to_rgb(record['latents'][0], (3.0, 0.25))
    assert statistics.make_preview(0, b'', expected).png in html
    _, png = show.show_record(data_set, int(record['key']))
    assert png == pixels.encode_png(expected)

    encoding = tmp_path / 'out' / 'encoding.json'
    content = json_digest.unseal(encoding.read_bytes())
    for name, value in {
        'latent_scale': [0, 'x'],
        'vae': 'caf\udce9',
        'moments': 'no',
    }.items():
        other = {**content, 'settings': {**content['settings'], name: value}}
        encoding.write_bytes(json_digest.seal(other))
        with pytest.raises(ValueError, match=rf'json: is damaged \(settings: {name} is .*, expect'):
            source_folder.find_source(tmp_path / 'out')


LATENTS_AT = 800  # a byte of the first latents in a tar


def remove(path: pathlib.Path) -> None:
    path.unlink()


def change(path: pathlib.Path) -> None:
    damages.flip(path, LATENTS_AT)


def lengthen(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(512))


DAMAGED = {
    'is gone': (remove, r'00001\.tar: is missing, but \S+/encoding\.json names it'),
    'has other bytes': (change, r'00001\.tar: has .* now, but when it was encoded it had'),
    'is longer': (lengthen, r'00001\.tar: has .* now, but when it was encoded it had'),
}


@pytest.mark.parametrize('latents', ['records', 'in_place'])
@pytest.mark.parametrize(('damage', 'message'), DAMAGED.values(), ids=DAMAGED)
def test_each_tar_of_an_encoding_is_needed_as_it_was_encoded(
    source, expected, encoder, tmp_path, damage, message, latents
):
    out = write_files(tmp_path / 'out', expected)
    damage(out / '00001.tar')
    with pytest.raises(ValueError, match=message):
        built.build(out, '', tmp_path / 'data', latents=latents)
    with pytest.raises(ValueError, match=message):
        mirror.mirror(out, tmp_path / 'mirror')
    assert not (tmp_path / 'mirror' / '00001.tar').exists()
    with pytest.raises(ValueError, match=message):
        dry_run.plan_or_estimate(str(out), BuildSettings())
    assert encode(source, encoder, out).num_encoded == 8
    assert files_of(str(out)) == expected


@pytest.mark.parametrize(
    'name', ['00003.tar', 'more.pt', 'latents-3crop/000000-000009.pt', 'x.safetensors']
)
def test_no_other_latents_lie_with_an_encoding(expected, tmp_path, name):
    out = write_files(tmp_path / 'out', expected | {name: expected['00000.tar']})
    with pytest.raises(ValueError, match=rf'{name}: is not of the encoding, which '):
        source_folder.find_source(out)


def test_a_copy_of_an_encoding_is_as_complete(expected, tmp_path, caplog):
    mirror.mirror(write_files(tmp_path / 'out', expected), tmp_path / 'copy')
    copied = source_folder.find_source(tmp_path / 'copy')
    assert [x.recorded is not None for x in copied.latent_files] == [True] * 3
    (tmp_path / 'copy' / schema.CAPTIONS_FILE).write_bytes(b'')
    remove(next((tmp_path / 'copy' / '.mirror').iterdir()))
    assert source_folder.find_source(tmp_path / 'copy').latent_files == copied.latent_files
    remove(tmp_path / 'copy' / '00002.tar')
    with pytest.raises(ValueError, match=r'copy/00002\.tar: is missing, .* copy this file too'):
        source_folder.find_source(tmp_path / 'copy')


def test_each_bucket_names_its_own_tars(encoder, tmp_path):
    sizes = [(384, 192), (384, 192), (256, 256), (256, 256)]
    images = made_images.make_images(12, sizes)
    source, out = made_images.write(tmp_path / 'images', 'json', images), tmp_path / 'out'
    encode(source, encoder, out, size=256, buckets=True)
    before = files_of(str(out))
    shapes = sorted(path.parent.name for path in out.glob('*/00000.tar'))
    assert len(shapes) == 2
    with pytest.raises(ValueError, match=rf'out: its folders are sources, such as {shapes[0]}'):
        source_folder.find_source(out)
    for shape in shapes:
        found = source_folder.find_source(out / shape)
        assert [file.name for file in found.latent_files] == ['00000.tar', '00001.tar']
        remove(out / shape / '00001.tar')
        with pytest.raises(ValueError, match=rf'{shape}/00001\.tar: is missing, but'):
            source_folder.find_source(out / shape)
        (out / shape / schema.ENCODING_FILE).write_bytes(b'[]')
    assert encode(source, encoder, out, size=256, buckets=True).num_encoded == 4
    assert files_of(str(out)) == before


def test_an_encoding_on_the_hub_needs_all_its_tars(expected, hub, tmp_path):
    hub.commit(expected)
    found = source_folder.find_source('hf://datasets/owner/name')
    assert [file.recorded is not None for file in found.latent_files] == [True] * 3
    hub.commit(expected | {'00001.tar': damages.flipped(expected['00001.tar'], LATENTS_AT)})
    with pytest.raises(ValueError, match=r'00001\.tar: has .* now, but when it was encoded'):
        built.build('hf://datasets/owner/name', '', tmp_path / 'data')
    hub.commit({name: data for name, data in expected.items() if name != '00001.tar'})
    with pytest.raises(ValueError, match=r'/00001\.tar: is missing, but hf://'):
        source_folder.find_source('hf://datasets/owner/name')


def test_an_encoding_in_a_bucket_needs_all_its_tars(expected, bucket):
    write_files('gs://latents/out', expected)
    found = source_folder.find_source('gs://latents/out')
    assert all(file.recorded == file.state for file in found.latent_files)
    bucket.put('latents', 'out/00001.tar', damages.flipped(expected['00001.tar'], LATENTS_AT))
    with pytest.raises(ValueError, match=r'00001\.tar: has .* now, but when it was encoded'):
        source_folder.find_source('gs://latents/out')
    storage.open_writable_folder('gs://latents/out').remove(['00001.tar'])
    with pytest.raises(ValueError, match=r'out/00001\.tar: is missing, but gs://latents/out/enc'):
        source_folder.find_source('gs://latents/out')


@pytest.mark.parametrize('kind', ['json', 'tar', 'parquet', 'index.json'])
def test_a_build_of_images_tells_how_they_are_encoded(tmp_path, kind):
    images = made_images.write(tmp_path / "strange's images", kind, IMAGES[:4])
    if kind == 'index.json':
        (images / kind).write_text('{}')
    message = f'coyo11m_tfds.encode_images --images={shlex.quote(str(images))} --vae=VAE --out='
    for latents in ('records', 'in_place'):
        with pytest.raises(ValueError, match=re.escape(message)):
            built.build(images, '', tmp_path / 'data', latents=latents)


REFUSED = {
    'a size that is no multiple of the factor of the VAE': (
        {'size': 15},
        'size=15: expected a multiple of 2, as ',
    ),
    'buckets of a size that has one': (
        {'size': 64, 'buckets': True},
        'size=64: has only one bucket, expected e.g. 256',
    ),
    'a size above that of every image': (
        {'size': 64},
        'no image is left.*\n22 left out: 22 x too small',
    ),
    'a size of more pixels than an image may have': (
        {'size': 64_000, 'buckets': True},
        'size=64000: expected at most 5792, because of max_pixels=33554432',
    ),
    'images of more pixels than Pillow opens': (
        {'max_pixels': 10**9},
        'max_pixels=1000000000: expected from 1 to 178956970',
    ),
    'a size with a point': ({'size': 16.5}, r'size=16\.5: expected a whole number'),
    'a truth as a size': ({'size': True}, 'size=True: expected a whole number'),
    'a text as a share': ({'max_bad': '0.1'}, "max_bad='0.1': expected a number"),
    'no share': ({'max_bad': float('nan')}, 'max_bad=nan: expected from 0 to 1'),
    'a word as a truth': ({'buckets': 'no'}, "buckets='no': expected True or False"),
    'no column of captions': ({'caption_column': None}, 'caption_column=None: expected a string'),
    'no path of a folder': ({'scratch_dir': 5}, 'scratch_dir=5: expected a path'),
    'less than no workers': ({'num_workers': -1}, 'num_workers=-1: expected at least 0'),
    'a scratch folder in a bucket': (
        {'scratch_dir': 'gs://bucket/scratch'},
        "scratch_dir is 'gs://bucket/scratch', expected a local folder",
    ),
    'two crops': ({'crops': 2}, 'crops=2: expected 1 or 3'),
    'a dtype that NumPy lacks': (
        {'dtype': 'bfloat16'},
        "dtype='bfloat16': expected 'float16' or 'float32'",
    ),
    'a part after the last': ({'share': (2, 2)}, 'part 2/2: expected I/N'),
    'keys of names': ({'keys': 'name'}, "keys='name': expected 'data' or 'path'"),
    'captions of a column that is not there': (
        {'caption_column': 'alt'},
        r"has 'alt', expected one of their texts \['caption'\]",
    ),
}


@pytest.mark.parametrize(('options', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_encoded_is_refused(source, encoder, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        encode(source, encoder, tmp_path / 'out', **options)


UNLISTED = {
    'a VAE that is not there': ('no-vae', 'out', {}, "cannot load the VAE '.*/no-vae'"),
    'a size that its factor does not divide': ('', 'out', {'size': 15}, 'size=15: expected a mult'),
    'a folder in a file': ('', 'file/out', {}, '/file is a file; name another folder'),
    'a scratch folder in a bucket': ('', 'out', {'scratch_dir': 'gs://b/s'}, 'expected a local fo'),
}


@pytest.mark.parametrize(('vae', 'out', 'options', 'message'), UNLISTED.values(), ids=UNLISTED)
def test_what_needs_no_list_of_images_is_checked_before_it(
    encoder, tmp_path, vae, out, options, message
):
    (tmp_path / 'file').touch()
    # Those that are listed are not there.
    images = tmp_path / 'nope'
    with pytest.raises((ValueError, OSError), match=message):
        encode(images, f'{tmp_path}/{vae}' if vae else encoder, tmp_path / out, **options)


def test_a_folder_without_images_is_told_from_none(encoder, tmp_path, bucket, hub):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'file.jpg').write_bytes(IMAGES[0].data)
    with pytest.raises(ValueError, match=r'/empty: has no images, expected \.jpg, \.jpeg, \.png, '):
        encode(tmp_path / 'empty', encoder, tmp_path / 'out')
    hub.commit({'x.jpg': b''})
    for missing in (
        tmp_path / 'nope',
        tmp_path / 'file.jpg',
        'gs://images/nope',
        'hf://datasets/owner/name/nope',
    ):
        with pytest.raises(ValueError, match=f'{missing}: there is no such folder, expected one o'):
            encode(missing, encoder, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_the_commands_at_the_end_fit_the_numbers_of_images():
    counts = ImageCounts()
    counts.shapes.update({'256x256': 250, '320x192': 750, '192x320': 90})
    small, embed, build, train = encode_images.describe_next('a b/out🦊', counts, True).splitlines()
    assert small == 'Too few images for the mixture: 192x320'
    loop = 'for shape in 256x256 320x192; do python -m coyo11m_tfds.'
    assert embed.startswith(f'{loop}embed_captions ') and build.startswith(f'{loop}build ')
    folders = [f'words:a b/out🦊-words/{shape}' for shape in ('256x256', '320x192')]
    assert f"'--encoder={','.join(folders)}'" in build
    assert '"validation_fraction": 0.04' in build
    flags = dict(flag.split('=', 1) for flag in shlex.split(train) if '=' in flag)
    mix = ast.literal_eval(flags['--config.data.mix'])
    assert [(x['dir'], x['weight'], x['seed']) for x in mix] == [
        ('a b/out🦊-data/coyo11m_tfds/256x256/1.0.0', 25, 0),
        ('a b/out🦊-data/coyo11m_tfds/320x192/1.0.0', 75, 1),
    ]
    fractions = [choose_validation_fraction(n) for n in (5, 320, 1000, 10**6)]
    assert fractions == [0.5, 0.031, 0.01, 0.01]
    page = (CHECKOUT / 'docs' / 'images.md').read_text()
    [fraction] = re.findall(r'"validation_fraction": ([\d.]+)', page)
    assert float(fraction) >= choose_validation_fraction(320)
    # A build leaves out what has no caption.
    assert '--config' not in encode_images.describe_next('x', counts, False)
    counts.num_without_caption = 590
    assert '"validation_fraction": 0.02' in encode_images.describe_next('x', counts, False)
    counts.num_without_caption = counts.shapes.total()
    told = encode_images.describe_next('x', counts, True)
    assert 'No image has a caption. ' in told
    assert ' --caption_column' in told
