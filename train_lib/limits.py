"""Names the limit of the input, and the setting to change: rules over measured facts.

    for line in limits.verdicts(facts):
        print(line)

Each rule is a function from `Facts` to a line that gives the figure it is based on and the field of
the configuration to set, or to None where it has nothing to say. The thresholds are those that
people use by hand; where one is more than a habit, its reason stands beside it.
"""

import dataclasses
from collections.abc import Callable, Iterator

_MB = 10**6

# Two times that differ by less are the same here: that is how much runs vary on a busy machine.
_SAME = 1.05
# Above this share of all cores, threads wait for a core rather than for the storage.
_BUSY = 0.7
_SHARD_BYTES = (64 * 2**20, 256 * 2**20)
_ADVISED_SHARD_BYTES = 128 * 2**20
# From there on each lane gives a batch so many records of one window that pairs from one chunk
# become common: `benchmarks.shuffle_quality` has the figures.
_LANE_RECORDS = 32
_WINDOW_SHARE = 0.25  # of the available memory
_FIRST_BATCH_SECONDS = 10


@dataclasses.dataclass(frozen=True)
class Facts:
    """Settings and measurements of one host.

    Attributes:
        engine: that reads: 'rows' or 'chunks'.
        batch_size, lanes: over all hosts.
        num_hosts: that share both equally.
        chunk, window: records.
        parallel_reads: chunks read at once in each lane.
        num_cores: of this host.
        is_remote: files that a batch comes from are in object storage.
        shard_bytes: the median over the shards, with latents in place.
        num_shards: of the split.
        built_shard_bytes: what the data set was built with; None where it does not say.
        sample_bytes: of one record as it waits in a window.
        request_seconds: to read one record at an offset.
        chunk_seconds: to read one chunk at an offset, with its rows of columns.
        chunk_bytes: of these.
        step_seconds: a step of the device on data that are there.
        batch_seconds: a batch of the pipeline alone.
        together_seconds: a step with both.
        first_batch_seconds: from opening the data set to its first batch.
        cpu_share: of all cores' time while the pipeline ran alone.
        resident_bytes: memory of this process with the pipeline.
        available_bytes: memory that was free for it.
    """

    engine: str
    batch_size: int
    lanes: int
    num_hosts: int
    chunk: int
    window: int
    parallel_reads: int
    num_cores: int
    is_remote: bool
    shard_bytes: float
    num_shards: int
    built_shard_bytes: int | None
    sample_bytes: float
    request_seconds: float
    chunk_seconds: float
    chunk_bytes: float
    step_seconds: float
    batch_seconds: float
    together_seconds: float
    first_batch_seconds: float
    cpu_share: float
    resident_bytes: float
    available_bytes: float

    @property
    def own_lanes(self) -> int:
        """Lanes of this host."""
        return self.lanes // self.num_hosts

    @property
    def window_bytes(self) -> float:
        """Memory for windows: of each lane those that are given out and those that are read.

        They are whole, and hold at least as many records as are read at once.
        """
        if self.engine == 'rows':
            return 0
        windows = -(-self.lane_in_flight // self.window)
        return 2 * self.own_lanes * windows * self.window * self.sample_bytes

    @property
    def lane_in_flight(self) -> int:
        """Records of a lane that are read at once."""
        return self.parallel_reads * self.chunk

    @property
    def is_input_bound(self) -> bool:
        """True if steps take longer with the pipeline than without, and for want of batches.

        Whoever waits for a batch waits at most as long as one takes. What more a step takes comes
        from cores that step and pipeline share, and from noise.
        """
        is_slower = self.together_seconds > _SAME * self.step_seconds
        waited = self.together_seconds - self.step_seconds
        return is_slower and _SAME * self.batch_seconds > min(waited, self.step_seconds)


def verdicts(facts: Facts) -> list[str]:
    """Returns what the limit is, in the first line, and then what to change."""
    speed: tuple[Callable[[Facts], str | None], ...] = (
        more_parallel_reads,
        larger_chunk,
        cpu_bound,
    )
    if facts.engine == 'rows':
        speed = (one_thread,)
    always = (shard_size, smaller_window, more_lanes)
    rules = [*(speed if facts.is_input_bound else ()), *always]
    return [limit(facts), *(line for rule in rules if (line := rule(facts)))]


def limit(facts: Facts) -> str:
    """Which of both is the limit."""
    step, batch, together = (
        f'{1000 * seconds:,.1f} ms'
        for seconds in (facts.step_seconds, facts.batch_seconds, facts.together_seconds)
    )
    if not facts.is_input_bound:
        return (
            f'Step-bound: a step takes {step} alone and {together} with the pipeline, whose batch '
            f'takes {batch}. A faster input gains nothing.'
            + (
                ' Steps and pipeline share the cores of this host.'
                if facts.together_seconds > _SAME * facts.step_seconds
                else ''
            )
        )
    if facts.batch_seconds > _SAME * facts.step_seconds:
        return (
            f'Input-bound: a batch takes {batch}, a step {step}; together {together}, of which '
            f'{1 - facts.step_seconds / facts.together_seconds:.0%} is waiting.'
        )
    return (
        f'Both: a step takes {step} and a batch {batch}, each alone, but {together} together. They '
        'compete for the cores of the host, or batches come unevenly: set data.prefetch higher.'
    )


def more_parallel_reads(facts: Facts) -> str | None:
    """Reads wait for the storage while the CPU idles."""
    if facts.cpu_share >= _BUSY:
        return None
    return (
        f'More parallel reads: the cores are {facts.cpu_share:.0%} busy while the pipeline runs '
        f'alone. Set data.parallel_reads={2 * facts.parallel_reads} (now {facts.parallel_reads}).'
    )


def larger_chunk(facts: Facts) -> str | None:
    """The storage takes longer to answer than to send a chunk."""
    if not facts.is_remote or facts.request_seconds <= facts.chunk_seconds / 2:
        return None
    return (
        f'Larger chunks: of {1000 * facts.chunk_seconds:,.0f} ms for a chunk of '
        f'{facts.chunk_bytes / _MB:,.1f} MB, '
        f'{1000 * facts.request_seconds:,.0f} ms are the answer to any request. Set '
        f'data.chunk={2 * facts.chunk} (now {facts.chunk}); it is another order, so start anew.'
    )


def cpu_bound(facts: Facts) -> str | None:
    """Reading and parsing take all there is."""
    if facts.cpu_share < _BUSY:
        return None
    rate = facts.batch_size / facts.num_hosts / facts.batch_seconds
    return (
        f'CPU-bound: the pipeline alone keeps {facts.num_cores} cores {facts.cpu_share:.0%} busy '
        f'at {rate:,.0f} samples/s. No setting helps: more or faster cores, more hosts, or fewer '
        'features in the records.'
    )


def one_thread(facts: Facts) -> str | None:
    """Rows are gathered by one thread, which works or waits for the disk."""
    busy = facts.cpu_share * facts.num_cores
    rate = facts.batch_size / facts.num_hosts / facts.batch_seconds
    if busy >= _BUSY:
        return (
            f'CPU-bound: rows are gathered by one thread, which is busy at {rate:,.0f} samples/s. '
            "data.verify='never' leaves out checksums; else more hosts or faster cores help."
        )
    return (
        f'Disk-bound: rows come at {rate:,.0f} samples/s, for which {busy:.2f} of a core is busy. '
        'A faster disk helps, or memory in which the data set stays.'
    )


def shard_size(facts: Facts) -> str | None:
    """Small shards cost openings and listings, large ones make hosts and retries uneven."""
    smallest, largest = _SHARD_BYTES
    is_as_advised = facts.built_shard_bytes == _ADVISED_SHARD_BYTES
    is_all = facts.num_shards == 1 and facts.shard_bytes < smallest
    if smallest <= facts.shard_bytes <= largest or is_as_advised or is_all:
        return None
    return (
        f'Shards: the median is {facts.shard_bytes / _MB:,.0f} MB, outside {smallest / _MB:,.0f} '
        f'to {largest / _MB:,.0f}. Build the data set with '
        f'shard_bytes={_ADVISED_SHARD_BYTES}.'
    )


def smaller_window(facts: Facts) -> str | None:
    """Windows fill memory, and all have to be full before the first batch."""
    is_short = facts.window_bytes > _WINDOW_SHARE * facts.available_bytes
    is_slow = facts.first_batch_seconds > _FIRST_BATCH_SECONDS
    is_smallest = facts.window <= facts.lane_in_flight  # smaller ones take no less memory
    if facts.engine == 'rows' or is_smallest or not (is_short or is_slow):
        return None
    reason = (
        f'windows take about {facts.window_bytes / _MB:,.0f} MB of '
        f'{facts.available_bytes / _MB:,.0f} available'
        if is_short
        else f'the first batch took {facts.first_batch_seconds:.0f} s'
    )
    return (
        f'Smaller windows: {reason}. Set data.window={facts.window // 2} (now {facts.window}); it '
        'is another order, so start anew.'
    )


def more_lanes(facts: Facts) -> str | None:
    """Large batches take many records of the same few chunks."""
    each = facts.batch_size / facts.lanes
    lanes = next(_lanes_for(facts), None)
    if each <= _LANE_RECORDS or lanes is None:
        return None
    window = max(facts.window * facts.lanes // lanes, 1)
    same = '' if facts.engine == 'rows' else f', and data.window={window} for the same memory'
    return (
        f'More lanes: each gives {each:.0f} records to a batch of {facts.batch_size}. Set '
        f'data.lanes={lanes} (now {facts.lanes}){same}; it is another order, so start anew.'
    )


def _lanes_for(facts: Facts) -> Iterator[int]:
    """Numbers of lanes that the hosts and the batch allow and that are enough."""
    for lanes in range(facts.num_hosts, facts.batch_size + 1, facts.num_hosts):
        if facts.batch_size % lanes == 0 and facts.batch_size <= lanes * _LANE_RECORDS:
            yield lanes
