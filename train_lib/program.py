"""Everything that is compiled, with where its arrays lie: made once from a configuration.

    program = make_program(config, mesh, stats, latent_shape=(32, 32, 4))
    state = program.init()
    state, update = program.train_step(state, batch)   # donates the state

Neither TensorFlow nor torch is imported here.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import optax
from jax.sharding import Mesh

from train_lib import flow, models, sampling, sharding, state, step
from train_lib.metrics import EvalMetrics, TrainMetrics

Batch = Mapping[str, jax.Array]

_OF_PREVIEWS = 'count', 'split'  # fields of `config.preview` that sampling does not depend on


@dataclasses.dataclass(frozen=True)
class Program:
    """Jitted functions; batches are split over the mesh, states as `sharding.by_shape` says.

    Attributes:
        abstract_state: shapes, dtypes and shardings of a state.
        init: to the state at step 0.
        no_metrics: to training metrics of no step.
        train_step: from `(state, batch)` to the next state and metrics; the state is donated.
        eval_step: from `(params, batch)` to metrics.
        draw: from `(params, texts)`, raw text embeddings `(n, D)` or token ids `(n, T)`, to raw
            latents, float32 `(n, C, H, W)`; both whole on every device. The noise is the same each
            time.
    """

    abstract_state: state.TrainState
    init: Callable[[], state.TrainState]
    no_metrics: Callable[[], TrainMetrics]
    train_step: jax.stages.Wrapped
    eval_step: Callable[[Any, Batch], EvalMetrics]
    draw: Callable[[Any, jax.Array], jax.Array]


def make_program(
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    stats: flow.Stats,
    *,
    latent_shape: Sequence[int],
    vocabulary: int = 0,
) -> Program:
    """Builds model, optimizer and steps; nothing is compiled before it is called.

    Args:
        config: see `configs/default.py`.
        mesh: from `sharding.make_mesh`.
        stats: of the data set.
        latent_shape: `(height, width, channels)` of one sample.
        vocabulary: of the data set's tokens; 0 where it has text embeddings.

    Raises:
        ValueError: a part of a batch cannot be split over the devices; or as `models.make`.
    """
    if config.accumulate != 1 and (
        config.accumulate < 1 or config.batch_size % (config.accumulate * mesh.size)
    ):
        raise ValueError(
            f'batch_size={config.batch_size} in accumulate={config.accumulate} parts cannot be '
            f'split over {mesh.size} devices: set accumulate to a divisor of the samples a device'
        )
    model = models.make(**config.model, vocabulary=vocabulary)
    schedule, tx = _make_optimizer(config)
    text_dim = 0 if vocabulary else len(stats.text_mean)
    init = state.make_init(model, tx, latent_shape=latent_shape, text_dim=text_dim)
    pinned = model.clone(pin=sharding.pin(mesh))
    train_step = step.make_train_step(
        pinned,
        tx,
        schedule,
        stats,
        ema_decay=config.ema_decay,
        seed=config.seed,
        parts=config.accumulate,
        **config.flow,
    )
    eval_step = step.make_eval_step(pinned, stats, seed=config.seed)

    def init_from_seed() -> state.TrainState:
        return init(jax.random.key(config.seed))

    abstract = jax.eval_shape(init_from_seed)
    states, batches = sharding.by_shape(abstract, mesh), sharding.batch(mesh)
    whole = sharding.replicated(mesh)
    draw = make_draw(config, model, stats, latent_shape=latent_shape)
    return Program(
        abstract_state=jax.tree.map(_with_sharding, abstract, states),
        init=jax.jit(init_from_seed, out_shardings=states),
        no_metrics=jax.jit(TrainMetrics.empty, out_shardings=whole),
        train_step=jax.jit(
            train_step,
            in_shardings=(states, batches),
            out_shardings=(states, whole),
            donate_argnums=0,
        ),
        eval_step=jax.jit(eval_step, in_shardings=(states.params, batches), out_shardings=whole),
        draw=jax.jit(draw, in_shardings=(states.params, whole), out_shardings=whole),
    )


def make_draw(
    config: ml_collections.ConfigDict,
    model: nn.Module,
    stats: flow.Stats,
    *,
    latent_shape: Sequence[int],
) -> Callable[..., jax.Array]:
    """Returns the function from `(params, texts, first)` to raw latents, to be jitted.

    Texts are raw text embeddings, `(n, D)`, or token ids, int32 `(n, T)`; latents float32
    `(n, C, H, W)`. The noise of a picture is a function of `config.seed` and its number, which is
    `first` (0 by default) for the first row. Other arguments as of `make_program`.
    """
    settings = {name: x for name, x in config.preview.items() if name not in _OF_PREVIEWS}

    def draw(params: Any, texts: jax.Array, first: int | jax.Array = 0) -> jax.Array:
        def noise_of(number: jax.Array) -> jax.Array:
            rng = jax.random.fold_in(jax.random.key(config.seed), number)
            return jax.random.normal(rng, latent_shape)

        drawn = sampling.sample(
            step.applied(model, params),
            jax.vmap(noise_of)(first + jnp.arange(len(texts))),
            flow.standardize_text(texts, stats),
            **settings,
        )
        return flow.raw_latents(drawn, stats)

    return draw


def _make_optimizer(
    config: ml_collections.ConfigDict,
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    optimizer = config.optimizer

    def schedule(learning_rate: float) -> optax.Schedule:
        return state.make_schedule(
            optimizer.schedule,
            num_steps=config.num_steps,
            learning_rate=learning_rate,
            warmup_steps=optimizer.warmup_steps,
        )

    tx = state.make_optimizer(
        optimizer.name,
        schedule(optimizer.learning_rate),
        schedule(optimizer.muon_learning_rate),
        weight_decay=optimizer.weight_decay,
        b1=optimizer.b1,
        b2=optimizer.b2,
        clip_norm=optimizer.clip_norm,
    )
    return schedule(optimizer.learning_rate), tx


def _with_sharding(
    leaf: jax.ShapeDtypeStruct, placed: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)
