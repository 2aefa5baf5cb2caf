"""Metrics as clu collections: built in the step, merged over steps, computed for the log."""

from typing import TypeVar

import flax
import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics

from coyo11m_tfds.process.jax_environment import promote_as_usual

# The evaluation loss is also computed for each quarter of time: bin i holds t in [i/4, (i+1)/4).
NUM_TIME_BINS = 4

Metrics = TypeVar('Metrics', bound=clu_metrics.Collection)


# Jitted, because a collection is a dozen small arrays: one dispatch instead of one for each.
@jax.jit
@promote_as_usual
def merge(merged: Metrics, update: Metrics) -> Metrics:
    """Returns the metrics of all samples of both; the two are of one class."""
    return merged.merge(update)


@flax.struct.dataclass
class _Mean(clu_metrics.Average):
    """Mean of the values that count; NaN if there are none."""

    def compute(self) -> np.ndarray:
        """Returns the mean, a scalar."""
        # NumPy, because JAX would send what was fetched to the device again.
        total = np.asarray(self.total)
        count = np.asarray(self.count)
        return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def _mean_of(name: str, counts: str) -> type[_Mean]:
    """Returns the class of the mean of the output `name` over the rows that count.

    The output `counts`, bool and as long, says which rows these are; without it, all do.
    """

    def select(**outputs: jax.Array) -> dict[str, jax.Array | None]:
        """Returns the arguments of `_Mean.from_model_output`, of one dimension or more."""
        mask = outputs.get(counts)
        if mask is not None:
            mask = jnp.atleast_1d(mask)
        return {'values': jnp.atleast_1d(outputs[name]), 'mask': mask}

    return _Mean.from_fun(select)


@flax.struct.dataclass
class _Maximum(clu_metrics.Metric):
    """The largest value of an output that is a count."""

    value: jax.Array

    @classmethod
    def empty(cls) -> clu_metrics.Metric:
        """Returns the metric of no step."""
        return cls(value=jnp.zeros((), jnp.int32))

    @classmethod
    def from_model_output(cls, value: jax.Array, **_) -> clu_metrics.Metric:
        """Returns the metric of one step."""
        return cls(value=value)

    def merge(self, other: clu_metrics.Metric) -> clu_metrics.Metric:
        """Returns the metric of the steps of both."""
        return type(self)(value=jnp.maximum(self.value, other.value))

    def compute(self) -> jax.Array:
        """Returns the largest value, int32 `()`."""
        return self.value


@flax.struct.dataclass
class TrainMetrics(clu_metrics.Collection):
    """Metrics of training; `grad_norm` is unclipped, counts of skipped steps are of the state."""

    # Samples that could not be read, or of a step that is not `finite`, do not count. Not by the
    # name `mask`, which clu would apply to all metrics.
    loss: _mean_of('loss', 'counts')
    grad_norm: _mean_of('grad_norm', 'finite')
    learning_rate: clu_metrics.LastValue.from_output('learning_rate')
    skipped_steps: _Maximum.from_output('skipped_steps')
    skipped_in_a_row: _Maximum.from_output('skipped_in_a_row')


def _time_bin(index: int) -> type[_Mean]:
    """Returns the class of the mean loss of samples in a bin of time; the last includes t = 1."""

    def select(*, loss: jax.Array, time: jax.Array, mask: jax.Array, **_) -> dict[str, jax.Array]:
        """Returns the losses, and which of them are of samples in the bin."""
        bins = jnp.clip(jnp.floor(time * NUM_TIME_BINS), 0, NUM_TIME_BINS - 1)
        return {'values': loss, 'mask': mask & (bins == index)}

    return _Mean.from_fun(select)


@flax.struct.dataclass
class EvalMetrics(clu_metrics.Collection):
    """Metrics of evaluation, over the samples of the mask; a time bin without samples is NaN."""

    loss: clu_metrics.Average.from_output('loss')
    loss_t0: _time_bin(0)
    loss_t1: _time_bin(1)
    loss_t2: _time_bin(2)
    loss_t3: _time_bin(3)
    # The loss with the text of another sample minus that with the own text.
    text_gain: _mean_of('text_gain', 'has_other_text')
