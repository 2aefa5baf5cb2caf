"""Values of sidecars by key, in one file or in parts: what is found and what is refused."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coyo11m_tfds import embed_captions, schema
from coyo11m_tfds.source import sidecar
from coyo11m_tfds.source.keyed_values import KeyedValues
from tests import built, damages, made_sources
from tests.convert import plans

EMBEDDINGS = {key: np.full(4, key, np.float16) for key in range(30)}


def join(place: pathlib.Path, wanted: Iterable[int] = (1, 2)) -> KeyedValues:
    folder = place.parent / f'{place.stem}-joined'
    shutil.rmtree(folder, ignore_errors=True)
    sidecar.join_values(
        sidecar.find_sidecar_files(place),
        str(folder),
        np.array(list(wanted), np.int64),
        hold=lambda file: contextlib.nullcontext(file.path),
    )
    return KeyedValues(str(folder))


def test_embeddings_are_found_by_key(tmp_path):
    rng = np.random.default_rng(0)
    wanted = {int(key): rng.normal(size=6).astype(np.float16) for key in rng.permutation(30_000)}
    path = made_sources.write_sidecar(tmp_path / 'x.parquet', wanted)
    found = join(path, [*range(29_000), -8, 40_000])
    header = sidecar.SidecarHeader(**found.facts['header'])
    assert header == sidecar.SidecarHeader(6, 'made-up', '1', 0, 'caption_llava', 'made-up')
    assert header.to_json() == sidecar.describe_values(str(path))['header']
    assert found.places.tolist() == list(range(29_000))
    for places in (np.arange(29_000), np.array([7]), np.array([], np.int64)):
        read = found.read_array(places)
        assert (read.dtype, read.shape) == (np.float16, (len(places), 6))
        for row, key in zip(read, places.tolist(), strict=True):
            np.testing.assert_array_equal(row, wanted[key])


def test_the_digest_of_embeddings_is_that_of_keys_and_vectors(tmp_path):
    digests = set()
    for rows in ({1: [1, 2], 2: [3, 4]}, {1: [1, 2], 2: [3, 5]}, {1: [1, 2], 3: [3, 4]}):
        rows = {key: np.array(vector, np.float16) for key, vector in rows.items()}
        digests.add(join(made_sources.write_sidecar(tmp_path / 'x', rows)).facts['digest'])
    assert len(digests) == 3


BAD = {
    'a number that is none': ({3: [1, 1], 4: [1, np.nan]}, {}, 'embedding of key 4 is not finite'),
    'no name of the encoder': (
        {3: [1, 1]},
        {'text_encoder': None},
        "metadata lacks 'text_encoder'",
    ),
    'no size': ({3: [1, 1]}, {'text_embedding_dim': None}, "metadata lacks 'text_embedding_dim'"),
    'no digest of the captions': (
        {3: [1, 1]},
        {'captions_digest': ''},
        "metadata lacks 'captions_digest'; make the file",
    ),
    'less than no tokens': (
        {3: [1, 1]},
        {'text_max_tokens': '-1'},
        "text_max_tokens '-1', expected a number",
    ),
    'another size than it says': (
        {3: [1, 1]},
        {'text_embedding_dim': '3'},
        'have 2 numbers, but its metadata says 3',
    ),
    'more numbers than a row may have': (
        {3: np.ones(16_385)},
        {},
        r'list of float16, at most 16,384',
    ),
}


@pytest.mark.parametrize(('rows', 'metadata', 'message'), BAD.values(), ids=BAD)
def test_a_bad_sidecar_is_refused_by_name(tmp_path, rows, metadata, message):
    rows = {key: np.array(row) for key, row in rows.items()}
    path = made_sources.write_sidecar(tmp_path / 'x.parquet', rows, **metadata)
    with pytest.raises(ValueError, match=rf'x\.parquet: .*{message}'):
        join(path)


OF_OTHERS = {
    'lists of any length': (
        {'text_embedding': pa.array([[1.0, 2.0]] * 2)},
        'expected a fixed-size list of float16',
    ),
    'lists of float32': (
        {'text_embedding': pa.array([[1.0]] * 2, pa.list_(pa.float32(), 1))},
        'list of float16',
    ),
    'a key that comes twice': (
        {'key': pa.array([5, 5])},
        '1 row repeats the key of another, e.g. key 5',
    ),
    # Arrow cannot even read nulls in lists of a fixed size.
    'a null': (
        {'text_embedding': pa.array([None, [0, 0]], pa.list_(pa.float16(), 2))},
        'has nulls|is damaged',
    ),
}


@pytest.mark.parametrize(('change', 'message'), OF_OTHERS.values(), ids=OF_OTHERS)
def test_columns_that_embed_captions_does_not_write_are_refused(tmp_path, change, message):
    path = made_sources.write_sidecar(tmp_path / 'x.parquet', {1: np.ones(2), 2: np.zeros(2)})
    table = pq.read_table(path)
    columns = {name: table.column(name) for name in table.column_names} | change
    changed = pa.table(columns).replace_schema_metadata(table.schema.metadata)
    pq.write_table(changed, path)
    with pytest.raises(ValueError, match=rf'x\.parquet: .*({message})'):
        join(path)


def test_damaged_embeddings_are_refused(tmp_path):
    """Pages that embed_captions writes have checksums."""
    (tmp_path / 'source').mkdir()
    made_sources.write_captions(tmp_path / 'source', {key: f'caption {key}' for key in range(50)})
    embed_captions.embed(tmp_path / 'source', 'hash', tmp_path / 'x')
    path = tmp_path / 'x' / sidecar.part_name(0, 1)
    column = pq.read_metadata(path).row_group(0).column(1)
    whole, start = path.read_bytes(), column.data_page_offset
    for at in range(start, start + column.total_compressed_size, 397):
        path.write_bytes(damages.flipped(whole, at))
        with pytest.raises(ValueError, match=r'1\.parquet: is damaged'):
            join(path)


def write_parts(folder: pathlib.Path, source: pathlib.Path | None = None) -> None:
    folder.mkdir()
    for number in range(3):
        write_part(folder, number, range(10 * number, 10 * number + 10), source)


def part(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / sidecar.part_name(number, 3)


def write_part(folder, number: int, keys, source=None, **metadata: str) -> None:
    path = part(folder, number)
    embeddings = {key: EMBEDDINGS[key] for key in keys}
    made_sources.write_sidecar(path, embeddings, source, part=f'{number} of 3', **metadata)
    table = pq.read_table(path)
    renamed = table.rename_columns([schema.PARQUET_KEY, schema.PART_EMBEDDING])
    pq.write_table(renamed.replace_schema_metadata(table.schema.metadata), path)


NOT_WHOLE = {
    'a part is gone': (lambda f: part(f, 1).unlink(), r'part-00001-of-00003\.parquet is missing'),
    'all parts are gone': (
        lambda f: [x.unlink() for x in f.iterdir()],
        r'holds no part-NNNNN-of-MMMMM\.parquet',
    ),
    'the folder is gone': (shutil.rmtree, 'parts: there is no such folder'),
    'a part of another number of parts': (
        lambda f: part(f, 1).rename(f / sidecar.part_name(1, 4)),
        r'00000-of-00003\.parquet and .*00001-of-00004\.parquet: parts of 3 and of 4',
    ),
    'a key comes twice': (
        lambda f: write_part(f, 1, [3]),
        r'parts: 1 row repeats .* e\.g\. key 3;',
    ),
    'a part is damaged': (
        lambda f: part(f, 2).write_bytes(b'PAR?'),
        r'part-00002-of-00003\.parquet: is damaged',
    ),
    'a part of another revision': (
        lambda f: write_part(f, 2, range(20, 30), text_encoder_revision='x'),
        r"00002-of-00003\.parquet: text_encoder_revision is 'x', but '1' in .*00000-of-00003",
    ),
}


@pytest.mark.parametrize(('change', 'message'), NOT_WHOLE.values(), ids=NOT_WHOLE)
def test_a_folder_that_is_not_whole_is_refused_by_name(tmp_path, change, message):
    write_parts(tmp_path / 'parts')
    change(tmp_path / 'parts')
    with pytest.raises(ValueError, match=message) as error:
        join(tmp_path / 'parts', range(30))
    assert '\n' not in str(error.value)


def test_a_data_set_is_the_same_of_parts_here_in_a_bucket_and_of_one_file(tmp_path, gcs):
    source = made_sources.write_source(tmp_path / 'source', [range(30)])
    write_parts(tmp_path / 'parts', source)
    made_sources.write_sidecar(tmp_path / 'one.parquet', EMBEDDINGS, source)
    gcs.upload_folder(tmp_path / 'parts', 'gs://bucket/parts')
    written = []
    for place in (f'{tmp_path}/one.parquet', f'{tmp_path}/parts', 'gs://bucket/parts'):
        made = plans.make_plan(source, tmp_path / 'stores', text_embeddings=place)
        plans.write(made, work := tmp_path / f'work{len(written)}')
        written.append(built.files_of(plans.data_folder(work)))
    assert written[0] == written[1] == written[2] != {}
