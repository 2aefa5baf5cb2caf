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
    return [x.ravel() for x in order.samples(range(lanes), step * each, (step + 1) * each)]


def epoch_steps(data: object, **settings: int) -> int:
    """Whole batches of an epoch."""
    return int(input_pipeline.train_plan(data, **settings).steps_per_epoch)


def check_memory(
    data: object, ram_budget_gb: float = 0.0, processes_on_host: int = 1, **arguments
) -> None:
    """`check_memory` of training batches, which the engine of chunks reads unless another does."""
    asked = {'seed': 0, 'engine': 'chunks', **arguments}
    with input_pipeline.train_batches(data, **asked) as batches:
        batches.check_memory(ram_budget_gb, processes_on_host)


def assert_same(got: list[Batch], expected: list[Batch]) -> None:
    assert len(got) == len(expected)
    for step, (got_batch, expected_batch) in enumerate(zip(got, expected, strict=True)):
        assert got_batch.keys() == expected_batch.keys()
        for name, x in expected_batch.items():
            assert (got_batch[name].dtype, got_batch[name].shape) == (x.dtype, x.shape)
            np.testing.assert_array_equal(got_batch[name], x, err_msg=f'{name} of batch {step}')


def wait_until_idle(counter: input_pipeline.ReadCounter) -> None:
    """Waits until nothing has been read ahead for half a second."""
    deadline, before, since = time.monotonic() + 60, None, 0.0
    while time.monotonic() < deadline:
        now = counter.read()
        if now != before or now.chunks_in_flight:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > 0.5:
            return
        time.sleep(0.05)
    raise AssertionError(f'still reading: {before}')
