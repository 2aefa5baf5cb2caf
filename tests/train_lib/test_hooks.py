"""What is done now and then: a hook of one's own is a class and an entry in the list."""

import logging

import jax
import jax.numpy as jnp
import pytest

from tests import runs
from train_lib import chips, hooks, train


class LargestWeight(hooks.Hook):
    """The example of the documentation, nearly."""

    name = 'largest weight'

    def __init__(self, run):
        super().__init__(run, every=2)

    def __call__(self, step, state):
        largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(state.params))
        self.run.writer.write_scalars(step, {'train/largest_weight': largest})
        return f'{largest:.2f}'


def test_a_hook_of_ones_own_is_called_when_due_and_told_of(
    mini_dataset, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(hooks, 'HOOKS', (LargestWeight, *hooks.HOOKS))
    kind = jax.devices()[0].device_kind
    monkeypatch.setitem(chips.CHIPS, kind, chips.Chip('mine', 1e12, 1e9, 1e9, 1e9))
    config = runs.small_config(mini_dataset, num_steps=5, eval_every=0, profile_steps=0)
    with caplog.at_level(logging.INFO):
        train.train_and_evaluate(config, tmp_path)
    scalars = runs.read_scalars(tmp_path)
    told = {step: values for (tag, step), values in scalars.items() if 'largest' in tag}
    assert set(told) == {2, 4, 5}
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(f'largest weight at step 4: {told[4][0]:.2f} (') for line in lines)

    # Beside it: passes over the data, and the share of what the chip could do.
    steps = 1053 // 8  # in an epoch, a few left out
    assert scalars['train/epoch', 5] == [pytest.approx(5 / steps, rel=0.05)]
    (rate,) = scalars['device/tflops_per_chip', 5]
    assert scalars['device/model_flop_utilization', 5] == [pytest.approx(rate)]
    samples = scalars['train/samples_per_second', 5][0]
    assert rate == pytest.approx(samples * 0.0394e9 / 1e12, rel=0.01)


@pytest.mark.slow  # in a process that has traced much already, the profiler takes minutes
@pytest.mark.parametrize(('num_steps', 'profile_steps', 'profiled'), [(13, 2, 2), (3, 50, 2)])
def test_a_profile_has_its_steps_or_those_of_a_short_run(
    mini_dataset, tmp_path, caplog, num_steps, profile_steps, profiled
):
    caplog.set_level(logging.INFO)
    changes = {'num_steps': num_steps, 'eval_every': 0, 'checkpoint_every': 0}
    config = runs.small_config(mini_dataset, **changes, profile_steps=profile_steps)
    train.train_and_evaluate(config, tmp_path)
    assert list(tmp_path.glob('plugins/profile/*/*.xplane.pb'))
    end = min(10 + profile_steps, num_steps)
    assert f'profile at step {end}: of {profiled} steps (' in caplog.text
