"""One step of training and one of evaluation: pure functions of arrays, to be jitted by the caller.

    train_step = make_train_step(model, tx, schedule, stats, ema_decay=0.9999, seed=0,
                                 logit_mean=0.0, logit_std=1.0)
    state, metrics = jax.jit(train_step, donate_argnums=0)(state, batch)

A batch holds `latents` `(b, 4, H, W)` raw, `key` uint32 `(b, 2)` and texts: `text_embedding`
`(b, D)` or, for a model with a vocabulary, `tokens` int32 `(b, T)`, which a frozen encoder may turn
into hidden states before the model sees them. For training it also holds `drop_text` bool `(b,)`
where texts may be dropped, for evaluation `mask` bool `(b,)`, False where there is no sample. A
training batch has a `mask` as well where records that cannot be read are skipped; a batch without
one is compiled as if there were no masks.
Neither TensorFlow nor torch is imported here, so that steps can be measured where JAX is alone.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from train_lib import accumulate, flow
from train_lib.metrics import EvalMetrics, TrainMetrics
from train_lib.state import TrainState
from train_lib.step_encoder import StepEncoder

Batch = Mapping[str, jax.Array]

_TEXTS = 'text_embedding', 'tokens', 'drop_text'  # of a batch, for the model


def make_train_step(
    model: nn.Module,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    stats: flow.Stats,
    *,
    ema_decay: float,
    seed: int,
    logit_mean: float,
    logit_std: float,
    parts: int = 1,
    encoder: StepEncoder | None = None,
) -> Callable[..., tuple[TrainState, TrainMetrics]]:
    """Returns the function that turns a state and a batch into the next state and metrics.

    It takes the frozen weights of the encoder as a third argument, None without one.

    Noise and times depend on `(seed, state.step)` alone, so a resumed run repeats them exactly. A
    step whose loss or gradient is not finite, or whose batch has no sample, changes nothing but its
    count, and the former is counted as skipped.

    Args:
        model: called as `model(z, t, text, drop_text)`.
        tx: the optimizer.
        schedule: its learning rate, for the metrics.
        stats: to standardize latents and text embeddings.
        ema_decay: a step, at the end; the average is shorter while there are few steps.
        seed: of noise and times.
        logit_mean: of the logit-normal times.
        logit_std: of the logit-normal times.
        parts: the gradient is computed over so many parts of the batch in turn.
        encoder: of tokens; None for a model that looks them up in a table of its own.
    """
    text_of = make_text_of(stats, encoder)

    def train_step(
        state: TrainState, batch: Batch, frozen: Any = None
    ) -> tuple[TrainState, TrainMetrics]:
        noise_rng, time_rng = jax.random.split(jax.random.fold_in(jax.random.key(seed), state.step))
        x = flow.standardize_latents(batch['latents'], stats)
        noise = jax.random.normal(noise_rng, x.shape)
        t = flow.logit_normal_times(time_rng, x.shape[0], logit_mean, logit_std)
        mask = batch.get('mask')
        texts = {name: batch[name] for name in _TEXTS if name in batch}
        rows = texts, x, noise, t, _weights(x.shape[0], mask)

        def mean_loss(params: Any, rows: Any) -> tuple[jax.Array, jax.Array]:
            texts, x, noise, t, weights = rows
            velocity = _velocity(model, params, texts, functools.partial(text_of, frozen))
            losses = flow.squared_errors(velocity, x, noise, t)
            return jnp.sum(jnp.where(weights > 0, weights * losses, 0)), losses

        gradient = accumulate.in_parts(jax.value_and_grad(mean_loss, has_aux=True), parts)
        (loss, losses), grads = gradient(state.params, rows)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        # A batch without a sample has gradients of zero, which would still decay the weights and
        # move them by the optimizer's momentum.
        useful = finite if mask is None else finite & jnp.any(mask)

        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        decay = _warm_decay(ema_decay, state.step)
        ema_params = optax.incremental_update(params, state.ema_params, 1 - decay)
        after = state.replace(params=params, ema_params=ema_params, opt_state=opt_state)
        after = jax.tree.map(lambda new, old: jnp.where(useful, new, old), after, state)
        after = after.replace(
            step=state.step + 1,
            skipped=state.skipped + ~finite,
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
        )
        metrics = TrainMetrics.single_from_model_output(
            loss=losses,
            counts=jnp.full(losses.shape, finite) if mask is None else finite & mask,
            grad_norm=grad_norm,
            finite=finite,
            learning_rate=jnp.asarray(schedule(state.step), jnp.float32),
            skipped_steps=after.skipped,
            skipped_in_a_row=after.skipped_in_a_row,
        )
        return after, metrics

    return train_step


def make_eval_step(
    model: nn.Module, stats: flow.Stats, *, seed: int, encoder: StepEncoder | None = None
) -> Callable[..., EvalMetrics]:
    """Returns the function from weights, a batch and frozen weights to the loss of its samples.

    Noise and a time uniform in [0, 1) come from `(seed, key)` of each sample: the loss of a split
    does not depend on its order, the batch size or the number of hosts.
    """
    text_of = make_text_of(stats, encoder)

    def eval_step(params: Any, batch: Batch, frozen: Any = None) -> EvalMetrics:
        x = flow.standardize_latents(batch['latents'], stats)
        noise, t = flow.noise_and_times_of_keys(batch['key'], x.shape[1:], seed)
        velocity = _velocity(model, params, batch, functools.partial(text_of, frozen))
        loss = flow.squared_errors(velocity, x, noise, t)
        return EvalMetrics.single_from_model_output(loss=loss, time=t, mask=batch['mask'])

    return eval_step


def _weights(count: int, mask: jax.Array | None) -> jax.Array:
    """Of `count` samples in the mean over those that the mask leaves."""
    if mask is None:
        return jnp.full(count, 1 / count, jnp.float32)
    return mask.astype(jnp.float32) / jnp.maximum(jnp.sum(mask), 1)


def make_text_of(stats: flow.Stats, encoder: StepEncoder | None) -> Callable[[Any, jax.Array], Any]:
    """Returns the function from frozen weights and raw texts to what the model is given.

    Text embeddings `(b, D)` are standardized, token ids int32 `(b, T)` encoded if there is an
    encoder.
    """

    def text_of(frozen: Any, texts: jax.Array) -> Any:
        if texts.dtype != jnp.int32:
            return flow.standardize_text(texts, stats)
        return encoder.encode(frozen, texts) if encoder else texts

    return text_of


def _velocity(
    model: nn.Module, params: Any, batch: Batch, text_of: Callable[[jax.Array], Any]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The model as a function of position and time, for the texts of a batch."""
    text = text_of(batch['tokens'] if 'tokens' in batch else batch['text_embedding'])
    drop_text = batch.get('drop_text')
    apply = applied(model, params)
    return lambda z, t: apply(z, t, text, drop_text)


def applied(model: nn.Module, params: Any) -> Callable[..., jax.Array]:
    """The model as a function of its inputs."""
    apply: Callable[..., Any] = model.apply
    return functools.partial(apply, {'params': params})


def _warm_decay(ema_decay: float, step: jax.Array) -> jax.Array:
    # As in TensorFlow's ExponentialMovingAverage with `num_updates`: an average over many steps
    # would hold the random first weights for as long.
    return jnp.minimum(ema_decay, (1.0 + step) / (10.0 + step))
