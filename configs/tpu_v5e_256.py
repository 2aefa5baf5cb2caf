"""TPU v5e-256 (64 hosts of 4 chips): XL/2, weights split over the chips of a host.

    python -m train_lib.main --config=configs/tpu_v5e_256.py --workdir=gs://BUCKET/RUN \\
        --config.data.dir=gs://BUCKET/coyo11m_tfds/tokens/1.0.0

Start it on all hosts. `python -m train_lib.tools.compile --topology=v5e:16x16` says, without a TPU:
fits: 57% of the memory, 0.95 times the least traffic, 105 ms a step by the compiler, an MFU of 61%,
51% with the exchanges that wait. See docs/pods.md.
"""

import ml_collections

from configs import default


def get_config() -> ml_collections.ConfigDict:
    """Fields that differ from the default."""
    config = default.get_config()
    config.distributed = True
    config.batch_size = 4096  # 16 a chip
    config.num_steps = 200_000
    config.data.lanes = 256  # 4 a host: 16 records of a batch each, as in the default
    config.model.name = 'XL/2'  # 0.75 billion weights, 15 GB with average, moments and gradient
    config.model.num_heads = 9  # of 128 numbers, a tile of the chip's memory
    config.model.text = 'sequence'  # attention sees the words of a caption, too
    config.encoder = 'jax:google/gemma-3-270m'  # or jax:FOLDER; frozen, it encodes the tokens
    config.model.attention = 'pallas'  # one kernel: scores never leave the chip
    config.model.remat = 'dots'  # products, and what attention mixes
    config.model.unroll = 28  # all blocks: in a loop a step takes a quarter more
    default.set_learning_rates(config, width=1152)
    config.mesh.fsdp = 4  # the chips of a host
    return config
