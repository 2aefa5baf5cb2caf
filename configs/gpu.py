"""One machine with GPUs: B/2, data parallel over all of them.

    python -m train_lib.main --config=configs/gpu.py --workdir=W \\
        --config.data.dir=OUT/coyo11m_tfds/CONFIG/1.0.0

The whole batch on one device takes 15 GB, besides 2 GB of state (compiled for a CPU).
"""

import ml_collections

from configs import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the default with other values of some fields."""
    config = default.get_config()
    config.model.name = 'B/2'
    default.set_learning_rates(config, width=768)
    return config
