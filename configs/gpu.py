"""One machine with GPUs: B/2, data parallel over all of them.

    python -m train_lib.main --config=configs/gpu.py --workdir=W \\
        --config.data.dir=OUT/coyo11m_tfds/CONFIG/1.0.0

The whole batch on one device takes 36 GB, besides 2 GB of state (compiled for a CPU): it fits one
GPU of 80 GB, or two of 40 GB. For smaller ones, `--config.model.remat=full` takes 14 GB and
computes each block again in the backward pass. B/2 was not yet measured on a GPU; XL/2 with 128
samples, `--config.model.attention=cudnn` and `remat=dots` takes 278 ms a step on an H200: 461
samples a second, 33% of its rate (benchmarks/README.md).
"""

import ml_collections

from configs import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the default with other values of some fields."""
    config = default.get_config()
    config.model.name = 'B/2'
    config.model.remat = 'dots'  # products, and what attention mixes
    default.set_learning_rates(config, width=768)
    config.optimizer.name = 'muon'  # learns more than AdamW in as many steps (docs/log.md)
    return config
