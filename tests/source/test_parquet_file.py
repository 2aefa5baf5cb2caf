"""Parquet files of latents: every type that holds them, faults by row, and builds of such files."""

import json
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coyo11m_tfds import add_column, dry_run, embed_captions, mirror, schema, verify
from coyo11m_tfds.convert.build_settings import BuildSettings
from coyo11m_tfds.source import parquet_file
from coyo11m_tfds.source.parquet_file import ParquetFile
from tests import built
from tests.fakes.latent_files import nested_lists
from tests.test_formats import assert_holds, hash_of, make_source, small_batches

COUNT = 50
SHAPE = (4, 8, 8)
SAYS_SHAPE = 'latent:float16:4,8,8'
REPO = 'hf://datasets/owner/name'


def made_values(dtype: str = 'float16') -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((COUNT, *SHAPE))
    return values.astype(dtype)


def raw_rows() -> list[bytes]:
    return [row.tobytes() for row in made_values()]


def write(path: pathlib.Path, latents: pa.Array, **columns: object) -> pathlib.Path:
    """Small row groups, so that a read crosses several."""
    table = pa.table({'latent': latents, **columns})
    pq.write_table(table, path, row_group_size=12)
    return path


def open_file(path: pathlib.Path, latents_from: str = '', key_column: str = '') -> ParquetFile:
    return ParquetFile(path, latents_from=schema.parse_latents_from(latents_from, key_column))


FLAT = made_values().reshape(COUNT, -1)
TYPES: dict[str, tuple[Callable[[], pa.Array], str]] = {
    'lists': (lambda: nested_lists(made_values()), ''),
    'lists of a fixed size': (lambda: nested_lists(made_values(), fixed=True), ''),
    'large lists': (
        lambda: nested_lists(made_values()).cast(
            pa.large_list(pa.large_list(pa.large_list(pa.float16())))
        ),
        '',
    ),
    'flat lists': (lambda: nested_lists(FLAT), SAYS_SHAPE),
    'flat lists of a fixed size': (lambda: nested_lists(FLAT, fixed=True), SAYS_SHAPE),
    'bytes': (lambda: pa.array(raw_rows(), pa.binary()), SAYS_SHAPE),
    'large bytes': (lambda: pa.array(raw_rows(), pa.large_binary()), SAYS_SHAPE),
    'bytes of a fixed size': (lambda: pa.array(raw_rows(), pa.binary(512)), SAYS_SHAPE),
}


@pytest.mark.parametrize(('make', 'latents_from'), TYPES.values(), ids=TYPES)
def test_rows_of_every_type_are_read_in_any_order(tmp_path, make, latents_from):
    file = open_file(write(tmp_path / 'x.parquet', make()), latents_from)
    assert (file.dtype, file.shape) == ('float16', (1, *SHAPE))
    rows = [30, 31, 49, 0, 1, 11, 12, 24, 23, *range(COUNT)]
    raw, values = file.latents(rows)
    assert raw.tobytes() == made_values()[rows].tobytes()
    np.testing.assert_array_equal(values[:, 0], made_values()[rows].astype(np.float32))


def test_float32_crops_and_bfloat16_are_read_as_they_are(tmp_path):
    values = made_values('float32')
    file = open_file(write(tmp_path / 'x.parquet', nested_lists(np.stack([values, -values], 1))))
    assert (file.dtype, file.shape) == ('float32', (2, *SHAPE))
    np.testing.assert_array_equal(file.latents([7])[1][0], [values[7], -values[7]])
    path = write(tmp_path / 'y.parquet', pa.array(raw_rows()))
    assert open_file(path, 'latent:bfloat16:4,8,8').dtype == 'bfloat16'


def test_keys_are_a_column_or_hashes_of_name_and_row(tmp_path):
    digits = [f'{2 * number:05}' for number in range(COUNT)]
    path = write(tmp_path / 'x.parquet', nested_lists(made_values()), id=digits)
    assert open_file(path, key_column='id').keys.tolist() == list(range(0, 2 * COUNT, 2))
    assert open_file(path).keys.tolist() == [hash_of('x.parquet', row) for row in range(COUNT)]


def with_row_7(value: object) -> pa.Array:
    lists = nested_lists(made_values()).to_pylist()
    lists[7] = value
    return pa.array(lists, nested_lists(made_values()).type)


def bytes_with_row_7(value: object) -> pa.Array:
    rows: list[object] = [*raw_rows()]
    rows[7] = value
    return pa.array(rows, pa.binary())


ROW = made_values()[7].tolist()
FAULTS: dict[str, tuple[Callable[[], pa.Array], str, str]] = {
    'a row is null': (lambda: with_row_7(None), '', 'latent of row 7 is null, expected numbers'),
    'a list is null': (lambda: with_row_7([*ROW[:3], None]), '', 'row 7 is a list with nulls'),
    'a number is null': (
        lambda: with_row_7([*ROW[:3], [*ROW[3][:7], [*ROW[3][7][:7], None]]]),
        '',
        'row 7 is a list with nulls, expected numbers in every row. Write the file again without',
    ),
    'a row has fewer channels': (
        lambda: with_row_7(ROW[:3]),
        '',
        r'row 7 has 3 values in a list, expected 4 for \(1, 4, 8, 8\) of float16. Write the file',
    ),
    'a list is longer': (
        lambda: with_row_7([*ROW[:3], [*ROW[3], ROW[3][0]]]),
        '',
        'row 7 has 9 values in a list, expected 8',
    ),
    'bytes are null': (lambda: bytes_with_row_7(None), SAYS_SHAPE, 'row 7 is null'),
    'bytes are few': (
        lambda: bytes_with_row_7(b'x' * 511),
        SAYS_SHAPE,
        'row 7 has 511 bytes, expected 512 for .* of float16. .* or set latents_from',
    ),
    'all bytes have another size': (
        lambda: pa.array(raw_rows()),
        'latent:float16:4,8,9',
        'row 0 has 512 bytes, expected 576',
    ),
    'bytes do not say their shape': (
        lambda: pa.array(raw_rows()),
        '',
        "does not say the shape of latent, whose first row has 512 bytes. .*'latent:float16:4,32",
    ),
    'a flat list does not say its shape': (
        lambda: nested_lists(FLAT.astype(np.float32)),
        'latent',
        "whose first row has 256 numbers. Set latents_from, e.g. 'latent:float32:4,32,32'",
    ),
    'lists have another shape than the config': (
        lambda: nested_lists(made_values()),
        'latent:float16:4,16,16',
        r'latent has rows \(1, 4, 8, 8\) of float16, expected \(4, 16, 16\)',
    ),
    'numbers are of double precision': (
        lambda: nested_lists(made_values('float64')),
        '',
        'latent is list<.*double.*, expected lists of float16 or float32, .* Write the file again',
    ),
    'numbers are whole': (
        lambda: nested_lists(made_values('int32')),
        'latent',
        'latent is list<.*int32.*, expected lists of float16 or float32',
    ),
    'it is text': (lambda: pa.array(['x'] * COUNT), 'latent', 'latent is string, expected lists'),
    'a list is empty': (lambda: pa.array([[]] * COUNT, pa.list_(pa.float16())), '', 'without num'),
    'lists have two levels': (
        lambda: nested_lists(FLAT.reshape(COUNT, 16, 16)),
        '',
        r'latent has rows \(16, 16\) of float16, expected \(C, H, W\)',
    ),
    'a column is missing': (lambda: nested_lists(made_values()), 'z', r"lacks 'z'; it has \["),
}


@pytest.mark.parametrize(('make', 'latents_from', 'problem'), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_with_its_row(tmp_path, make, latents_from, problem):
    path = write(tmp_path / 'x.parquet', make())
    with pytest.raises(ValueError, match=rf'x\.parquet: .*{problem}'):
        open_file(path, latents_from).latents(range(COUNT))


@pytest.mark.parametrize('pandas', ['[1]', 'nothing', '{"index_columns": null}'])
def test_a_damaged_description_by_pandas_is_named(tmp_path, pandas):
    table = pa.table({'latent': nested_lists(made_values())})
    pq.write_table(table.replace_schema_metadata({'pandas': pandas}), tmp_path / 'x.parquet')
    with pytest.raises(ValueError, match=r'x\.parquet: is damaged or not a Parquet file'):
        open_file(tmp_path / 'x.parquet')


def test_a_choice_between_columns_is_asked_for(tmp_path):
    lists = nested_lists(made_values())
    two = write(tmp_path / 'two.parquet', lists, latents_512=lists)
    with pytest.raises(ValueError, match=r"two\.parquet: has latents in .* choose it with .*'lat"):
        open_file(two)
    assert open_file(two, 'latents_512').shape == (1, *SHAPE)
    path = tmp_path / 'none.parquet'
    pq.write_table(pa.table({'image': raw_rows(), 'text': ['x'] * COUNT}), path)
    with pytest.raises(ValueError, match=r"none\.parquet: has no column 'latents' .*encode_images"):
        open_file(path)
    table = pa.Table.from_arrays([lists, lists], ['latent', 'latent'])
    pq.write_table(table, tmp_path / 'same.parquet')
    with pytest.raises(ValueError, match=r"same\.parquet: has 2 columns 'latent', expected one"):
        open_file(tmp_path / 'same.parquet', 'latent')


def test_a_row_group_that_would_be_read_again_and_again_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / 'x.parquet', nested_lists(made_values()))
    monkeypatch.setattr(parquet_file, '_MAX_GROUP_NBYTES', 12 * 512 - 1)
    problem = r'row group 0 has 12 rows with .* expected at most 6,143.*row_group_size=1000'
    with pytest.raises(ValueError, match=problem):
        open_file(path)


def test_a_cut_file_is_damaged(tmp_path):
    data = write(tmp_path / 'x.parquet', nested_lists(made_values())).read_bytes()
    for size in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / 'cut.parquet').write_bytes(data[:size])
        with pytest.raises(ValueError, match=r'cut\.parquet: is damaged or not a Parquet file'):
            open_file(tmp_path / 'cut.parquet')


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp('source') / 'parquet'
    return folder, make_source(folder, 'parquet')


def test_a_build_has_the_latents_captions_and_numbers_of_the_files(source, tmp_path):
    folder, truth = source
    data_set = built.build(folder, '', tmp_path / 'data', shard_bytes=200_000)
    for engine in ('rows', 'chunks'):
        assert_holds(data_set, truth, engine)
    assert not verify.verify(data_set).faults
    metadata = json.loads((data_set / schema.METADATA_FILE).read_text())
    assert metadata['caption_column'] == 'text'
    mirror.mirror(folder, tmp_path / 'copy')
    copied = built.build(tmp_path / 'copy', '', tmp_path / 'copied', shard_bytes=200_000)
    shards, same_shards = (
        [path.read_bytes() for path in sorted(final.glob('*-of-*'))] for final in (data_set, copied)
    )
    assert shards == same_shards and len(shards) > 3
    assert add_column.add(data_set, 'size', source=folder, column='width').dtype == 'int64'
    found = dry_run.plan_or_estimate(str(folder), BuildSettings())
    assert found.num_records == len(truth)


def test_captions_are_embedded_or_come_from_other_files(source, tmp_path):
    folder, truth = source
    embed_captions.embed(folder, 'hash', tmp_path / 'hash')
    data_set = built.build(folder, tmp_path / 'hash', tmp_path / 'data')
    assert next(small_batches(data_set, schema.TEXT_EMBEDDING))['text_embedding'].any()
    copy = shutil.copytree(folder, tmp_path / 'copy')
    captions = {'key': list(truth), 'blip': [f'Blip {key}.' for key in truth]}
    pq.write_table(pa.table(captions), copy / 'metadata.parquet')
    fields = {'captions': 'metadata.parquet', 'caption_column': 'blip'}
    data_set = built.build(copy, '', tmp_path / 'other', **fields)
    others = {key: (crops, f'Blip {key}.'.encode()) for key, (crops, _) in truth.items()}
    assert_holds(data_set, others, 'rows')


def test_rows_with_nan_are_dropped_and_counted(source, tmp_path):
    folder, truth = source
    copy = shutil.copytree(folder, tmp_path / 'copy')
    path = copy / 'train-00000-of-00002.parquet'
    table = pq.read_table(path)
    lists = table['latent'].to_pylist()
    lists[3][0][0][0] = float('nan')
    table = table.set_column(1, 'latent', pa.array(lists, table['latent'].type))
    pq.write_table(table, path)
    fields = {'max_bad_fraction': 0.1}
    data_set = built.build(copy, '', tmp_path / 'data', **fields)
    assert_holds(data_set, {key: x for key, x in truth.items() if key != 9}, 'rows')
    with pytest.raises(ValueError, match=r'00000-of-00002\.parquet: latents of key 9 are not fin'):
        built.build(copy, '', tmp_path / 'stop', bad_data='stop')


def test_latents_in_parquet_are_not_read_in_place(source, tmp_path):
    with pytest.raises(ValueError, match=r"\.parquet: latents='in_place' .*Set latents='records'"):
        built.build(source[0], '', tmp_path / 'data', latents='in_place')


def test_a_repository_of_the_hub_is_a_source(source, hub, tmp_path):
    folder, truth = source
    hub.commit({f'data/{path.name}': path for path in folder.iterdir()})
    data_set = built.build(f'{REPO}/data', '', tmp_path / 'data')
    assert_holds(data_set, truth, 'rows')
    metadata = json.loads((data_set / schema.METADATA_FILE).read_text())
    assert metadata['source']['place'].startswith(f'{REPO}@')
