"""From the command to the first step on the latents of a hub, over a line of 20 MB/s."""

import os
import pathlib
import time

import pytest
import torch

from coyo11m_tfds import schema
from tests import children, made_sources
from tests.fakes.cloud import Hub, fake_hub
from tests.test_in_place_hub import REPO, files_below

NUM_FILES, NUM_ROWS = 20, 4069  # of 24,576 bytes: 100 MB a file
BUILD = '{"name": "hub", "latents": "in_place", "read_latents": "heads"}'


def write_source(folder: pathlib.Path) -> None:
    latents = made_sources.make_latents(NUM_ROWS)
    keys = torch.arange(NUM_FILES * NUM_ROWS)
    for number, file_keys in enumerate(keys.split(NUM_ROWS)):
        content = {schema.PT_KEYS: file_keys.clone(), schema.PT_LATENTS: latents.roll(number, 0)}
        path = made_sources.latents_file(folder, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    made_sources.write_captions(folder, {key: f'Caption of {key}.' for key in keys.tolist()})


@pytest.mark.slow
def test_the_first_step_comes_soon_and_of_few_bytes(tmp_path):
    write_source(tmp_path / 'source')
    size = sum(path.stat().st_size for path in (tmp_path / 'source').rglob('*.*'))
    with fake_hub(files_below(tmp_path / 'source')) as hub:
        hub.bytes_per_second = 20e6
        hub.latency = 0.08
        start = time.monotonic()
        build = f'--manual_dir={REPO}', f'--data_dir={tmp_path}', f'--config={BUILD}'
        run('coyo11m_tfds.build', *build, '--encoder=words', **hub.env)
        report('built', hub, start, size)
        data = f'--config.data.dir={tmp_path}/coyo11m_tfds/hub/1.0.0'
        # Its end comes after the first step, and evaluates and draws nothing.
        fields = 'num_steps=1', 'optimizer.warmup_steps=0', 'eval_every=0', 'preview_every=0'
        once = [f'--config.{field}' for field in fields]
        run('train_lib.main', '--config=small', f'--workdir={tmp_path}/W', data, *once, **hub.env)
        assert report('trained a step', hub, start, size) < 0.05 * size


def run(program: str, *flags: str, **variables: str) -> None:
    """Runs a program, which must end well."""
    child = children.program(program, *flags, **variables)
    assert child.returncode == 0, child.stdout + child.stderr


def report(what: str, hub: Hub, start: float, size: int) -> int:
    """Prints the time since the start, that of the CPU and the bytes sent; returns the bytes."""
    num_bytes = sum(request.nbytes for request in hub.requests)
    seconds = time.monotonic() - start
    cpu_seconds = os.times().children_user + os.times().children_system
    print(f'{what} after {seconds:.0f} s, {cpu_seconds:.0f} s of CPU in all programs')
    print(f'{num_bytes:,} of {size:,} bytes ({num_bytes / size:.2%})')
    return num_bytes
