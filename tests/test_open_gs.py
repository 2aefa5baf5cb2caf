"""Opening a data set on gs://: bytes that are flipped on the way, and what is damaged there."""

import pytest

import input_pipeline
from coyo11m_tfds import schema
from tests.fakes.cloud import Fault, Gcs
from tests.reading import small_dataset

DATA = 'gs://bucket/d/1.0.0'
FILES = 'dataset_info.json', 'features.json', 'metadata.json', 'chunk_index-train.npy'


@pytest.fixture
def storage(gcs: Gcs, tmp_path) -> Gcs:
    folder = tmp_path / '1.0.0'
    small_dataset.write(folder, {schema.TRAIN: (100, 31), schema.VALIDATION: (40,)})
    (folder / 'metadata.json').write_text('{"text_encoder": "hash"}')
    gcs.upload_folder(folder, DATA)
    return gcs


def opened() -> list:
    """What is read."""
    data = input_pipeline.open_data(DATA)
    index = data.split('train').index
    return [index.shard_lengths.tolist(), index.byte_range(1, 0, 31), repr(data), str(data.stats())]


def test_a_flipped_byte_changes_nothing(storage: Gcs):
    undisturbed = opened()
    for name in FILES:
        size = len(storage.objects('bucket')[f'd/1.0.0/{name}'])
        for place in (0, size // 2):
            storage.clear()
            storage.inject(Fault('flip', match=f'read bucket/d/1.0.0/{name}', after_bytes=place))
            assert opened() == undisturbed
            assert [r.fault for r in storage.requests].count('flip') == 1
            storage.heal()


def test_what_is_damaged_where_it_is_stored_is_an_error_at_once(storage: Gcs):
    whole = storage.objects('bucket')
    for name, message in zip(
        FILES[::3], ('dataset_info.json', 'is not a chunk index'), strict=True
    ):
        storage.put('bucket', f'd/1.0.0/{name}', whole[f'd/1.0.0/{name}'][:-10])
        with pytest.raises(ValueError, match=f'{DATA}.*{message}'):
            opened()
        storage.put('bucket', f'd/1.0.0/{name}', whole[f'd/1.0.0/{name}'])


def test_a_data_set_that_is_not_there(gcs: Gcs):
    with pytest.raises(FileNotFoundError, match='gs://bucket/none'):
        input_pipeline.open_data('gs://bucket/none')
    with pytest.raises(OSError, match='gs://no-such-bucket: there is no such bucket'):
        input_pipeline.open_data('gs://no-such-bucket/d')
