"""Programs that read end when they are done or have failed: at once, and with their own status."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

from coyo11m_tfds import schema
from tests import runs
from tests.reading import small_dataset

PATIENCE = 300  # seconds; each is over in a few, on a machine that has nothing else to do

# (how it ends, what it reads): status, and what it says last but for TensorFlow's own lines.
ENDS = {
    ('loop', 'damaged'): (1, 'cannot be read'),
    ('loop', 'missing'): (1, 'is missing: restore it'),
    ('to_device', 'damaged'): (1, 'cannot be read'),
    ('to_device', 'missing'): (1, 'is missing: restore it'),
    ('raise', 'whole'): (1, 'RuntimeError: the step has failed'),
    ('exit', 'whole'): (1, 'leaving'),
    ('interrupt', 'whole'): (-signal.SIGINT, 'KeyboardInterrupt'),
    ('interrupt twice', 'whole'): (-signal.SIGINT, ''),
    ('return', 'whole'): (0, ''),
    ('hold', 'whole'): (0, ''),
}


def damage(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    for place in range(20_000, len(content), 300_000):
        content[place] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Data sets that are whole, have damaged records, and lack shards."""
    root = tmp_path_factory.mktemp('data')
    small_dataset.write(root / 'whole' / '1.0.0', {schema.TRAIN: (400, 131, 500, 64, 500, 205)})
    for name, spoil in {'damaged': damage, 'missing': pathlib.Path.unlink}.items():
        shutil.copytree(root / 'whole', root / name)
        for path in sorted((root / name).glob('1.0.0/*.tfrecord*'))[1:]:
            spoil(path)
    return root


def start(how: str, data_dir: pathlib.Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, '-m', 'tests.reading.ended_reader', how, str(data_dir)],
        cwd=runs.CHECKOUT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check(process: subprocess.Popen, status: int, message: str) -> None:
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f'hangs after {process.communicate()[0]}') from None
    assert process.returncode == status, output
    assert message in output
    # What TensorFlow says of functions that are called too late, or whose thread was ended.
    for noise in (
        'interpreter state',
        'terminate called',
        'Exception ignored',
        'Fatal Python',
        'Type inf',
    ):
        assert noise not in output, output
    # Nor anything else that TensorFlow logs after the error.
    error = output.rfind('errors_impl.')
    assert error < 0 or not re.search(r'^[IWEF]\d{4} ', output[error:], re.MULTILINE), output


def test_a_loop_over_batches_ends(folder):
    chosen = {key: end for key, end in ENDS.items() if key[0] == 'loop'}
    processes = [(start(how, folder / data / '1.0.0'), end) for (how, data), end in chosen.items()]
    for process, end in processes:
        check(process, *end)


@pytest.mark.slow
def test_programs_that_read_end_fifty_times_out_of_fifty(folder):
    for attempt in range(50):
        (how, data), end = list(ENDS.items())[attempt % len(ENDS)]
        check(start(how, folder / data / '1.0.0'), *end)
