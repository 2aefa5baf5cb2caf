"""Steps of training and evaluation, and drawing: pure functions of arrays, compiled for a mesh.

A batch holds raw `latents` `(b, C, H, W)`, `key` uint32 `(b, 2)` and texts: `text_embedding`
`(b, D)` or `tokens` int32 `(b, T)`, which a frozen encoder may turn into hidden states. Where they
are needed, it holds `drop_text` bool `(b,)`, `crop` int32 `(b,)`, and `mask` bool `(b,)`, False for
rows without a sample. With recorded moments, latents are `(b, 2C, H, W)`, and a training batch
holds `noise_seed` uint32 `(b,)`. Frozen weights, or None, are the first argument of the functions.
"""

# Imports neither TensorFlow nor torch: steps can be measured with JAX alone.

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import optax
from jax.sharding import Mesh

from coyo11m_tfds.dataset.stored_dataset import DatasetStats
from coyo11m_tfds.process.errors import FieldError
from coyo11m_tfds.process.jax_environment import promote_as_usual
from train_lib.learning import flow, models, sharding, state, step_encoder
from train_lib.learning.metrics import EvalMetrics, TrainMetrics
from train_lib.learning.state import TrainState, cast_block_kernels
from train_lib.learning.step_encoder import StepEncoder

Batch = Mapping[str, jax.Array]

_TEXT_FEATURES = 'text_embedding', 'tokens'


# --- Pure functions -----------------------------------------------------------------------------


def make_train_step(
    config: ml_collections.ConfigDict,
    model: nn.Module,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    stats: DatasetStats,
    encoder: StepEncoder | None = None,
) -> Callable[..., tuple[TrainState, TrainMetrics]]:
    """Returns a function from frozen weights, a state and a batch to the next state and metrics.

    Args:
        config: Configuration of the run.
        model: Model whose weights the state holds.
        tx: Its optimizer.
        schedule: Learning rate by step, for the metrics.
        stats: Statistics of the training data.
        encoder: Frozen encoder of token ids; None if the model takes texts as the batch has them.
    """
    # Inputs of the model behind the text, in its order, by their names in a batch.
    conditions = ['drop_text']
    if getattr(model, 'crops', 1) > 1:
        conditions.append('crop')
    # A batch has one of the texts, or none, and perhaps not all conditions.
    input_names = list(_TEXT_FEATURES)
    input_names += conditions

    @promote_as_usual
    def train_step(frozen: Any, state: TrainState, batch: Batch) -> tuple[TrainState, TrainMetrics]:
        """Trains on one batch; a step whose loss or gradient is not finite changes no weight."""
        # Functions of seed and step alone, so a resumed run repeats noise and times exactly.
        rng = jax.random.fold_in(flow.make_key(config.seed), state.step)
        noise_rng, time_rng = jax.random.split(rng)
        latents = batch['latents']
        if stats.moments:
            # Anew in each epoch: the data set holds what the VAE gives to draw from.
            latents = flow.draw_latents(latents, batch['noise_seed'], stats)
        x = flow.standardize_latents(latents, stats)
        noise = jax.random.normal(noise_rng, x.shape, jnp.float32)
        t = flow.logit_normal_times(time_rng, x.shape[0], **config.flow)
        mask = batch.get('mask')
        inputs = {name: batch[name] for name in input_names if name in batch}
        weights = _mean_weights(x.shape[0], mask)
        # Everything with a row for each sample, of which `accumulate_gradient` takes slices.
        rows = inputs, x, noise, t, weights

        def mean_loss(params: Any, rows: Any) -> tuple[jax.Array, jax.Array]:
            """Returns the weighted sum of the losses of some rows, and each loss, `(n,)`."""
            inputs, x, noise, t, weights = rows
            # Encoded here and not before, so that hidden states of one slice exist at a time.
            raw_text = _raw_text(inputs, len(x))
            text = prepare_text(stats, encoder, frozen, raw_text)
            # A gradient has the dtype of its kernel while the devices add up their parts of it. The
            # products cast kernels to the same dtype, so the velocity does not change.
            params = cast_block_kernels(params, config.gradient_dtype)
            values = [inputs.get(name) for name in conditions]
            velocity = _velocity_at(model, params, text, *values)
            losses = flow.squared_errors(velocity, x, noise, t)
            # Rows without a sample may have losses that are not finite: a product with 0 would not
            # leave them out.
            weighted = jnp.where(weights > 0, weights * losses, 0)
            return jnp.sum(weighted), losses

        value_and_grad = jax.value_and_grad(mean_loss, has_aux=True)
        gradient = accumulate_gradient(value_and_grad, config.accumulate)
        (loss, losses), grads = gradient(state.params, rows)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        # Losses of rows with a sample count, if the step does.
        if mask is None:
            has_effect = finite
            counts = jnp.full(losses.shape, finite)
        else:
            # A batch without a sample has gradients of zero, which would still decay the weights
            # and move them by the optimizer's momentum.
            has_effect = finite & jnp.any(mask)
            counts = finite & mask
        next_state = _update_state(state, grads, tx, config.ema_decay, finite, has_effect)
        metrics = TrainMetrics.single_from_model_output(
            loss=losses,
            counts=counts,
            grad_norm=grad_norm,
            finite=finite,
            learning_rate=jnp.asarray(schedule(state.step), jnp.float32),
            skipped_steps=next_state.skipped,
            skipped_in_a_row=next_state.skipped_in_a_row,
        )
        return next_state, metrics

    return train_step


def _update_state(
    state: TrainState,
    grads: Any,
    tx: optax.GradientTransformation,
    ema_decay: float,
    finite: jax.Array,
    has_effect: jax.Array,
) -> TrainState:
    """Returns the state after a step; weights, average and optimizer change if it `has_effect`."""

    def choose(new: Any, old: Any) -> Any:
        """Returns the new arrays of a tree if the step has an effect, else the old ones."""
        return jax.tree.map(functools.partial(jnp.where, has_effect), new, old)

    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    # Chosen before they are averaged: else XLA goes through all weights once more to choose.
    params = choose(optax.apply_updates(state.params, updates), state.params)
    # As in TensorFlow's ExponentialMovingAverage with `num_updates`: an average over many steps
    # would hold the random first weights for as long.
    decay = jnp.minimum(ema_decay, (1.0 + state.step) / (10.0 + state.step))
    ema_params = optax.incremental_update(params, state.ema_params, 1 - decay)
    return state.replace(
        params=params,
        ema_params=choose(ema_params, state.ema_params),
        opt_state=choose(opt_state, state.opt_state),
        # Counts skipped steps, too: it says which batch and which noise come next.
        step=state.step + 1,
        skipped=state.skipped + ~finite,
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
    )


def make_eval_step(
    config: ml_collections.ConfigDict,
    model: nn.Module,
    stats: DatasetStats,
    encoder: StepEncoder | None = None,
) -> Callable[..., EvalMetrics]:
    """Returns a function from frozen weights, weights and a batch to metrics of the batch.

    The arguments are those of `make_train_step`.
    """

    @promote_as_usual
    def eval_step(frozen: Any, params: Any, batch: Batch) -> EvalMetrics:
        """Measures losses at noise and times that are functions of the records' keys."""
        x = flow.standardize_latents(batch['latents'], stats)
        noise, t = flow.noise_and_times_of_keys(batch['key'], x.shape[1:], config.seed)

        def measure(text: Any, drop_text: jax.Array | None) -> jax.Array:
            """Returns the loss of each sample with some texts, `(b,)`."""
            velocity = _velocity_at(model, params, text, drop_text)
            return flow.squared_errors(velocity, x, noise, t)

        mask = batch['mask']
        raw_text = _raw_text(batch, len(x))
        text = prepare_text(stats, encoder, frozen, raw_text)
        own = mask, text, batch.get('drop_text')
        # Each sample also gets the text of the one before, which only real samples have. So the
        # gain from texts depends on the order of samples, while their loss does not.
        other_mask, *other_text = jax.tree.map(lambda rows: jnp.roll(rows, 1, axis=0), own)
        loss = measure(text, batch.get('drop_text'))
        return EvalMetrics.single_from_model_output(
            loss=loss,
            text_gain=measure(*other_text) - loss,
            has_other_text=mask & other_mask,
            time=t,
            mask=mask,
        )

    return eval_step


def sampling_settings(preview: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `config.preview` that `flow.sample` takes."""
    # The others say what is drawn, and how latents become pictures.
    others = 'count', 'split', 'vae'
    return {name: value for name, value in preview.items() if name not in others}


def make_draw(
    config: ml_collections.ConfigDict,
    model: nn.Module,
    stats: DatasetStats,
    encoder: StepEncoder | None,
) -> Callable[..., jax.Array]:
    """Returns a function from `(frozen, params, texts, first)` to raw latents `(n, C, H, W)`.

    The texts are raw: embeddings `(n, D)`, or ids, int32 `(n, T)`. The noise of a row is a function
    of the seed and of its number, which is `first` for the first row. The arguments are those of
    `make_train_step`.
    """
    _, channels, height, width = stats.latents_shape
    settings = sampling_settings(config.preview)
    # A model that has seen no texts has not learned to ignore one.
    if not (stats.text_dim or stats.vocabulary):
        settings['guidance'] = 1.0

    @promote_as_usual
    def draw(frozen: Any, params: Any, texts: jax.Array, first: int | jax.Array) -> jax.Array:
        """Draws one picture for each text."""

        def make_noise(number: jax.Array) -> jax.Array:
            """Returns the noise of one picture, whatever the batch that it is drawn in."""
            rng = jax.random.fold_in(flow.make_key(config.seed), number)
            return jax.random.normal(rng, (height, width, channels), jnp.float32)

        numbers = first + jnp.arange(len(texts), dtype=jnp.int32)
        noise = jax.vmap(make_noise)(numbers)
        text = prepare_text(stats, encoder, frozen, texts)
        latents = flow.sample(bind_params(model, params), noise, text, **settings)
        return flow.raw_latents(latents, stats)

    return draw


@promote_as_usual
def prepare_text(
    stats: DatasetStats, encoder: StepEncoder | None, frozen: Any, texts: jax.Array
) -> Any:
    """Returns raw texts, embeddings `(b, D)` or ids, int32 `(b, T)`, as the model takes them."""
    if texts.dtype != jnp.int32:
        return flow.standardize_text(texts, stats)
    # Without a frozen encoder, the model has a table of its own for the ids.
    if encoder is None:
        return texts
    return encoder.encode(frozen, texts)


def bind_params(model: nn.Module, params: Any) -> Callable[..., jax.Array]:
    """Returns the model with these weights, as a function of its inputs."""
    apply: Callable[..., Any] = model.apply
    return functools.partial(apply, {'params': params})


def _raw_text(batch: Batch, count: int) -> jax.Array:
    """Returns the texts of `count` samples; embeddings of no numbers where there is none."""
    for name in _TEXT_FEATURES:
        if name in batch:
            return batch[name]
    return jnp.zeros((count, 0), jnp.float16)


def _velocity_at(
    model: nn.Module, params: Any, *conditions: Any
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the model as a function of position and time.

    The conditions are texts, drops and perhaps crops.
    """
    apply = bind_params(model, params)
    return lambda z, t: apply(z, t, *conditions)


def _mean_weights(count: int, mask: jax.Array | None) -> jax.Array:
    """Returns the weights of samples in a mean over those that the mask keeps, `(count,)`."""
    if mask is None:
        return jnp.full(count, 1 / count, jnp.float32)
    # At least 1: a batch without a sample has weights of 0.
    return mask.astype(jnp.float32) / jnp.maximum(jnp.sum(mask), 1)


ValueAndGrad = Callable[[Any, Any], tuple[tuple[jax.Array, jax.Array], Any]]


def accumulate_gradient(value_and_grad: ValueAndGrad, count: int) -> ValueAndGrad:
    """Returns the same function, computed over `count` slices of the rows in turn to save memory.

    Args:
        value_and_grad: Function of weights and rows, a pytree of arrays `(b, ...)`. It returns a
            value, which is a float32 sum over the rows, with an array `(b, ...)` of one entry a
            row, and the gradient.
        count: Number of slices; a divisor of `b`.
    """
    if count == 1:
        return value_and_grad

    def split(x: jax.Array) -> jax.Array:
        """Cuts rows `(b, ...)` into `(count, b / count, ...)`."""
        # Slice i takes every `count`-th row, starting with row i. So each device computes its own
        # rows in every slice, and no row moves.
        return jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1)

    def join(slices: jax.Array) -> jax.Array:
        """Inverts `split`."""
        return jnp.swapaxes(slices, 0, 1).reshape(-1, *slices.shape[2:])

    def accumulate(params: Any, rows: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
        """Computes as `value_and_grad` does, but for the order of additions."""

        def add_slice(total: Any, rows: Any) -> tuple[Any, jax.Array]:
            """Returns the sums with those of a slice, and its entries."""
            (value, entries), grads = value_and_grad(params, rows)
            next_total = jax.tree.map(jnp.add, total, (value, grads))
            return next_total, entries

        slices = jax.tree.map(split, rows)
        no_value = jnp.zeros((), jnp.float32)
        no_grads = jax.tree.map(jnp.zeros_like, params)
        # A loop of the device: the activations of one slice are in its memory at a time.
        (value, grads), entries = jax.lax.scan(add_slice, (no_value, no_grads), slices)
        return (value, join(entries)), grads

    return accumulate


# --- Compiled for a mesh ------------------------------------------------------------------------


class _Bound(functools.partial):
    """A jitted function with its first argument."""

    # Also JAX's rules of compilation, of bfloat16 in attention, mix dtypes.
    __call__ = promote_as_usual(functools.partial.__call__)


def bind(
    function: Callable, encoder: StepEncoder | None, *in_shardings: Any, **options: Any
) -> functools.partial:
    """Jits a function with the encoder's weights, on their devices, as its first argument.

    Args:
        function: Function of frozen weights, or None, and further arguments.
        encoder: Frozen encoder; None without one.
        *in_shardings: Shardings of the further arguments.
        **options: Further options of `jax.jit`.
    """
    # An argument and not a constant, or XLA would compile the weights into the program.
    frozen = encoder.params if encoder else None
    frozen_shardings = jax.tree.map(lambda leaf: leaf.sharding, frozen)
    jitted = jax.jit(function, in_shardings=(frozen_shardings, *in_shardings), **options)
    return _Bound(jitted, frozen)


@dataclasses.dataclass(frozen=True)
class Program:
    """Jitted functions: batches are split over the mesh, states by `sharding.by_shape`."""

    encoder: StepEncoder | None  # frozen, for texts; the steps take its weights
    abstract_state: TrainState  # shapes, dtypes and shardings
    init: Callable[[], TrainState]  # at step 0
    no_metrics: Callable[[], TrainMetrics]  # of no step
    train_step: functools.partial[tuple[TrainState, TrainMetrics]]  # donates the state
    eval_step: functools.partial[EvalMetrics]  # of `(params, batch)`
    draw: functools.partial[jax.Array]  # of `(params, texts, first)`, see `make_draw`
    # FLOPs of the model's matrix products for the training on one sample, by the number of tokens
    # of its text, without those of a frozen encoder.
    flops: Callable[[int], int]


def for_data(config: ml_collections.ConfigDict, mesh: Mesh, stats: DatasetStats) -> Program:
    """Makes the program for a data set, with the text encoder of the configuration.

    Raises a FieldError as `make_program`, or for an encoder that did not make the texts.
    """
    encoder = step_encoder.load_step_encoder(config.encoder, stats, mesh, dtype=config.model.dtype)
    return make_program(config, mesh, stats, encoder)


def make_program(
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    stats: DatasetStats,
    encoder: StepEncoder | None = None,
) -> Program:
    """Builds model, optimizer and steps; each function is compiled at its first call.

    Args:
        config: Configuration of the run.
        mesh: Devices, see `sharding.make_mesh`.
        stats: Statistics of the training data.
        encoder: Frozen encoder of token ids; None without one.

    Raises:
        FieldError: A field is out of its range, or the devices cannot share the batch equally.
    """
    # Functions are traced at their first call, and later changes must not reach them.
    config = config.copy_and_resolve_references()
    _check_batch_size(config, mesh)
    num_crops, channels, height, width = stats.latents_shape
    latent_shape = height, width, channels
    model = models.make_model(**config.model, vocabulary=stats.vocabulary, num_crops=num_crops)
    schedule, tx = state.make_optimizer(
        **config.optimizer,
        num_steps=config.num_steps,
        dtype=config.model.dtype,
        map_matrices=functools.partial(sharding.map_matrices, mesh),
    )
    # Weights are initialized without pins: one sample does not fill the devices.
    text = _abstract_text(stats, encoder)
    init = state.make_init(model, tx, latent_shape=latent_shape, text=text)
    pinned_model = model.clone(pin=sharding.RowPinning(mesh))
    train_step = make_train_step(config, pinned_model, tx, schedule, stats, encoder)
    eval_step = make_eval_step(config, pinned_model, stats, encoder)
    draw = make_draw(config, pinned_model, stats, encoder)

    def init_from_seed() -> TrainState:
        """Returns the state at step 0."""
        return init(flow.make_key(config.seed))

    # Shapes alone: the weights are made on the devices where they stay.
    abstract = jax.eval_shape(init_from_seed)
    states = sharding.by_shape(abstract, mesh)
    batches = sharding.batch(mesh)
    whole = sharding.replicated(mesh)

    def flops(num_tokens: int) -> int:
        """Returns the FLOPs to train on a sample with a text of so many tokens."""
        text_dim = encoder.dim if encoder else stats.text_dim
        # The backward pass takes two products for each one of the forward pass.
        return 3 * model.flops(latent_shape, text_dim, num_tokens)

    return Program(
        encoder=encoder,
        abstract_state=jax.tree.map(sharding.abstract_array, abstract, states),
        init=jax.jit(init_from_seed, out_shardings=states),
        no_metrics=jax.jit(TrainMetrics.empty, out_shardings=whole),
        # The next state takes the memory of the last one, which is gone after the step.
        train_step=bind(
            train_step, encoder, states, batches, out_shardings=(states, whole), donate_argnums=1
        ),
        eval_step=bind(eval_step, encoder, states.params, batches, out_shardings=whole),
        draw=bind(draw, encoder, states.params, whole, whole, out_shardings=whole),
        flops=flops,
    )


def _check_batch_size(config: ml_collections.ConfigDict, mesh: Mesh) -> None:
    """Raises a FieldError unless all devices get equal shares of each slice of a batch."""
    product = config.accumulate * mesh.size
    if product < 1 or config.batch_size < 1 or config.batch_size % product:
        problem = (
            f'cannot be split over {mesh.size} devices with accumulate={config.accumulate}: '
            f'expected a multiple of their product {product}'
        )
        raise FieldError('batch_size', config.batch_size, problem)


def _abstract_text(stats: DatasetStats, encoder: StepEncoder | None) -> Any:
    """Returns shapes and dtypes of the text of one sample, as the model takes it."""
    if stats.vocabulary:
        # No weight of the model has the length of a text, so one token will do.
        raw = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    else:
        raw = jax.ShapeDtypeStruct((1, stats.text_dim), jnp.float32)
    frozen = encoder.params if encoder else None
    prepare = functools.partial(prepare_text, stats, encoder)
    return jax.eval_shape(prepare, frozen, raw)
