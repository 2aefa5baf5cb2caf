"""The state of training, a plain pytree of arrays: how it begins, and the optimizer's updates."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from coyo11m_tfds.process.errors import FieldError
from coyo11m_tfds.process.jax_environment import promote_as_usual

_DECAY_SHARE = 0.3  # of a run, for the schedule `wsd`


class TrainState(flax.struct.PyTreeNode):
    """Everything that the next step needs except its batch; scalars are int32, weights float32."""

    step: jax.Array
    params: Any
    # Exponential moving average of the weights, for evaluation and sampling.
    ema_params: Any
    opt_state: optax.OptState
    # Number of steps without effect, because their loss or gradient was not finite.
    skipped: jax.Array
    # Number of such steps since the last step with an effect.
    skipped_in_a_row: jax.Array


def make_schedule(
    name: str, *, num_steps: int, learning_rate: float, warmup_steps: int
) -> optax.Schedule:
    """Returns the learning rate as a function of the step: linear warm-up, then `name`.

    Args:
        name: 'cosine' falls to 0 at the last step, 'constant' stays, and 'wsd' stays and then falls
            to 0 on a line, during the last three tenths of the run.
        num_steps: Steps of the run.
        learning_rate: Rate after the warm-up.
        warmup_steps: Steps of the warm-up, which begins at 0.

    Raises:
        FieldError: There is no such schedule, or the warm-up is longer than the run.
    """
    if not 0 <= warmup_steps < num_steps:
        problem = f'expected at least 0 and less than num_steps={num_steps}'
        raise FieldError('optimizer.warmup_steps', warmup_steps, problem)
    # The second schedule counts its steps from the end of the warm-up.
    warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    if name == 'cosine':
        decay = optax.cosine_decay_schedule(learning_rate, num_steps - warmup_steps)
    elif name == 'constant':
        decay = optax.constant_schedule(learning_rate)
    elif name == 'wsd':  # warm-up, stable, decay: Hägele et al., arXiv:2405.18392
        # A long warm-up leaves less: the rate is 0 at the last step all the same.
        decay_steps = min(round(_DECAY_SHARE * num_steps), num_steps - warmup_steps)
        stable_steps = num_steps - warmup_steps - decay_steps
        decay = optax.linear_schedule(learning_rate, 0.0, decay_steps, stable_steps)
    else:
        raise FieldError('optimizer.schedule', name, "expected 'cosine', 'wsd' or 'constant'")
    return optax.join_schedules([warmup, decay], [warmup_steps])


def make_optimizer(
    name: str,
    *,
    schedule: str,
    num_steps: int,
    warmup_steps: int,
    learning_rate: float,
    muon_learning_rate: float,
    weight_decay: float,
    b1: float,
    b2: float,
    clip_norm: float,
    **muon_options: Any,
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """Returns the learning rate of AdamW, and the optimizer of a run.

    This is AdamW (Loshchilov and Hutter, arXiv:1711.05101), or `muon` for the kernels of blocks and
    AdamW for all else; both take gradients that are clipped together.

    Args:
        name: 'adamw' or 'muon'.
        schedule: Name of the schedule, see `make_schedule`.
        num_steps: Steps of the run.
        warmup_steps: Steps of the warm-up.
        learning_rate: Rate of AdamW after the warm-up.
        muon_learning_rate: Rate of Muon after the warm-up.
        weight_decay: Decay of kernels; biases, scales and the vector for no text have none.
        b1: Decay of AdamW's mean of gradients.
        b2: Decay of AdamW's mean of squared gradients.
        clip_norm: Largest norm of all gradients together.
        **muon_options: Further arguments of `muon`.

    Raises:
        FieldError: There is no such optimizer or schedule, or the warm-up is longer than the run.
    """
    make_rate = functools.partial(
        make_schedule, schedule, num_steps=num_steps, warmup_steps=warmup_steps
    )
    adamw_rate = make_rate(learning_rate=learning_rate)
    muon_rate = make_rate(learning_rate=muon_learning_rate)
    # First in both chains: the norm is that of all gradients, whichever optimizer takes them.
    clip = optax.clip_by_global_norm(clip_norm)
    adamw = optax.adamw(adamw_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=_mask_kernels)
    if name == 'adamw':
        return adamw_rate, optax.chain(clip, adamw)
    if name != 'muon':
        raise FieldError('optimizer.name', name, "expected 'adamw' or 'muon'")
    orthogonal = muon(muon_rate, weight_decay=weight_decay, **muon_options)
    by_kind = optax.partition({True: orthogonal, False: adamw}, mask_muon_kernels)
    return adamw_rate, optax.chain(clip, by_kind)


def mask_muon_kernels(params: Any) -> Any:
    """Returns a pytree of bool: True for the kernels of blocks that do not modulate.

    Raises a FieldError for a model that has none.
    """

    def is_for_muon(path: Any, _: Any) -> bool:
        """Whether Muon trains the array at a path."""
        modulates = any(key.key == 'modulation' for key in path)
        return _is_block_kernel(path) and not modulates

    by_muon = jax.tree_util.tree_map_with_path(is_for_muon, params)
    if not any(jax.tree.leaves(by_muon)):
        problem = "the model has no kernels in a module named 'blocks': expected 'adamw'"
        raise FieldError('optimizer.name', 'muon', problem)
    return by_muon


def cast_block_kernels(params: Any, dtype: jnp.dtype | str) -> Any:
    """Returns weights whose kernels of blocks, nearly all of a model, have the dtype."""

    def cast(path: Any, x: jax.Array) -> jax.Array:
        """Returns one array of the weights."""
        return x.astype(dtype) if _is_block_kernel(path) else x

    return jax.tree_util.tree_map_with_path(cast, params)


def _is_block_kernel(path: Any) -> bool:
    """Whether a path in the tree of weights is that of a kernel of the blocks."""
    return path[0].key == 'blocks' and path[-1].key == 'kernel'


def make_init(
    model: nn.Module,
    tx: optax.GradientTransformation,
    *,
    latent_shape: Sequence[int],
    text: Any,
) -> Callable[[jax.Array], TrainState]:
    """Returns a function, to be jitted with shardings, from a random key to the state at step 0.

    Args:
        model: Model of the run.
        tx: Its optimizer.
        latent_shape: Shape of one sample, `(H, W, C)`.
        text: Shapes and dtypes of the text of one sample as the model takes it, a pytree.
    """

    @promote_as_usual
    def init(rng: jax.Array) -> TrainState:
        """Returns the state at step 0."""
        x = jnp.zeros((1, *latent_shape), jnp.float32)
        t = jnp.zeros((1,), jnp.float32)
        no_text = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), text)
        params = model.init(rng, x, t, no_text, None)['params']
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            # A copy: a donated state must not hold one buffer twice.
            ema_params=jax.tree.map(jnp.copy, params),
            opt_state=tx.init(params),
            skipped=jnp.zeros((), jnp.int32),
            skipped_in_a_row=jnp.zeros((), jnp.int32),
        )

    return init


def _mask_kernels(params: Any) -> Any:
    """Returns a pytree of bool: True for kernels, which decay."""
    # By name and not by rank: the scanned blocks stack their biases to matrices.
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == 'kernel', params)


# --- Muon ---------------------------------------------------------------------------------------

# Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024): Nesterov momentum, in
# float32, and five steps of a Newton-Schulz iteration with his coefficients, which bring singular
# values to between 0.5 and 1.5. Updates are scaled to the root mean square of AdamW's, as in Liu et
# al., arXiv:2502.16982.
_MUON_MOMENTUM = 0.95
_NUM_STEPS = 5
_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the first, third and fifth power
_ADAMW_RMS = 0.2
# Matrices side by side in a kernel, by the name of its module: queries, keys and values.
_SIDE_BY_SIDE = {'qkv': 3, 'words': 2}

MapMatrices = Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array]


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: float,
    dtype: jnp.dtype | str = jnp.float32,
    map_matrices: MapMatrices = lambda function, stack: function(stack),
) -> optax.GradientTransformation:
    """Returns the optimizer of a pytree of kernels `(..., in, out)`, of which each is a stack.

    Its steps go along momentum whose singular values are all brought near 1. A kernel in a module
    `qkv` or `words` is three or two matrices side by side, each of which is orthogonalized for
    itself: its update is as large as that of any other matrix, and the values' gradient does not
    decide the direction of the queries'.

    Args:
        learning_rate: Learning rate, or a schedule.
        weight_decay: Decay of the kernels, times the learning rate.
        dtype: Dtype in which matrices are iterated and moved between devices; bfloat16 is Jordan's.
        map_matrices: Calls a function of `(n, rows, columns)` with the matrices of a stack, such as
            `sharding.map_matrices` of a mesh.
    """

    def direction(path: Any, momentum: jax.Array) -> jax.Array:
        """Returns the update of one stack of kernels before the learning rate."""
        count = _SIDE_BY_SIDE.get(path[-2].key, 1)
        rows = momentum.shape[-2]
        columns = momentum.shape[-1] // count
        if columns * count != momentum.shape[-1]:
            raise ValueError(
                f'{jax.tree_util.keystr(path)} is {momentum.shape}: in a module named '
                f'{path[-2].key!r}, Muon expects {count} matrices side by side; rename the module'
            )

        def orthogonalize_each(kernels: jax.Array) -> jax.Array:
            """Returns kernels whose matrices side by side are each orthogonalized."""
            matrices = kernels.reshape(-1, rows, count, columns).swapaxes(1, 2)
            orthogonal = orthogonalize(matrices)
            return orthogonal.swapaxes(1, 2).reshape(kernels.shape)

        # Cast before the matrices move between devices: half of the bytes in bfloat16.
        update = map_matrices(orthogonalize_each, momentum.astype(dtype))
        # The root mean square of an orthogonal matrix is the inverse of this root.
        scale = _ADAMW_RMS * math.sqrt(max(rows, columns))
        return scale * update.astype(momentum.dtype)

    def directions(momenta: Any, _: Any) -> Any:
        """Returns the updates of all stacks of kernels."""
        return jax.tree_util.tree_map_with_path(direction, momenta)

    return optax.chain(
        optax.trace(_MUON_MOMENTUM, nesterov=True),
        optax.stateless(directions),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def orthogonalize(matrices: jax.Array) -> jax.Array:
    """Returns matrices `(..., rows, columns)` with singular values near 1; zeros stay zeros.

    By the Newton-Schulz iteration of Jordan (2024), in the dtype of the matrices.
    """
    # A wide matrix has the smaller product with its transpose.
    rows, columns = matrices.shape[-2:]
    is_tall = rows > columns
    x = matrices.mT if is_tall else matrices
    # The iteration converges for singular values up to 1, which this norm bounds.
    norms = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x = (x / jnp.maximum(norms, 1e-20)).astype(matrices.dtype)
    first, third, fifth = _COEFFICIENTS
    for _ in range(_NUM_STEPS):
        square = x @ x.mT
        x = first * x + (third * square + fifth * square @ square) @ x
    return x.mT if is_tall else x
