"""Encodes images in a process of its own, forked from one that has imported what it needs."""

import os

from absl import logging

from coyo11m_tfds import encode_images
from coyo11m_tfds.encoding.settings import EncodingSettings


def run(
    env: dict[str, str],
    log: str,
    images: str,
    vae: str,
    out: str,
    share: tuple[int, int],
    fields: dict,
) -> None:
    """Encodes; what the process says goes to the file `log`."""
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(env)
    logging.set_verbosity(logging.WARNING)
    encode_images.encode(images, vae, out, EncodingSettings(**fields), share=share)
