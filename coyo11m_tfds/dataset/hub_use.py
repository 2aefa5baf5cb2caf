"""What reading a data set from the hub takes of the quota of an account.

The hub counts *resolves*: requests that turn the name of a file into the address of its bytes. Such
an address serves for an hour; requests of ranges with it are not counted.
"""

import dataclasses
import math

from coyo11m_tfds import schema
from coyo11m_tfds.dataset.columns import AddedColumn
from coyo11m_tfds.dataset.stored_dataset import StoredDataset
from coyo11m_tfds.storage import hub

_SMALL_FILES = 8  # that each process reads once: metadata, index, checksums, descriptions


@dataclasses.dataclass(frozen=True)
class HubUse:
    """The requests of all processes of a run that reads the train split from the hub."""

    requests_per_second: float  # for ranges of files, which count against no quota
    request_nbytes: float  # mean
    num_files: int  # that hold records, latents in place and values of columns
    num_resolves: int  # in the window of the quota that has the most of them
    quota: hub.Quota | None  # of the account; None if the hub does not say it

    @property
    def is_within(self) -> bool:
        """Whether no process has to wait for another window."""
        return self.quota is None or self.num_resolves <= self.quota.limit


def estimate_use(
    data: StoredDataset, *, samples_per_second: float, chunk: int, num_processes: int
) -> HubUse:
    """Returns an estimate of the requests of a run, and the quota, by a request for a file.

    Args:
        data: A data set on the hub, without filters: all of its columns count.
        samples_per_second: Of all processes.
        chunk: Records of a request.
        num_processes: Processes that share the account, or the address of an anonymous user.

    Raises:
        ValueError: It has no train split, or one without records.
        OSError: The hub refuses the request.
    """
    split = data.splits.get(schema.TRAIN)
    # That of another program may be called otherwise.
    if not split or not split.num_records:
        raise ValueError(f'{data.folder}: has no records in a split {schema.TRAIN!r}.')
    num_files = len(split.file_names)
    record_nbytes = split.num_bytes / split.num_records
    # The records of a chunk are one request, and its rows in each column are another.
    requests_per_chunk = 1
    for column in data.columns.values():
        requests_per_chunk += 1
        record_nbytes += column.row_nbytes
        # Each split has one file of an added column.
        if isinstance(column, AddedColumn):
            num_files += 1
        else:
            num_files += len(column.files)
    requests_per_second = samples_per_second / chunk * requests_per_chunk
    quota = hub.read_quota(f'{data.folder}/{split.file_names[0]}')
    # Each file is resolved once an hour, at its first request. So the first window has the most.
    seconds = quota.seconds if quota else hub.USUAL_WINDOW
    # At worst every request is the first one of its file, until all processes know all files.
    num_requests = math.ceil(requests_per_second * seconds)
    num_first_requests = min(num_files * num_processes, num_requests)
    chunk_nbytes = record_nbytes * chunk
    return HubUse(
        requests_per_second=requests_per_second,
        request_nbytes=chunk_nbytes / requests_per_chunk,
        num_files=num_files,
        num_resolves=num_first_requests + _SMALL_FILES * num_processes,
        quota=quota,
    )
