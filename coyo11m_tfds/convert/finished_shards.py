"""Records of finished shards, from which an interrupted build resumes.

    finished = FinishedShards(folder, '3f9a1c20')   # folder: a destination.Destination
    results = finished.load(plan.tasks)             # those that need not be written again
    finished.save(task, local_file, result)         # stores the shard, then its record

A shard is finished if its record says that it was made from the same source, rows and settings as
are planned now, by this version of the package, and the file has the size and the checksum in the
record. A file alone proves nothing. Records lie in a sub-folder until the build is complete.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from coyo11m_tfds.convert.data_folder import SETTINGS_FILE, sub_folder
from coyo11m_tfds.convert.tasks import THIS_WRITER, ShardResult, ShardTask
from coyo11m_tfds.process.progress import Progress
from coyo11m_tfds.storage import json_digest
from coyo11m_tfds.storage.destination import Destination
from coyo11m_tfds.storage.file_state import FileState


class FinishedShards:
    """The shards of a build that is under way, and their records.

    Attributes:
        folder: of the data set, where the shards lie.
        build: ID of the build.
    """

    def __init__(self, folder: Destination, build: str):
        """Does not touch the storage."""
        self.folder, self.build = folder, build

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Says that the build is under way, so that what it writes is known to be its own."""
        name = f'{sub_folder(self.build)}/{SETTINGS_FILE}'
        self.folder.put_bytes(name, json.dumps(settings, indent=1).encode())

    def save(self, task: ShardTask, local_file: str, result: ShardResult) -> None:
        """Stores a shard from a local file, and then its record.

        Raises:
            OSError: it cannot be stored.
        """
        self.folder.put(local_file, task.filename, result.crc32c)
        name = f'{sub_folder(self.build)}/{task.filename}.json'
        self.folder.put_bytes(name, _make_record(task, result))

    def load(self, tasks: Sequence[ShardTask]) -> list[ShardResult]:
        """Returns the results of the tasks that are finished; the others have to be written.

        Local shards are read for their checksums; in a bucket the storage reports them.
        """
        by_name = {f'{task.filename}.json': task for task in tasks}
        records = self.folder.read_all(sub_folder(self.build), by_name)
        found = {by_name[n].filename: _read_record(d, by_name[n]) for n, d in records.items()}
        recorded = {name: result for name, result in found.items() if result}
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

    def _read_states(self, recorded: Mapping[str, ShardResult]) -> dict[str, FileState]:
        """Returns the state of the shards that have a record, by name."""
        if self.folder.is_remote:
            return self.folder.inventory(names=recorded)
        num_bytes = sum(result.num_bytes for result in recorded.values())
        with Progress('Checking finished shards', num_bytes, 'B') as progress:
            return self.folder.inventory('', progress.add, recorded)


def _make_record(task: ShardTask, result: ShardResult) -> bytes:
    record = {
        'fingerprint': task.fingerprint,
        'source': task.source,
        'rows': [part.row_range for part in task.parts],
        'result': result.to_json(),
    }
    return json.dumps(record | {'digest': json_digest.sha256(record)}).encode()


def _read_record(data: bytes, task: ShardTask) -> ShardResult | None:
    """The result in a record; None if it is damaged, of another task or of another writer."""
    try:
        record = json.loads(data)
        if record.pop('digest') != json_digest.sha256(record):
            raise ValueError('wrong digest')
        result = ShardResult.from_json(record['result'])
        same = record['fingerprint'] == task.fingerprint
    except (AttributeError, KeyError, TypeError, ValueError):
        logging.warning('%s: its record is damaged, it will be written again', task.filename)
        return None
    has_read = result.read == tuple(part.digest for part in task.parts)
    return result if same and has_read and result.writer == THIS_WRITER else None
