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

    config.model.name = 'tiny/4'  # 64 tokens; with patches of 8 the width is too small for a token
    # In equal time, widths of 128 and of 64 draw fewer shapes right (benchmarks/README.md).
    config.model.width = 96
    config.model.num_heads = 3
    config.model.dtype = 'float32'  # CPUs are no faster at bfloat16
    # More of the pictures are right, by more than seeds differ (benchmarks/README.md): a token is
    # 64 numbers, and the model has a width of 96.
    config.model.prediction = 'latents'

    # In equal time, Muon draws more shapes right than AdamW alone (benchmarks/README.md).
    config.optimizer.name = 'muon'
    config.optimizer.muon_learning_rate = 8e-3
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.schedule = 'wsd'

    # Large plain shapes: noisy times decide their places. 1 and 2.5 draw fewer right pictures
    # (benchmarks/README.md).
    config.flow.logit_mean = 1.5

    config.preview.guidance = 3.0
    config.preview.num_steps = 25
    config.preview.time_shift = 3.0  # as above: more right pictures in as many steps

    config.log_every = 50
    config.eval_every = 500
    config.preview_every = 250
    config.checkpoint_every = 250
    return config
