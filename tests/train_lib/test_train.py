"""Training as a whole, on a small data set made here: it runs, it resumes exactly, it refuses.

Runs that are to be killed are real processes, started as a user starts them.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow_datasets as tfds
from clu import metric_writers
from PIL import Image

import input_pipeline
from coyo11m_tfds import schema
from tests import runs
from tests.runs import (
    CHECKOUT,
    SMALL,
    losses,
    read_scalars,
    saved_steps,
    shared_compilations,
    small_config,
    start,
    wait_until,
)
from train_lib import checkpoint, data, sharding, train


@pytest.fixture(scope='module')
def data_dir(mini_dataset):
    return mini_dataset


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
        'train/loss',
        'train/grad_norm',
        'train/learning_rate',
        'train/epoch',
        'train/samples_per_second',
        'train/steps_per_second',
        'device/step_seconds_median',
        'device/step_seconds_p95',
        'device/tflops_per_chip',
        'input/wait_share_min',
        'input/wait_share_max',
        'input/batches_ready',
        'input/read_mb_per_second',
        'input/chunks_in_flight',
        'input/bad_records',
        'eval/loss',
    }
    assert {step for tag, step in scalars if tag == 'train/loss'} == {2, 4}
    assert 0 <= scalars['input/wait_share_max', 4][0] <= 1
    assert scalars['input/bad_records', 4] == [0]
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


def test_what_is_due_when_sigterm_comes_is_done_by_the_run_that_goes_on(data_dir, tmp_path):
    def stop_when_saved():
        while not saved_steps(tmp_path):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    often = {'eval_every': 1, 'preview_every': 1, 'checkpoint_every': 2}
    stopper = threading.Thread(target=stop_when_saved)
    stopper.start()
    config = small_config(data_dir, **often, num_steps=10_000)
    stopped = int(train.train_and_evaluate(config, tmp_path).step)
    stopper.join()
    # The signal may come between the evaluation and the picture.
    assert not (tmp_path / 'previews' / f'step_{stopped:06}.png').exists()
    config.num_steps = stopped + 1
    train.train_and_evaluate(config, tmp_path, accept_changes=['num_steps'])
    evaluated = {step for tag, step in losses(tmp_path) if tag == 'eval/loss'}
    assert evaluated == set(range(1, stopped + 2))
    assert len(list((tmp_path / 'previews').glob('*.png'))) == stopped + 1


def test_killed_and_stopped_at_any_step_a_run_computes_what_it_would_have(
    data_dir, uninterrupted, env, tmp_path
):
    # While a checkpoint is being written.
    process = start(data_dir, tmp_path, env)
    folder = tmp_path / checkpoint.FOLDER
    wait_until(lambda: saved_steps(tmp_path) and list(folder.glob('*tmp*')), process)
    process.kill()
    process.communicate()
    first = max(saved_steps(tmp_path))

    # At any moment.
    process = start(data_dir, tmp_path, env)
    wait_until(lambda: max(saved_steps(tmp_path)) > first, process)
    time.sleep(random.uniform(0, 0.3))
    process.kill()
    process.communicate()
    second = max(saved_steps(tmp_path))

    # As a machine that is to be preempted is told.
    process = start(data_dir, tmp_path, env)
    wait_until(lambda: max(saved_steps(tmp_path)) > second, process)
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    stopped = max(saved_steps(tmp_path))
    assert process.returncode == (75 if stopped < SMALL['num_steps'] else 0), output
    if stopped < SMALL['num_steps']:
        assert f'Stopped at step {stopped}' in output
        assert f'--workdir={tmp_path}' in output.splitlines()[-1]

    train.train_and_evaluate(small_config(data_dir), tmp_path)
    assert losses(tmp_path) == uninterrupted
    assert len([key for key in uninterrupted if key[0] == 'train/loss']) == SMALL['num_steps']


@pytest.mark.slow
def test_an_interrupted_log_window_is_averaged_over_all_its_steps(
    data_dir, uninterrupted, tmp_path
):
    for num_steps in (7, 10):
        config = small_config(data_dir, num_steps=num_steps, log_every=10, eval_every=0)
        train.train_and_evaluate(config, tmp_path, accept_changes=['num_steps'])
    expected = np.mean([np.float32(uninterrupted['train/loss', step]) for step in range(1, 11)])
    np.testing.assert_allclose(losses(tmp_path)['train/loss', 10], expected, rtol=1e-6)


def test_another_data_set_batch_size_or_encoder_is_refused_by_name(data_dir, tmp_path):
    workdir = tmp_path / 'run'
    short = {'num_steps': 2, 'checkpoint_every': 0, 'eval_every': 0}
    train.train_and_evaluate(small_config(data_dir, **short), workdir)

    def refusal(directory=data_dir, **changes):
        with pytest.raises(checkpoint.OtherRunError) as error:
            train.train_and_evaluate(small_config(directory, **short, **changes), workdir)
        return str(error.value)

    message = refusal(batch_size=16)
    assert 'other settings: batch_size was 8 and is now 16. If' in message  # nothing else differs
    assert '--accept_changes=batch_size;' in message

    # The same files, but of another source.
    other = rewritten(data_dir, tmp_path / 'other', schema.META_SOURCE_FINGERPRINT)
    assert "other settings: data.dir was 'coyo11m_tfds/hash/1.0.0 train " in refusal(other)

    # The same files, but vectors that claim to come from another encoder.
    message = refusal(rewritten(data_dir, tmp_path / 'renamed', schema.META_TEXT_ENCODER))
    assert "text_encoder.name was 'hash' and is now 'another'" in message
    assert 'data.' not in message.partition('belongs to')[2]


def test_a_change_of_what_steps_compute_has_to_be_meant(data_dir, tmp_path, caplog):
    first = {'num_steps': 3, 'checkpoint_every': 0, 'eval_every': 0}
    train.train_and_evaluate(small_config(data_dir, **first), tmp_path)
    longer = first | {'num_steps': 4, 'optimizer.learning_rate': 1e-4}

    def resume(*accept_changes):
        return train.train_and_evaluate(small_config(data_dir, **longer), tmp_path, accept_changes)

    both = '--accept_changes=num_steps,optimizer.learning_rate'
    with pytest.raises(checkpoint.OtherRunError) as error:
        resume()
    assert 'num_steps was 3 and is now 4; optimizer.learning_rate was 0.0002 and is ' in str(
        error.value
    )
    assert both in str(error.value)
    with pytest.raises(checkpoint.OtherRunError) as error:
        resume('num_steps')
    assert 'other settings: optimizer.learning_rate was 0.0002 and is now 0.0001. If' in str(
        error.value
    )
    assert both in str(error.value)
    with pytest.raises(ValueError, match=r'--accept_changes=model\.name: expected some'):
        resume('num_steps', 'model.name')

    assert int(resume('num_steps', 'optimizer.learning_rate').step) == 4
    assert 'optimizer.learning_rate was 0.0002 and is now 0.0001' in caplog.text
    # The last checkpoint holds what it was trained with.
    assert int(resume().step) == 4

    longer['num_steps'] = 2
    with pytest.raises(ValueError, match=r'num_steps=2: \S+/4 has been trained for 4 steps, '):
        resume('num_steps')


def test_a_run_that_diverges_ends_and_keeps_no_broken_checkpoint(data_dir, tmp_path):
    changes = {'optimizer.learning_rate': 1e30, 'optimizer.clip_norm': 1e30, 'num_steps': 20}
    config = small_config(data_dir, **changes, max_skipped_in_a_row=4, eval_every=0)
    with pytest.raises(FloatingPointError, match=r'^5 steps in a row up to step \d+ had a loss or'):
        train.train_and_evaluate(config, tmp_path)
    assert saved_steps(tmp_path) == []


def test_weights_from_before_the_skipped_steps_are_advised(data_dir, tmp_path, monkeypatch):
    with_nan(monkeypatch, set(range(9, 20)))
    changes = {'num_steps': 20, 'eval_every': 0, 'checkpoint_every': 2, 'keep_checkpoints': 3}
    config = small_config(data_dir, **changes, max_skipped_in_a_row=6)
    folder = tmp_path / 'checkpoints'
    advice = f'Remove {folder}/8 and resume from {folder}/6, with a lower'
    with pytest.raises(FloatingPointError, match=f'^7 steps in a row up to step 15 .* {advice}'):
        train.train_and_evaluate(config, tmp_path)
    assert sorted(saved_steps(tmp_path)) == [4, 6, 8]


def test_a_run_does_not_end_well_with_a_skipped_step(data_dir, tmp_path, monkeypatch):
    with_nan(monkeypatch, {5})
    config = small_config(data_dir, num_steps=5, eval_every=0, checkpoint_every=2)
    message = f'Step 5 is not saved: the last 1 steps .* and resume from {tmp_path}/checkpoints/2'
    with pytest.raises(FloatingPointError, match=message):
        train.train_and_evaluate(config, tmp_path)
    assert sorted(saved_steps(tmp_path)) == [2, 4]


def with_nan(monkeypatch, steps):
    """Makes the latents of some steps NaN."""
    train_batches = data.TrainingData.train_batches

    def spoilt(self, start_sample):
        first_step = start_sample // self.samples_a_step + 1
        for step, batch in enumerate(train_batches(self, start_sample), first_step):
            if step in steps:
                batch['latents'] = batch['latents'] * np.float16('nan')
            yield batch

    monkeypatch.setattr(data.TrainingData, 'train_batches', spoilt)


def test_a_step_that_is_not_finite_is_passed_and_counted_also_over_a_resume(
    data_dir, tmp_path, monkeypatch
):
    with_nan(monkeypatch, {4, 5, 9})
    config = small_config(data_dir, num_steps=12, log_every=4, max_skipped=3, eval_every=0)
    state = train.train_and_evaluate(config, tmp_path / 'whole')
    assert (int(state.skipped), int(state.skipped_in_a_row)) == (3, 0)
    skipped = {
        step: value
        for (tag, step), (value,) in read_scalars(tmp_path / 'whole').items()
        if tag == 'train/skipped_steps'
    }
    assert skipped == {4: 1, 8: 2, 12: 3}
    expected = losses(tmp_path / 'whole')
    assert all(np.isfinite(loss) for loss in expected.values())

    for num_steps in (6, 12):  # 6: inside of a window, after two that were skipped
        config.num_steps = num_steps
        train.train_and_evaluate(config, tmp_path / 'parts', accept_changes=['num_steps'])
    assert losses(tmp_path / 'parts') == expected


def test_a_second_run_in_a_workdir_is_refused_until_the_first_was_killed(data_dir, env, tmp_path):
    config = small_config(data_dir, num_steps=9_000, eval_every=0)
    process = runs.start(data_dir, tmp_path, env, num_steps=9_000, eval_every=0)
    runs.wait_until(lambda: saved_steps(tmp_path), process)
    first = rf'{tmp_path}/training: process {process.pid} on {socket.gethostname()}, since'
    with pytest.raises(TimeoutError, match=rf'^{first} .* another --workdir\.$'):
        train.train_and_evaluate(config, tmp_path)
    process.kill()
    process.communicate(timeout=60)
    config.num_steps = max(saved_steps(tmp_path)) + 1
    train.train_and_evaluate(config, tmp_path, accept_changes=['num_steps'])
    assert not (tmp_path / 'training.lock').exists()


def test_a_run_that_ended_while_another_one_looked_is_not_gone_on_with(data_dir, tmp_path):
    config = small_config(data_dir, num_steps=2, eval_every=0)
    setup = train.set_up(config, tmp_path)
    train.train_and_evaluate(config, tmp_path)
    with pytest.raises(OSError, match=f'^{tmp_path}: another run has just trained there; start'):
        train.train(setup)


@pytest.mark.parametrize('limit', ['max_skipped_in_a_row', 'max_skipped'])
def test_too_many_steps_that_are_not_finite_end_the_run(data_dir, tmp_path, monkeypatch, limit):
    with_nan(monkeypatch, {4, 5, 6})
    config = small_config(data_dir, num_steps=10, eval_every=0, **{limit: 2})
    with pytest.raises(FloatingPointError, match=f'up to step 6 .* more than {limit}=2'):
        train.train_and_evaluate(config, tmp_path)
    assert max(saved_steps(tmp_path)) == 3


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'optimizer.warmup_steps': 30}, 'optimizer.warmup_steps=30'),
        ({'optimizer.schedule': 'step'}, "optimizer.schedule='step'"),
        ({'data.lanes': 3}, 'batch_size=8 with data.lanes=3 cannot be shared equally'),
        ({'data.device_prefetch': 0}, 'data.device_prefetch=0: expected at least 1'),
        ({'preview_every': 4, 'preview.split': 'test'}, "preview.split='test': .* none in 'test'"),
        (
            {'data.ram_budget_gb': 0.001, 'data.engine': 'chunks'},
            '0.00 GB of data.ram_budget_gb=0.001 .* set data.ram_budget_gb to 0.3',
        ),
        ({'model.name': 'S'}, "model.name='S': expected SIZE/PATCH"),
        ({'model.name': 'S/5'}, 'latents of 32x32 cannot be cut into patches of 5x5: expected a'),
        ({'mesh.fsdp': 3}, 'mesh data=0 x fsdp=3'),
    ],
)
def test_a_configuration_that_cannot_work_leaves_nothing_behind(
    data_dir, tmp_path, changes, message
):
    with pytest.raises(ValueError, match=message):
        train.train_and_evaluate(small_config(data_dir, **changes), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_data_set_without_text_embeddings_is_refused(data_dir, tmp_path):
    bare = metadata_alone(data_dir, tmp_path / 'bare')
    path = bare / 'features.json'
    features = json.loads(path.read_text())
    del features['featuresDict']['features'][schema.TEXT_EMBEDDING]
    path.write_text(json.dumps(features))
    with pytest.raises(ValueError, match='holds no text embeddings in its records: build it with'):
        train.train_and_evaluate(small_config(bare), tmp_path / 'run')


def test_a_validation_split_that_will_be_needed_is_missed_at_once(data_dir, tmp_path):
    bare = metadata_alone(data_dir, tmp_path / 'bare')
    path = bare / 'dataset_info.json'
    info = json.loads(path.read_text())
    info['splits'] = [split for split in info['splits'] if split['name'] != schema.VALIDATION]
    path.write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"eval_every=10: .* none in 'validation': build it"):
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


def test_what_evaluations_read_is_not_counted_as_read_for_training(data_dir):
    opened = data.TrainingData(small_config(data_dir), sharding.make_mesh())
    assert sum(1 for _ in opened.eval_batches()) > 1
    assert opened.read_counts().num_bytes == 0
    batches = opened.train_batches(0)
    next(batches)
    assert opened.read_counts().num_bytes > 0
    batches.close()


@pytest.mark.parametrize('ahead', [1, 3])
def test_batches_are_on_the_device_before_they_are_asked_for(data_dir, monkeypatch, ahead):
    made = []

    def host_batches(*_, **__):
        while True:
            made.append({'key': np.zeros(8, np.int64)})
            yield made[-1]

    monkeypatch.setattr(input_pipeline, 'train_batches', host_batches)
    config = small_config(data_dir, **{'data.device_prefetch': ahead})
    batches = data.TrainingData(config, sharding.make_mesh()).train_batches(0)
    for asked in (1, 2, 3):
        next(batches)
        deadline = time.monotonic() + 60
        while len(made) < asked + ahead:
            assert time.monotonic() < deadline
            time.sleep(0.002)
    assert len(made) == 3 + ahead
    batches.close()


def test_logs_that_cannot_be_written_end_a_run_in_one_line(data_dir, tmp_path, monkeypatch):
    class Full(metric_writers.SummaryWriter):
        def write_scalars(self, step, scalars):
            raise OSError(28, 'No space left on device')

    monkeypatch.setattr(metric_writers, 'SummaryWriter', Full)
    config = small_config(data_dir, num_steps=3, eval_every=0)
    message = rf'^{tmp_path}: logs cannot be written: OSError: .* No space left on device$'
    with pytest.raises(OSError, match=message):
        train.train_and_evaluate(config, tmp_path)


@pytest.mark.parametrize('error', [KeyError('latents'), MemoryError()])
def test_an_error_that_is_none_of_reading_keeps_its_kind(data_dir, monkeypatch, error):
    def host_batches(*_, **__):
        raise error
        yield

    monkeypatch.setattr(input_pipeline, 'train_batches', host_batches)
    batches = data.TrainingData(small_config(data_dir), sharding.make_mesh()).train_batches(0)
    with pytest.raises(type(error)):
        next(batches)


def damaged(data_dir, folder):
    """A copy of a data set with a byte changed here and there in every train shard."""
    shutil.copytree(data_dir, folder)
    for path in folder.glob('*-train*.tfrecord*'):
        content = bytearray(path.read_bytes())
        for place in range(20_000, len(content), 500_000):
            content[place] ^= 1
        path.write_bytes(content)
    return folder


def test_records_that_cannot_be_read_stop_a_run_or_are_skipped_and_told(data_dir, tmp_path, caplog):
    bad = damaged(data_dir, tmp_path / 'bad')
    short = {'num_steps': 12, 'eval_every': 0, 'checkpoint_every': 0}
    config = small_config(bad, **short, **{'data.on_bad_records': 'skip'})
    state = train.train_and_evaluate(config, tmp_path / 'run')
    assert int(state.step) == 12
    told = [
        value
        for (tag, _), (value,) in read_scalars(tmp_path / 'run').items()
        if tag == 'input/bad_records'
    ]
    assert max(told) > 0
    assert all(np.isfinite(loss) for loss in losses(tmp_path / 'run').values())
    left_out = [r.getMessage() for r in caplog.records if 'were left out' in r.getMessage()]
    assert len(left_out) == 1 and int(left_out[0].split()[0]) >= max(told)

    for engine in ('rows', 'chunks', 'tf_data'):
        config = small_config(bad, **short, **{'data.engine': engine})
        message = r'^/[^\n]*train[^\n]*\.tfrecord[^\n]*: record \d+ cannot be read[^\n]*$'
        with pytest.raises(data.ReadError, match=message):
            train.train_and_evaluate(config, tmp_path / engine)


def test_every_engine_trains_with_the_same_losses(data_dir, tmp_path):
    short, found = {'num_steps': 6, 'eval_every': 3, 'checkpoint_every': 0}, []
    with shared_compilations(tmp_path / 'compiled'):
        for engine in ('rows', 'chunks', 'tf_data'):
            config = small_config(data_dir, **short, **{'data.engine': engine})
            train.train_and_evaluate(config, tmp_path / engine)
            found.append(losses(tmp_path / engine))
    assert found[0] == found[1] == found[2] and len(found[0]) >= 8


_START = """
import sys
from absl import flags
import input_pipeline
from train_lib import main

def apply():
    print('prepared', *{'tensorflow', 'tensorflow_datasets', 'torch'} & set(sys.modules))
    sys.exit()

input_pipeline.prepare_process = apply
flags.FLAGS(sys.argv)
main.main()
"""


def test_settings_for_reading_are_made_before_tensorflow_is_imported(tmp_path):
    flags = ['--config=configs/default.py', f'--workdir={tmp_path}']
    done = subprocess.run(
        [sys.executable, '-c', _START, *flags],
        cwd=CHECKOUT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ['prepared']


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
        cwd=CHECKOUT,
        env=os.environ
        | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_backend_optimization_level=0'},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert all(np.isfinite(float(loss)) for loss in done.stdout.split())
