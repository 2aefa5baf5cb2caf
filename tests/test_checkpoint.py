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
    'data': {'fingerprint': 'abc', 'batch_size': 64, 'lanes': 4},
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


def _open(folder):
    return checkpoint.open_manager(folder, keep=2, writable=True)


def _save(manager, step, value):
    checkpoint.save(manager, step, _state(value), _window(value), _describe(IDENTITY))


def _restore(manager, identity=IDENTITY):
    wanted = _abstract(_state(0)), _abstract(_window(0))
    return checkpoint.restore(manager, *wanted, _describe(identity))


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


def test_a_reader_disturbs_nobody(tmp_path):
    with _open(tmp_path) as manager:
        _save(manager, 7, 7)
    # Another process is writing the next one.
    unfinished = tmp_path / 'checkpoints' / '8.orbax-checkpoint-tmp'
    unfinished.mkdir()
    with checkpoint.open_manager(tmp_path, keep=2) as manager:
        state = checkpoint.restore_state(manager, _abstract(_state(0)), IDENTITY)
    assert state['step'] == 7
    assert unfinished.exists()
    with _open(tmp_path) as manager:
        _save(manager, 9, 9)
    assert not unfinished.exists()


def test_a_reader_finds_nothing_and_makes_nothing(tmp_path):
    with checkpoint.open_manager(tmp_path / 'run', keep=2) as manager:
        assert checkpoint.restore_state(manager, _abstract(_state(0)), IDENTITY) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ('group', 'field', 'value', 'message'),
    [
        ('data', 'fingerprint', 'xyz', "data.fingerprint was 'abc' and is now 'xyz'"),
        ('data', 'batch_size', 32, 'data.batch_size was 64 and is now 32'),
        ('text_encoder', 'name', 'hf:g', "text_encoder.name was 'hash' and is now 'hf:g'"),
        ('text_encoder', 'width', 384, 'text_encoder.width was 640 and is now 384'),
        ('data', 'window', 256, "data.window was 'absent' and is now 256"),
    ],
)
def test_another_run_is_refused_with_the_culprit(tmp_path, group, field, value, message):
    with _open(tmp_path) as manager:
        _save(manager, 1, 1)
        manager.wait_until_finished()
        other = IDENTITY | {group: IDENTITY[group] | {field: value}}
        with pytest.raises(checkpoint.OtherRunError) as error:
            _restore(manager, other)
    assert message in str(error.value)
    assert str(tmp_path / 'checkpoints' / '1') in str(error.value)
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

    # Without settings nobody resumes: the state is only looked at.
    if not current or names <= accepted:
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
    with checkpoint.open_manager(sys.argv[1], keep=1, writable=True) as manager:
        checkpoint.save(manager, 1, placed(state, 1), {'loss': jnp.ones(())},
                        checkpoint.Description({}))
        manager.wait_until_finished()
        wanted = abstract(placed(state, 4))
        restored = checkpoint.restore_state(manager, wanted, {})
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
