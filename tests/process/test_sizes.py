"""One way to write numbers of bytes."""

import re

import pytest

from coyo11m_tfds.process import sizes
from tests.checkout import CHECKOUT


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


def test_no_message_computes_its_own_units():
    """As '8.7 MB' came out as '0.0 GB'."""
    written = re.compile(r'\{[^{}]*(1e[69]|_MB|_GB|10\*\*9|2\*\*30)[^{}]*\} *[MG]B')
    found = set()
    for folder in ('coyo11m_tfds', 'train_lib'):
        for file in (CHECKOUT / folder).rglob('*.py'):
            if written.search(file.read_text()):
                found.add(file.name)
    # A table in GB, a setting in GB, a speed.
    assert found <= {'compile.py', 'memory.py', 'progress.py'}
