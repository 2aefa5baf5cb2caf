"""Plans of small sources, and what comes of them, for the tests of the conversion."""

import pathlib
from collections.abc import Sequence

from coyo11m_tfds import plan, prepare, schema, shard_pool, shard_writer, sources
from coyo11m_tfds.finished import FinishedShards
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.scratch import Scratch


def shard_filename(split: str, index: int, count: int) -> str:
    """Names of the shards of `make_plan`."""
    return f'{split}-{index}-of-{count}'


def make_plan(source: str | pathlib.Path, folder: pathlib.Path, **settings) -> plan.Plan:
    """Plans small shards, a fifth of the keys for validation; stores go into `folder`."""
    folder.mkdir(exist_ok=True)
    defaults = {'validation_fraction': 0.2, 'shard_bytes': 150_000}
    return plan.make_plan(
        sources.find(source),
        plan.PlanSettings(**(defaults | settings)),
        Scratch(folder / 'source', 10**9),
        str(folder),
        shard_filename,
    )


def write(
    made: plan.Plan, work: pathlib.Path, num_workers: int = 1
) -> list[shard_writer.ShardResult]:
    """Writes what is missing of a plan; shards are in `work / schema.BUILD_DATA`."""

    def engine(tasks: Sequence[shard_writer.ShardTask], finished: FinishedShards):
        staging = Destination(work).staging('')
        scratch = Scratch(work / 'source', 10**9)
        return shard_pool.write_shards(tasks, finished, scratch, staging, num_workers)

    return prepare.write_shards(made, Destination(work), engine)


def data_folder(work: pathlib.Path) -> pathlib.Path:
    """Where the shards of `write` are."""
    return work / schema.BUILD_DATA


def planned_keys(made: plan.Plan) -> dict[str, list[list[int]]]:
    """Keys of every shard, by split."""
    splits: dict[str, list[list[int]]] = {}
    for task in sorted(made.tasks, key=lambda task: task.index):
        splits.setdefault(task.split, []).append(task.inputs.open().keys.tolist())
    return splits
