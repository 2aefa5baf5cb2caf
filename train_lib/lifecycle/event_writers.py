"""The writers of `writers`, as `clu.metric_writers` has them; an import takes seconds.

It imports TensorFlow, which writes TensorBoard's files.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from clu import metric_writers
from etils import epath

from coyo11m_tfds.process.shown_text import escape_for_html

# Names under which TensorBoard shows the losses again: it sorts groups by name, capitals first, and
# that of the devices would come before those of training and evaluation.
_FIRST_NAMES = {'train/loss': 'Loss/train', 'eval/loss': 'Loss/evaluation'}


class TensorBoardWriter(metric_writers.MultiWriter):
    """Writes for TensorBoard, and the losses once more where it shows them first."""

    def __init__(self, workdir: epath.Path):
        super().__init__([metric_writers.SummaryWriter(os.fspath(workdir))])

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes scalars of a step, by name."""
        written = dict(scalars)
        for name, first_name in _FIRST_NAMES.items():
            if name in scalars:
                written[first_name] = scalars[name]
        super().write_scalars(step, written)


class WandbWriter(metric_writers.MultiWriter):
    """Sends scalars, images and texts to Weights & Biases; ignores other kinds of data."""

    def __init__(self, run: Any):
        """Takes the run of wandb, which `close` ends."""
        import wandb

        super().__init__([])
        self._run = run
        self._image = wandb.Image
        self._html = wandb.Html

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Sends scalars of a step, by name."""
        values = {name: float(value) for name, value in scalars.items()}
        self._run.log(values, step=step)

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Sends pictures of a step, uint8 `(n, H, W, 3)` by name."""
        values = {}
        for name, pictures in images.items():
            # In one transfer: they may still lie on a device.
            arrays = np.asarray(pictures)
            values[name] = [self._image(array) for array in arrays]
        self._run.log(values, step=step)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Sends texts of a step, by name."""
        values = {}
        for name, text in texts.items():
            # With its lines as they are, such as those of a configuration.
            shown = f'<pre>{escape_for_html(text)}</pre>'
            values[name] = self._html(shown)
        self._run.log(values, step=step)

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()
