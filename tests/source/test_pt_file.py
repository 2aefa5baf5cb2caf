"""Reading one `.pt` file."""

import pathlib

import numpy as np
import pytest
import torch

from coyo11m_tfds import schema
from coyo11m_tfds.source.pt_file import PtFile
from tests import made_sources


@pytest.mark.parametrize('dtype', schema.LATENT_DTYPES)
@pytest.mark.parametrize('rows', [[], [0], [3, 0, 3], [0, 1, 2, 5, 6], [6, 5, 5, 6], range(7)])
def test_rows_are_read_bit_for_bit_in_the_order_asked_for(tmp_path, dtype, rows):
    # A slice: the rows begin later than what is stored.
    latents = made_sources.make_latents(8, dtype)[1:]
    path = tmp_path / 'x.pt'
    torch.save({'keys': torch.arange(7), 'latents': latents}, path)
    shard = PtFile(path)
    raw, values = shard.latents(rows)
    assert shard.dtype == dtype
    np.testing.assert_array_equal(shard.keys, np.arange(7))
    expected = latents[list(rows)]
    assert raw.tobytes() == expected.view(torch.uint8).numpy().tobytes()
    assert values.dtype == np.float32 and values.shape == (len(rows), 3, 4, 32, 32)
    np.testing.assert_array_equal(values, expected.float().numpy())


@pytest.mark.parametrize('spread', [False, True])
def test_memory_does_not_grow_with_the_file(tmp_path, spread):
    count = 4000  # 98 MB
    made_sources.write_pt(
        tmp_path / 'x.pt',
        range(count),
        replace={'latents': torch.zeros(count, 3, 4, 32, 32).half()},
    )
    before = resident_bytes()
    shard = PtFile(tmp_path / 'x.pt')
    rows = np.arange(count).reshape(40, 100)
    total = sum(shard.latents(part)[1].sum() for part in (rows.T if spread else rows))
    assert total == 0
    assert resident_bytes() - before < 40e6


def resident_bytes() -> int:
    """Memory of this process, with pages of mapped files."""
    status = pathlib.Path('/proc/self/status').read_text()
    line = next(line for line in status.splitlines() if line.startswith('VmRSS'))
    return 1024 * int(line.split()[1])


def test_a_file_that_becomes_shorter_while_it_is_open_is_an_error(tmp_path):
    path = tmp_path / 'x.pt'
    made_sources.write_pt(path, range(50))
    shard = PtFile(path)
    shard.latents([0])
    with path.open('r+b') as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(ValueError, match=r'x\.pt: ends before its last row'):
        shard.latents([49])
