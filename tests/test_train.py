"""Training as a whole, on a small data set made here: it runs, it resumes exactly, it refuses.

Runs that are to be killed are real processes, started as a user starts them.
"""

import collections
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from jax.experimental.compilation_cache import compilation_cache
from PIL import Image

from configs import default
from coyo11m_tfds import schema
from train_lib import checkpoint, data, sharding, train

REPO = pathlib.Path(__file__).parents[1]

QUICK = '--xla_backend_optimization_level=0'  # compiles in a third of the time

# What makes a run small; as flags for a process, as fields in this one.
SMALL = {
    'batch_size': 8,
    'num_steps': 30,
    'data.chunk': 32,
    'data.lanes': 2,
    'data.window': 32,
    'model.name': 'tiny/16',  # 4 tokens
    'model.dtype': 'float32',
    # The compiled step is then the same for every number of steps.
    'optimizer.warmup_steps': 1,
    'optimizer.schedule': 'constant',
    'preview.count': 3,
    'preview.num_steps': 2,
    'log_every': 1,
    'eval_every': 10,
    'preview_every': 0,
    'checkpoint_every': 3,
    'keep_checkpoints': 2,
}


@pytest.fixture(scope='module')
def data_dir(mini_dataset):
    return mini_dataset


@pytest.fixture(scope='module', autouse=True)
def compiled(tmp_path_factory):
    """Lets runs share what they compile; the environment for processes that shall do so too."""
    folder = str(tmp_path_factory.mktemp('compiled'))
    jax.config.update('jax_compilation_cache_dir', folder)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
    compilation_cache.reset_cache()
    yield {
        'JAX_COMPILATION_CACHE_DIR': folder,
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1',
        'JAX_PLATFORMS': 'cpu',
        'TF_CPP_MIN_LOG_LEVEL': '2',
    }
    jax.config.update('jax_compilation_cache_dir', None)
    compilation_cache.reset_cache()


def small_config(data_dir, **changes):
    config = default.get_config()
    config.update_from_flattened_dict(SMALL | {'data.dir': str(data_dir)} | changes)
    return config


def start(data_dir, workdir, env, **changes):
    """Starts a run as a process of its own."""
    fields = SMALL | {'data.dir': data_dir} | changes
    flags = [f'--config.{name}={value}' for name, value in fields.items()]
    command = [sys.executable, '-m', 'train_lib.main', '--config=configs/default.py', *flags]
    return subprocess.Popen(
        [*command, f'--workdir={workdir}'],
        cwd=REPO,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_scalars(workdir):
    """All values that were ever written: `{(tag, step): [values]}`."""
    values = collections.defaultdict(list)
    for path in sorted(workdir.glob('events.out.tfevents.*')):
        # A process that was killed may leave half a record at the end.
        records = tf.data.TFRecordDataset(str(path)).ignore_errors()
        for record in records.as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == 'scalars' or value.tensor.dtype == 1:
                    values[value.tag, event.step].append(tf.make_ndarray(value.tensor).item())
    return values


def losses(workdir):
    """`{(tag, step): value}` of losses; a value written twice has to be the same bit for bit."""
    found = {}
    for key, values in read_scalars(workdir).items():
        if 'loss' in key[0]:
            assert len(set(values)) == 1, (key, values)
            found[key] = values[0]
    return found


def rewritten(data_dir, folder, field):
    """A copy of a data set whose metadata say that a field is 'another'."""
    shutil.copytree(data_dir, folder)
    path = folder / 'metadata.json'
    metadata = json.loads(path.read_text())
    assert field in metadata
    path.write_text(json.dumps(metadata | {field: 'another'}))
    return folder


def metadata_alone(data_dir, folder):
    """A data set without records, which TFDS can make up."""
    folder.mkdir()
    for name in ('dataset_info.json', 'features.json', 'metadata.json'):
        shutil.copy(data_dir / name, folder)
    return folder


def saved_steps(workdir):
    folder = workdir / checkpoint.FOLDER
    names = os.listdir(folder) if folder.exists() else []
    return [int(name) for name in names if name.isdigit()]


def wait_until(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope='module')
def uninterrupted(data_dir, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('uninterrupted')
    train.train_and_evaluate(small_config(data_dir), workdir)
    return losses(workdir)


def test_the_default_configuration_made_small_does_everything_once(data_dir, tmp_path):
    changes = {'num_steps': 4, 'log_every': 2, 'eval_every': 4, 'preview_every': 3}
    state = train.train_and_evaluate(small_config(data_dir, **changes), tmp_path)

    assert int(state.step) == 4
    assert sorted(saved_steps(tmp_path)) == [3, 4]
    scalars = read_scalars(tmp_path)
    assert {tag for tag, step in scalars if step == 4} >= {
        'loss',
        'grad_norm',
        'learning_rate',
        'examples_per_second',
        'data_wait_share',
        'eval_loss',
        'steps_per_sec',
    }
    assert {step for tag, step in scalars if tag == 'loss'} == {2, 4}
    assert 0 <= scalars['data_wait_share', 4][0] <= 1
    pictures = sorted((tmp_path / 'previews').iterdir())
    assert [path.name for path in pictures] == ['step_000003.png', 'step_000004.png']
    with Image.open(pictures[0]) as picture:
        assert picture.width == 2 * (2 * 128 + 8) + 3 * 8


def test_a_finished_run_started_again_does_nothing(data_dir, tmp_path):
    config = small_config(data_dir, num_steps=6, eval_every=0)
    train.train_and_evaluate(config, tmp_path)
    before = losses(tmp_path)
    state = train.train_and_evaluate(config, tmp_path)
    assert int(state.step) == 6
    assert losses(tmp_path) == before


def test_killed_and_stopped_at_any_step_a_run_computes_what_it_would_have(
    data_dir, uninterrupted, compiled, tmp_path
):
    # While a checkpoint is being written.
    process = start(data_dir, tmp_path, compiled)
    folder = tmp_path / checkpoint.FOLDER
    wait_until(lambda: saved_steps(tmp_path) and list(folder.glob('*tmp*')), process)
    process.kill()
    process.communicate()
    first = max(saved_steps(tmp_path))

    # At any moment.
    process = start(data_dir, tmp_path, compiled)
    wait_until(lambda: max(saved_steps(tmp_path)) > first, process)
    time.sleep(random.uniform(0, 0.3))
    process.kill()
    process.communicate()
    second = max(saved_steps(tmp_path))

    # As a machine that is to be preempted is told.
    process = start(data_dir, tmp_path, compiled)
    wait_until(lambda: max(saved_steps(tmp_path)) > second, process)
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    stopped = max(saved_steps(tmp_path))
    if stopped < SMALL['num_steps']:
        assert f'Stopped at step {stopped}' in output
        assert f'--workdir={tmp_path}' in output.splitlines()[-1]

    train.train_and_evaluate(small_config(data_dir), tmp_path)
    assert losses(tmp_path) == uninterrupted
    assert len([key for key in uninterrupted if key[0] == 'loss']) == SMALL['num_steps']


_WORKER = """
import json, sys
import jax
import tensorflow as tf
from configs import default
from train_lib import train

index, port, workdir = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(f'127.0.0.1:{port}', 2, index)
config = default.get_config()
config.update_from_flattened_dict(json.loads(sys.argv[4]))
state = train.train_and_evaluate(config, workdir)
print('stopped at', int(state.step))
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_hosts_train_as_one_stop_as_one_and_one_goes_on(data_dir, uninterrupted, tmp_path):
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    changes = {'mesh.fsdp': 2, 'num_steps': 500, 'preview_every': 10}
    fields = SMALL | {'data.dir': str(data_dir)} | changes
    hosts = [
        subprocess.Popen(
            [sys.executable, '-c', _WORKER, str(index), port, str(tmp_path), json.dumps(fields)],
            cwd=REPO,
            env=os.environ | {'XLA_FLAGS': f'{QUICK} --xla_force_host_platform_device_count=2'},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    wait_until(lambda: max(saved_steps(tmp_path), default=0) >= 12, hosts[0])
    hosts[1].send_signal(signal.SIGTERM)
    outputs = [host.communicate(timeout=60)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    stopped = [out[out.index('stopped at') :].split()[2] for out in outputs]
    assert stopped == [str(max(saved_steps(tmp_path)))] * 2
    assert 12 <= int(stopped[0]) < 500

    # One host with one device goes on with what two hosts of two devices have written.
    config = small_config(data_dir, num_steps=int(stopped[0]) + 5)
    train.train_and_evaluate(config, tmp_path)
    together = losses(tmp_path)
    assert len([key for key in together if key[0] == 'loss']) == int(stopped[0]) + 5
    common = together.keys() & uninterrupted.keys()
    assert len(common) > 12
    for key in common:
        np.testing.assert_allclose(together[key], uninterrupted[key], rtol=2e-5, err_msg=str(key))


def test_an_interrupted_log_window_is_averaged_over_all_its_steps(
    data_dir, uninterrupted, tmp_path
):
    for num_steps in (7, 10):
        config = small_config(data_dir, num_steps=num_steps, log_every=10, eval_every=0)
        train.train_and_evaluate(config, tmp_path)
    expected = np.mean([np.float32(uninterrupted['loss', step]) for step in range(1, 11)])
    np.testing.assert_allclose(losses(tmp_path)['loss', 10], expected, rtol=1e-6)


def test_another_data_set_batch_size_or_encoder_is_refused_by_name(data_dir, tmp_path):
    workdir = tmp_path / 'run'
    short = {'num_steps': 2, 'checkpoint_every': 0, 'eval_every': 0}
    train.train_and_evaluate(small_config(data_dir, **short), workdir)

    def refusal(directory=data_dir, **changes):
        with pytest.raises(checkpoint.OtherRunError) as error:
            train.train_and_evaluate(small_config(directory, **short, **changes), workdir)
        return str(error.value)

    message = refusal(batch_size=16)
    assert 'data.batch_size was 8 and is now 16;' not in message  # nothing else differs
    assert 'data.batch_size was 8 and is now 16.' in message

    # The same files, but of another source.
    other = rewritten(data_dir, tmp_path / 'other', schema.META_SOURCE_FINGERPRINT)
    assert 'data.data_set was ' in refusal(other)

    # The same files, but vectors that claim to come from another encoder.
    message = refusal(rewritten(data_dir, tmp_path / 'renamed', schema.META_TEXT_ENCODER))
    assert "text_encoder.name was 'hash' and is now 'another'" in message
    assert 'data.' not in message


def test_the_command_ends_with_one_message(data_dir, compiled, tmp_path):
    short = {'num_steps': 2, 'eval_every': 0}
    train.train_and_evaluate(small_config(data_dir, **short), tmp_path)
    process = start(data_dir, tmp_path, compiled, **short, seed=1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert 'Traceback' not in output
    assert output.splitlines()[-1].startswith('ERROR: ')
    assert 'data.seed was 0 and is now 1' in output.splitlines()[-1]


def test_a_run_that_diverges_ends_and_keeps_no_broken_checkpoint(data_dir, tmp_path):
    changes = {'optimizer.learning_rate': 1e30, 'optimizer.clip_norm': 1e30, 'num_steps': 20}
    with pytest.raises(FloatingPointError, match='in the steps up to'):
        train.train_and_evaluate(small_config(data_dir, **changes), tmp_path)
    for step in saved_steps(tmp_path):
        assert np.isfinite(losses(tmp_path)['loss', step])


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'data.dir': ''}, 'data.dir is empty'),
        ({'optimizer.warmup_steps': 30}, 'optimizer.warmup_steps=30'),
        ({'optimizer.schedule': 'step'}, "optimizer.schedule='step'"),
        ({'data.lanes': 3}, 'lanes=3 does not divide batch_size=8'),
        ({'model.name': 'S'}, "model name is 'S'"),
        ({'mesh.fsdp': 3}, 'mesh data=0 x fsdp=3'),
    ],
)
def test_a_configuration_that_cannot_work_leaves_nothing_behind(
    data_dir, tmp_path, changes, message
):
    with pytest.raises(ValueError, match=message):
        train.train_and_evaluate(small_config(data_dir, **changes), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_data_set_without_text_vectors_is_refused(data_dir, tmp_path):
    bare = metadata_alone(data_dir, tmp_path / 'bare')
    path = bare / 'features.json'
    features = json.loads(path.read_text())
    del features['featuresDict']['features'][schema.TEXT_EMBEDDING]
    path.write_text(json.dumps(features))
    with pytest.raises(ValueError, match='holds no text vectors: build it with'):
        train.train_and_evaluate(small_config(bare), tmp_path / 'run')


def test_a_validation_split_that_will_be_needed_is_missed_at_once(data_dir, tmp_path):
    bare = metadata_alone(data_dir, tmp_path / 'bare')
    path = bare / 'dataset_info.json'
    info = json.loads(path.read_text())
    info['splits'] = [split for split in info['splits'] if split['name'] != schema.VALIDATION]
    path.write_text(json.dumps(info))
    with pytest.raises(ValueError, match='the validation split is empty'):
        train.train_and_evaluate(small_config(bare), tmp_path / 'run')


def test_one_step_on_mocked_data(data_dir, tmp_path, monkeypatch):
    bare = metadata_alone(data_dir, tmp_path / 'bare')
    # Opened first: under mock_data TFDS does not read the features of a folder.
    builder = tfds.builder_from_directory(bare)
    monkeypatch.setattr(tfds, 'builder_from_directory', lambda folder: builder)
    config = small_config(bare, num_steps=2, eval_every=2)
    with tfds.testing.mock_data(num_examples=16):
        state = train.train_and_evaluate(config, tmp_path / 'run')
    assert int(state.step) == 2
    assert all(np.isfinite(loss) for loss in losses(tmp_path / 'run').values())


def test_previews_show_the_first_records_of_the_split_that_is_asked_for(data_dir):
    shown = {}
    for split in ('train', 'validation'):
        config = small_config(data_dir, **{'preview.split': split})
        shown[split] = data.TrainingData(config, sharding.make_mesh()).preview_samples.captions
        examples = tfds.builder_from_directory(data_dir).as_dataset(split=split).take(3)
        expected = [example['caption'].decode() for example in tfds.as_numpy(examples)]
        assert list(shown[split]) == expected
    assert shown['train'] != shown['validation']


_ALONE = """
import sys
for name in ('tensorflow', 'tensorflow_datasets', 'torch'):
    sys.modules[name] = None  # an import of it is an error
import jax, numpy as np
from configs import default
from train_lib import flow, program, sharding
config = default.get_config()
config.model.name = 'tiny/16'
stats = flow.Stats(*(np.ones(n, np.float32) for n in (4, 4, 5, 5)))
made = program.make_program(config, sharding.make_mesh(), stats, latent_shape=(32, 32, 4))
batch = {
    'key': np.zeros((2, 2), np.uint32),
    'latents': np.zeros((2, 4, 32, 32), np.float16),
    'text_embedding': np.zeros((2, 5), np.float16),
}
state, update = made.train_step(made.init(), batch | {'drop_text': np.zeros(2, bool)})
evaluated = made.eval_step(state.ema_params, batch | {'mask': np.ones(2, bool)})
print(float(update.compute()['loss']), float(evaluated.compute()['loss']))
"""


def test_model_and_steps_run_where_there_is_jax_alone():
    done = subprocess.run(
        [sys.executable, '-c', _ALONE],
        cwd=REPO,
        env=os.environ
        | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_backend_optimization_level=0'},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert all(np.isfinite(float(loss)) for loss in done.stdout.split())
