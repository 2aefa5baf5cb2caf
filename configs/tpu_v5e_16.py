"""TPU v5e-16 (4 hosts of 4 chips): L/2, weights split over the chips of a host.

    python -m train_lib.main --config=configs/tpu_v5e_16.py --workdir=gs://BUCKET/RUN \\
        --config.data.dir=gs://BUCKET/coyo11m_tfds/CONFIG/1.0.0

On every host at once. L/2 has 0.46 billion weights: with their average, two moments and the
gradient that is 9 GB in float32, 2.3 GB a chip when split over four. Activations take about 6 GB a
chip (XLA's count for 64 samples, compiled for CPU).
"""

import ml_collections

from configs import default


def get_config() -> ml_collections.ConfigDict:
    """What differs from the default."""
    config = default.get_config()
    config.distributed = True
    config.batch_size = 1024  # 64 a chip
    config.num_steps = 300_000
    config.data.lanes = 64  # 16 a host: 16 records of a batch each, as in the default
    config.model.name = 'L/2'
    config.model.remat = 'full'  # 16 GB a chip
    config.mesh.fsdp = 4  # the chips of a host
    return config
