"""Models by name.

    model = models.make('S/2', dtype='bfloat16')

A name is a size and a patch size. Sizes S to XL are those of DiT (Peebles & Xie 2023, table 1);
`tiny` is for the demo and the tests.
"""

import jax.numpy as jnp

from train_lib.models.dit import ATTENTION, REMAT, DiT

SIZES = {
    'tiny': {'width': 128, 'depth': 6, 'num_heads': 4, 'unroll': 6},
    'S': {'width': 384, 'depth': 12, 'num_heads': 6},
    'B': {'width': 768, 'depth': 12, 'num_heads': 12},
    'L': {'width': 1024, 'depth': 24, 'num_heads': 16},
    'XL': {'width': 1152, 'depth': 28, 'num_heads': 16},
}


def make(name: str, *, dtype: str = 'bfloat16', remat: str = 'none', attention: str = 'xla') -> DiT:
    """Makes the model of a name such as `'S/2'`.

    Args:
        name: size and patch size, `SIZE/PATCH`.
        dtype: of the computation; parameters are float32.
        remat: what is kept for the backward pass: `none` of it is computed again, all but `dots`
            (the products with weights) or the blocks in `full`.
        attention: `xla`, or `cudnn` on NVIDIA GPUs.

    Raises:
        ValueError: an unknown size, or a patch size that is not a positive number; another value
            of `remat` or `attention`.
    """
    size, _, patch = name.partition('/')
    if size not in SIZES or not patch.isdigit() or int(patch) < 1:
        raise ValueError(
            f'model.name={name!r}: expected SIZE/PATCH such as "S/2" '
            f'with SIZE one of {", ".join(SIZES)}.'
        )
    if remat not in REMAT:
        raise ValueError(
            f'model.remat is {remat!r}, expected one of {", ".join(REMAT)}; write "full" for what '
            'was true, "none" for what was false.'
        )
    if attention not in ATTENTION:
        raise ValueError(
            f'model.attention is {attention!r}, expected one of {", ".join(ATTENTION)}.'
        )
    return DiT(
        **SIZES[size],
        patch_size=int(patch),
        dtype=jnp.dtype(dtype),
        remat=remat,
        attention=attention,
    )
