"""Everything that is compiled, with where its arrays lie: made once from a configuration.

    program = for_data(config, mesh, facts)     # or make_program, which needs no data set
    state = program.init()
    state, update = program.train_step(state, batch)   # donates the state

The weights of a frozen text encoder are one more argument of what is compiled, and in no state.
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

from train_lib import flow, models, sampling, sharding, state, step, step_encoder
from train_lib.data_facts import DataFacts
from train_lib.metrics import EvalMetrics, TrainMetrics
from train_lib.step_encoder import StepEncoder

Batch = Mapping[str, jax.Array]

_OF_PREVIEWS = (
    'count',
    'split',
    'vae',
)  # fields of `config.preview` that sampling does not depend on


@dataclasses.dataclass(frozen=True)
class Bound:
    """A jitted function whose last argument is always the same.

    Attributes:
        jitted: the function.
        frozen: that argument: the weights of a text encoder, or their shapes where the function is
            only compiled; None without an encoder.
    """

    jitted: jax.stages.Wrapped
    frozen: Any

    def __call__(self, *arguments: Any) -> Any:
        """Calls it."""
        return self.jitted(*arguments, self.frozen)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """Lowers it; what is compiled of that takes `frozen` too."""
        return self.jitted.lower(*arguments, self.frozen)


def bind(
    function: Callable, encoder: StepEncoder | None, *in_shardings: Any, **options: Any
) -> Bound:
    """Jits a function whose last argument are the weights of the encoder, where they lie."""
    frozen = _frozen(encoder)
    of_frozen = jax.tree.map(lambda leaf: leaf.sharding, frozen)
    return Bound(jax.jit(function, in_shardings=(*in_shardings, of_frozen), **options), frozen)


def _frozen(encoder: StepEncoder | None) -> Any:
    return encoder.params if encoder else None


@dataclasses.dataclass(frozen=True)
class Program:
    """Jitted functions; batches are split over the mesh, states as `sharding.by_shape` says.

    Attributes:
        encoder: of token ids, frozen; None without.
        abstract_state: shapes, dtypes and shardings of a state.
        init: to the state at step 0.
        no_metrics: to training metrics of no step.
        train_step: from `(state, batch)` to the next state and metrics; the state is donated.
        eval_step: from `(params, batch)` to metrics.
        draw: from `(params, texts)`, raw text embeddings `(n, D)` or token ids `(n, T)`, to raw
            latents, float32 `(n, C, H, W)`; both whole on every device. The noise is the same each
            time.
    """

    encoder: StepEncoder | None
    abstract_state: state.TrainState
    init: Callable[[], state.TrainState]
    no_metrics: Callable[[], TrainMetrics]
    train_step: Bound
    eval_step: Callable[[Any, Batch], EvalMetrics]
    draw: Callable[[Any, jax.Array], jax.Array]

    @property
    def identity(self) -> dict[str, Any]:
        """What no resume can change, in plain values; see `checkpoint.Description`."""
        return {'encoder': self.encoder.identity} if self.encoder else {}


def for_data(config: ml_collections.ConfigDict, mesh: Mesh, facts: DataFacts) -> Program:
    """The program for a data set, with the text encoder that the configuration names.

    Raises:
        ValueError: as of `make_program` or `step_encoder.load`.
    """
    return make_program(
        config,
        mesh,
        facts.stats,
        latent_shape=facts.latent_shape,
        vocabulary=facts.vocabulary,
        encoder=step_encoder.load(config.encoder, facts, mesh, dtype=config.model.dtype),
    )


def make_program(
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    stats: flow.Stats,
    *,
    latent_shape: Sequence[int],
    vocabulary: int = 0,
    encoder: StepEncoder | None = None,
) -> Program:
    """Builds model, optimizer and steps; nothing is compiled before it is called.

    Args:
        config: see `configs/default.py`.
        mesh: from `sharding.make_mesh`.
        stats: of the data set.
        latent_shape: `(height, width, channels)` of one sample.
        vocabulary: of the data set's tokens; 0 where it has text embeddings.
        encoder: of these tokens, on the same mesh; None for a learned table.

    Raises:
        ValueError: a part of a batch cannot be split over the devices; or as of `models.make`.
    """
    if config.accumulate < 1 or config.batch_size % (config.accumulate * mesh.size):
        raise ValueError(
            f'batch_size={config.batch_size} in accumulate={config.accumulate} parts cannot be '
            f'split over {mesh.size} devices: expected a multiple of their product'
        )
    model = models.make(**config.model, vocabulary=vocabulary)
    schedule, tx = _make_optimizer(config)
    raw = jax.ShapeDtypeStruct((1, len(stats.text_mean)), jnp.float32)
    if vocabulary:
        raw = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    text = jax.eval_shape(step.make_text_of(stats, encoder), _frozen(encoder), raw)
    init = state.make_init(model, tx, latent_shape=latent_shape, text=text)
    pinned = model.clone(pin=sharding.pin(mesh))
    train_step = step.make_train_step(
        pinned,
        tx,
        schedule,
        stats,
        ema_decay=config.ema_decay,
        seed=config.seed,
        parts=config.accumulate,
        encoder=encoder,
        **config.flow,
    )
    eval_step = step.make_eval_step(pinned, stats, seed=config.seed, encoder=encoder)
    draw = make_draw(config, model, stats, encoder, latent_shape=latent_shape)

    def init_from_seed() -> state.TrainState:
        return init(jax.random.key(config.seed))

    abstract = jax.eval_shape(init_from_seed)
    states, batches = sharding.by_shape(abstract, mesh), sharding.batch(mesh)
    whole = sharding.replicated(mesh)

    def draw_first(params: Any, texts: jax.Array, frozen: Any) -> jax.Array:
        return draw(params, texts, 0, frozen)

    return Program(
        encoder=encoder,
        abstract_state=jax.tree.map(_with_sharding, abstract, states),
        init=jax.jit(init_from_seed, out_shardings=states),
        no_metrics=jax.jit(TrainMetrics.empty, out_shardings=whole),
        train_step=bind(
            train_step, encoder, states, batches, out_shardings=(states, whole), donate_argnums=0
        ),
        eval_step=bind(eval_step, encoder, states.params, batches, out_shardings=whole),
        draw=bind(draw_first, encoder, states.params, whole, out_shardings=whole),
    )


def make_draw(
    config: ml_collections.ConfigDict,
    model: nn.Module,
    stats: flow.Stats,
    encoder: StepEncoder | None,
    *,
    latent_shape: Sequence[int],
) -> Callable[..., jax.Array]:
    """Returns the function from `(params, texts, first, frozen)` to raw latents, for `bind`.

    Texts are raw text embeddings, `(n, D)`, or token ids, int32 `(n, T)`; latents are float32
    `(n, C, H, W)`. The noise of a picture is a function of `config.seed` and its number, which is
    `first` for the first row. Other arguments as of `make_program`.
    """
    settings = {name: x for name, x in config.preview.items() if name not in _OF_PREVIEWS}
    text_of = step.make_text_of(stats, encoder)

    def draw(params: Any, texts: jax.Array, first: int | jax.Array, frozen: Any) -> jax.Array:
        def noise_of(number: jax.Array) -> jax.Array:
            rng = jax.random.fold_in(jax.random.key(config.seed), number)
            return jax.random.normal(rng, latent_shape)

        drawn = sampling.sample(
            step.applied(model, params),
            jax.vmap(noise_of)(first + jnp.arange(len(texts))),
            text_of(frozen, texts),
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
