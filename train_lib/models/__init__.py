"""Models by name.

    model = models.make('S/2', dtype='bfloat16')

A name is a size and a patch size. Sizes S to XL are those of DiT (Peebles & Xie 2023, table 1);
`tiny` is for the demo and the tests.
"""

import jax.numpy as jnp

from train_lib.models.dit import DiT

SIZES = {
    'tiny': {'width': 128, 'depth': 6, 'num_heads': 4, 'unroll': 6},
    'S': {'width': 384, 'depth': 12, 'num_heads': 6},
    'B': {'width': 768, 'depth': 12, 'num_heads': 12},
    'L': {'width': 1024, 'depth': 24, 'num_heads': 16},
    'XL': {'width': 1152, 'depth': 28, 'num_heads': 16},
}


def make(name: str, *, dtype: str = 'bfloat16', remat: bool = False) -> DiT:
    """Makes the model of a name such as `'S/2'`.

    Args:
        name: size and patch size, `SIZE/PATCH`.
        dtype: of the computation; parameters are float32.
        remat: recompute activations in the backward pass.

    Raises:
        ValueError: an unknown size, or a patch size that is not a positive number.
    """
    size, _, patch = name.partition('/')
    if size not in SIZES or not patch.isdigit() or int(patch) < 1:
        raise ValueError(
            f'model.name={name!r}: expected SIZE/PATCH such as "S/2" '
            f'with SIZE one of {", ".join(SIZES)}.'
        )
    return DiT(**SIZES[size], patch_size=int(patch), dtype=jnp.dtype(dtype), remat=remat)
