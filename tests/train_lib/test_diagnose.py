"""What holds a run back: its own engine is timed, and the figures lead to a verdict."""

import functools
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import input_pipeline
from coyo11m_tfds import schema
from tests import runs
from tests.checkout import CHECKOUT
from tests.reading import small_dataset
from train_lib import diagnose, input_facts, limits

SMALL = {'batch_size': 16, 'data.lanes': 4}


def measure(path: pathlib.Path, **changes) -> limits.Facts:
    config = runs.small_config(path, **SMALL, **changes)
    return input_facts.measure_facts(config, num_hosts=2, step_ms=0.001, seconds=0.1)


def test_the_engine_of_the_run_is_timed(mini_dataset, monkeypatch):
    facts = measure(mini_dataset, **{'data.engine': 'chunks'})
    assert facts.engine == 'chunks' and 'a batch alone, by chunks: ' in diagnose.describe(facts)
    # Two lanes of this host, two times four windows of 32 records: latents, text and keys.
    assert facts.window_bytes == pytest.approx(2 * 2 * 4 * 32 * (8192 + 1280 + 8), rel=0.01)

    @functools.wraps(input_pipeline.train_dataset)  # its signature is looked at
    def refuse(*arguments, **keywords):
        raise AssertionError('read by chunks')

    monkeypatch.setattr(input_pipeline, 'train_dataset', refuse)
    facts = measure(mini_dataset)
    assert facts.engine == 'rows' and facts.window_bytes == 0
    assert min(facts.batch_seconds, facts.request_seconds, facts.chunk_seconds) > 0


def test_a_chunk_of_latents_in_place_is_timed_with_them(tmp_path):
    path = tmp_path / 'small' / schema.VERSION
    small_dataset.write(path, {schema.TRAIN: (64,) * 6}, source=tmp_path / 'source')
    facts = measure(path)
    assert facts.chunk_bytes > 32 * 3 * schema.LATENT_NBYTES
    assert facts.shard_bytes > 64 * 3 * schema.LATENT_NBYTES
    assert f'one chunk of {facts.chunk_bytes / 1e6:.1f} MB: ' in diagnose.describe(facts)


@pytest.mark.slow
def test_the_command_times_a_step_of_the_model_here(mini_dataset):
    flags = [f'--config.{name}={value}' for name, value in {**runs.SMALL, **SMALL}.items()]
    command = [sys.executable, '-m', 'train_lib.diagnose', '--config=default', '--seconds=0.2']
    ended = subprocess.run(
        [*command, *flags, f'--config.data.dir={mini_dataset}'],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    names = ('a step alone: ', 'a batch alone, by rows: ', 'a step with both: ')
    times = [
        float(ended.stdout.partition(n)[2].partition(' ms')[0].replace(',', '')) for n in names
    ]
    assert np.greater(times, 0).all()
    assert re.search(r'^- (Step-bound|Input-bound|Both): ', ended.stdout, re.MULTILINE)


def test_what_cannot_be_diagnosed_is_an_error_in_one_line(tmp_path):
    command = [sys.executable, '-m', 'train_lib.diagnose', '--config=default']
    ended = subprocess.run(
        [*command, f'--config.data.dir={tmp_path}/none', '--step_ms=1'],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 1 and not ended.stdout
    assert f'{tmp_path}/none' in ended.stderr.splitlines()[-1]
    assert ended.stderr.splitlines()[-1].startswith('error: ')
