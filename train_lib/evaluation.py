"""One pass over the validation split: the loss at fixed noise and times.

    scalars = evaluation.evaluate(eval_step, state.ema_params, batches)
    # {'eval/loss': ..., 'eval/loss_t0': ..., 'eval/loss_t3': ...}

Two evaluations differ by their weights alone, so their losses can be compared.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from train_lib import metrics


def evaluate(
    eval_step: Callable[[Any, dict], metrics.EvalMetrics], params: Any, batches: Iterable[dict]
) -> dict[str, float]:
    """Averages over all samples of all batches, weighted by sample and not by batch.

    Args:
        eval_step: jitted, from `(params, batch)` to metrics.
        params: the weights to judge.
        batches: device batches with a `mask`; as many on every process.

    Returns:
        Names to values, without the time bins that no sample fell into.

    Raises:
        ValueError: there is no batch.
    """
    merged = None
    for batch in batches:
        update = eval_step(params, batch)
        merged = update if merged is None else metrics.merge(merged, update)
    if merged is None:
        raise ValueError('there is no batch to evaluate on')
    computed = jax.device_get(merged).compute()
    return {f'eval/{name}': float(x) for name, x in computed.items() if not math.isnan(x)}
