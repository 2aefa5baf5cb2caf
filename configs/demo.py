"""The demo: a tiny model on the synthetic pictures of `coyo11m_tfds.sample_data`, on two CPU cores.

    python -m train_lib.main --config=configs/demo.py --workdir=demo/run

With the variables that `make demo` sets, it takes 7 to 8 minutes on two idle cores of an Intel Xeon
(4.6 to 5.7 steps a second). Then `python -m train_lib.demo` counts the pictures of held-out
captions with the right colours and the right shape.
"""

import ml_collections

from configs import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the default with other values of some fields."""
    config = default.get_config()
    with config.unlocked():
        config.data.dir = 'demo/data/coyo11m_tfds/words/1.0.0'
    config.batch_size = 32
    config.num_steps = 2_100
    config.ema_decay = 0.99  # remembers the last 100 steps: the run is short

    config.data.chunk = 32  # the data set has a few thousand records
    config.data.lanes = 4
    config.data.window = 256

    config.model.name = 'tiny/4'  # 64 tokens; with patches of 8 the width is too small for a token
    # In equal time, widths of 128 and of 64 draw fewer shapes right (benchmarks/README.md).
    config.model.width = 96
    config.model.num_heads = 3
    # After a quarter of the demo, all pictures have the right colours; with one embedding a
    # caption, 5 in 6 pictures do.
    config.model.text = 'sequence'
    config.model.dtype = 'float32'  # CPUs are no faster at bfloat16

    # In equal time, Muon draws more shapes right than AdamW alone (benchmarks/README.md).
    config.optimizer.name = 'muon'
    config.optimizer.muon_learning_rate = 8e-3
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 175
    config.optimizer.schedule = 'wsd'

    config.flow.logit_mean = 1.0  # large plain shapes: noisy times decide their places

    config.preview.guidance = 3.0
    config.preview.num_steps = 25

    config.log_every = 100
    config.eval_every = 700
    config.preview_every = 700
    config.checkpoint_every = 700
    return config
