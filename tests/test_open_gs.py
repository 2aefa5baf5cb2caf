"""Opening a data set on gs://: bytes that are flipped on the way."""

import json
from collections.abc import Iterator

import pytest

from coyo11m_tfds import schema
from tests import children
from tests.fakes.cloud import Fault, Gcs, fake_gcs
from tests.reading import small_dataset

LENGTHS = {schema.TRAIN: (100, 31), schema.VALIDATION: (40,)}
DATA = 'gs://bucket/d/1.0.0'

OPEN = """
    import json
    import input_pipeline
    for line in sys.stdin:
        try:
            data = input_pipeline.open_data(json.loads(line))
            index = data.split('train').index
            found = [index.shard_lengths.tolist(), index.byte_range(1, 0, 31)[1].item()]
            found += [data.folder, repr(data), str(data.stats())]
        except Exception as error:
            found = f'{type(error).__name__}: {error}'
        print(json.dumps(found), flush=True)
"""


class Opener:
    """A process that opens data sets, and the storage that it reads."""

    def __init__(self, gcs: Gcs, child):
        self.gcs, self._child = gcs, child

    def __call__(self, url: str = DATA) -> list | str:
        """What was read, or the error."""
        print(json.dumps(url), file=self._child.stdin, flush=True)
        return json.loads(self._child.stdout.readline())


@pytest.fixture(scope='module')
def opener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    folder = tmp_path_factory.mktemp('local') / '1.0.0'
    small_dataset.write(folder, LENGTHS)
    metadata = {schema.META_LATENT_MEAN: [1.25, -2.5, 3, 4], schema.META_TEXT_ENCODER: 'hash'}
    (folder / 'metadata.json').write_text(json.dumps(metadata))
    with pytest.MonkeyPatch.context() as patch, fake_gcs(tmp_path_factory.mktemp('gcs')) as server:
        for name, value in server.env.items():
            patch.setenv(name, value)
        patch.setenv('TF_CPP_MIN_LOG_LEVEL', '3')
        server.upload_folder(folder, DATA)
        with children.python(OPEN) as child:
            yield Opener(server, child)


@pytest.fixture
def undisturbed(opener: Opener) -> list:
    opener.gcs.heal()
    found = opener()
    assert isinstance(found, list), found
    opener.gcs.clear()
    return found


@pytest.mark.parametrize(
    'name', ['dataset_info.json', 'features.json', 'metadata.json', 'chunk_index-train.npy']
)
def test_a_flipped_byte_changes_nothing(opener: Opener, undisturbed: list, name: str):
    size = len(opener.gcs.objects('bucket')[f'd/1.0.0/{name}'])
    for place in range(0, size, size // 5 + 1):
        opener.gcs.inject(Fault('flip', match=f'read bucket/d/1.0.0/{name}', after_bytes=place))
        assert opener() == undisturbed
        assert [r.fault for r in opener.gcs.requests].count('flip') == 1
        opener.gcs.heal()
        opener.gcs.clear()


def test_what_is_damaged_where_it_is_stored_is_an_error_at_once(opener: Opener, undisturbed: list):
    whole = opener.gcs.objects('bucket')
    for name, message in (
        ('dataset_info.json', 'dataset_info.json'),
        ('chunk_index-train.npy', 'is not a chunk index'),
    ):
        opener.gcs.put('bucket', f'd/1.0.0/{name}', whole[f'd/1.0.0/{name}'][:-10])
        found = opener()
        assert isinstance(found, str) and message in found and DATA in found
        assert 'given up' not in found
        opener.gcs.put('bucket', f'd/1.0.0/{name}', whole[f'd/1.0.0/{name}'])


def test_a_data_set_that_is_not_there(opener: Opener, undisturbed: list):
    assert opener('gs://bucket/none') and 'gs://bucket/none' in opener('gs://bucket/none')
    assert opener('gs://no-such-bucket/d').startswith(
        'OSError: gs://no-such-bucket: there is no such bucket.'
    )
