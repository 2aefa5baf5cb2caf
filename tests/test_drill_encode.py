"""Drills: encoding that is killed at random moments, and images on their whole way to pictures.

`COYO11M_DRILL_SEED` chooses other moments, `COYO11M_DRILL_SHARE` how many of them, and of images.
"""

import json
import pathlib
import random
import time

import pytest

from coyo11m_tfds import schema
from tests import children, encode_program, made_images, small_vae
from tests.damages import SEED, SHARE
from tests.test_encode_images import files_of
from tests.test_readme import blocks
from tests.test_snippets import run

OPTIONS = {'size': 16, 'part_images': 16, 'num_workers': 2}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize('kind', ['local', 'bucket'])
def test_killed_at_random_moments(gcs, tmp_path, kind):
    """The process or one of its workers; two processes share the work."""
    choose = random.Random(f'{SEED}-{kind}')
    images = made_images.write(tmp_path / 'images', 'json', made_images.make_images(160))
    vae, root = small_vae.make(tmp_path / 'vae'), str(tmp_path)
    if kind == 'bucket':
        gcs.upload_folder(images, 'gs://images/photos')
        images, root = 'gs://images/photos', 'gs://latents'
        gcs.latency = 0.002

    def start(out: str, share: tuple[int, int]):
        fields = OPTIONS | {'scratch_dir': str(tmp_path / 'scratch')}
        arguments = gcs.env, str(tmp_path / 'log'), str(images), str(vae), out, share, fields
        return children.fork(encode_program.run, *arguments)

    def finish(out: str) -> dict[str, bytes]:
        process = start(out, (0, 1))
        process.join(120)
        assert process.exitcode == 0, (tmp_path / 'log').read_text()[-2000:]
        return files_of(out)

    begin = time.monotonic()
    expected = finish(f'{root}/expected')
    seconds, kills = time.monotonic() - begin, 0
    tars = {name: data for name, data in expected.items() if name.endswith('.tar')}
    assert len(tars) == 10
    number = 0
    while kills < 30 * SHARE:
        number += 1
        out = f'{root}/{number}'
        for _ in range(choose.randrange(1, 5)):
            processes = [start(out, (0, 2)), start(out, (1, 2))]
            victim = choose.choice(processes)
            time.sleep(choose.random() * seconds)
            pids = [pid for x in processes for pid in (x.pid, *children.of(x.pid))]
            # One of the workers, whose image is then tried again, or the process itself.
            for pid in choose.choice([[victim.pid], children.of(victim.pid)[-1:]]):
                kills += children.kill(pid)
            for process in processes:
                process.join(120)
            children.wait_for_end(pids)
            assert {n: x for n, x in files_of(out).items() if n.endswith('.tar')}.items() <= (
                tars.items()
            )
        assert finish(out) == expected


# Widths and heights that lead to the three buckets of 256 pixels, and to none.
SIZES = [(300, 280), (420, 300), (300, 420), (261, 512), (200, 300), (900, 300)]


@pytest.fixture
def photos(tmp_path) -> pathlib.Path:
    """2,000 images in folders, 40 of them bad."""
    count = int(2000 * max(SHARE, 0.5))  # so that a build is printed of each bucket
    images = made_images.make_images(count, SIZES)
    bad = [b'', b'<!DOCTYPE html>', b'RIFF', images[0].data[:900], images[2].data[:700]]
    for number in range(0, count, 50):
        images[number] = images[number]._replace(data=bad[number // 50 % len(bad)])
    return made_images.write(tmp_path / 'PHOTOS', 'json', images)


def test_the_page_leads_from_images_to_pictures(photos, tmp_path):
    small_vae.make(tmp_path / 'vae', halvings=3)

    def here(command: str) -> str:
        return command.replace('stabilityai/sdxl-vae', 'vae').replace(
            '--images=PHOTOS', '--images=PHOTOS --max_bad=0.03'
        )

    text = '\n'.join(text for _, text in blocks('docs/images.md')).replace('\\\n', '')
    commands = []
    for line in text.splitlines():
        # Those of emoji are for a real VAE, and train for 45 minutes.
        if line.startswith('python -m ') and 'EMOJI' not in line:
            commands.append(here(line))
    for command in commands[:3]:  # of one resolution: encode, build, add a column of numbers
        run(['bash', '-c', command], tmp_path)
    encode, draw = commands[3:]
    said = run(['bash', '-c', encode], tmp_path)
    count = len(list(photos.glob('*/*.json')))
    assert f'{count // 50} bad: ' in said
    embed, build, train = said.splitlines()[-3:]
    run(['bash', '-c', embed], tmp_path)
    run(['bash', '-c', build], tmp_path)
    fields = 'num_steps=30 batch_size=8 model.name=tiny/8 eval_every=30 preview_every=30'
    flags = ' '.join(f'--config.{x}' for x in (*fields.split(), 'optimizer.warmup_steps=1'))
    run(['bash', '-c', f'{train} {flags} --config.preview.vae=vae'], tmp_path)
    run(['bash', '-c', f'{draw} --num_steps=2'], tmp_path)
    folders = {path.name for path in (tmp_path / 'BUCKETS').iterdir() if path.is_dir()}
    shapes = folders - {'.encoded'}
    assert len(shapes) == 3
    for shape in shapes:
        folder = tmp_path / 'BUCKETS-data' / schema.NAME / shape / schema.VERSION
        assert json.loads((folder / schema.METADATA_FILE).read_text())['vae'] == 'vae'
    assert list((tmp_path / 'BUCKETS-run').rglob('*.png'))
