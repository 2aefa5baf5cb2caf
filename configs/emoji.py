"""Less than an hour on two CPU cores: emoji of 128 pixels, as latents of a VAE.

    python -m train_lib.main --config=emoji --workdir=EMOJI-run

docs/images.md has the commands that make the data set. In 45 minutes of CPU time, on two cores of
which other programs took half, it learned to draw 89.9% of 437 captions that it had not seen nearer
to the artist's own picture than to any other of 3,789 (docs/training.md).
"""

import ml_collections

from configs import demo


def get_config() -> ml_collections.ConfigDict:
    """Returns that of the demo with other values of some fields."""
    config = demo.get_config()
    config.data.dir = 'EMOJI-data/coyo11m_tfds/words/1.0.0'
    config.num_steps = 5_500
    config.ema_decay = 0.999

    config.model.name = 'tiny/2'  # 64 tokens of 16 x 16 latents
    config.model.width = 128
    config.model.depth = 6
    config.model.num_heads = 4

    config.optimizer.muon_learning_rate = 6e-3
    config.optimizer.learning_rate = 1.5e-3
    config.optimizer.warmup_steps = 300

    # A VAE leaves less noise for a picture to show through, and a long run has time for low times.
    config.flow.logit_mean = 1.25
    config.preview.time_shift = 10.0  # 3 draws less like the artist's own

    config.eval_every = 1_000
    config.preview_every = 1_000
    config.checkpoint_every = 500
    config.keep_every = 1_000
    return config
