"""Records of finished shards, from which an interrupted build resumes.

    finished = FinishedShards(work)                 # work: a destination.Destination
    results = finished.load(plan.tasks)             # those that need not be written again
    finished.save(task, local_file, result)         # stores the shard, then its record

A shard is finished if its record says that it was made from the same source, rows and settings as
are planned now, and the file has the size and the checksum in the record. A file alone proves
nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.build.tasks import ShardResult, ShardTask
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import FileState

_RECORDS = 'finished'


class FinishedShards:
    """The shards in the folder of a build that is under way, and their records.

    Attributes:
        work: the folder; shards are in its sub-folder `schema.BUILD_DATA`.
        check: makes sure that this process may write there; what it raises ends its work.
        are_shared: whether other processes of the job write there too.
    """

    def __init__(
        self,
        work: Destination,
        check: Callable[[], None] = lambda: None,
        are_shared: bool = False,
    ):
        """Does not touch the storage."""
        self.work, self.check, self.are_shared = work, check, are_shared

    def save(self, task: ShardTask, local_file: str, result: ShardResult) -> None:
        """Stores a shard from a local file, and then its record.

        Raises:
            OSError: it cannot be stored.
        """
        self.check()
        self.work.put(local_file, f'{schema.BUILD_DATA}/{task.filename}', result.crc32c)
        self.check()
        self.work.put_bytes(_record_name(task), _make_record(task, result))

    def load(self, tasks: Sequence[ShardTask]) -> list[ShardResult]:
        """Returns the results of the tasks that are finished; the others have to be written.

        Local shards are read for their checksums; in a bucket the storage reports them.
        """
        recorded = {task.filename: result for task, result in self.look(tasks)}
        if not recorded:
            return []
        states = self._read_states(recorded)
        results = [
            result
            for name, result in recorded.items()
            if states.get(name) == FileState(result.num_bytes, result.crc32c)
        ]
        logging.info('%d of %d shards are finished already', len(results), len(tasks))
        return results

    def look(self, tasks: Sequence[ShardTask]) -> list[tuple[ShardTask, ShardResult]]:
        """Returns the tasks that have a record, and their results, without checking the shards."""
        by_name = {f'{task.filename}.json': task for task in tasks}
        records = self.work.read_all(_RECORDS, by_name)
        found = (
            (by_name[name], _read_record(data, by_name[name])) for name, data in records.items()
        )
        return [(task, result) for task, result in found if result]

    def forget(self, tasks: Sequence[ShardTask]) -> None:
        """Removes the records of tasks, so that a later record is of a shard written since."""
        names = {f'{task.filename}.json' for task in tasks}
        self.work.keep_only(_RECORDS, self.work.inventory(_RECORDS).keys() - names, self.check)

    def _read_states(self, recorded: Mapping[str, ShardResult]) -> dict[str, FileState]:
        """Returns the state of the shards that have a record, by name."""
        if self.work.is_remote:
            return self.work.inventory(schema.BUILD_DATA, names=recorded)
        num_bytes = sum(result.num_bytes for result in recorded.values())
        with Progress('Checking finished shards', num_bytes, 'B') as progress:
            return self.work.inventory(schema.BUILD_DATA, progress.add, names=recorded)


def _record_name(task: ShardTask) -> str:
    return f'{_RECORDS}/{task.filename}.json'


def _make_record(task: ShardTask, result: ShardResult) -> bytes:
    record = {
        'fingerprint': task.fingerprint,
        'source': task.source,
        'rows': [part.row_range for part in task.parts],
        'result': result.to_json(),
    }
    return json.dumps(record | {'digest': json_digest.sha256(record)}).encode()


def _read_record(data: bytes, task: ShardTask) -> ShardResult | None:
    """The result in a record; None if it is damaged, or of another task."""
    try:
        record = json.loads(data)
        if record.pop('digest') != json_digest.sha256(record):
            raise ValueError('wrong digest')
        same = record['fingerprint'] == task.fingerprint
        return ShardResult.from_json(record['result']) if same else None
    except (AttributeError, KeyError, TypeError, ValueError):
        logging.warning('%s: its record is damaged, it will be written again', task.filename)
        return None
