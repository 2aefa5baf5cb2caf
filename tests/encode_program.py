"""Encodes images in a process of its own, forked from one that has imported what it needs."""

from absl import logging

from coyo11m_tfds import encode_images
from coyo11m_tfds.encoding.settings import EncodingSettings
from tests import children


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
    children.enter(env, log, log)
    logging.set_verbosity(logging.WARNING)
    encode_images.encode(images, vae, out, EncodingSettings(**fields), share=share)
