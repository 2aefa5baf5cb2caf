"""A first trial: a tiny model, for a CPU or a GPU of 8 GB, on any data set.

    python -m train_lib.main --config=small --workdir=TRY \\
        --config.data.dir=OUT/coyo11m_tfds/CONFIG/1.0.0

The pictures in TRY/previews show what the model has learned. If the data set has no text, the model
learns to draw without captions, and the log says so.
"""

import ml_collections

from configs import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the default with other values of some fields."""
    config = default.get_config()
    # Percentages here are of exact pictures after 1,200 steps of this recipe with 6 blocks, which
    # has 64%, or other recipes of the same CPU time, means of three seeds (docs/log.md).
    config.batch_size = 32  # 16 have 56%, 64 have 54%
    config.num_steps = 1_000
    config.ema_decay = 0.99  # remembers the last 100 steps; 200 have 63%

    config.data.chunk = 32  # the data set may have only some hundred records
    config.data.lanes = 4
    config.data.window = 256
    config.data.require_text = False
    config.data.caption_dropout = 0.05  # 0.1 has 61%

    # 64 tokens; patches of 8 are more numbers than the width, patches of 2 have 2%.
    config.model.name = 'tiny/4'
    config.model.width = 96  # 128 has 59%, 192 has 48%
    config.model.depth = 4  # has 65%, 1,680 steps in less time; its pictures are closer to the true
    config.model.num_heads = 3
    config.model.dtype = 'float32'  # CPUs are no faster at bfloat16
    # A token is 64 numbers, and the model has a width of 96. Velocities have 57%.
    config.model.prediction = 'latents'

    config.optimizer.name = 'muon'  # AdamW has 48%
    config.optimizer.muon_learning_rate = 8e-3
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.schedule = 'wsd'

    # Noisy times decide what a picture shows, and a short run has to learn this first. Means of 3,
    # 2, 1.5, 1 and 0 have 60, 59, 54, 34 and 2%.
    config.flow.logit_mean = 2.5

    config.preview.guidance = 3.0  # without it 54%
    config.preview.guidance_low = 0.8  # below, it changes colours: with 0.6 60%, with 0 52%
    config.preview.num_steps = 25
    # The last step begins at a time of 0.45: at lower ones the model has learned little. Shifts of
    # 50, 3 and 1 have 61, 54 and 52%.
    config.preview.time_shift = 20.0

    config.log_every = 50
    config.eval_every = 500
    config.preview_every = 250
    config.checkpoint_every = 250
    return config
