"""A sidecar in parts: found whole or refused by name, and read as one file would be."""

import pathlib

import numpy as np
import pyarrow.parquet as pq
import pytest

from coyo11m_tfds import schema
from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig
from coyo11m_tfds.source import sidecar
from tests import joins, made_sources

EMBEDDINGS = {key: np.full(4, key, np.float16) for key in range(30)}


def write_parts(folder: pathlib.Path, source: pathlib.Path | None = None, **metadata: str) -> None:
    """Writes three parts, the last with other `metadata`."""
    folder.mkdir()
    for number in range(3):
        path = folder / sidecar.part_name(number, 3)
        embeddings = {key: EMBEDDINGS[key] for key in range(10 * number, 10 * number + 10)}
        entries = {schema.META_PART: f'{number} of 3'} | (metadata if number == 2 else {})
        made_sources.write_sidecar(path, embeddings, source, **entries)
        table = pq.read_table(path)
        renamed = table.rename_columns([schema.PARQUET_KEY, schema.PART_EMBEDDING])
        pq.write_table(renamed.replace_schema_metadata(table.schema.metadata), path)


def test_parts_are_read_as_one_file_would_be(tmp_path):
    write_parts(tmp_path / 'parts')
    one = made_sources.write_sidecar(tmp_path / 'one.parquet', EMBEDDINGS)
    wanted = [25, 3, 17, 99]
    found = [
        joins.of_values(place, tmp_path / f'{place.stem}-joined', wanted)
        for place in (tmp_path / 'parts', one)
    ]
    assert found[0].facts == found[1].facts
    for joined in found:
        assert joined.places.tolist() == [0, 1, 2]
        np.testing.assert_array_equal(sidecar.read(joined, joined.places)[:, 0], [25, 3, 17])


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (
            lambda f: (f / sidecar.part_name(1, 3)).unlink(),
            r'part-00001-of-00003\.parquet is missing',
        ),
        (
            lambda f: [path.unlink() for path in f.iterdir()],
            r'parts: holds no part-NNNNN-of-MMMMM\.parquet',
        ),
        (
            lambda f: (f / sidecar.part_name(1, 3)).rename(f / sidecar.part_name(1, 4)),
            r'00000-of-00003\.parquet and .*00001-of-00004\.parquet: parts of 3 and of 4',
        ),
        (
            lambda f: made_sources.write_sidecar(f / sidecar.part_name(1, 3), {3: EMBEDDINGS[3]}),
            r'parts: 1 rows repeat .* e\.g\. key 3;',
        ),
        (
            lambda f: (f / sidecar.part_name(2, 3)).write_bytes(b'PAR?'),
            r'part-00002-of-00003\.parquet: is damaged',
        ),
    ],
    ids=['missing', 'none', 'other count', 'key twice', 'damaged'],
)
def test_a_folder_that_is_not_whole_is_refused_by_name(tmp_path, change, message):
    write_parts(tmp_path / 'parts')
    change(tmp_path / 'parts')
    with pytest.raises(ValueError, match=message) as error:
        joins.of_values(tmp_path / 'parts', tmp_path / 'joined', range(30))
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'entry', [schema.META_TEXT_REVISION, schema.META_CAPTIONS_DIGEST, 'text_encoder_dtype']
)
def test_parts_of_different_making_are_refused_by_name(tmp_path, entry):
    write_parts(tmp_path / 'parts', **{entry: 'other'})
    message = rf"part-00002-of-00003\.parquet: {entry} is 'other', but .* in .*part-00000-of-00003"
    with pytest.raises(ValueError, match=message):
        joins.of_values(tmp_path / 'parts', tmp_path / 'joined', range(30))


def test_a_data_set_is_the_same_of_parts_here_in_a_bucket_and_of_one_file(tmp_path, gcs):
    source = made_sources.write_source(tmp_path / 'source', [range(30)])
    write_parts(tmp_path / 'parts', source)
    made_sources.write_sidecar(tmp_path / 'one.parquet', EMBEDDINGS, source)
    gcs.upload_folder(tmp_path / 'parts', 'gs://bucket/parts')
    built = {}
    for number, place in enumerate(
        (str(tmp_path / 'one.parquet'), str(tmp_path / 'parts'), 'gs://bucket/parts')
    ):
        out = tmp_path / f'out{number}'
        config = Coyo11mConfig(name='x', source=str(source), text_embeddings=place, num_workers=1)
        Builder(data_dir=out, config=config).download_and_prepare()
        Builder(data_dir=out, config=config).download_and_prepare()  # finds it there
        built[place] = {
            path.name: path.read_bytes()
            for path in (out / 'coyo11m_tfds' / 'x' / '1.0.0').iterdir()
        }
    one, here, in_bucket = built.values()
    assert one == here == in_bucket
