"""Plans of small sources, and what comes of them, for the tests of the conversion."""

import functools
import pathlib

from coyo11m_tfds import storage
from coyo11m_tfds.convert import driver, local_runner, plan
from coyo11m_tfds.convert.build_settings import BuildSettings
from coyo11m_tfds.convert.data_folder import FinishedShards
from coyo11m_tfds.convert.tasks import ShardResult
from coyo11m_tfds.source import source_folder
from coyo11m_tfds.storage.scratch import Scratch


def make_plan(
    source: str | pathlib.Path, folder: pathlib.Path, limit: int | None = None, **settings
) -> plan.BuildPlan:
    """Plans small shards, a fifth of the keys for validation; stores go into `folder`."""
    folder.mkdir(exist_ok=True)
    defaults = {'validation_fraction': 0.2, 'shard_bytes': 150_000}
    return plan.make_plan(
        source_folder.find_source(source),
        BuildSettings(**(defaults | settings)),
        Scratch(folder / 'source'),
        str(folder),
        limit,
    )


def write(made: plan.BuildPlan, work: pathlib.Path, num_workers: int = 1) -> list[ShardResult]:
    """Writes what is missing of a plan; shards are in `data_folder(work)`."""
    scratch = Scratch(work / 'source')
    engine = functools.partial(
        local_runner.write_with_workers, scratch=scratch, local='', num_workers=num_workers
    )
    finished = FinishedShards(storage.open_writable_folder(data_folder(work)), made.build)
    return driver.write_shards(made, finished, engine)


def data_folder(work: pathlib.Path) -> pathlib.Path:
    """Where the shards of `write` are."""
    return work / 'data'


def planned_keys(made: plan.BuildPlan) -> dict[str, list[list[int]]]:
    """Keys of every shard, by split."""
    keys_of_splits: dict[str, list[list[int]]] = {}
    for task in sorted(made.tasks, key=lambda task: task.index):
        keys = task.inputs.open().keys
        keys_of_splits.setdefault(task.split, []).append(keys.tolist())
    return keys_of_splits
