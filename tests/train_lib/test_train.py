"""Training as a whole, on a small data set made here: it runs, it resumes exactly, it refuses.

Runs that are to be killed are real processes, started as a user starts them.
"""

import os
import random
import shutil
import signal
import socket
import threading
import time

import jax
import numpy as np
import pytest
from clu import metric_writers
from PIL import Image

from coyo11m_tfds import schema
from tests import children, runs
from tests.runs import SMALL, losses, read_scalars, saved_steps, small_config
from tests.train_lib.test_data import rewritten
from train_lib import data, train
from train_lib.lifecycle import beginnings, checkpoint, chips


@pytest.fixture(scope='module')
def uninterrupted(mini_dataset, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('uninterrupted')
    runs.train(mini_dataset, workdir, checkpoint_every=0)
    return losses(workdir)


def largest_weight(run, step, state):
    """The example of the documentation, nearly."""
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(jax.device_get(state.params)))
    run.writer.write_scalars(step, {'train/largest_weight': largest})
    return f'{largest:.2f}'


def test_a_small_run_does_everything_once_and_nothing_when_started_again(
    mini_dataset, tmp_path, monkeypatch, caplog
):
    caplog.set_level('INFO')
    own = train.Hook('largest weight', train.every(lambda config: 2), largest_weight)
    kind = jax.devices()[0].device_kind
    monkeypatch.setitem(chips.CHIPS, kind, chips.Chip('mine', 1e12, 1e9, 1e9, 1e9))
    changes = {'num_steps': 5, 'log_every': 2, 'eval_every': 4, 'preview_every': 3}
    config = small_config(mini_dataset, **changes)
    state = runs.train_config(config, tmp_path, hooks=(own, *train.DEFAULT_HOOKS))

    assert int(state.step) == 5
    assert sorted(saved_steps(tmp_path)) == [3, 5]
    scalars = read_scalars(tmp_path)
    steps = {}
    for tag, step in scalars:
        steps.setdefault(tag, set()).add(step)
    assert steps['train/loss'] == {2, 4}
    assert steps['train/largest_weight'] == {2, 4, 5}
    assert steps['eval/loss'] == {4, 5}
    # TensorBoard sorts by names.
    assert sorted(steps)[:2] == ['Loss/evaluation', 'Loss/train']
    assert scalars['Loss/train', 4] == scalars['train/loss', 4]
    assert scalars['Loss/evaluation', 5] == scalars['eval/loss', 5]
    for kind, names in {
        'train': 'grad_norm learning_rate samples_per_second steps_per_second',
        'device': 'step_seconds_median step_seconds_p95',
        'input': 'wait_share_min wait_share_max batches_ready read_mb_per_second chunks_in_flight',
    }.items():
        assert {f'{kind}/{name}' for name in names.split()} <= steps.keys()
    assert 0 <= scalars['input/wait_share_max', 4][0] <= 1
    assert scalars['input/bad_records', 4] == [0]
    epoch = 1053 // 8  # steps, a few left out
    assert scalars['train/epoch', 4] == [pytest.approx(4 / epoch, rel=0.05)]
    (rate,) = scalars['device/tflops_per_chip', 4]
    assert scalars['device/model_flop_utilization', 4] == [pytest.approx(rate)]
    samples = scalars['train/samples_per_second', 4][0]
    flops = train.set_up(config, tmp_path).program.flops(num_tokens=0)
    assert rate == pytest.approx(samples * flops / 1e12, rel=0.01)
    pictures = sorted((tmp_path / 'previews').iterdir())
    assert [path.name for path in pictures] == ['step_000003.png', 'step_000005.png']
    with Image.open(pictures[0]) as picture:
        assert picture.width == 2 * (2 * 128 + 8) + 3 * 8
    largest = scalars['train/largest_weight', 4][0]
    assert f'largest weight at step 4: {largest:.2f} (' in caplog.text

    assert int(train.train_and_evaluate(config, tmp_path).step) == 5
    assert f'Finished already: all 5 steps are in {tmp_path}.' in caplog.text
    assert read_scalars(tmp_path) == scalars


def test_what_is_due_when_sigterm_comes_is_done_by_the_run_that_goes_on(mini_dataset, tmp_path):
    def stop_when_saved():
        while not saved_steps(tmp_path):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    often = {'eval_every': 1, 'preview_every': 1, 'checkpoint_every': 2}
    stopper = threading.Thread(target=stop_when_saved)
    stopper.start()
    stopped = int(runs.train(mini_dataset, tmp_path, **often, num_steps=10_000).step)
    stopper.join()
    # The signal may come between the evaluation and the picture.
    assert not (tmp_path / 'previews' / f'step_{stopped:06}.png').exists()
    written = []
    for num_steps in (stopped, stopped, stopped + 1):  # at first as if that was the last step
        runs.train(mini_dataset, tmp_path, ['num_steps'], **often, num_steps=num_steps)
        written.append(read_scalars(tmp_path))
    assert ('eval/loss', stopped) in written[0] and written[0] == written[1]
    evaluated = {step for tag, step in losses(tmp_path) if tag == 'eval/loss'}
    assert evaluated == set(range(1, stopped + 2))
    assert len(list((tmp_path / 'previews').glob('*.png'))) == stopped + 1


def test_killed_and_stopped_at_any_step_a_run_computes_what_it_would_have(
    mini_dataset, uninterrupted, tmp_path
):
    # While a checkpoint is being written; meanwhile no other run may use the folder.
    process = runs.start(mini_dataset, tmp_path)
    folder = tmp_path / checkpoint.FOLDER
    children.wait_until(lambda: saved_steps(tmp_path) and list(folder.glob('*tmp*')), process)
    time.sleep(random.uniform(0, 0.1))
    process.send_signal(signal.SIGSTOP)
    first = rf'{tmp_path}/training: process {process.pid} on {socket.gethostname()}, since'
    with pytest.raises(TimeoutError, match=rf'^{first} .* another --workdir\.$'):
        runs.train(mini_dataset, tmp_path)
    process.kill()
    process.communicate()
    killed = max(saved_steps(tmp_path))

    # As a machine that is to be preempted is told.
    def is_due(run, step):
        return step == killed + 2

    def terminate(run, step, state):
        os.kill(os.getpid(), signal.SIGTERM)

    hooks = (train.Hook('the end', is_due, terminate), *train.DEFAULT_HOOKS)
    stopped = runs.train_config(small_config(mini_dataset), tmp_path, hooks=hooks)
    assert killed < stopped.step < SMALL['num_steps']

    runs.train(mini_dataset, tmp_path)
    assert losses(tmp_path) == uninterrupted
    assert len([key for key in uninterrupted if key[0] == 'train/loss']) == SMALL['num_steps']
    assert not (tmp_path / 'training.lock').exists()


SHORT = {'num_steps': 4, 'checkpoint_every': 0, 'eval_every': 0}


def test_another_data_set_or_encoder_is_refused_by_name(mini_dataset, small_run, tmp_path):
    def refusal(directory):
        with pytest.raises(beginnings.OtherRunError) as error:
            train.set_up(small_config(directory, **SHORT), small_run[0])
        return str(error.value)

    # The same files, but of another source.
    other = rewritten(mini_dataset, tmp_path / 'other', schema.META_SOURCE_FINGERPRINT)
    assert "other settings: data.dir was 'coyo11m_tfds/hash/1.0.0 train " in refusal(other)

    # The same files, but vectors that claim to come from another encoder.
    message = refusal(rewritten(mini_dataset, tmp_path / 'renamed', schema.META_TEXT_ENCODER))
    assert "text_encoder.name was 'hash' and is now 'another'" in message
    assert 'data.' not in message.partition('belongs to')[2]


def test_a_change_of_what_steps_compute_has_to_be_meant(mini_dataset, small_run, tmp_path, caplog):
    workdir = shutil.copytree(small_run[0], tmp_path / 'run')
    changes = SHORT | {'num_steps': 5, 'optimizer.learning_rate': 1e-4}
    config = small_config(mini_dataset, **changes)
    both = 'num_steps,optimizer.learning_rate'
    rate = 'optimizer.learning_rate was 0.01 and is now 0.0001'
    for accepted, told in (([], f'num_steps was 4 and is now 5; {rate}'), (['num_steps'], rate)):
        message = f'other settings: {told}. To .*--accept_changes={both};'
        with pytest.raises(beginnings.OtherRunError, match=message):
            train.set_up(config, workdir, accepted)
    with pytest.raises(ValueError, match=r'--accept_changes=model\.name: expected some'):
        train.set_up(config, workdir, ['num_steps', 'model.name'])

    assert int(runs.train_config(config, workdir, both.split(',')).step) == 5
    assert rate in caplog.text
    # The last checkpoint holds what it was trained with.
    assert train.set_up(config, workdir).beginning.step == 5
    config.num_steps = 2
    with pytest.raises(ValueError, match=r'num_steps=2: \S+/5 has been trained for 5 steps, '):
        train.set_up(config, workdir, ['num_steps'])


def test_weights_from_before_the_skipped_steps_are_advised(mini_dataset, tmp_path, monkeypatch):
    with_nan(monkeypatch, set(range(9, 20)))
    changes = {'num_steps': 20, 'eval_every': 0, 'checkpoint_every': 2, 'keep_checkpoints': 3}
    folder = tmp_path / 'checkpoints'
    change = '--accept_changes=optimizer.learning_rate,optimizer.warmup_steps: lower'
    advice = f'Remove {folder}/8 and resume from {folder}/6 with {change}'
    with pytest.raises(FloatingPointError, match=f'^7 steps in a row up to step 15 .* {advice}'):
        runs.train(mini_dataset, tmp_path, **changes, max_skipped_in_a_row=6)
    assert sorted(saved_steps(tmp_path)) == [4, 6, 8]
    with_nan(monkeypatch, set(range(1, 20)))
    advice = 'Start afresh in another --workdir: lower optimizer.learning_rate or raise'
    with pytest.raises(FloatingPointError, match=advice):
        runs.train(mini_dataset, tmp_path / 'new', **changes, max_skipped_in_a_row=3)


def test_a_run_does_not_end_well_with_a_skipped_step(mini_dataset, tmp_path, monkeypatch):
    with_nan(monkeypatch, {5})
    message = f'Step 5 is not saved: the last 1 steps .* and resume from {tmp_path}/checkpoints/2'
    with pytest.raises(FloatingPointError, match=message):
        runs.train(mini_dataset, tmp_path, num_steps=5, eval_every=0, checkpoint_every=2)
    assert sorted(saved_steps(tmp_path)) == [2, 4]


def with_nan(monkeypatch, steps):
    """Makes the latents of some steps NaN."""
    train_batches = data.TrainingData.train_batches

    def spoilt(self, position):
        for step, batch in enumerate(train_batches(self, position), position['step'] + 1):
            if step in steps:
                batch['latents'] = batch['latents'] * np.float16('nan')
            yield batch

    monkeypatch.setattr(data.TrainingData, 'train_batches', spoilt)


def test_a_step_that_is_not_finite_is_passed_and_counted_also_over_a_resume(
    mini_dataset, tmp_path, monkeypatch
):
    with_nan(monkeypatch, {4, 5, 9})
    changes = {'log_every': 4, 'max_skipped': 3, 'eval_every': 0}
    state = runs.train(mini_dataset, tmp_path / 'whole', **changes, num_steps=12)
    assert (int(state.skipped), int(state.skipped_in_a_row)) == (3, 0)
    scalars = read_scalars(tmp_path / 'whole')
    assert [scalars['train/skipped_steps', step] for step in (4, 8, 12)] == [[1], [2], [3]]
    means = [
        scalars[f'train/{name}', step] for name in ('loss', 'grad_norm') for step in (4, 8, 12)
    ]
    assert np.isfinite(means).all()
    expected = losses(tmp_path / 'whole')

    for num_steps in (6, 12):  # 6: inside of a window, after two that were skipped
        runs.train(mini_dataset, tmp_path / 'parts', ['num_steps'], **changes, num_steps=num_steps)
    assert losses(tmp_path / 'parts') == expected


def test_a_run_that_ended_while_another_one_looked_is_not_gone_on_with(
    mini_dataset, small_run, tmp_path
):
    setup = train.set_up(small_config(mini_dataset, **SHORT), tmp_path)
    shutil.copytree(small_run[0] / checkpoint.FOLDER, tmp_path / checkpoint.FOLDER)
    with pytest.raises(OSError, match=f'^{tmp_path}: another run has just trained there; start'):
        train.train(setup)


UNWORKABLE = {
    'a warmup as long as the run': ({'optimizer.warmup_steps': 30}, 'optimizer.warmup_steps=30'),
    'previews of a split that is not there': (
        {'preview_every': 4, 'preview.split': 'test'},
        "preview.split='test': .* none in 'test'",
    ),
    'windows of more memory than there may be': (
        {'data.ram_budget_gb': 0.001, 'data.engine': 'chunks'},
        '0.00 GB of data.ram_budget_gb=0.001 .* set data.ram_budget_gb to 0.3',
    ),
    'patches that do not divide the latents': (
        {'model.name': 'tiny/5'},
        'latents of 32x32 cannot be cut into patches of 5x5: expected a',
    ),
}


@pytest.mark.parametrize(('changes', 'message'), UNWORKABLE.values(), ids=UNWORKABLE)
def test_a_configuration_that_cannot_work_leaves_nothing_behind(
    mini_dataset, tmp_path, changes, message
):
    with pytest.raises(ValueError, match=message):
        train.train_and_evaluate(small_config(mini_dataset, **changes), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_logs_that_cannot_be_written_end_a_run_in_one_line(mini_dataset, tmp_path, monkeypatch):
    class Full(metric_writers.SummaryWriter):
        def write_scalars(self, step, scalars):
            raise OSError(28, 'No space left on device')

    monkeypatch.setattr(metric_writers, 'SummaryWriter', Full)
    message = rf'^{tmp_path}: logs cannot be written: OSError: .* No space left on device$'
    with pytest.raises(OSError, match=message):
        runs.train(mini_dataset, tmp_path, num_steps=3, eval_every=0)


@pytest.mark.slow  # in a process that has traced much already, the profiler takes minutes
def test_a_profile_of_some_steps(mini_dataset, tmp_path):
    changes = {'num_steps': 13, 'eval_every': 0, 'checkpoint_every': 0}
    runs.train(mini_dataset, tmp_path, **changes, profile_steps=2)
    [profile] = tmp_path.glob('plugins/profile/*/*.xplane.pb')
    assert b'waiting for input' in profile.read_bytes()
