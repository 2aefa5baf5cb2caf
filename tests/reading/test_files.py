"""Nothing outside of files is read, whatever the files hold.

A child process has each file right before or right behind memory that nobody may read, so that one
byte too many ends the child.
"""

import gc
import pathlib

import numpy as np
import pytest

from coyo11m_tfds import schema
from coyo11m_tfds.memory.files import MappedFiles
from tests import children
from tests.reading import small_dataset

LENGTHS = (70, 33)

GUARDS = """
    import ctypes, mmap
    import numpy as np
    from coyo11m_tfds.memory import files

    protect = files._libc.mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    guard = 1 << 20  # more bytes than a record has
    page = mmap.PAGESIZE
    zeros = files.NUM_ZEROS  # before all files

    def lay_out(size):
        room = -(-size // page) * page
        starts = guard * np.arange(1, 1 + len(size)) + zeros + np.cumsum(room) - room
        nbytes = zeros + int(room.sum()) + guard * (1 + len(size))
        return starts + (room - size if at == 'end' else 0), nbytes

    def copy_at(data, start, file, size, flags):
        first = start // page * page
        end = -(-(start + size) // page) * page
        address = data[first:end].ctypes.data
        assert protect(address, end - first, 3) == 0
        ctypes.memmove(address + start - first, file.read(), size)
        for unreadable in (first - guard, end):
            assert protect(data[unreadable:].ctypes.data, guard, 0) == 0

    files._lay_out, files._map_at = lay_out, copy_at
"""

READ = """
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
    num_read, num_bad = map(int, children.output(GUARDS + READ, path, at, forked=True).split())
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


def test_places_outside_of_all_files_are_refused_and_others_read_as_zeros(tmp_path):
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(b'some bytes')
    files = MappedFiles()
    files.add_shards(lambda number: str(paths[number]), [10] * 3)
    begin, _ = files.locate(np.array([0, 2]), np.array([0, 0]), 10)
    between = int(begin.sum()) // 2  # in the file that is not open
    places = np.array([0, begin[0], between, begin[1]])
    found = files.gather(places, 10).tolist()
    assert found == [bytes(10), b'some bytes', bytes(10), b'some bytes']
    for nbytes in (10, 100_000):
        with pytest.raises(IndexError):
            files.gather(np.array([2**40]), nbytes)


@pytest.mark.skipif(not pathlib.Path('/proc/self/maps').exists(), reason='needs Linux')
def test_files_are_unmapped_when_nobody_has_their_bytes(tmp_path):
    path = tmp_path / 'mapped'
    path.write_bytes(b'some bytes')

    def is_mapped() -> bool:
        return str(path) in pathlib.Path('/proc/self/maps').read_text()

    files = MappedFiles()
    files.add_shards(lambda number: str(path), [10])
    view = files.views(*files.locate(np.array([0]), np.array([0]), 10))[0]
    del files
    gc.collect()
    assert is_mapped() and view.tobytes() == b'some bytes'
    del view
    gc.collect()
    assert not is_mapped()
