"""Numbers as people read them."""

import pytest

from coyo11m_tfds.mirror import MirrorSummary
from coyo11m_tfds.process import job, sizes
from coyo11m_tfds.process.progress import Progress


@pytest.mark.parametrize(
    ('number', 'nouns', 'text'),
    [
        (0, ('file',), '0 files'),
        (1, ('file',), '1 file'),
        (11_000, ('file',), '11,000 files'),
        (1, ('process', 'processes'), '1 process'),
        (2, ('process', 'processes'), '2 processes'),
        (1, ('part is', 'parts are'), '1 part is'),
        (3, ('part is', 'parts are'), '3 parts are'),
    ],
)
def test_one_thing_is_singular(number, nouns, text):
    assert sizes.format_count(number, *nouns) == text


def test_a_share_is_compared_as_it_is_written():
    assert 0.29 * 100 < 29 and not sizes.exceeds_share(29, 0.29, 100)
    assert sizes.exceeds_share(30, 0.29, 100) and sizes.exceeds_share(1, 1, 0)
    assert not sizes.exceeds_share(0, 0, 0)


def test_reports_of_one_thing_say_so(caplog):
    summary = str(MirrorSummary(1, 5, 1, 'there'))
    assert summary == '1 file, 5 bytes, is verified at there; 1 of them was copied now.'
    assert job.describe_missing_parts([4]).startswith('; 1 part is missing, such as 4: ')
    with caplog.at_level('INFO', logger='absl'), Progress('Copying', 1, 'files', {'shards': 1}):
        pass
    assert caplog.messages[0].startswith('Copying: 0%, 0 of 1 file, 0 of 1 shard, 0 files/s')
