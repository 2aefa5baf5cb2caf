"""Hostile and damaged images, tars and Parquet files through the whole of `encode_images`."""

import pathlib
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from coyo11m_tfds import encode_images
from coyo11m_tfds.encoding.settings import EncodingSettings
from coyo11m_tfds.pictures import pixels
from coyo11m_tfds.pictures.vae_encoder import VaeEncoder
from tests import children, hostile_images, made_images, small_vae
from tests.checkout import CHECKOUT
from tests.damages import SEED, SHARE
from tests.made_images import MadeImage

pytestmark = pytest.mark.slow

NUM_DAMAGES = round(2000 * SHARE)
NUM_GOOD = 200


def make_image(number: int, data: bytes, suffix: str) -> MadeImage:
    return MadeImage(
        f'img.{number:04}.{suffix}', data, {'key': number, 'caption': f'Image {number}'}
    )


def run(images: pathlib.Path, vae: pathlib.Path, *flags: str) -> tuple[int, str, float]:
    """Exit status, output, and the peak of the memory of all processes together, in MB."""
    out = images.with_name(f'{images.name}-out')
    places = f'--images={images}', f'--vae={vae}', f'--out={out}'
    command = [sys.executable, '-m', 'coyo11m_tfds.encode_images', *places, *flags]
    command += ['--size=64', '--num_workers=2']
    log, peak = out.with_suffix('.log'), 0
    with (
        log.open('w') as file,
        subprocess.Popen(command, cwd=CHECKOUT, stdout=file, stderr=file) as process,
    ):
        while process.poll() is None:
            pids = [process.pid, *children.of(process.pid)]
            peak = max(peak, sum(map(resident_kilobytes, pids)))
            time.sleep(0.02)
    output = log.read_text()
    assert 'Traceback' not in output, output
    return process.returncode, output, peak / 1000


def resident_kilobytes(pid: int) -> int:
    try:
        status = pathlib.Path(f'/proc/{pid}/status').read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    resident = re.search('VmRSS:(.*)kB', status)
    return int(resident[1]) if resident else 0


@pytest.fixture(scope='module')
def vae(tmp_path_factory) -> pathlib.Path:
    return small_vae.make(tmp_path_factory.mktemp('small-vae'))


@pytest.fixture(scope='module')
def good() -> list[MadeImage]:
    return [
        make_image(number, hostile_images.encode(hostile_images.photo(seed=number), 'JPEG'), 'jpg')
        for number in range(NUM_GOOD)
    ]


@pytest.fixture(scope='module')
def hostile() -> list[MadeImage]:
    """Damaged and hostile images, each under the suffix that its name claims."""
    files, random = hostile_images.undamaged(), np.random.default_rng(SEED)
    images = [(hostile_images.damage(files[k % 8], random), 'png') for k in range(NUM_DAMAGES)]
    images += [(data, name.rpartition('.')[2]) for name, data in hostile_images.make().items()]
    limit = pixels.Target(()).max_pixels
    images += [(data, suffix) for suffix, data in hostile_images.make_large(limit)]
    return [make_image(NUM_GOOD + k, *image) for k, image in enumerate(images)]


@pytest.fixture(scope='module')
def undisturbed_peak(vae, good, hostile, tmp_path_factory) -> float:
    """Megabytes of a run over as many good images."""
    images = [*good, *(x._replace(data=good[0].data) for x in hostile)]
    folder = made_images.write(tmp_path_factory.mktemp('undisturbed') / 'images', 'json', images)
    status, output, peak = run(folder, vae)
    assert status == 0 and f'{len(images):,} images' in output, output
    return peak


@pytest.mark.parametrize('kind', ['json', 'tar', 'parquet'])
def test_hostile_images_are_counted_and_named(vae, good, hostile, undisturbed_peak, tmp_path, kind):
    images = made_images.write(tmp_path / 'images', kind, [*good, *hostile])
    status, output, peak = run(images, vae, '--max_bad=1')
    assert status == 0, output
    encoded, small, bad = (
        sum(
            int(number.replace(',', ''))
            for number in re.findall(f'^([0-9,]+) {what}', output, re.M)
        )
        for what in ('images', 'left out', 'bad')
    )
    assert encoded + small + bad == len(good) + len(hostile)
    assert encoded > NUM_GOOD and bad > NUM_DAMAGES / 9
    assert peak < undisturbed_peak + 1000
    # The limit is checked again although all is encoded.
    status, output, _ = run(images, vae)
    assert status == 1 and 'more than max_bad=0.01' in output.splitlines()[-1]


@pytest.mark.parametrize(
    ('kind', 'name'), [('tar', '00000.tar'), ('parquet', 'train-00000-of-00001.parquet')]
)
def test_damaged_files_are_named(vae, good, tmp_path, kind, name):
    """Through the function, because a start of the program takes 5 s."""
    source, count = made_images.write(tmp_path / 'images', kind, good[:10]), NUM_DAMAGES // 10
    encoder, path, refusals = VaeEncoder(str(vae)), source / name, []
    data, random = path.read_bytes(), np.random.default_rng(SEED)
    for _ in range(count):
        path.write_bytes(hostile_images.damage(data, random))
        try:
            settings = EncodingSettings(size=64, max_bad=1, num_workers=1)
            encode_images.encode(source, encoder, tmp_path / 'out', settings)
        except (ValueError, OSError) as error:
            refusals.append(str(error))
        shutil.rmtree(tmp_path / 'out', ignore_errors=True)
    assert len(refusals) > count / 5
    assert [message for message in refusals if name not in message] == []
