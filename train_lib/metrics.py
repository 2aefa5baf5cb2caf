"""What a step measures, as clu collections: built inside the step, merged, computed when logged.

    update = TrainMetrics.single_from_model_output(
        loss=losses, grad_norm=optax.tree.norm(grads), learning_rate=schedule(step))
    merged = metrics.merge(merged, update)
    scalars = jax.device_get(merged).compute()   # {'loss': ..., 'grad_norm': ..., ...}

Neither TensorFlow nor torch is imported here.
"""

import flax
import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics

# The evaluation loss is also told apart by time: bin i holds t in [i/4, (i+1)/4).
NUM_TIME_BINS = 4


# Jitted, because a collection is a dozen of small arrays: one dispatch instead of one for each.
merge = jax.jit(lambda merged, update: merged.merge(update))


@flax.struct.dataclass
class _MeanLoss(clu_metrics.Average):
    """Mean over the samples that count; 0 where there is none, which is no sign of divergence."""

    @classmethod
    def from_model_output(
        cls, *, loss: jax.Array, counts: jax.Array | None = None, **_
    ) -> '_MeanLoss':
        return super().from_model_output(loss, mask=counts)

    def compute(self) -> jax.Array:
        # NumPy's `maximum`: JAX's would send what was fetched to the device again.
        return self.total / np.maximum(self.count, 1)


@flax.struct.dataclass
class TrainMetrics(clu_metrics.Collection):
    """From one step: `loss` of every sample, `grad_norm` (before clipping) and `learning_rate`.

    `counts` (bool, as long as `loss`) may leave out samples that could not be read. It is not
    called `mask`, because clu would apply that to the other two as well.
    """

    loss: _MeanLoss
    grad_norm: clu_metrics.Average.from_output('grad_norm')
    learning_rate: clu_metrics.LastValue.from_output('learning_rate')


def _time_bin(index: int) -> type[clu_metrics.Average]:
    """Mean loss of the samples whose time falls into one bin; the last bin includes t = 1."""

    def select(*, loss: jax.Array, time: jax.Array, mask: jax.Array, **_) -> dict[str, jax.Array]:
        bins = jnp.clip(jnp.floor(time * NUM_TIME_BINS), 0, NUM_TIME_BINS - 1)
        return {'values': loss, 'mask': mask & (bins == index)}

    return clu_metrics.Average.from_fun(select)


@flax.struct.dataclass
class EvalMetrics(clu_metrics.Collection):
    """From `loss`, `time` (float32, in [0, 1]) and `mask` (bool) of every sample, each `(b,)`.

    Samples that the mask leaves out count nowhere. A time bin that held no sample is NaN.
    """

    loss: clu_metrics.Average.from_output('loss')
    loss_t0: _time_bin(0)
    loss_t1: _time_bin(1)
    loss_t2: _time_bin(2)
    loss_t3: _time_bin(3)
