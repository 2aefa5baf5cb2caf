"""The demo: a tiny model on the emoji of `coyo11m_tfds.sample_data`, on two CPU cores.

    python -m train_lib.main --config=configs/demo.py --workdir=demo/run

With the variables that `make demo` sets, it takes about 6 minutes on two idle cores. Then
`python -m train_lib.demo` compares pictures of captions that it has not seen with the true ones.
"""

import ml_collections

from configs import small


def get_config() -> ml_collections.ConfigDict:
    """Returns that of a first trial with other values of some fields."""
    config = small.get_config()
    config.data.dir = 'demo/data/coyo11m_tfds/words/1.0.0'
    config.data.require_text = True
    config.num_steps = 2_800
    config.optimizer.warmup_steps = 233
    config.log_every = 100
    config.eval_every = 700
    config.preview_every = 700
    config.checkpoint_every = 700
    return config
