"""Runs on a mixture: the same run however often it stops, with any batch."""

import itertools
import json
import pathlib
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import input_pipeline
from coyo11m_tfds import add_column, schema
from tests import built, runs
from tests.runs import small_config
from train_lib import data
from train_lib.learning import sharding
from train_lib.lifecycle import beginnings, checkpoint

STAGES = ({'from': 5, 'weights': (1, 1)},)


@pytest.fixture(scope='module')
def mix(mini_dataset, sample_source, hash_sidecar, tmp_path_factory) -> tuple[dict, ...]:
    """Two data sets: of the first, records of a third of the scores; the second in place."""
    folder = tmp_path_factory.mktemp('mix')
    scored = folder / 'hash' / schema.VERSION
    shutil.copytree(mini_dataset, scored)
    keys = pq.read_table(hash_sidecar, columns=['key']).column(0)
    held_out = input_pipeline.eval_batches(mini_dataset, batch_size=400, features=('key',))
    numbers = {
        'score': np.arange(len(keys), dtype=np.float32) % 3,
        'held_out': np.isin(keys.to_numpy(), next(held_out)['key']).astype(np.uint8),
    }
    pq.write_table(pa.table({'key': keys, **numbers}), folder / 'numbers')
    for name in numbers:
        add_column.add(scored, name, parquet=folder / 'numbers', column=name)
    other = built.build(sample_source, hash_sidecar, folder, name='here', latents='in_place')
    first = {'dir': str(scored), 'weight': 3, 'where': 'score == 1'}
    return first, {'dir': str(other), 'weight': 1}


def mixed(mix, **changes) -> dict:
    """Fields of a configuration."""
    return {'data.mix': mix, 'data.stages': STAGES, 'eval_every': 6} | changes


def run(workdir: pathlib.Path, mix, parts) -> dict[tuple[str, int], float]:
    """Trains to these steps with these batch sizes, one part after the other."""
    for num_steps, batch_size in parts:
        changes = {'num_steps': num_steps, 'batch_size': batch_size}
        runs.train('', workdir, [*changes], **mixed(mix, **changes))
    return runs.losses(workdir)


def test_a_run_that_stops_and_changes_its_batch_is_the_unbroken_one(mix, tmp_path):
    whole = run(tmp_path / 'whole', mix, [(6, 8), (12, 16)])
    broken = run(tmp_path / 'broken', mix, [(2, 8), (6, 8), (7, 16), (12, 16)])
    at = {('eval/loss', 6), ('eval/loss/hash', 6), ('eval/loss/here', 6)}
    assert at <= whole.keys()
    assert {key: broken[key] for key in whole} == whole
    place = checkpoint.find_last(tmp_path / 'broken').description.position
    assert place['step'] == 12 and len(json.dumps(place)) < 600
    # Of every lane 3 + 1 samples up to step 5, then 2 + 2, and 4 + 4 in the larger batch.
    assert list(place['samples'].values()) == [5 * 3 + 2 + 6 * 4, 5 * 1 + 2 + 6 * 4]
    # Each source's own passes; the first one is the shorter.
    scalars = runs.read_scalars(tmp_path / 'whole')
    assert scalars['data/hash/samples', 12] == [2 * 41]
    assert scalars['data/hash/epoch', 12][0] > 2 * scalars['data/here/epoch', 12][0] > 0


def test_the_log_tells_share_kept_and_share_of_the_batch(mix):
    (first, *_, stage, read) = data.TrainingData(
        small_config('', **mixed(mix)), sharding.make_mesh()
    ).description
    assert first.startswith(f'hash: {mix[0]["dir"]}, ') and 'have score == 1' in first
    assert '(33.' in first or '(32.' in first or '(34.' in first
    assert (stage, 'steps an epoch' in read) == ('shares hash 0.5, here 0.5', True)


def test_a_run_on_one_data_set_goes_on_with_a_further_one(mix, tmp_path, caplog):
    """The first goes on at its next sample, the other one begins, where that is confirmed."""
    caplog.set_level('INFO')
    (first, other), alone = mix, {'eval_every': 0, 'num_steps': 4}
    runs.train(other['dir'], tmp_path, **alone)
    changes = mixed((other, first), num_steps=6, eval_every=0) | {'data.caption_dropout': 0.1}
    with pytest.raises(beginnings.OtherRunError, match=r'data.dir was .*data\.mix was'):
        runs.train('', tmp_path, ['num_steps'], **changes)
    accepted = ['num_steps', 'data.dir', 'data.mix', 'data.stages']
    runs.train('', tmp_path, accepted, **changes)
    assert caplog.text.count('the other data set is read from its beginning') == 1
    place = checkpoint.find_last(tmp_path).description.position
    # 4 samples of a lane in each of 4 steps alone; then 1 + 3 in step 5, and 2 + 2 in step 6.
    assert list(place['samples'].values()) == [4 * 4 + 1 + 2, 3 + 2]


WRONG = {
    'a folder with a mixture': ({'data.dir': 'X'}, "data.dir='X': expected none with data.mix"),
    'neither folder nor mixture': ({'data.mix': ()}, 'data.dir=.*: expected the folder'),
    'stages without a mixture': (
        {'data.mix': (), 'data.dir': 'X'},
        r'data.stages=.*: expected none without data.mix',
    ),
    'a folder that is not there': (
        {'data.mix': ({'dir': 'nowhere'},)},
        r'data\.mix=.*: nowhere: there is no such folder',
    ),
}


@pytest.mark.parametrize('changes, message', WRONG.values(), ids=WRONG)
def test_settings_of_a_mixture_are_checked(mix, changes, message):
    config = small_config('', **mixed(mix) | changes)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data.TrainingData(config, sharding.make_mesh())


def test_a_condition_that_leaves_nothing_to_evaluate_is_told_at_the_start(mix):
    few = ({**mix[0], 'where': 'held_out == 0'}, mix[1])  # every record of the other split
    with pytest.raises(ValueError, match=r"would come in lockstep\. Give 'here' a 'seed'"):
        data.TrainingData(small_config('', **mixed(few)), sharding.make_mesh())
    few[0]['seed'] = 7
    opened = data.TrainingData(small_config('', **mixed(few)), sharding.make_mesh())
    # A resumed run compares it.
    assert [source['seed'] for source in opened.settings['data.mix']] == [7, None]
    with pytest.raises(ValueError, match=r"keeps none of the .* records of split 'validation'"):
        opened.check_reading()


@pytest.mark.slow
def test_latents_of_several_shapes_are_learned_in_turns(sample_source, hash_sidecar, tmp_path):
    """A step and an evaluation for each shape; steps are shared out by weight."""
    wide = shutil.copytree(sample_source, tmp_path / 'source')
    for path in (wide / schema.LATENTS_FOLDER).iterdir():
        content = torch.load(path, weights_only=True)
        latents = content[schema.PT_LATENTS][:, :1, :, :16].clone()
        torch.save(content | {schema.PT_LATENTS: latents}, path)
    mix = (
        {'dir': str(built.build(sample_source, hash_sidecar, tmp_path)), 'weight': 2},
        {
            'dir': str(built.build(wide, hash_sidecar, tmp_path, name='wide')),
            'weight': 1,
            'seed': 1,
        },
    )
    config = small_config('', **mixed(mix, num_steps=6, preview_every=6) | {'data.stages': ()})
    state = runs.train_config(config, tmp_path / 'run')
    assert int(state.step) == 6 and int(state.skipped) == 0
    losses = runs.losses(tmp_path / 'run')
    assert {('eval/loss/hash', 6), ('eval/loss/wide', 6)} <= losses.keys()
    assert all(np.isfinite(loss) for loss in losses.values())
    opened = data.TrainingData(config, sharding.make_mesh())
    shapes = [
        batch[schema.LATENTS].shape[2:] for batch in itertools.islice(opened.train_batches(), 6)
    ]
    assert shapes == [(32, 32), (16, 32), (32, 32)] * 2
    place = checkpoint.find_last(tmp_path / 'run').description.position
    assert list(place['samples'].values()) == [4 * 4, 2 * 4]
