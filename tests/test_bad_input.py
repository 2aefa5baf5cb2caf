"""Bad sources: one message that names the culprit, and no half-made data set."""

import os
import pathlib
import pickle
import zipfile
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from coyo11m_tfds import mirror, schema
from coyo11m_tfds.coyo11m_tfds_dataset_builder import Builder, Coyo11mConfig
from tests import made_sources

LATENTS = made_sources.make_latents(6)


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    """A good source of two files; the tests spoil the second, `000010-000019.pt`."""
    return made_sources.write_source(tmp_path / 'source', [range(10), range(10, 16)])


def build(source: pathlib.Path, out: pathlib.Path, **fields) -> None:
    fields = {'bad_data': 'stop'} | fields
    config = Coyo11mConfig(name='x', source=str(source), num_workers=1, **fields)
    Builder(data_dir=out, config=config).download_and_prepare()


def assert_refused(source: pathlib.Path, culprit: str, message: str, **fields) -> None:
    """Building fails with one message that holds both strings, and leaves no file of data."""
    out = source.parent / 'out'
    with pytest.raises(ValueError) as error:
        build(source, out, **fields)
    assert culprit in str(error.value)
    assert message in str(error.value)
    assert_no_data_set(out)


def assert_no_data_set(out: pathlib.Path) -> None:
    """No data set; what a later build would resume from may be there."""
    assert not [path for path in out.rglob('*') if path.name == schema.INFO_FILE]


class Malicious:
    """Unpickling it runs a shell command."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f'touch {self.path}',)


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def empty(path: pathlib.Path) -> None:
    path.write_bytes(b'')


def replace_by_text(path: pathlib.Path) -> None:
    path.write_text('<html>404: not found</html>')


def replace_by_another_zip(path: pathlib.Path) -> None:
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('hello.txt', 'hello')


def damage_the_pickle(path: pathlib.Path) -> None:
    content = path.read_bytes()
    at = content.index(b'ctorch._utils')
    path.write_bytes(content[:at] + b'\xff' * 10 + content[at + 10 :])


def save_in_the_old_format(path: pathlib.Path) -> None:
    content = torch.load(path, weights_only=True)
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ('spoil', 'message'),
    [
        (truncate, 'is truncated or'),
        (empty, 'or not a .pt file'),
        (replace_by_text, 'or not a .pt file'),
        (replace_by_another_zip, 'cannot be read as a .pt file'),
        (damage_the_pickle, "data.pkl' has CRC-32"),
        (save_in_the_old_format, 'or not a .pt file'),
    ],
)
def test_a_file_that_is_no_whole_pt_file(
    source: pathlib.Path, spoil: Callable[[pathlib.Path], None], message: str
):
    path = made_sources.latents_file(source, 1)
    spoil(path)
    assert_refused(source, str(path), message)


@pytest.mark.parametrize('bad_data', ['drop', 'stop'])
def test_latents_that_were_not_copied_yet(source: pathlib.Path, bad_data: str):
    """As of a download into a file of full size: zeros are finite numbers."""
    path = made_sources.latents_file(source, 1)
    with path.open('r+b') as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(50_000))
    assert_refused(source, str(path), 'is damaged or still being copied', bad_data=bad_data)


def test_a_damaged_key_is_told_before_anything_is_written(source: pathlib.Path):
    """Even one that has become the key of another caption."""
    path = made_sources.latents_file(source, 1)
    content = path.read_bytes()
    at = content.index(np.arange(10, 16).tobytes()) + 5 * 8
    path.write_bytes(content[:at] + bytes([99]) + content[at + 1 :])
    made_sources.write_captions(source, dict.fromkeys(range(100), 'text'))
    assert_refused(source, str(path), "data/0' has CRC-32")
    assert not [
        path
        for path in source.parent.rglob('*')
        if path.name.startswith(('building-', 'coyo11m_tfds'))
    ]


def test_a_copy_that_is_not_what_was_mirrored(source: pathlib.Path, tmp_path: pathlib.Path):
    for name, spoil, options in (
        (made_sources.latents_file(source, 1).relative_to(source), grow, {}),
        (schema.CAPTIONS_FILE, grow, {}),
        (made_sources.latents_file(source, 1).relative_to(source), flip_a_byte_in_between, {}),
        (schema.CAPTIONS_FILE, flip_a_byte_in_between, {}),
        (made_sources.latents_file(source, 0).relative_to(source), zero, {'check_crc': False}),
    ):
        copy = tmp_path / spoil.__name__ / str(name).replace('/', '-') / 'source'
        mirror.mirror(source, copy)
        build(copy, copy / 'good')
        spoil(copy / name)
        assert_refused(copy, str(copy / name), 'when it was mirrored', **options)


def grow(path: pathlib.Path) -> None:
    content = path.read_bytes()
    path.write_bytes(b'#' + content if path.suffix == '.pt' else content[:4] + b'#' + content[4:])


def flip_a_byte_in_between(path: pathlib.Path) -> None:
    """Where neither a reader of `.pt` files nor one of Parquet files looks."""
    content = path.read_bytes()
    at = content.index(b'ZZZZ') if path.suffix == '.pt' else content.index(b'parquet-cpp-arrow')
    path.write_bytes(content[:at] + b'Q' + content[at + 1 :])


def zero(path: pathlib.Path) -> None:
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half] + bytes(999) + content[half + 999 :])


def test_a_damaged_pickle_of_a_file_without_checksums(source: pathlib.Path):
    path = made_sources.latents_file(source, 1)
    damage_the_pickle(path)
    assert_refused(source, str(path), 'its pickle is damaged or', check_crc=False)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'keys': None}, "lacks 'keys'; it has ['latents']"),
        ({'latents': None}, "lacks 'latents'; it has ['keys']"),
        ({'latents': [1, 2]}, 'latents is a list, expected a tensor'),
        (
            {'latents': LATENTS[:, 0]},
            'latents are float16 (1, 4, 32, 32), but those of',
        ),
        ({'latents': LATENTS[:, :, :, :16]}, 'latents are float16 (3, 4, 16, 32), but those of'),
        ({'latents': LATENTS[:5]}, 'latents has shape (5, 3, 4, 32, 32)'),
        ({'latents': LATENTS.float()}, 'latents are float32 (3, 4, 32, 32), but those of'),
        ({'latents': LATENTS.double()}, 'expected a dense tensor of float16 or bfloat16'),
        ({'latents': LATENTS[:, 0, 0]}, 'latents has shape (6, 32, 32), expected (6, crops, C, H'),
        ({'latents': LATENTS.to_sparse()}, 'expected a dense tensor'),
        ({'keys': torch.arange(6).float()}, 'expected a dense tensor of int64'),
        ({'keys': torch.arange(6).reshape(2, 3)}, 'keys has shape (2, 3), expected (N,)'),
        ({'embeddings': torch.zeros(5, 8)}, 'embeddings has shape (5, 8), expected (6, D)'),
        ({'embeddings': torch.zeros(6, 0)}, 'embeddings has shape (6, 0)'),
        ({'latents': LATENTS.bfloat16()}, 'latents are bfloat16 (3, 4, 32, 32), but those of'),
        ({'latents': torch._neg_view(LATENTS)}, 'latents has its negative bit set'),
        ({'keys': torch._neg_view(torch.arange(6))}, 'keys has its negative bit set'),
        ({'embeddings': torch._neg_view(torch.ones(6, 8))}, 'embeddings has its negative bit set'),
    ],
)
def test_tensors_that_are_missing_or_of_another_kind(
    source: pathlib.Path, changes: dict, message: str
):
    path = made_sources.latents_file(source, 1)
    made_sources.write_pt(path, range(10, 16), replace=changes)
    assert_refused(source, str(path), message)


def test_numbers_of_the_other_byte_order(source: pathlib.Path, monkeypatch):
    path = made_sources.latents_file(source, 1)
    with monkeypatch.context() as patch:
        patch.setattr('sys.byteorder', 'big')
        made_sources.write_pt(path, range(10, 16))
    assert_refused(source, str(path), "has its numbers in byte order 'big', expected 'little'")


def test_a_file_that_holds_something_else_than_a_dict(source: pathlib.Path):
    path = made_sources.latents_file(source, 1)
    torch.save(LATENTS, path)
    assert_refused(source, str(path), 'holds a Tensor, expected a dict')


@pytest.mark.parametrize('protocol', ['in a .pt file', 'as a bare pickle'])
def test_a_pickle_that_would_run_code_does_not(
    source: pathlib.Path, tmp_path: pathlib.Path, protocol: str
):
    path, touched = made_sources.latents_file(source, 1), tmp_path / 'touched'
    content = {'keys': torch.arange(6), 'latents': LATENTS, 'more': Malicious(touched)}
    if protocol == 'in a .pt file':
        torch.save(content, path)
        assert_refused(
            source, str(path), f'refused, its pickle asks for {os.system.__module__}.system'
        )
    else:
        path.write_bytes(pickle.dumps(Malicious(touched)))
        assert_refused(source, str(path), 'or not a .pt file')
    assert not touched.exists()
    torch.load(path, weights_only=False) if protocol == 'in a .pt file' else pickle.loads(
        path.read_bytes()
    )
    assert touched.exists()  # so the pickle is a real one


def test_a_key_that_comes_twice(source: pathlib.Path):
    first, second = (made_sources.latents_file(source, n) for n in (0, 1))
    made_sources.write_pt(second, [10, 11, 7, 12])
    assert_refused(source, f'{second}: row 2 has key 7', f'{first}: row 7')
    made_sources.write_pt(second, [10, 11, 11, 12])
    assert_refused(source, f'{second}: row 2 has key 11', f'{second}: row 1')


@pytest.mark.parametrize('value', [np.inf, np.nan])
def test_latents_that_are_not_finite(source: pathlib.Path, value: float):
    latents = LATENTS.clone()
    latents[4, 1, 2, 3, 4] = value
    path = made_sources.latents_file(source, 1)
    made_sources.write_pt(path, range(10, 16), replace={'latents': latents})
    assert_refused(source, str(path), 'latents of key 14 are not finite')


def test_embeddings_that_float16_cannot_hold(source: pathlib.Path):
    for number, keys in enumerate((range(10), range(10, 16))):
        embeddings = torch.ones(len(keys), 4)
        embeddings[3, 1] = 1e6 * number
        path = made_sources.latents_file(source, number)
        made_sources.write_pt(path, keys, replace={'embeddings': embeddings})
    assert_refused(
        source,
        str(path),
        'latents of key 13 (or its embeddings) are not finite',
        text_embeddings='pt',
    )


def test_embeddings_that_are_missing_or_of_unequal_width(source: pathlib.Path):
    first, second = (made_sources.latents_file(source, n) for n in (0, 1))
    made_sources.write_pt(first, range(10), replace={'embeddings': torch.zeros(10, 4)})
    assert_refused(source, str(second), "lacks 'embeddings'", text_embeddings='pt')
    made_sources.write_pt(second, range(10, 16), replace={'embeddings': torch.zeros(6, 5)})
    assert_refused(source, str(second), 'has 5 numbers a row', text_embeddings='pt')


def test_folders_and_files_that_are_not_there(source: pathlib.Path, tmp_path: pathlib.Path):
    empty_folder = tmp_path / 'nothing'
    empty_folder.mkdir()
    assert_refused(empty_folder, str(empty_folder), 'No .safetensors, .mds, .tar, .pt files')
    assert_refused(tmp_path / 'absent', str(tmp_path / 'absent'), 'is not a folder')
    assert_refused(
        source, 'embeddings.parquet', 'is missing or a folder', text_embeddings='embeddings.parquet'
    )
    (source / schema.CAPTIONS_FILE).rename(source / 'other.parquet')
    assert_refused(source, schema.CAPTIONS_FILE, 'Parquet files in the folder: other.parquet')


def test_captions_without_the_column(source: pathlib.Path):
    path = str(source / schema.CAPTIONS_FILE)
    assert_refused(source, path, "has no column 'nothing'", caption_column='nothing')
    assert_refused(source, path, "'key' is int64, expected text", caption_column='key')
    pq.write_table(pa.table({'caption_llava': ['a']}), path)
    assert_refused(source, path, "has no column 'key'")


def test_captions_of_other_images(source: pathlib.Path):
    made_sources.write_captions(source, {-key: 'text' for key in range(1, 20)})
    assert_refused(source, schema.CAPTIONS_FILE, 'no_row: 16')


def test_embeddings_of_another_caption_column(source: pathlib.Path, tmp_path: pathlib.Path):
    rows = {key: np.ones(4) for key in range(16)}
    path = made_sources.write_sidecar(
        tmp_path / 'v.parquet', rows, source, caption_column='caption'
    )
    assert_refused(source, str(path), "were made of column 'caption'", text_embeddings=str(path))
    build(source, tmp_path / 'good', text_embeddings=str(path), caption_column='caption')


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'captoin_column': 'caption'}, "unknown field 'captoin_column'; the fields are name,"),
        ({'name': ''}, "name is '', expected"),
        ({'name': 'a/b'}, "name is 'a/b', expected"),
        ({'validation_fraction': 1}, 'validation_fraction is 1, expected one in'),
        ({'validation_fraction': '0.1'}, "validation_fraction is '0.1', expected a number"),
        ({'latents': 'elsewhere'}, "latents is 'elsewhere', expected 'records' or 'in_place'"),
        ({'bad_data': 'ignore'}, "bad_data is 'ignore', expected 'drop' or 'stop'"),
        ({'max_bad_fraction': 1.5}, 'max_bad_fraction is 1.5, expected one in'),
        ({'scratch_gb': 0}, 'scratch_gb is 0, expected more than 0'),
        ({'scratch_gb': float('inf')}, 'scratch_gb is inf, expected more than 0, and finite'),
        ({'wait_hours': -1}, 'wait_hours is -1, expected at least 0'),
        ({'shard_bytes': 0}, 'shard_bytes is 0, expected at least 1'),
        ({'shard_bytes': 1e8}, 'shard_bytes is 100000000.0, expected an integer'),
        ({'check_crc': 'no'}, "check_crc is 'no', expected true or false"),
        ({'num_workers': -1}, 'num_workers is -1, expected at least 0'),
        ({'text_embeddings': None}, 'text_embeddings is None, expected a string'),
    ],
)
def test_a_config_with_a_bad_field(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Coyo11mConfig(**({'name': 'x'} | fields))
