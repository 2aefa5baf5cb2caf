"""Estimates the memory that the engine `chunks` needs for training, before it reads.

Six measured runs of 0.7 to 1.5 GB with other lanes, windows and chunks took 20% less to 12% more.
"""

import dataclasses
import math

from coyo11m_tfds.process import machine

# Of whole windows: one is given out, one is filled, of the one before some batches may be in use.
_BLOCKS = 2.2
# Of chunks in flight or arrived early: the allocator keeps what threads have freed.
_RAW_CHUNKS = 1.5
_FIXED = 200_000_000  # also plans, threads, and chunks that are being gathered


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    lanes: int  # of this process
    window: int  # records
    in_flight: int  # records of a lane that are being read at once
    rows_ready: int  # of the batch in use and of all batches that are ready
    row_nbytes: int  # of a record in a batch
    raw_nbytes: int  # of a record in the files

    @property
    def num_bytes(self) -> int:
        """The memory that reading takes, beyond that of a process that has read a few records."""
        windows = -(-self.in_flight // self.window)
        return int(self._window_record_nbytes * self.window * windows + self._other_nbytes)

    @property
    def _window_record_nbytes(self) -> float:
        return _BLOCKS * self.lanes * self.row_nbytes

    @property
    def _other_nbytes(self) -> float:
        raw = _RAW_CHUNKS * self.lanes * self.in_flight * self.raw_nbytes
        return raw + self.rows_ready * self.row_nbytes + _FIXED

    def check(self, budget_gb: float, processes_on_host: int) -> None:
        """Implements `Batches.check_memory`; assumes equal needs of all processes of the host."""
        budget = 1e9 * budget_gb or machine.usable_memory() / 2
        total = processes_on_host * self.num_bytes
        if total <= budget:
            return
        total_gb = math.ceil(total / 1e8) / 10
        process_budget = budget / processes_on_host
        window = math.floor((process_budget - self._other_nbytes) / self._window_record_nbytes)
        # A window of fewer records than are read at once takes no less.
        advice = [f'data.window to {window}'] if window >= self.in_flight else []
        processes = f' in each of {processes_on_host} processes' if processes_on_host > 1 else ''
        raise ValueError(
            f'Reading with data.window={self.window} in {self.lanes} lanes{processes} takes '
            f'{total_gb:.1f} GB of memory on this host, more than the {budget / 1e9:.2f} GB of '
            f'data.ram_budget_gb={budget_gb} (0: half of what it has): set '
            f'{" or ".join([*advice, f"data.ram_budget_gb to {total_gb:.1f}"])}'
        )
