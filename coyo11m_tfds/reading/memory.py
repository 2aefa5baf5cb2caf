"""Estimates the memory that the engine `chunks` needs for training, before it reads.

    need = memory.Need(lanes=16, window=1024, in_flight=256, rows_ready=768, row_nbytes=9481,
                       raw_nbytes=25_955)
    need.num_bytes                                          # 708,000,000
    memory.check(need, budget_gb=0, processes_on_host=1)    # ValueError: the machine has too little

The sum is the memory beyond that of a process that has read a few records: blocks of windows,
chunks in flight, and batches that are ready. Memory of the batches' user comes on top.

While the loop uses one block of batches, the next one is filled. A block has whole windows of each
lane, with at least as many records as are read at once. Chunks that are in flight, or have arrived
early, take as many bytes as in their files.

The factors come from the peak resident memory of child processes with records of 26 KB (2 busy
cores, glibc told to keep freed memory, see `process_settings`): six runs of 0.7 to 1.5 GB, 8 to 32
lanes, windows of 1,024 to 3,072, chunks of 64 and 128, 4 and 8 parallel reads and batches of 256
and 4,096, took 20% less to 12% more than estimated.
"""

import dataclasses
import functools
import math

from coyo11m_tfds.process import machine

# One block is given out, one is filled, and of the one before some batches may be in use.
_BLOCKS = 2.2
# The allocator keeps what threads have freed.
_RAW_CHUNKS = 1.5
_FIXED = 200_000_000  # also plans, threads, and chunks that are being gathered


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """The quantities that decide how much memory one process needs to read.

    Attributes:
        lanes: Lanes of this process.
        window: Records of a window.
        in_flight: Records of a lane that are being read at once.
        rows_ready: Rows of the batch in use and of all batches that are ready.
        row_nbytes: Bytes of a record in a batch.
        raw_nbytes: Bytes of a record in the files.
    """

    lanes: int
    window: int
    in_flight: int
    rows_ready: int
    row_nbytes: int
    raw_nbytes: int

    @functools.cached_property
    def num_bytes(self) -> int:
        """The memory that reading takes."""
        windows = -(-self.in_flight // self.window)
        return int(self._for_window * self.window * windows + self._besides_windows)

    def largest_window(self, num_bytes: float) -> int:
        """Returns the largest window for which `num_bytes` suffice; 0 if none does."""
        largest = math.floor((num_bytes - self._besides_windows) / self._for_window)
        # A window of fewer records than are read at once takes no less.
        return largest if largest >= self.in_flight else 0

    @property
    def _for_window(self) -> float:
        """Bytes for each record of a window, in all lanes."""
        return _BLOCKS * self.lanes * self.row_nbytes

    @property
    def _besides_windows(self) -> float:
        raw = _RAW_CHUNKS * self.lanes * self.in_flight * self.raw_nbytes
        return raw + self.rows_ready * self.row_nbytes + _FIXED


def check(need: Need, *, budget_gb: float, processes_on_host: int) -> None:
    """Checks that the reading of all processes on this host fits into a budget.

    Args:
        need: Need of each process.
        budget_gb: Memory in GB (10^9 bytes) that all of them may take; 0 for half of the memory of
            this machine or container.
        processes_on_host: Processes that read on this host.

    Raises:
        ValueError: They take more; the message names the largest window that fits, and the budget
            needed.
    """
    budget = 1e9 * budget_gb or machine.usable_memory() / 2
    total = processes_on_host * need.num_bytes
    if total <= budget:
        return
    needed = math.ceil(total / 1e8) / 10
    fits = need.largest_window(budget / processes_on_host)
    advice = [f'data.window to {fits}'] if fits else []
    processes = f' in each of {processes_on_host} processes' if processes_on_host > 1 else ''
    raise ValueError(
        f'Reading with data.window={need.window} in {need.lanes} lanes{processes} takes '
        f'{needed:.1f} GB of memory on this host, more than the {budget / 1e9:.2f} GB of '
        f'data.ram_budget_gb={budget_gb} (0: half of what it has): set '
        f'{" or ".join([*advice, f"data.ram_budget_gb to {needed:.1f}"])}'
    )
