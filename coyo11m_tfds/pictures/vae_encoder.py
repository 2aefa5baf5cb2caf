"""Encodes pictures into latents with the encoder of a VAE, in JAX, on all local devices.

    encoder = vae_encoder.VaeEncoder('stabilityai/sdxl-vae')   # or a folder in diffusers' layout
    mean, deviation = encoder.encode(pictures)   # uint8 (n, 256, 256, 3) -> float32 (n, 4, 32, 32)

It reads the encoders of diffusers' `AutoencoderKL` and `AutoencoderTiny`, as `vae_decoder` reads
their decoders.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coyo11m_tfds import schema
from coyo11m_tfds.pictures import vae_files
from coyo11m_tfds.pictures.vae_layers import VaeLayers
from coyo11m_tfds.process import jax_environment
from coyo11m_tfds.storage import model_files

# Limits of a batch on one device. SDXL's encoder takes 1 GB for so many pixels.
_PICTURES = 8
_PIXELS = 8 * 256**2
_SAMPLE_SIZE = 2 ** (vae_files.MAX_STAGES - 1)  # pixels, which all stages can halve


class VaeEncoder:
    """Turns pictures into raw latents. The same pictures on the same kind of device give the same
    bytes, whatever the number of devices and of pictures in a call.
    """

    def __init__(self, model: str):
        """Loads the encoder of a folder, or of a name on the hub.

        Raises a ValueError for a VAE that cannot be read or encodes in another way.
        """
        vae = vae_files.open_vae(model, ('encoder.', 'quant_conv.'))
        networks = {'AutoencoderKL': _encode_kl, 'AutoencoderTiny': _encode_tiny}
        sample_shape = (1, _SAMPLE_SIZE, _SAMPLE_SIZE, 3)
        network, (mean, deviation) = vae.bind(networks, sample_shape)
        self.name = model_files.public_name(model)
        self.revision = vae.commit or model_files.revision(str(vae.folder))
        self.channels = vae.channels
        # Pixels of a latent position, in each direction.
        self.factor = _SAMPLE_SIZE // mean.shape[1]
        # Factor and shift, as in `latent_rgb.SCALES`.
        self.scale = vae.config['scaling_factor'], vae.config['shift_factor'] or 0.0
        self.has_moments = deviation is not None
        # Latents of another precision would be other ones.
        jax_environment.check()
        mesh = Mesh(np.array(jax.local_devices()), ('pictures',))
        self._rows = NamedSharding(mesh, P('pictures'))
        self._weights = jax.device_put(vae.read_weights(), NamedSharding(mesh, P()))

        def encode(weights: Mapping[str, Any], pixels: jax.Array) -> Any:
            """Returns mean and deviation of uint8 pictures, with the channels first."""
            # Else accelerators round the operands of float32 products to fewer bits.
            with jax.default_matmul_precision('highest'):
                latents = network(weights, pixels.astype(jnp.float32) / 127.5 - 1)
            return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 1), latents)

        # Each device runs the same program, however many devices there are.
        rows = self._rows.spec
        mapped = jax.shard_map(encode, mesh=mesh, in_specs=(P(), rows), out_specs=rows)
        options = {}
        if mesh.devices.flat[0].platform == 'gpu':
            # Else XLA chooses between algorithms by how fast they are at the moment.
            options['xla_gpu_deterministic_ops'] = True
        self._encode = jax.jit(mapped, compiler_options=options or None)

    def batch_size(self, height: int, width: int) -> int:
        """Returns how many pictures of a size are computed at once, on all local devices."""
        of_device = max(1, _PIXELS // (height * width))
        return min(_PICTURES, of_device) * self._rows.mesh.size

    def encode(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Encodes pictures, uint8 `(n, H, W, 3)`, into mean and deviation, float32 `(n, C, h, w)`.

        Those of an `AutoencoderKL` are raw. An `AutoencoderTiny` gives scaled latents, and None for
        the deviation. Raises a ValueError for no pictures, and for sides that are no multiples of
        `factor`.
        """
        return self.start(pixels)()

    def start(self, pixels: np.ndarray) -> Callable[[], tuple[np.ndarray, np.ndarray | None]]:
        """Starts to encode pictures; returns a function that waits for the result of `encode`."""
        count, height, width, _ = pixels.shape
        if not count or height % self.factor or width % self.factor:
            raise ValueError(
                f'the VAE {self.name} encodes pictures of multiples of {self.factor} pixels, got '
                f'{count} of {width} x {height}'
            )
        batch_size = self.batch_size(height, width)
        # One number of pictures is one compilation.
        num_missing = -count % batch_size
        padded = np.pad(pixels, [(0, num_missing), (0, 0), (0, 0), (0, 0)])
        batches = []
        for batch in np.split(padded, len(padded) // batch_size):
            on_devices = jax.device_put(batch, self._rows)
            # JAX returns before the devices have computed.
            batches.append(self._encode(self._weights, on_devices))

        def finish() -> tuple[np.ndarray, np.ndarray | None]:
            """Waits for the devices, and returns what `encode` does."""
            results = jax.device_get(batches)
            # Mean and deviation apart, without the padding.
            return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *results)

        return finish


# --- Networks: from pictures in [-1, 1] to mean and deviation, all float32 `(n, H, W, C)` ---------

_Latents = tuple[jax.Array, jax.Array | None]


def _encode_tiny(layers: VaeLayers, x: jax.Array) -> _Latents:
    """diffusers' `EncoderTiny`, which takes pictures in [0, 1]."""
    names = (f'encoder.layers.{number}' for number in itertools.count())
    stages = layers.config['num_encoder_blocks']
    widths = layers.widths('encoder_block_out_channels', len(stages))
    x = layers.conv(next(names), (x + 1) / 2, widths[0])
    for stage, (num_blocks, width) in enumerate(zip(stages, widths, strict=True)):
        if stage > 0:
            # Halves both sides.
            padding = [(1, 1), (1, 1)]
            x = layers.conv(next(names), x, width, stride=2, padding=padding, has_bias=False)
        for _ in range(num_blocks):
            x = layers.tiny_block(next(names), x)
    return layers.conv(next(names), x, layers.config['latent_channels']), None


def _encode_kl(layers: VaeLayers, x: jax.Array) -> _Latents:
    """diffusers' `Encoder` of `AutoencoderKL`."""
    num_stages = len(layers.config['down_block_types'])
    widths = layers.widths('block_out_channels', num_stages)
    x = layers.conv('encoder.conv_in', x, widths[0])
    for stage, width in enumerate(widths):
        block = f'encoder.down_blocks.{stage}'
        for number in range(layers.config['layers_per_block']):
            x = layers.resnet(f'{block}.resnets.{number}', x, width)
        if stage < num_stages - 1:
            # The padding of diffusers: nothing before, a zero behind.
            padding = [(0, 1), (0, 1)]
            name = f'{block}.downsamplers.0.conv'
            x = layers.conv(name, x, x.shape[-1], stride=2, padding=padding)
    num_moments = 2 * layers.config['latent_channels']
    x = layers.middle('encoder.mid_block', x)
    x = layers.out('encoder', x, num_moments)
    if layers.config['use_quant_conv']:
        x = layers.conv('quant_conv', x, num_moments, size=1)
    mean, log_variance = jnp.split(x, 2, axis=-1)
    return mean, jnp.exp(0.5 * jnp.clip(log_variance, *schema.LOG_VARIANCE_LIMITS))
