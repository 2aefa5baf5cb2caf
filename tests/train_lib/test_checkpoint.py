"""What was saved comes back, the last few are kept, and another run's checkpoint is refused."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train_lib import checkpoint

IDENTITY = {
    'text_encoder': {'name': 'hash', 'width': 640},
    'model': 'tiny/4',
}


def _describe(identity, **settings):
    return checkpoint.Description(identity, settings)


def _state(value):
    return {'kernel': jnp.full((3, 2), value, jnp.float32), 'step': jnp.int32(value)}


def _window(value):
    return {'loss': jnp.float32(value)}


def _abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _open(folder, **kept):
    return checkpoint.open_manager(folder, keep=2, **kept)


def _save(manager, step, value):
    checkpoint.save(manager, step, _state(value), _window(value), _describe(IDENTITY))


def _restore(manager):
    return checkpoint.restore(manager, _abstract(_state(0)), _abstract(_window(0)))


def test_the_last_checkpoint_comes_back_bit_for_bit(tmp_path):
    with _open(tmp_path) as manager:
        assert _restore(manager) is None
        for step in (1, 2, 3):
            _save(manager, step, step / 3)
    with _open(tmp_path) as manager:
        assert list(manager.all_steps()) == [2, 3]
        restored = _restore(manager)
    jax.tree.map(np.testing.assert_array_equal, restored, (_state(3 / 3), _window(3 / 3), False))


def test_a_step_is_saved_once(tmp_path):
    with _open(tmp_path) as manager:
        _save(manager, 1, 1)
        _save(manager, 1, 2)
        manager.wait_until_finished()
        state, window, _ = _restore(manager)
    assert state['step'] == window['loss'] == 1


@pytest.mark.parametrize('interrupted', [False, True])
def test_what_was_not_done_is_known(tmp_path, interrupted):
    with _open(tmp_path) as manager:
        state, window = _state(1), _window(1)
        checkpoint.save(manager, 1, state, window, _describe(IDENTITY), interrupted=interrupted)
    with _open(tmp_path) as manager:
        assert _restore(manager)[2] is interrupted


@pytest.mark.parametrize(
    ('keep_every', 'kept'), [(0, [7, 8]), (3, [3, 6, 7, 8]), (4, [4, 7, 8]), (1, list(range(1, 9)))]
)
def test_checkpoints_of_every_so_many_steps_are_kept_beside_the_last(tmp_path, keep_every, kept):
    # As two runs of one workdir.
    for steps in (range(1, 6), range(6, 9)):
        with _open(tmp_path, keep_every=keep_every) as manager:
            for step in steps:
                _save(manager, step, step)
    assert sorted(int(path.name) for path in (tmp_path / checkpoint.FOLDER).iterdir()) == kept


def test_fewer_checkpoints_make_room_before_another_one_is_written(tmp_path):
    with checkpoint.open_manager(tmp_path, keep=4, keep_every=2) as manager:
        for step in range(1, 6):
            _save(manager, step, step)
    with checkpoint.open_manager(tmp_path, keep=1, keep_every=2):
        left = sorted(int(path.name) for path in (tmp_path / checkpoint.FOLDER).iterdir())
    assert left == [2, 4, 5]


@pytest.mark.parametrize(
    ('field', 'value', 'message'),
    [
        ('name', 'hf:g', "text_encoder.name was 'hash' and is now 'hf:g'"),
        ('width', 384, 'text_encoder.width was 640 and is now 384'),
        ('revision', '1', "text_encoder.revision was absent and is now '1'"),
    ],
)
def test_another_run_is_refused_with_the_culprit(field, value, message):
    other = IDENTITY | {'text_encoder': IDENTITY['text_encoder'] | {field: value}}
    descriptions = _describe(IDENTITY), _describe(other)
    with pytest.raises(checkpoint.OtherRunError) as error:
        checkpoint.check_same(*descriptions, accept_changes=[f'text_encoder.{field}'], where='W/1')
    assert message in str(error.value)
    assert 'W/1' in str(error.value)
    assert 'another --workdir' in str(error.value)


_PLAIN = st.dictionaries(
    st.sampled_from('abc'),
    st.one_of(st.integers(), st.text('xyz', max_size=3), st.tuples(st.integers()), st.none()),
)


@settings(deadline=None)
@given(_PLAIN, _PLAIN)
def test_identities_are_equal_or_every_difference_is_named(saved, current):
    names = {
        name
        for name in saved.keys() | current.keys()
        if name not in saved or name not in current or saved[name] != current[name]
    }

    def check():
        descriptions = _describe({'x': saved}), _describe({'x': current})
        checkpoint.check_same(*descriptions, accept_changes=names, where='W')

    if not names:
        check()
        return
    with pytest.raises(checkpoint.OtherRunError) as error:
        check()
    for name in 'abc':
        assert (f'x.{name} was ' in str(error.value)) == (name in names)


@settings(deadline=None)
@given(_PLAIN, _PLAIN, st.sets(st.sampled_from('abc')))
def test_settings_are_equal_or_accepted_or_every_other_one_is_named(saved, current, accepted):
    names = {
        name
        for name in saved.keys() | current.keys()
        if name not in saved or name not in current or saved[name] != current[name]
    }

    def check():
        descriptions = _describe({}, **saved), _describe({}, **current)
        checkpoint.check_same(*descriptions, accept_changes=accepted, where='W')

    if names <= accepted:
        check()
        return
    with pytest.raises(checkpoint.OtherRunError) as error:
        check()
    for name in 'abc':
        assert (f'{name} was ' in str(error.value)) == (name in names - accepted)
    assert f'--accept_changes={",".join(sorted(names))};' in str(error.value)


_RESHARD = """
    import sys
    import jax, jax.numpy as jnp
    from train_lib import checkpoint, sharding

    def placed(tree, fsdp):
        return jax.device_put(tree, sharding.by_shape(tree, sharding.make_mesh(-1, fsdp)))

    def abstract(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

    state = {'kernel': jnp.arange(2**16, dtype=jnp.float32).reshape(256, 256)}
    window = {'loss': jnp.ones(())}
    with checkpoint.open_manager(sys.argv[1], keep=1) as manager:
        checkpoint.save(manager, 1, placed(state, 1), window, checkpoint.Description({}))
        manager.wait_until_finished()
        wanted = abstract(placed(state, 4))
        restored, _, _ = checkpoint.restore(manager, wanted, abstract(window))
    assert (restored['kernel'] == state['kernel']).all()
    print(restored['kernel'].addressable_shards[0].data.shape)
"""


def test_a_checkpoint_can_be_restored_to_other_shardings(tmp_path):
    env = os.environ | {
        'XLA_FLAGS': '--xla_force_host_platform_device_count=4',
        'JAX_PLATFORMS': 'cpu',
    }
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(_RESHARD), str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == '(256, 64)'
