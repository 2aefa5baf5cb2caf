"""TPU v5e-256 (64 hosts of 4 chips): XL/2, weights split over the chips of four hosts.

    python -m train_lib.main --config=configs/tpu_v5e_256.py --workdir=gs://BUCKET/RUN \\
        --config.data.dir=gs://BUCKET/coyo11m_tfds/tokens/1.0.0

Start it on all hosts. `python -m train_lib.tools.compile --topology=v5e:16x16` says, without a TPU:
fits: 38% of the memory, 0.93 times the least traffic, 100 ms a step by the compiler, an MFU of 63%,
58% with the exchanges that wait. See docs/pods.md. The fields are those of v5e-128: 16 samples a
chip, 4 lanes a host.
"""

from configs.tpu_v5e_128 import get_config

__all__ = ['get_config']
