"""Comparing batches."""

import numpy as np


def assert_same(got: list[dict], expected: list[dict]) -> None:
    assert len(got) == len(expected)
    for step, (got_batch, expected_batch) in enumerate(zip(got, expected, strict=True)):
        assert got_batch.keys() == expected_batch.keys()
        for name, x in expected_batch.items():
            assert got_batch[name].dtype == x.dtype
            np.testing.assert_array_equal(got_batch[name], x, err_msg=f'{name} of batch {step}')
