"""One way to write numbers of bytes."""

import pytest

from coyo11m_tfds.process import sizes


@pytest.mark.parametrize(
    ('num_bytes', 'text'),
    [
        (0, '0 bytes'),
        (999, '999 bytes'),
        (1000, '1.0 kB'),
        (999_600, '1.0 MB'),
        (8_700_000, '8.7 MB'),
        (1_100_000_000_000, '1.1 TB'),
        (5e15, '5,000.0 TB'),
    ],
)
def test_a_size_has_a_decimal_and_a_unit(num_bytes, text):
    assert sizes.readable(num_bytes) == text
