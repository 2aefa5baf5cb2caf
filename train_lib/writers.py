"""Writers of a run's scalars, pictures and texts: TensorBoard and, if chosen, Weights & Biases.

    writers.check(config)                  # before anything is written
    with writers.errors_named(workdir), contextlib.closing(writers.make(config, workdir)) as writer:
        writer.write_scalars(step, scalars)

To add a writer, add a `clu.metric_writers.MetricWriter` to the list in `make`. Each writer writes
in a thread of its own, in process 0.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import jax
import ml_collections
import tensorflow as tf
from clu import asynclib, metric_writers
from etils import epath

from train_lib import failures


def check(config: ml_collections.ConfigDict) -> None:
    """Raises a ValueError for a writer that is asked for and not installed."""
    if config.wandb.project and importlib.util.find_spec('wandb') is None:
        raise ValueError(
            f'wandb.project={config.wandb.project!r}: wandb is not installed: '
            "pip install -c constraints.txt -e '.[wandb]'"
        )


def make(
    config: ml_collections.ConfigDict, workdir: epath.Path, verbose: bool = False
) -> metric_writers.MetricWriter:
    """Opens all writers; `verbose` has everything that is written in the log as well."""
    if jax.process_index():
        return metric_writers.MultiWriter([])
    writers = [metric_writers.SummaryWriter(os.fspath(workdir))]
    if config.wandb.project:
        from train_lib.wandb_writer import WandbWriter

        writers.append(WandbWriter(config, workdir))
    if verbose:
        writers.append(metric_writers.LoggingWriter())
    return metric_writers.AsyncMultiWriter(writers)


@contextlib.contextmanager
def errors_named(workdir: epath.Path) -> Iterator[None]:
    """Turns the errors of writers, which come from their threads, into an `OSError` of one line."""
    try:
        yield
    except (asynclib.AsyncError, tf.errors.OpError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise OSError(f'{workdir}: logs cannot be written: {failures.summary(cause)}') from error
