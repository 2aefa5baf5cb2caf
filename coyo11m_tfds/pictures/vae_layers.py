"""The layers of diffusers' VAEs, which its encoders and decoders share."""

from collections.abc import Mapping
from typing import Any

import jax

_NORM_EPSILON = 1e-6


class VaeLayers:
    """Layers on float32 `(n, H, W, C)`, called by the names of their weights in diffusers."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Any]):
        """Takes the content of config.json, and the weights."""
        self._config, self._weights = config, weights

    def conv(self, name: str, x: jax.Array, stride: int = 1, padding: Any = 'SAME') -> jax.Array:
        """Convolves; the bias may be missing."""
        y = jax.lax.conv_general_dilated(
            x,
            self._weights[f'{name}.weight'],
            (stride, stride),
            padding,
            dimension_numbers=('NHWC', 'OIHW', 'NHWC'),
        )
        return y + self._weights[f'{name}.bias'] if f'{name}.bias' in self._weights else y

    def tiny_block(self, name: str, x: jax.Array) -> jax.Array:
        """`AutoencoderTinyBlock`, of equal widths."""
        y = x
        for layer in (0, 2, 4):
            y = self.conv(f'{name}.conv.{layer}', y)
            y = jax.nn.relu(y) if layer < 4 else y
        return jax.nn.relu(x + y)

    def resnet(self, name: str, x: jax.Array) -> jax.Array:
        """`ResnetBlock2D` without a time."""
        y = self.conv(f'{name}.conv1', self._norm_silu(f'{name}.norm1', x))
        y = self.conv(f'{name}.conv2', self._norm_silu(f'{name}.norm2', y))
        if x.shape[-1] != y.shape[-1]:
            x = self.conv(f'{name}.conv_shortcut', x)
        return x + y

    def middle(self, name: str, x: jax.Array) -> jax.Array:
        """`UNetMidBlock2D`."""
        x = self.resnet(f'{name}.resnets.0', x)
        if self._config.get('mid_block_add_attention', True):
            x = self._self_attention(f'{name}.attentions.0', x)
        return self.resnet(f'{name}.resnets.1', x)

    def out(self, half: str, x: jax.Array) -> jax.Array:
        """The last layers of a half, `encoder` or `decoder`."""
        return self.conv(f'{half}.conv_out', self._norm_silu(f'{half}.conv_norm_out', x))

    def _self_attention(self, name: str, x: jax.Array) -> jax.Array:
        # One head over all positions.
        y = self._group_norm(f'{name}.group_norm', x).reshape(len(x), -1, x.shape[-1])

        def linear(layer: str, y: jax.Array) -> jax.Array:
            # In old files it is a convolution over one position.
            matrix = self._weights[f'{name}.{layer}.weight'].reshape(x.shape[-1], -1)
            return y @ matrix.T + self._weights[f'{name}.{layer}.bias']

        query, key, value = (linear(layer, y) for layer in ('to_q', 'to_k', 'to_v'))
        scores = query @ key.swapaxes(1, 2) * x.shape[-1] ** -0.5
        return x + linear('to_out.0', jax.nn.softmax(scores) @ value).reshape(x.shape)

    def _norm_silu(self, name: str, x: jax.Array) -> jax.Array:
        return jax.nn.silu(self._group_norm(name, x))

    def _group_norm(self, name: str, x: jax.Array) -> jax.Array:
        """Normalizes groups of channels over all positions (Wu & He, "Group Normalization")."""
        groups = self._config.get('norm_num_groups', 32)
        grouped = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
        mean = grouped.mean(axis=(1, 3), keepdims=True)
        variance = grouped.var(axis=(1, 3), keepdims=True)
        normed = ((grouped - mean) * jax.lax.rsqrt(variance + _NORM_EPSILON)).reshape(x.shape)
        return normed * self._weights[f'{name}.weight'] + self._weights[f'{name}.bias']


def check_blocks(config: Mapping[str, Any], field: str, block: str, activation: str) -> None:
    """Raises a ValueError for other kinds of blocks in a field, or another activation."""
    value = config.get(field, block)
    blocks = {value} if isinstance(value, str) else {*value}
    if blocks != {block} or config.get('act_fn', activation) != activation:
        raise ValueError(
            f'{field} is {value!r} and act_fn is {config.get("act_fn")!r}, expected only {block} '
            f'and {activation}'
        )
