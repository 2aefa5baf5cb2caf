"""What is set before TensorFlow starts, and that programs end: at once, with their own status."""

import os
import pathlib
import re
import shutil
import signal

import pytest

from coyo11m_tfds import schema
from coyo11m_tfds.process import preparation
from tests import children
from tests.reading import small_dataset

PATIENCE = 300  # seconds; each is over in a few, on a machine that has nothing else to do

# How a program goes on after `batches`, what it reads, its status, and what it says in the end.
ENDS = {
    'loop': ('for _ in batches.as_numpy_iterator(): pass', 'damaged', 1, 'cannot be read'),
    'missing': ('for _ in batches.as_numpy_iterator(): pass', 'missing', 1, 'restore it'),
    'devices': ('for _ in on_device(): pass', 'damaged', 1, 'cannot be read'),
    'raise': ("raise RuntimeError('the step has failed')", 'whole', 1, 'the step has failed'),
    'exit': ("sys.exit('leaving')", 'whole', 1, 'leaving'),
    'interrupt': ('signal.raise_signal(signal.SIGINT)', 'whole', -signal.SIGINT, 'Interrupt'),
    'interrupt twice': (
        'atexit.register(signal.raise_signal, signal.SIGINT); signal.raise_signal(signal.SIGINT)',
        'whole',
        -signal.SIGINT,
        '',
    ),
    'return': ('', 'whole', 0, ''),
    'hold': ('kept.append(on_device()); next(kept[-1])', 'whole', 0, ''),
}

PROGRAM = """
import atexit, os, signal
os.environ['JAX_PLATFORMS'] = 'cpu'
from coyo11m_tfds.process import preparation
preparation.prepare_process()
import jax
import input_pipeline

# A shell that starts the tests in the background has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings = dict(batch_size=32, seed=5, chunk=32, lanes=4, window=64)
batches = input_pipeline.train_dataset(sys.argv[1], features=('key', 'latents'), **settings)

def on_device():
    mesh = jax.make_mesh((1,), ('data',), devices=jax.devices()[:1])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    return input_pipeline.to_device(batches, sharding)

kept = [batches.as_numpy_iterator(), iter(batches)]  # as a notebook keeps what it has made
for iterator in kept:
    next(iterator)
"""


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


def check(how: str, folder: pathlib.Path) -> None:
    code, data, status, message = ENDS[how]
    with children.python(f'{PROGRAM}{code}\n', folder / data / '1.0.0') as child:
        out, output = child.communicate(timeout=PATIENCE)
    assert (child.returncode, out) == (status, ''), output
    assert message in output
    # What TensorFlow says of functions that are called too late, or whose thread was ended.
    noises = ['interpreter state', 'terminate called', 'Exception ignored', 'Fatal Python']
    # What it says of the machine when it starts.
    for noise in (*noises, 'Type inf', 'oneDNN', 'CPU instructions'):
        assert noise not in output, output
    # Nor anything else that TensorFlow logs after the error.
    error = output.rfind('errors_impl.')
    assert error < 0 or not re.search(r'^[IWEF]\d{4} ', output[error:], re.MULTILINE), output


def test_a_loop_ends_at_damage_and_tensorflow_says_nothing_of_the_machine(folder, monkeypatch):
    for name in ('TF_CPP_MIN_LOG_LEVEL', 'TF_ENABLE_ONEDNN_OPTS'):
        monkeypatch.delenv(name, raising=False)
    check('loop', folder)


LEFT_OPEN = """
import jax
import input_pipeline

mesh = jax.make_mesh((1,), ('data',), devices=jax.devices()[:1])
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))

settings = dict(batch_size=32, seed=5, chunk=32, lanes=4, window=64, features=['key'])

def arrays(engine):
    yield from input_pipeline.train_arrays(sys.argv[1], sharding, engine=engine, **settings)

# In a global variable, in a module that outlives it, and in both an iterator within another.
left = arrays('rows')
jax.left = [arrays('chunks'), input_pipeline.train_batches(sys.argv[1], **settings)]
for iterator in (left, *jax.left):
    next(iterator)
"""


def test_iterators_that_are_left_open_say_nothing(folder):
    with children.python(LEFT_OPEN, folder / 'whole' / '1.0.0') as child:
        output = child.communicate(timeout=PATIENCE)
    assert (child.returncode, output) == (0, ('', ''))


def test_what_the_environment_says_of_the_log_stays(monkeypatch):
    monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '0')
    preparation.quiet_tensorflow()
    assert os.environ['TF_CPP_MIN_LOG_LEVEL'] == '0'


@pytest.mark.slow
def test_programs_that_read_end_fifty_times_out_of_fifty(folder):
    for attempt in range(50):
        check(list(ENDS)[attempt % len(ENDS)], folder)
