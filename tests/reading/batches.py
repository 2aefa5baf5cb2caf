"""Comparing batches, and waiting until none are read ahead."""

import time

import numpy as np

import input_pipeline


def assert_same(got: list[dict], expected: list[dict]) -> None:
    assert len(got) == len(expected)
    for step, (got_batch, expected_batch) in enumerate(zip(got, expected, strict=True)):
        assert got_batch.keys() == expected_batch.keys()
        for name, x in expected_batch.items():
            assert got_batch[name].dtype == x.dtype
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
