"""Records of finished shards, from which an interrupted build resumes.

    finished = FinishedShards(work)                 # work: a destination.Destination
    results = finished.load(plan.tasks)             # those that need not be written again
    finished.save(task, local_file, result)         # stores the shard, then its record

A shard is finished if its record says that it was made of the same source, rows and settings as
are planned now, and the file that is there has the size and the checksum of the record. That there
is a file says nothing.
"""

import json
from collections.abc import Mapping, Sequence

from absl import logging

from coyo11m_tfds import schema
from coyo11m_tfds.build.tasks import ShardResult, ShardTask
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.destination import Destination, FileState

_RECORDS = 'finished'


class FinishedShards:
    """The shards in the folder of a build that is under way, and their records.

    Args:
        work: the folder; shards are in its sub-folder `schema.BUILD_DATA`.
    """

    def __init__(self, work: Destination):
        self._work = work

    def save(self, task: ShardTask, local_file: str, result: ShardResult) -> None:
        """Stores a shard that lies in a local file, and its record when it is safely there.

        Raises:
            OSError: it cannot be stored.
        """
        self._work.put(local_file, f'{schema.BUILD_DATA}/{task.filename}', result.crc32c)
        data = _make_record(task, result)
        self._work.put_bytes(f'{_RECORDS}/{task.filename}.json', data)

    def load(self, tasks: Sequence[ShardTask]) -> list[ShardResult]:
        """Returns the results of the tasks that are finished; the others have to be written.

        Local shards are read through for their checksum, the storage tells those of a bucket.
        """
        records = self._work.read_all(_RECORDS)
        recorded = {
            task.filename: result
            for task in tasks
            if (result := _read_record(records.get(f'{task.filename}.json'), task))
        }
        if not recorded:
            return []
        states = self._check(recorded)
        results = [
            result
            for name, result in recorded.items()
            if states.get(name) == FileState(result.num_bytes, result.crc32c)
        ]
        logging.info('%d of %d shards are finished already', len(results), len(tasks))
        return results

    def _check(self, recorded: Mapping[str, ShardResult]) -> dict[str, FileState]:
        """Returns the state of the shards that have a record, by name."""
        if self._work.is_remote:
            return self._work.inventory(schema.BUILD_DATA, names=recorded)
        num_bytes = sum(result.num_bytes for result in recorded.values())
        with Progress('Checking finished shards', num_bytes, 'B') as progress:
            return self._work.inventory(schema.BUILD_DATA, progress.add, names=recorded)


def _make_record(task: ShardTask, result: ShardResult) -> bytes:
    record = {
        'fingerprint': task.fingerprint,
        'source': task.source,
        'rows': [part.row_range for part in task.parts],
        'result': result.to_json(),
    }
    return json.dumps(record | {'digest': json_digest.sha256(record)}).encode()


def _read_record(data: bytes | None, task: ShardTask) -> ShardResult | None:
    """The result in a record; None if there is no record, a damaged one, or one of another task."""
    if data is None:
        return None
    try:
        record = json.loads(data)
        if record.pop('digest') != json_digest.sha256(record):
            raise ValueError('wrong digest')
        same = record['fingerprint'] == task.fingerprint
        return ShardResult.from_json(record['result']) if same else None
    except (AttributeError, KeyError, TypeError, ValueError):
        logging.warning('%s: its record is damaged, it will be written again', task.filename)
        return None
