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
    config.batch_size = 32
    config.num_steps = 1_000
    config.ema_decay = 0.99  # remembers the last 100 steps: the run is short

    config.data.chunk = 32  # the data set may have only some hundred records
    config.data.lanes = 4
    config.data.window = 256
    config.data.require_text = False
    config.data.caption_dropout = 0.05  # 0.1 draws fewer right pictures (docs/log.md)

    config.model.name = 'tiny/4'  # 64 tokens; with patches of 8 the width is too small for a token
    config.model.width = 96
    config.model.num_heads = 3
    config.model.dtype = 'float32'  # CPUs are no faster at bfloat16
    # A token is 64 numbers, and the model has a width of 96.
    config.model.prediction = 'latents'

    config.optimizer.name = 'muon'
    config.optimizer.muon_learning_rate = 8e-3
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.schedule = 'wsd'

    # Noisy times decide what a picture shows, and a short run has to learn this first. Lower means
    # draw fewer of the right things (docs/log.md).
    config.flow.logit_mean = 2.5

    config.preview.guidance = 3.0
    config.preview.guidance_low = 0.8  # below, it changes colours
    config.preview.num_steps = 25
    # The last step begins at a time of 0.45: at lower ones the model has learned little.
    config.preview.time_shift = 20.0

    config.log_every = 50
    config.eval_every = 500
    config.preview_every = 250
    config.checkpoint_every = 250
    return config
