"""The layers of diffusers' VAEs that encoders and decoders share, in JAX."""

from collections.abc import Mapping
from typing import Any

import jax

_NORM_EPSILON = 1e-6


class VaeLayers:
    """Layers on float32 `(n, H, W, C)`, called by the names of their weights in diffusers.

    A layer raises a ValueError if a weight is missing or of another shape than it expects.
    """

    used_names: set[str]  # of the weights of all layers that were called

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Any]):
        """Takes config.json, and the weights as arrays or tracers."""
        self.config = config
        self._weights = weights
        self.used_names = set()

    def widths(self, field: str, num_stages: int) -> list[int | None]:
        """Returns the channels of each stage of a half, None if config.json does not have them."""
        widths = self.config.get(field, [None] * num_stages)
        if len(widths) != num_stages:
            raise ValueError(f'{field} is {widths}, expected one number for each of {num_stages}')
        return widths

    def conv(
        self,
        name: str,
        x: jax.Array,
        width: int | None,
        size: int = 3,
        stride: int = 1,
        padding: Any = 'SAME',
        has_bias: bool = True,
    ) -> jax.Array:
        """Convolves to `width` channels, or as many as the weight makes, with a square kernel."""
        weight = self._weight(f'{name}.weight', width, x.shape[-1], size, size)
        y = jax.lax.conv_general_dilated(
            x, weight, (stride, stride), padding, dimension_numbers=('NHWC', 'OIHW', 'NHWC')
        )
        if has_bias:
            y = y + self._weight(f'{name}.bias', y.shape[-1])
        return y

    def tiny_block(self, name: str, x: jax.Array) -> jax.Array:
        """`AutoencoderTinyBlock` of diffusers, of equal widths."""
        width = x.shape[-1]
        # The odd numbers are the activations.
        y = jax.nn.relu(self.conv(f'{name}.conv.0', x, width))
        y = jax.nn.relu(self.conv(f'{name}.conv.2', y, width))
        y = self.conv(f'{name}.conv.4', y, width)
        return jax.nn.relu(x + y)

    def resnet(self, name: str, x: jax.Array, width: int | None) -> jax.Array:
        """`ResnetBlock2D` of diffusers, without a time."""
        y = self._norm_silu(f'{name}.norm1', x)
        y = self.conv(f'{name}.conv1', y, width)
        y = self._norm_silu(f'{name}.norm2', y)
        y = self.conv(f'{name}.conv2', y, y.shape[-1])
        # Where the width changes, the shortcut has weights.
        if x.shape[-1] != y.shape[-1]:
            x = self.conv(f'{name}.conv_shortcut', x, y.shape[-1], size=1)
        return x + y

    def middle(self, name: str, x: jax.Array) -> jax.Array:
        """`UNetMidBlock2D` of diffusers; the width stays."""
        x = self.resnet(f'{name}.resnets.0', x, x.shape[-1])
        if self.config['mid_block_add_attention']:
            x = self._self_attention(f'{name}.attentions.0', x)
        return self.resnet(f'{name}.resnets.1', x, x.shape[-1])

    def out(self, half: str, x: jax.Array, width: int) -> jax.Array:
        """The last layers of a half, `encoder` or `decoder`."""
        y = self._norm_silu(f'{half}.conv_norm_out', x)
        return self.conv(f'{half}.conv_out', y, width)

    def _weight(self, name: str, *shape: int | None) -> Any:
        """Returns a weight of a shape, of which None stands for any number."""
        if name not in self._weights:
            raise ValueError(f'{name} is missing')
        weight = self._weights[name]
        if not _fits(weight.shape, shape):
            expected = ', '.join('any' if size is None else str(size) for size in shape)
            raise ValueError(f'{name} has the shape {weight.shape}, expected ({expected})')
        self.used_names.add(name)
        return weight

    def _self_attention(self, name: str, x: jax.Array) -> jax.Array:
        """Attention with one head over all positions, added to its input."""
        width = x.shape[-1]
        y = self._group_norm(f'{name}.group_norm', x)
        y = y.reshape(len(x), -1, width)

        def linear(layer: str, y: jax.Array) -> jax.Array:
            """Returns the product with a layer, whose matrix is (out, in)."""
            matrix = self._weight(f'{name}.{layer}.weight', width, width)
            return y @ matrix.T + self._weight(f'{name}.{layer}.bias', width)

        query = linear('to_q', y)
        key = linear('to_k', y)
        value = linear('to_v', y)
        scores = query @ key.swapaxes(1, 2) * width**-0.5
        mixed = jax.nn.softmax(scores) @ value
        output = linear('to_out.0', mixed)
        return x + output.reshape(x.shape)

    def _norm_silu(self, name: str, x: jax.Array) -> jax.Array:
        """Returns the activation of normalized values, as before each convolution."""
        return jax.nn.silu(self._group_norm(name, x))

    def _group_norm(self, name: str, x: jax.Array) -> jax.Array:
        """Normalizes groups of channels over all positions (Wu & He, "Group Normalization")."""
        groups = self.config['norm_num_groups']
        width = x.shape[-1]
        if width % groups:
            raise ValueError(
                f'norm_num_groups is {groups}, expected a divisor of the {width} channels of {name}'
            )
        grouped = x.reshape(len(x), -1, groups, width // groups)
        mean = grouped.mean(axis=(1, 3), keepdims=True)
        variance = grouped.var(axis=(1, 3), keepdims=True)
        normed = (grouped - mean) * jax.lax.rsqrt(variance + _NORM_EPSILON)
        scale = self._weight(f'{name}.weight', width)
        bias = self._weight(f'{name}.bias', width)
        return normed.reshape(x.shape) * scale + bias


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Whether a shape is the expected one, in which None stands for any number but 0."""
    if len(shape) != len(expected):
        return False
    for size, expected_size in zip(shape, expected, strict=True):
        if expected_size is None:
            if size < 1:
                return False
        elif size != expected_size:
            return False
    return True
