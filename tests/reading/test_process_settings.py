"""What is set before TensorFlow starts."""

import io
import json
import os
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coyo11m_tfds import chunk_index, schema
from coyo11m_tfds.reading import process_settings
from tests import children
from tests.fakes.cloud import Fault, Gcs
from tests.reading import small_dataset

LENGTHS = {schema.TRAIN: (70, 0, 97, 64, 131)}

# Says what it set, and that TensorFlow has not been imported.
PROGRAM = """
    import json, os
    from coyo11m_tfds.reading import process_settings
    process_settings.apply(sys.argv[1], int(sys.argv[2]))
    assert 'tensorflow' not in sys.modules
    print(json.dumps(os.environ.get('GCS_READAHEAD_BUFFER_SIZE_BYTES')))
"""


@pytest.fixture(scope='module')
def local(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp('local') / '1.0.0'
    small_dataset.write(path, LENGTHS)
    return path


@pytest.fixture
def remote(local, gcs) -> str:
    gcs.upload_folder(local, 'gs://bucket/data/1.0.0')
    return 'gs://bucket/data/1.0.0'


def read_ahead(data_dir: object, chunk: int) -> str | None:
    with children.python(PROGRAM, data_dir, chunk) as child:
        output, error = child.communicate(timeout=60)
    assert child.returncode == 0, error
    return json.loads(output)


def largest_run(path: pathlib.Path, chunk: int) -> int:
    """Bytes of the largest chunk, looked up one by one."""
    index = chunk_index.ChunkIndex.load(path, schema.TRAIN)
    return max(
        int(index.byte_range(shard, first, min(chunk, length - first))[1])
        for shard, length in enumerate(index.shard_lengths.tolist())
        for first in range(0, length, chunk)
    )


@pytest.mark.parametrize('chunk', [32, 64, 256])
def test_on_gs_a_request_is_as_large_as_a_chunk(local, remote, chunk):
    assert read_ahead(remote, chunk) == str(largest_run(local, chunk) + 1)


def test_what_the_user_has_set_stays(remote, monkeypatch):
    monkeypatch.setenv(process_settings.READ_AHEAD, '12345')
    assert read_ahead(remote, 64) == '12345'


def test_nothing_is_set_for_local_data_or_without_an_index(local, gcs: Gcs):
    assert read_ahead(local, 64) is None
    gcs.put('bucket', 'other/dataset_info.json', b'{}')
    assert read_ahead('gs://bucket/other', 64) is None


def test_a_refusal_is_told(remote, gcs: Gcs):
    gcs.inject(Fault('403', count=None))
    with pytest.raises(PermissionError, match='gcloud auth'):
        process_settings.apply(remote, 64)


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=12),
    st.sampled_from([32, 64, 128]),
    st.randoms(use_true_random=False),
)
def test_the_largest_chunk_of_any_index(lengths, chunk, random):
    offsets, sizes = [], []
    for length in lengths:
        ends = np.cumsum([random.randint(100, 1000) for _ in range(-(-length // 32))])
        offsets.append(np.concatenate([[0], ends[:-1]])[: len(ends)].astype(np.int64))
        sizes.append(int(ends[-1]) if length else 0)
    flat = [x for n, o, s in zip(lengths, offsets, sizes, strict=True) for x in (n, *o, s)]
    file = io.BytesIO()
    np.save(file, np.array(flat, np.int64))
    index = chunk_index.ChunkIndex(np.array(flat, np.int64))

    def largest_of(num_shards: int) -> int:
        return max(
            (
                int(index.byte_range(shard, first, min(chunk, length - first))[1])
                for shard, length in enumerate(lengths[:num_shards])
                for first in range(0, length, chunk)
            ),
            default=0,
        )

    assert chunk_index.largest_chunk(file.getvalue(), chunk) == largest_of(len(lengths))
    # Of a beginning, the shards count that are whole in it.
    kept = random.randint(1, len(lengths))
    entries = sum(len(o) + 2 for o in offsets[:kept])
    head = file.getvalue()[: len(file.getvalue()) - 8 * (len(flat) - entries)]
    assert chunk_index.largest_chunk(head, chunk) == largest_of(kept)
    if len(flat) > entries:
        assert chunk_index.largest_chunk(head + b'\1' * 7, chunk) == largest_of(kept)


def test_tensorflow_says_nothing_of_the_machine_when_it_starts():
    program = """
    from coyo11m_tfds.reading import process_settings
    process_settings.quiet_tensorflow()
    import tensorflow as tf
    tf.data.Dataset.range(3).map(lambda x: x + 1).reduce(tf.cast(0, tf.int64), lambda x, y: x + y)
    """
    with children.python(program) as child:
        out, err = child.communicate(timeout=120)
    assert (child.returncode, out) == (0, '')
    assert 'oneDNN' not in err and 'CPU instructions' not in err


def test_what_the_environment_says_of_the_log_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '0')
    monkeypatch.setenv('TF_ENABLE_ONEDNN_OPTS', '1')
    process_settings.quiet_tensorflow()
    assert os.environ['TF_CPP_MIN_LOG_LEVEL'] == '0'
    assert os.environ['TF_ENABLE_ONEDNN_OPTS'] == '1'
