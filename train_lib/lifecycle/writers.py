"""Writers of a run's scalars, pictures and texts: TensorBoard and, if chosen, Weights & Biases."""

import contextlib
import importlib.util
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_collections
import numpy as np
import tensorflow as tf
from clu import asynclib, metric_writers
from etils import epath

from coyo11m_tfds.process import errors
from coyo11m_tfds.process.shown_text import escape_for_html
from train_lib.lifecycle import config_rules

_ID_FILE = 'wandb_id.txt'  # in the workdir

# Names under which TensorBoard shows the losses again: it sorts groups by name, capitals first, and
# that of the devices would come before those of training and evaluation.
_FIRST_NAMES = {'train/loss': 'Loss/train', 'eval/loss': 'Loss/evaluation'}


def check_installed(config: ml_collections.ConfigDict) -> None:
    """Raises a FieldError if the configuration names a writer that is not installed."""
    if config.wandb.project and importlib.util.find_spec('wandb') is None:
        problem = "wandb is not installed: pip install -c constraints.txt -e '.[wandb]'"
        raise errors.FieldError('wandb.project', config.wandb.project, problem)


def make_writer(
    config: ml_collections.ConfigDict, workdir: epath.Path, verbose: bool = False
) -> metric_writers.MetricWriter:
    """Opens the writers of a run; with `verbose`, one of them writes to the log.

    Raises an OSError if Weights & Biases refuses the run.
    """
    # Scalars and pictures are equal on all processes, so only the first one writes them.
    if jax.process_index():
        return metric_writers.MultiWriter([])
    writers: list[metric_writers.MetricWriter] = [TensorBoardWriter(workdir)]
    if config.wandb.project:
        writers.append(WandbWriter(config, workdir))
    if verbose:
        writers.append(metric_writers.LoggingWriter())
    # In threads of their own, or each write to a bucket would delay a step.
    return metric_writers.AsyncMultiWriter(writers)


@contextlib.contextmanager
def name_writer_errors(workdir: epath.Path) -> Iterator[None]:
    """Turns the errors of writers, which come from their threads, into an `OSError` of one line."""
    try:
        yield
    except (asynclib.AsyncError, tf.errors.OpError) as error:
        *_, cause = errors.follow_causes(error)
        problem = errors.summarize_error(cause)
        raise OSError(f'{workdir}: logs cannot be written: {problem}') from error


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

    def __init__(self, config: ml_collections.ConfigDict, workdir: epath.Path):
        """Raises an OSError if wandb refuses the run, for example because nobody is logged in."""
        import wandb

        super().__init__([])
        # A resumed run continues the same chart. It sends the steps after its last checkpoint
        # again; wandb ignores these duplicates.
        path = workdir / _ID_FILE
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(uuid.uuid4().hex[:12])
        try:
            self._run = wandb.init(
                project=config.wandb.project,
                id=path.read_text().strip(),
                name=workdir.name,
                resume='allow',
                config=config_rules.flatten_fields(config.to_dict()),
                settings=wandb.Settings(console='off', silent=True),
            )
        except wandb.Error as error:
            raise OSError(
                f'wandb.project={config.wandb.project!r}: {error} WANDB_MODE=offline keeps the run '
                'here, and `wandb sync` sends it later.'
            ) from error
        self._image = wandb.Image
        self._html = wandb.Html

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Sends scalars of a step, by name."""
        self._run.log({name: float(x) for name, x in scalars.items()}, step=step)

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Sends pictures of a step, uint8 `(n, H, W, 3)` by name."""
        values = {}
        for name, pictures in images.items():
            values[name] = [self._image(picture) for picture in np.asarray(pictures)]
        self._run.log(values, step=step)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Sends texts of a step, by name."""
        values = {name: self._html(f'<pre>{escape_for_html(x)}</pre>') for name, x in texts.items()}
        self._run.log(values, step=step)

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()
