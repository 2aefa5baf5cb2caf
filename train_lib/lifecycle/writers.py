"""Writers of a run's scalars, pictures and texts: TensorBoard and, if chosen, Weights & Biases.

They work in a thread, which imports them first: `clu.metric_writers` takes seconds, because it
imports TensorFlow.
"""

import contextlib
import functools
import importlib.util
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import ml_collections
from clu import asynclib
from etils import epath

from coyo11m_tfds.process import errors, preparation
from train_lib.lifecycle import config_rules

if TYPE_CHECKING:
    from clu import metric_writers

_ID_FILE = 'wandb_id.txt'  # in the workdir


def check_installed(config: ml_collections.ConfigDict) -> None:
    """Raises a FieldError if the configuration names a writer that is not installed."""
    if config.wandb.project and importlib.util.find_spec('wandb') is None:
        problem = "wandb is not installed: pip install -c constraints.txt -e '.[wandb]'"
        raise errors.FieldError('wandb.project', config.wandb.project, problem)


class BackgroundWriter:
    """Calls the methods of a writer in a thread of its own: a write to a bucket delays no step.

    It has all methods `write_...` of `clu.metric_writers.MetricWriter`. Each one raises an
    `asynclib.AsyncError` if one before it has failed.
    """

    def __init__(self, open_writer: 'Callable[[], metric_writers.MetricWriter] | None'):
        """Takes what opens the writer, in the thread; None for a writer that ignores all calls."""
        self._pool = asynclib.Pool('writer', max_workers=1)
        self._ignores_calls = open_writer is None
        self._may_open = threading.Event()
        self._writer: Any = None
        if open_writer is not None:
            self._call(lambda: self._open(open_writer))

    def start(self) -> None:
        """Lets the thread open the writer; until then calls wait there, and nothing is imported."""
        self._may_open.set()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns a method `write_...` of the writer."""
        if not name.startswith('write_'):
            raise AttributeError(f'{type(self).__name__} has no attribute {name!r}')

        def write(*args: Any, **kwargs: Any) -> None:
            """Calls the method in the thread."""
            self._call(lambda: getattr(self._writer, name)(*args, **kwargs))

        return write

    def flush(self) -> None:
        """Waits until all is written that was given so far."""
        self._call(lambda: self._writer.flush())
        # A run that ends before its first step has not started the thread.
        self.start()
        self._pool.join()

    def close(self) -> None:
        """Writes what is left, and closes the writer."""
        self._call(lambda: self._writer.close())
        self.start()
        self._pool.close()

    def _open(self, open_writer: 'Callable[[], metric_writers.MetricWriter]') -> None:
        """Opens the writer, as the first call in the thread; the others wait behind it."""
        self._may_open.wait()
        self._writer = open_writer()

    def _call(self, function: Callable[[], None]) -> None:
        """Calls a function in the thread, after those before it."""
        if not self._ignores_calls:
            self._pool(function)()


def make_writer(
    config: ml_collections.ConfigDict, workdir: epath.Path, verbose: bool = False
) -> BackgroundWriter:
    """Returns the writer of a run, which waits for its `start`; `verbose`: it also writes a log.

    Raises an OSError if Weights & Biases refuses the run.
    """
    # Scalars and pictures are equal on all processes, so only the first one writes them.
    if jax.process_index():
        return BackgroundWriter(None)
    wandb_run = None
    if config.wandb.project:
        # Not in the thread: a refusal must come before minutes of compiling.
        wandb_run = _begin_wandb_run(config, workdir)
    return BackgroundWriter(functools.partial(_open_writers, workdir, wandb_run, verbose))


def _open_writers(
    workdir: epath.Path, wandb_run: Any, verbose: bool
) -> 'metric_writers.MetricWriter':
    """Returns the writers of process 0 as one."""
    # Here, because it takes seconds: in the thread, while the first step is compiled.
    preparation.hide_accelerators_from_tensorflow()
    from clu import metric_writers

    from train_lib.lifecycle import event_writers

    writers: list[metric_writers.MetricWriter] = [event_writers.TensorBoardWriter(workdir)]
    if wandb_run is not None:
        writers.append(event_writers.WandbWriter(wandb_run))
    if verbose:
        writers.append(metric_writers.LoggingWriter())
    return metric_writers.MultiWriter(writers)


@contextlib.contextmanager
def name_writer_errors(workdir: epath.Path) -> Iterator[None]:
    """Turns the errors of writers, which come from their thread, into an `OSError` of one line."""
    try:
        yield
    except asynclib.AsyncError as error:
        *_, cause = errors.follow_causes(error)
        problem = errors.summarize_error(cause)
        raise OSError(f'{workdir}: logs cannot be written: {problem}') from error


def _begin_wandb_run(config: ml_collections.ConfigDict, workdir: epath.Path) -> Any:
    """Returns the run of wandb, new or resumed.

    Raises an OSError if wandb refuses it, for example because nobody is logged in.
    """
    import wandb

    # A resumed run continues the same chart. It sends the steps after its last checkpoint again;
    # wandb ignores these duplicates.
    path = workdir / _ID_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12])
    try:
        return wandb.init(
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
