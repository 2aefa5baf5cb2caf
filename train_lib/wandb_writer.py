"""Scalars, pictures and texts for Weights & Biases, as a writer of clu.

    writer = WandbWriter(config, workdir)      # on with --config.wandb.project=NAME

`WANDB_MODE=offline` keeps all on this machine; `wandb sync` sends it later. The run's id lies in
the workdir, so that a resumed run continues the same chart. A run that was killed sends again what
came after its last checkpoint; that is the same, and wandb ignores it.
"""

import html
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections
import numpy as np
import wandb
from clu import metric_writers
from etils import epath

from train_lib import settings

ID_FILE = 'wandb_id.txt'  # in the workdir


class WandbWriter(metric_writers.MetricWriter):
    """Sends scalars, images, texts, histograms and hyperparameters; ignores all else."""

    def __init__(self, config: ml_collections.ConfigDict, workdir: epath.Path):
        """Begins a run of `wandb.project`, or resumes the one whose id is in the workdir.

        Raises:
            OSError: wandb refuses, above all where nobody is logged in.
        """
        path = workdir / ID_FILE
        if path.exists():
            run_id = path.read_text().strip()
        else:
            run_id = uuid.uuid4().hex[:12]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(run_id)
        try:
            self._run = wandb.init(
                project=config.wandb.project,
                id=run_id,
                name=workdir.name,
                resume='allow',
                config=settings.flatten(config.to_dict()),
                settings=wandb.Settings(console='off', silent=True),
            )
        except wandb.Error as error:
            raise OSError(
                f'wandb.project={config.wandb.project!r}: {error} WANDB_MODE=offline keeps the run '
                'here, and `wandb sync` sends it later.'
            ) from error

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """See `clu.metric_writers.MetricWriter`, also for the other methods."""
        self._run.log({name: float(x) for name, x in scalars.items()}, step=step)

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Images `(n, H, W, C)` or `(H, W, C)`."""
        values = {}
        for name, image in images.items():
            several = np.asarray(image)
            several = several if several.ndim == 4 else several[None]
            values[name] = [wandb.Image(one) for one in several]
        self._run.log(values, step=step)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Shown as they are."""
        values = {
            name: wandb.Html(f'<pre>{html.escape(text)}</pre>') for name, text in texts.items()
        }
        self._run.log(values, step=step)

    def write_histograms(self, step: int, arrays: Mapping[str, Any], num_buckets=None) -> None:
        """With 64 buckets where `num_buckets` does not say how many."""
        buckets = num_buckets or {}
        # Its type names sequences alone, but it takes arrays.
        histogram: Callable[..., wandb.Histogram] = wandb.Histogram
        values = {
            name: histogram(np.asarray(x), num_bins=buckets.get(name) or 64)
            for name, x in arrays.items()
        }
        self._run.log(values, step=step)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Adds to the run's config."""
        self._run.config.update(dict(hparams), allow_val_change=True)

    def write_summaries(self, step, values, metadata=None) -> None:
        """Ignored."""

    def write_videos(self, step, videos) -> None:
        """Ignored."""

    def write_audios(self, step, audios, *, sample_rate) -> None:
        """Ignored."""

    def flush(self) -> None:
        """wandb sends by itself."""

    def close(self) -> None:
        """Ends the run and waits until all is sent."""
        self._run.finish()
