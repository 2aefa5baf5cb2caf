"""Small training runs: in this process, as a command, or on several hosts, and what they wrote."""

import collections
import contextlib
import dataclasses
import os
import pathlib
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import ml_collections
import numpy as np
import tensorflow as tf

from configs import default
from coyo11m_tfds import schema
from tests import children
from tests.checkout import CHECKOUT
from train_lib import train as loop
from train_lib.learning import state, step
from train_lib.lifecycle import checkpoint, config_rules

# What makes a run small; as flags for a process, as fields in this one.
SMALL = {
    'batch_size': 8,
    'num_steps': 30,
    'data.chunk': 32,
    'data.lanes': 2,
    'data.window': 32,
    'model.name': 'tiny/16',  # 4 tokens
    'model.width': 32,
    'model.depth': 2,
    'model.unroll': 1,
    'model.dtype': 'float32',
    # The compiled step is then the same for every number of steps.
    'optimizer.learning_rate': 1e-2,
    'optimizer.warmup_steps': 1,
    'optimizer.schedule': 'constant',
    'preview.count': 3,
    'preview.num_steps': 2,
    'log_every': 1,
    'eval_every': 10,
    'preview_every': 0,
    'checkpoint_every': 3,
    'keep_checkpoints': 2,
}


def small_config(data_dir: os.PathLike, **changes) -> ml_collections.ConfigDict:
    """The default configuration made small."""
    config = default.get_config()
    config.update_from_flattened_dict(SMALL | {'data.dir': str(data_dir)} | changes)
    return config


# What the jitted functions of a run do not depend on, given what it knows of its data.
_NOT_COMPILED = re.compile(
    r'data\.|keep_|max_skipped|profile_|(log|eval|preview|checkpoint)_every|init_'
    r'|preview\.(count|split|vae)|num_steps$'
)
_programs: dict[str, step.Program] = {}


def train(
    data_dir: os.PathLike, workdir: os.PathLike, accept: Sequence[str] = (), **changes
) -> state.TrainState:
    """Trains a small run in this process; its last state."""
    return train_config(small_config(data_dir, **changes), workdir, accept)


def train_config(
    config: ml_collections.ConfigDict,
    workdir: os.PathLike,
    accept: Sequence[str] = (),
    hooks: Sequence[loop.Hook] | None = None,
) -> state.TrainState:
    """`train.train_and_evaluate` with the jitted functions, slow to make, of an equal run."""
    setup = loop.set_up(config, workdir, accept)
    fields = config_rules.flatten_fields(config.to_dict())
    assert config.optimizer.schedule == 'constant'  # others depend on the number of steps
    compiled = {name: x for name, x in fields.items() if not _NOT_COMPILED.match(name)}
    key = repr((compiled, setup.data.facts.to_json(), setup.program.abstract_state))
    program = _programs.setdefault(key, setup.program)
    return loop.train(dataclasses.replace(setup, program=program), hooks)[0]


# --- Runs as processes -------------------------------------------------------------------------


def start(
    data_dir: os.PathLike, workdir: os.PathLike, forked: bool = False, **changes
) -> subprocess.Popen:
    """Starts a run as a process of its own; its output is text in a pipe."""
    python = children.interpreter(forked)
    return subprocess.Popen(
        [*python, '-m', 'train_lib.main', *flags(data_dir, workdir, **changes), _ACCEPTED],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@dataclasses.dataclass
class Host:
    """One process of a run on several, as if on a machine of its own."""

    process: subprocess.Popen
    output: pathlib.Path  # not a pipe: a host that waits for a reader stops them all


@contextlib.contextmanager
def hosts(
    data_dir: os.PathLike,
    workdir: pathlib.Path,
    *,
    processes: int,
    devices: int,
    forked: bool = False,
    **changes,
) -> Iterator[list[Host]]:
    """Starts a run on several processes of so many devices each; kills what is left of it at last.

    They note the keys of every step in `workdir` (see `train_process.py`).
    """
    common = [*flags(data_dir, workdir, **changes), _ACCEPTED]
    if processes > 1:
        common += [f'--coordinator_address=127.0.0.1:{free_port()}', f'--process_count={processes}']
    command = [*children.interpreter(forked), '-m', 'tests.train_lib.train_process', str(workdir)]
    xla_flags = f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count={devices}'
    workdir.mkdir(parents=True, exist_ok=True)
    started = []
    try:
        for index in range(processes):
            own = []
            if processes > 1:
                own.append(f'--process_index={index}')
            output = workdir / f'host_{index}_of_{processes}.log'
            with output.open('w') as file:
                process = subprocess.Popen(
                    [*command, *common, *own],
                    cwd=CHECKOUT,
                    env=os.environ | {'XLA_FLAGS': xla_flags},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            started.append(Host(process, output))
        yield started
    finally:
        for host in started:
            host.process.kill()
            host.process.wait()


# So that a run can be resumed for some more steps, also with other batches.
_ACCEPTED = '--accept_changes=num_steps,batch_size'


def flags(data_dir: os.PathLike, workdir: os.PathLike, **changes) -> list[str]:
    """Flags that name a small run."""
    fields = SMALL | {'data.dir': data_dir} | changes
    fields = [f'--config.{name}={value}' for name, value in fields.items()]
    return ['--config=configs/default.py', f'--workdir={workdir}', *fields]


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


# What a test waits for at most; four hosts on two busy cores take a minute to compile.
_PATIENCE = 300  # seconds


def wait(started: Sequence[Host]) -> list[int]:
    """Waits until all hosts have ended; their exit codes."""
    deadline = time.monotonic() + _PATIENCE
    return [host.process.wait(max(0.0, deadline - time.monotonic())) for host in started]


# --- What runs wrote ---------------------------------------------------------------------------


def read_events(workdir: pathlib.Path) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yields tag, step and value of all that was ever written."""
    for path in sorted(workdir.glob('events.out.tfevents.*')):
        # A process that was killed may leave half a record at the end.
        records = tf.data.TFRecordDataset(str(path)).ignore_errors()
        for record in records.as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                yield value.tag, event.step, tf.make_ndarray(value.tensor)


def read_scalars(workdir: pathlib.Path) -> dict[tuple[str, int], list[float]]:
    """All numbers that were ever written: `{(tag, step): [values]}`."""
    values = collections.defaultdict(list)
    for tag, number, value in read_events(workdir):
        if value.dtype == np.float32:
            values[tag, number].append(value.item())
    return values


def losses(workdir: pathlib.Path) -> dict[tuple[str, int], float]:
    """`{(tag, step): value}` of losses; a value written twice has to be the same bit for bit."""
    values_by_step = {}
    for (tag, number), values in read_scalars(workdir).items():
        if 'loss' in tag:
            assert len(set(values)) == 1, (tag, number, values)
            values_by_step[tag, number] = values[0]
    return values_by_step


def saved_steps(workdir: pathlib.Path) -> list[int]:
    """The steps of the complete checkpoints, in order."""
    folder = workdir / checkpoint.FOLDER
    if not folder.exists():
        return []
    # One that is being written has a longer name.
    return sorted(int(name) for name in os.listdir(folder) if name.isdigit())


def own_keys(batch: Mapping[str, jax.Array]) -> np.ndarray:
    """The keys of this process' rows of a batch on the devices, int64 `(b,)`."""
    # In the order of the rows, not of the devices; all rows have no start.
    shards = sorted(
        batch[schema.KEY].addressable_shards, key=lambda shard: shard.index[0].start or 0
    )
    words = np.concatenate([np.asarray(shard.data) for shard in shards])
    # Devices hold a key as two words of 32 bits.
    return words.astype('<u4').view('<i8')[:, 0]
