"""Drills: encoding that is killed at random moments, and images on their whole way to pictures.

`COYO11M_DRILL_SEED` chooses other moments, `COYO11M_DRILL_SHARE` how many of them, and of images.
"""

import contextlib
import os
import random
import time

import pytest

from coyo11m_tfds import storage
from tests import children, encode_program, made_images, small_vae

SHARE = float(os.environ.get('COYO11M_DRILL_SHARE', '1'))
SEED = os.environ.get('COYO11M_DRILL_SEED', '0')
OPTIONS = {'size': 16, 'part_images': 16, 'num_workers': 2}

pytestmark = pytest.mark.slow


def files_of(out: str) -> dict[str, bytes]:
    folder = storage.open_folder(out)
    return {name: folder.read(name) for name in folder.sizes()}


@pytest.mark.parametrize('kind', ['local', 'bucket'])
def test_killed_at_random_moments(gcs, tmp_path, kind):
    """The process or one of its workers; two processes share the work."""
    choose = random.Random(f'{SEED}-{kind}')
    images, vae = (
        made_images.write(tmp_path / 'images', 'json', made_images.make_images(160)),
        tmp_path / 'vae',
    )
    vae.mkdir()
    small_vae.make(vae)
    root = str(tmp_path)
    if kind == 'bucket':
        gcs.upload_folder(images, 'gs://images/photos')
        images, root = 'gs://images/photos', 'gs://latents'
        gcs.latency = 0.002

    def start(out: str, share: tuple[int, int]):
        options = OPTIONS | {'share': share, 'scratch_dir': str(tmp_path / 'scratch')}
        arguments = gcs.env, str(tmp_path / 'log'), str(images), str(vae), out, options
        return encode_program.start(*arguments)

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
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(pid, 9)
                    kills += 1
            for process in processes:
                process.join(120)
            children.wait_until(lambda pids=pids: not any(map(children.is_running, pids)), 20)
            assert {n: x for n, x in files_of(out).items() if n.endswith('.tar')}.items() <= (
                tars.items()
            )
        assert finish(out) == expected
