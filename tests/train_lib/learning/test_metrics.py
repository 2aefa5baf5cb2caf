"""Means are over samples, whatever the batches; masks and time bins count what they should."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from train_lib.learning import metrics

_SAMPLES = st.lists(
    st.tuples(st.floats(0, 4, width=32), st.floats(0, 1, width=32), st.booleans()),
    min_size=8,
    max_size=8,
)


@settings(max_examples=30, deadline=None)
@given(_SAMPLES)
@example([(1.0, time, True) for time in (0.0, 0.1, 0.25, 0.7499, 0.75, 0.9, 1.0, 0.5)])
def test_evaluation_metrics_are_means_over_real_samples(samples):
    loss, time, mask = (np.asarray(column) for column in zip(*samples, strict=True))
    loss, time = loss.astype(np.float32), time.astype(np.float32)
    halves = [
        metrics.EvalMetrics.single_from_model_output(
            loss=loss[s], time=time[s], mask=mask[s], text_gain=time[s], has_other_text=loss[s] > 1
        )
        for s in (slice(0, 4), slice(4, 8))
    ]
    computed = metrics.merge(*halves).compute()

    def mean(chosen):
        return loss[chosen].mean() if chosen.any() else np.nan

    gains = time[loss > 1]
    expected = {'loss': mean(mask), 'text_gain': gains.mean() if len(gains) else np.nan}
    bins = np.minimum((time * metrics.NUM_TIME_BINS).astype(int), metrics.NUM_TIME_BINS - 1)
    for index in range(metrics.NUM_TIME_BINS):
        expected[f'loss_t{index}'] = mean(mask & (bins == index))
    assert set(computed) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(computed[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_an_empty_time_bin_of_fetched_metrics_is_nan_without_a_warning():
    one, counts = np.ones(1), np.ones(1, bool)
    update = metrics.EvalMetrics.single_from_model_output(
        loss=one, text_gain=one, mask=counts, has_other_text=counts, time=jnp.zeros(1)
    )
    with np.errstate(all='raise'), jax.transfer_guard('disallow'):
        assert np.isnan(jax.device_get(update).compute()['loss_t3'])
