"""One machine with GPUs: B/2, data parallel over all of them.

    python -m train_lib.main --config=configs/gpu.py --workdir=W \\
        --config.data.dir=OUT/coyo11m_tfds/CONFIG/1.0.0
"""

import ml_collections

from configs import default


def get_config() -> ml_collections.ConfigDict:
    """Fields that differ from the default."""
    config = default.get_config()
    config.model.name = 'B/2'
    # By XLA's own count (compiled for CPU) the whole batch on one device takes 15 GB so and
    # 134 GB otherwise, besides 2 GB of state.
    config.model.remat = 'full'
    return config
