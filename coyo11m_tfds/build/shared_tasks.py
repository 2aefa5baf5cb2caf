"""The processes of a job share a build: the first plans it, all write its shards, the first joins.

    shared_tasks.offer(folder.work, tasks)              # the first, which holds the lock
    tasks = shared_tasks.in_turn(tasks, *job.share())   # in its own order
    folder.withdraw()                                   # when all are written

    shared_tasks.help_out(folder, engine, job.share(), wait_seconds)     # the others

An offer is a file in the folder of the build that lists all tasks; beside it are the captions and
embeddings of each, whose stores are on the first process' machine. Nobody claims a task. Process i
of n starts with every n-th group of files from the i-th on, continues with what the others have not
written yet, and leaves out what they have. So the shards of a dead process are written by the rest,
and nobody has to notice its death; two that write the same shard write the same bytes.

A process stores a shard only as long as the offer that it took exists. A builder that begins in
that folder first removes all offers, so that no process of an earlier job writes into it.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import logging

from coyo11m_tfds.build import shard_inputs
from coyo11m_tfds.build.build_folder import OFFERS, BuildFolder
from coyo11m_tfds.build.finished_shards import FinishedShards
from coyo11m_tfds.build.tasks import ShardTask
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.storage import build_lock
from coyo11m_tfds.storage.destination import Destination

if TYPE_CHECKING:
    from coyo11m_tfds.build.run_plan import Engine

_INPUTS = 'inputs'
_UPLOADS_AT_ONCE = 8


class _Ended(Exception):
    """There is nothing left to help with, or nobody to help."""


def pack(tasks: Sequence[ShardTask], work: Destination) -> list[ShardTask]:
    """Copies what tasks of a plan read from stores to the build's folder.

    Returns:
        Tasks that read it there.

    Raises:
        OSError: it cannot be stored.
    """

    def pack_one(task: ShardTask) -> ShardTask:
        assert isinstance(task.inputs, shard_inputs.StoreInputs)  # what a plan has
        name = f'{_INPUTS}/{task.filename}.npz'
        work.put_bytes(name, shard_inputs.pack(task.inputs))
        return dataclasses.replace(task, inputs=shard_inputs.PackedInputs(f'{work.folder}/{name}'))

    with concurrent.futures.ThreadPoolExecutor(_UPLOADS_AT_ONCE) as threads:
        return list(threads.map(pack_one, tasks))


def offer(work: Destination, tasks: Sequence[ShardTask]) -> None:
    """Lets the other processes of the job write tasks of a plan, as `help_out` does.

    Raises:
        OSError: it cannot be stored.
    """
    data = json.dumps([task.to_json() for task in pack(tasks, work)]).encode()
    work.put_bytes(f'{OFFERS}/{uuid.uuid4().hex}.json', data)


def in_turn(tasks: Sequence[ShardTask], index: int, count: int) -> list[ShardTask]:
    """Returns tasks in the order in which process `index` of `count` writes them.

    Groups index, index + count, ... are its own. Those of the next process follow, the last one
    first, as that process writes it last; then those of the one after it, and so on.
    """
    groups = [list(group) for _, group in itertools.groupby(tasks, lambda task: task.group)]
    order = groups[index::count]
    for other in range(index + 1, index + count):
        order += reversed(groups[other % count :: count])
    return list(itertools.chain(*order))


def help_out(
    folder: BuildFolder, engine: 'Engine', share: tuple[int, int], wait_seconds: float
) -> None:
    """Writes what the first process of the job offers, and waits until the data set is there.

    A process that cannot write, for whatever reason, leaves the tasks to the others.

    Args:
        folder: of the build.
        engine: writes.
        share: number of this process, and how many there are.
        wait_seconds: how long to wait.

    Raises:
        TimeoutError: it is not there by then.
        RuntimeError: the first process has failed, or was killed.
    """
    watch = build_lock.Watch(folder.final, folder.failure)
    taken: set[str] = set()

    def is_ready() -> bool:
        return folder.is_complete() or not _offers(folder.work) <= taken

    while True:
        watch.wait_for(is_ready, wait_seconds)
        if folder.is_complete():
            return
        for name in _offers(folder.work) - taken:
            taken.add(name)
            try:
                _write(folder.work, name, engine, share, watch)
            except _Ended:
                pass
            except Exception as error:
                logging.warning('%s: this process no longer helps: %s', folder.final, error)


def _write(
    work: Destination,
    name: str,
    engine: 'Engine',
    share: tuple[int, int],
    watch: build_lock.Watch,
) -> None:
    """Writes tasks of an offer that others have not written, until all are."""

    def check() -> None:
        if not work.identity(OFFERS, name) or watch.look():
            raise _Ended

    offered = work.read_all(OFFERS, [name])
    if not offered:
        return
    tasks = in_turn([ShardTask.from_json(task) for task in json.loads(offered[name])], *share)
    logging.info('%s: process %d of %d helps to write %d shards', work.folder, *share, len(tasks))
    num_bytes = sum(task.num_bytes for task in tasks)
    with Progress('Writing shards', num_bytes, 'B', {'shards': len(tasks)}) as progress:
        for _, result in engine(tasks, FinishedShards(work, check, are_shared=True)):
            progress.add(result.num_bytes, shards=1, records=result.num_records)


def _offers(work: Destination) -> set[str]:
    return set(work.inventory(OFFERS))
