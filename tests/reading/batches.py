"""Reading batches, comparing them, and waiting until none are read ahead."""

import time
from collections.abc import Iterable

import numpy as np

import input_pipeline

Batch = dict[str, np.ndarray]


def joined(parts: Iterable[Iterable[Batch]]) -> list[Batch]:
    """Global batches, put together from those of every process."""
    return [
        {name: np.concatenate([part[name] for part in step]) for name in step[0]}
        for step in zip(*parts, strict=True)
    ]


def planned_batch(order: input_pipeline.Order, batch_size: int, step: int) -> list[np.ndarray]:
    """Epoch, shard and record of each sample of a global batch, int64 `(batch_size,)`."""
    lanes = order.settings.lanes
    each = batch_size // lanes
    first = step * each
    arrays = order.samples(range(lanes), first, first + each)
    return [array.ravel() for array in arrays]


def epoch_steps(data: object, **settings: int) -> int:
    """Whole batches of an epoch."""
    return int(input_pipeline.train_plan(data, **settings).steps_per_epoch)


def check_memory(
    data: object, ram_budget_gb: float = 0.0, processes_on_host: int = 1, **arguments
) -> None:
    """`check_memory` of training batches, which the engine of chunks reads unless another does."""
    options = {'seed': 0, 'engine': 'chunks'} | arguments
    with input_pipeline.train_batches(data, **options) as batches:
        batches.check_memory(ram_budget_gb, processes_on_host)


def assert_same(got: list[Batch], expected: list[Batch]) -> None:
    """Asserts that batches have the same names, dtypes, shapes and values."""
    assert len(got) == len(expected)
    for step, expected_batch in enumerate(expected):
        batch = got[step]
        assert batch.keys() == expected_batch.keys()
        for name, expected_values in expected_batch.items():
            values = batch[name]
            # The comparison of values would let these pass.
            assert values.dtype == expected_values.dtype
            assert values.shape == expected_values.shape
            problem = f'{name} of batch {step}'
            np.testing.assert_array_equal(values, expected_values, err_msg=problem)


def wait_until_idle(counter: input_pipeline.ReadCounter) -> None:
    """Waits until nothing has been read ahead for half a second."""
    deadline = time.monotonic() + 60
    last_counts = None
    last_change = 0.0
    while time.monotonic() < deadline:
        counts = counter.read()
        # What is on its way will change them.
        if counts != last_counts or counts.chunks_in_flight:
            last_counts = counts
            last_change = time.monotonic()
        elif time.monotonic() - last_change > 0.5:
            return
        time.sleep(0.05)
    raise AssertionError(f'still reading: {last_counts}')
