"""The benchmark of the conversion on a tiny source: same work for all writers."""

import pathlib

import numpy as np
import pytest

from benchmarks import convert, runner, source
from coyo11m_tfds.source.pt_file import PtFile

NUM_SAMPLES = 50
LEFT_OUT = 'cp', 'builder2'


@pytest.fixture(scope='module')
def tiny_source(tmp_path_factory) -> pathlib.Path:
    return source.make(tmp_path_factory.mktemp('made'), NUM_SAMPLES)


@pytest.mark.parametrize(
    'name',
    # A build with two processes is the same code with another number.
    ['cp', *(pytest.param(x, marks=pytest.mark.slow) for x in convert.SIDES if x not in LEFT_OUT)],
)
def test_every_writer_writes_all_that_is_in_the_source(tmp_path, tiny_source, name):
    side = convert.SIDES[name]
    pytest.importorskip(side.settings['module'])
    out = tmp_path / 'out'
    out.mkdir()

    figures = runner.run(side, source_dir=tiny_source, out=out)

    assert figures['rate'] == pytest.approx(NUM_SAMPLES / figures['seconds'])
    written = b''.join(map(_content, out.rglob('*')))
    rows = list(source.samples(tiny_source, NUM_SAMPLES))
    assert len(rows) == NUM_SAMPLES
    if name != 'in_place':
        assert all(latents.tobytes() in written for _, latents, _ in rows)
    if name != 'cp':  # whose captions are still compressed
        assert all(caption.encode() in written for _, _, caption in rows)


def _content(path: pathlib.Path) -> bytes:
    if path.suffix == '.array_record':  # whose files have a header in every 64 KB
        from array_record.python.array_record_module import ArrayRecordReader

        return b''.join(ArrayRecordReader(str(path)).read_all())
    return path.read_bytes() if path.is_file() else b''


def test_a_source_is_what_the_builder_expects_and_is_made_once(tmp_path):
    made = source.make(tmp_path, num_samples=7, seed=1)

    shards = [PtFile(path) for path in source.pt_files(made)]
    assert [len(shard.keys) for shard in shards] == [2, 2, 2, 1]
    samples = list(source.samples(made, 7))
    keys = np.concatenate([shard.keys for shard in shards]).tolist()
    assert [key for key, _, _ in samples] == keys and len(set(keys)) == 7
    assert all(200 <= len(caption) <= 600 for _, _, caption in samples)
    values = samples[0][1].astype(np.float32)
    assert (values.mean(), values.std()) == pytest.approx((1, 6), rel=0.1)
    assert source.num_samples(made) == 7
    before = made.stat()
    assert source.make(tmp_path, num_samples=7, seed=1).stat() == before
    other = source.make(tmp_path, num_samples=7, seed=2)
    assert [key for key, _, _ in source.samples(other, 7)] != keys
