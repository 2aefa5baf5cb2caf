"""Nothing outside of files is read, whatever the files hold.

A child process maps each file right before or right behind memory that nobody may read, so that one
byte too many ends the child.
"""

import pytest

from coyo11m_tfds import schema
from tests import children
from tests.reading import small_dataset

LENGTHS = (70, 33)

GUARDS = """
    import ctypes, mmap
    from coyo11m_tfds.reading import files

    protect = files._libc.mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    guard = 1 << 20  # more bytes than a record has

    def guarded_map(file, size):
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = files._libc.mmap(None, room + 2 * guard, 3, 0x22, -1, 0)
        first = whole + guard
        address = first if at == 'begin' else first + room - size
        ctypes.memmove(address, file.read(), size)
        for unreadable in (whole, first + room):
            assert protect(unreadable, guard, 0) == 0
        return address

    files._map = guarded_map
"""

READ = """
    import numpy as np
    import input_pipeline
    from tests.reading.damaged import shard_path

    path, at = sys.argv[1:]
    shards = [shard_path(path, shard) for shard in (0, 1)]
    intact, damages = [x.read_bytes() for x in shards], np.random.default_rng(0)
    asked = dict(verify='never', on_bad_records='skip')

    def changed(data):
        data, numbers = bytearray(data), damages.integers(0, 2**31, 4).tolist()
        starts = [0]
        while starts[-1] < len(data):
            starts.append(starts[-1] + 16 + int.from_bytes(data[starts[-1] :][:8], 'little'))
        start = starts[(0, -2, numbers[0] % (len(starts) - 1))[numbers[3] % 3]]
        kind = numbers[1] % 4
        if kind == 0:  # a length that may lead anywhere
            rest, number = len(data) - start - 16, numbers[2]
            length = (number % 2**27, number % 2**12, rest + number % 9, 2**63)[number % 4]
            data[start : start + 8] = length.to_bytes(8, 'little')
        elif kind == 1:
            del data[-1 - numbers[2] % (len(data) if numbers[2] % 2 else 40) :]
        elif kind == 2:
            data[start + 12 : start + 40] = damages.bytes(28)
        else:
            data[-60:-4] = damages.bytes(56)
        return bytes(data)

    num_read = num_bad = 0
    for _ in range(150):
        for shard, data in zip(shards, intact):
            shard.write_bytes(changed(data))
        for batch in input_pipeline.eval_batches(
            path, split='train', batch_size=40, max_bad_fraction=1, engine='rows', **asked
        ):
            num_read, num_bad = num_read + 40, num_bad + (~batch['mask']).sum()
    print(num_read, num_bad)
"""


@pytest.mark.parametrize('at', ['begin', 'end'])
@pytest.mark.parametrize('in_place', [False, True])
def test_damage_leads_nowhere(tmp_path, at, in_place):
    path = tmp_path / schema.VERSION
    source = tmp_path / 'source' if in_place else None
    small_dataset.write(path, {schema.TRAIN: LENGTHS}, source=source)
    num_read, num_bad = map(int, children.output(GUARDS + READ, path, at).split())
    assert num_read == 150 * 120 and 0.05 < num_bad / num_read < 0.95


@pytest.mark.parametrize('at', ['begin', 'end'])
def test_records_that_are_shorter_than_the_layout_are_refused(tmp_path, at):
    splits, path = {schema.TRAIN: (3,)}, tmp_path / schema.VERSION
    small_dataset.write(path, splits, source=tmp_path / 'source')
    (path / 'columns.json').unlink()
    small_dataset.write_metadata(path, splits)
    program = """
    import input_pipeline
    path, at = sys.argv[1:]
    try:
        next(input_pipeline.eval_batches(path, split='train', batch_size=3))
    except ValueError as error:
        print(error)
    """
    assert 'record 0 is not of this data set' in children.output(GUARDS + program, path, at)
