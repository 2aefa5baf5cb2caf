"""What a run begins with: another run's weights, or its own, also with other data or batches."""

import itertools
import json
import re

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hypothesis import given
from hypothesis import strategies as st

import input_pipeline
from coyo11m_tfds import schema
from tests import runs
from tests.runs import small_config
from tests.train_lib.test_data import rewritten
from train_lib import data, run_setup, train
from train_lib.learning import flow, sharding, step
from train_lib.lifecycle import beginnings, checkpoint
from train_lib.lifecycle.checkpoint import Description

SHORT = {'eval_every': 0, 'checkpoint_every': 0}


@pytest.fixture
def keys(monkeypatch):
    """The keys of every batch that is trained on from now on, a list of int64 `(b,)`."""
    seen, train_batches = [], data.TrainingData.train_batches

    def noting(self, position):
        for batch in train_batches(self, position):
            seen.append(runs.own_keys(batch))
            yield batch

    monkeypatch.setattr(data.TrainingData, 'train_batches', noting)
    return seen


def keys_of(data_dir, start, count, **order):
    """The keys of `count` batches of a data set, from sample `start` of every lane on."""
    order = {'batch_size': 8, 'seed': 0, 'chunk': 32, 'lanes': 2, 'window': 32} | order
    batches = input_pipeline.train_batches(data_dir, features=[schema.KEY], **order)
    (source,) = batches.get_state()['samples']
    batches.set_state({'step': 0, 'samples': {source: start}})
    return [batch[schema.KEY] for batch in itertools.islice(batches, count)]


def samples_at(workdir):
    """The samples of every lane that the last checkpoint of a run has seen of its only source."""
    (samples,) = checkpoint.find_last(workdir).description.position['samples'].values()
    return samples


_PLAIN = st.dictionaries(
    st.sampled_from('abc'),
    st.one_of(st.integers(), st.text('xyz', max_size=3), st.tuples(st.integers()), st.none()),
)


@given(_PLAIN, _PLAIN, st.sets(st.sampled_from('abc')))
def test_settings_are_equal_or_accepted_or_every_other_one_is_named(saved, current, accepted):
    names = {
        name
        for name in saved.keys() | current.keys()
        if name not in saved or name not in current or saved[name] != current[name]
    }
    descriptions = Description({}, saved), Description({}, current)
    if names <= accepted:
        beginnings.check_resumable(*descriptions, accepted, checkpoint_path='W')
        return
    with pytest.raises(beginnings.OtherRunError) as error:
        beginnings.check_resumable(*descriptions, accepted, checkpoint_path='W')
    for name in 'abc':
        assert (f'{name} was ' in str(error.value)) == (name in names - accepted)
    assert f'--accept_changes={",".join(sorted(names))};' in str(error.value)


def test_a_run_resumes_with_another_permutation(mini_dataset, keys, tmp_path, caplog):
    caplog.set_level('INFO')
    runs.train(mini_dataset, tmp_path, **SHORT, num_steps=2)
    changes = {'data.lanes': 4, 'data.window': 64, 'num_steps': 4}
    with pytest.raises(beginnings.OtherRunError, match=f'--accept_changes={",".join(changes)};'):
        runs.train(mini_dataset, tmp_path, **SHORT, **changes)
    runs.train(mini_dataset, tmp_path, [*changes], **SHORT, **changes)
    expected = keys_of(mini_dataset, 0, 2) + keys_of(mini_dataset, 4, 2, lanes=4, window=64)
    jax.tree.map(np.testing.assert_array_equal, keys, expected)
    told = 'from sample 4 of each lane on: in the rest of this epoch, some records come twice and'
    assert told in caplog.text


def test_a_resumed_run_looks_at_no_other_weights_and_its_data_set_may_have_moved(
    mini_dataset, small_run
):
    config = small_config(mini_dataset, **SHORT, num_steps=4, init_from='/gone')
    assert train.set_up(config, small_run[0]).beginning.step == 4


def test_tensorboard_has_each_configuration_once(mini_dataset, tmp_path):
    for num_steps in (2, 2, 3):
        runs.train(mini_dataset, tmp_path, ['num_steps'], **SHORT, num_steps=num_steps)
    first, second = (x for x in runs.read_events(tmp_path) if x[0] == 'config')
    assert (first[1], second[1]) == (0, 2)
    text = first[2].item().decode()
    config = small_config(mini_dataset, **SHORT, num_steps=2)
    assert json.loads(text) == json.loads(json.dumps(config.to_dict()))
    assert all(line.startswith('    ') for line in text.splitlines())  # as code
    assert b'"num_steps": 3' in second[2].item()
    assert checkpoint.find_last(tmp_path).description.config['num_steps'] == 3


def begin(data_dir, workdir, init_from, **changes):
    """The state at step 0 of a run that begins with another one's weights."""
    config = small_config(data_dir, **SHORT, init_from=str(init_from), **changes)
    setup = train.set_up(config, workdir)
    return jax.device_get((setup.beginning.state(setup.program), setup.program.init()))


@pytest.mark.parametrize('average', [True, False])
def test_a_run_begins_with_the_weights_of_another(mini_dataset, small_run, tmp_path, average):
    changes = {'init_average': average, 'batch_size': 16, 'seed': 3, 'optimizer.b1': 0.5}
    state, fresh = begin(mini_dataset, tmp_path / 'new', small_run[0], **changes)
    expected = small_run[1].ema_params if average else small_run[1].params
    for weights in (state.params, state.ema_params):
        jax.tree.map(np.testing.assert_array_equal, weights, expected)
    empty = {'params': None, 'ema_params': None}
    jax.tree.map(np.testing.assert_array_equal, state.replace(**empty), fresh.replace(**empty))
    assert int(state.step) == 0
    assert not (tmp_path / 'new').exists()  # so far nothing has been written
    if average:
        earlier, _ = begin(mini_dataset, tmp_path / 'new', f'{small_run[0]}@2')
        assert not np.array_equal(
            earlier.params['patches']['kernel'], state.params['patches']['kernel']
        )


@pytest.mark.parametrize(
    ('changes', 'text_dim', 'arguments', 'begun'),
    [
        ({}, 640, {'latents_shape': (3, 4, 16, 16)}, set()),
        (
            {},
            5,
            {'latents_shape': (5, 4, 32, 32)},
            {'conditioning/text_1/kernel', 'conditioning/crops/kernel'},
        ),
        (
            {'model.patch_size': 8},
            0,
            {'vocabulary': 7},
            {'patches/kernel', 'velocity/kernel', 'velocity/bias', 'conditioning/text_1/kernel'}
            | {f'words/{x}' for x in ('table', 'nothing', 'neighbours/kernel', 'neighbours/bias')}
            | {f'blocks/attention/words/{x}' for x in ('kernel', 'bias')},
        ),
    ],
    ids=['resolution', 'texts and crops', 'patches and tokens'],
)
def test_what_does_not_fit_another_model_begins_anew_and_is_named(
    mini_dataset, small_run, tmp_path, caplog, changes, text_dim, arguments, begun
):
    config = small_config(mini_dataset, **SHORT, init_from=str(small_run[0]), seed=5, **changes)
    mesh = sharding.make_mesh()
    program = step.make_program(config, mesh, flow.no_stats(text_dim, **arguments))
    description = run_setup.describe_run(config, data.TrainingData(config, mesh), program)
    beginning = beginnings.find_beginning(config, None, description, program)
    told = set(re.findall(r'Not taken from \S+: parameter (\S+) has shape \S', caplog.text))
    is_here = flatten_dict(program.abstract_state.params, sep='/').keys()
    assert told & is_here == begun
    assert told - is_here == ({'conditioning/crops/kernel'} if changes else set())
    taken = flatten_dict(small_run[1].ema_params, sep='/')
    fresh = program.init()
    state = beginning.state(program)
    expected = {
        name: x if name in begun else taken[name]
        for name, x in flatten_dict(fresh.params, sep='/').items()
    }
    for weights in (state.params, state.ema_params):
        found = flatten_dict(weights, sep='/')
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert {name: x.sharding for name, x in found.items()} == {
            name: x.sharding for name, x in flatten_dict(fresh.params, sep='/').items()
        }


def test_other_data_with_another_encoder_are_told(mini_dataset, small_run, tmp_path, caplog):
    other = rewritten(mini_dataset, tmp_path / 'other', schema.META_TEXT_ENCODER)
    begin(other, tmp_path / 'run', small_run[0])
    assert (
        "trained with other settings: text_encoder.name was 'hash' and is now 'another'"
        in caplog.text
    )


UNFIT = {
    'a wider model': (
        '',
        {'model.width': 64},
        r'parameter blocks/\S+ has shape .* there and .* here; expected .* model.width and mod',
    ),
    'a deeper model': (
        '',
        {'model.depth': 3},
        r'parameter blocks/\S+ has shape .* there and .* here; ',
    ),
    'other heads': (
        '',
        {'model.num_heads': 2},
        'its model.num_heads is 4, expected 2 as in this run',
    ),
    'a step that is not there': ('@3', {}, 'holds no checkpoint of step 3; there are 2, 4'),
    'a folder without steps': ('/checkpoints', {}, 'holds no checkpoint: train first'),
}


@pytest.mark.parametrize(('place', 'changes', 'message'), UNFIT.values(), ids=UNFIT)
def test_weights_that_do_not_fit_are_refused_by_name(
    mini_dataset, small_run, tmp_path, place, changes, message
):
    with pytest.raises(
        ValueError, match=rf"^init_from='{small_run[0]}{place}': .*{message}"
    ) as error:
        begin(mini_dataset, tmp_path / 'run', f'{small_run[0]}{place}', **changes)
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'run').exists()
