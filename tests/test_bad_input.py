"""Bad sources: one message that names the culprit, and no half-made data set."""

import json
import os
import pathlib
import pickle

import numpy as np
import pytest
import torch
from packaging.version import Version

from coyo11m_tfds import mirror, schema
from coyo11m_tfds.coyo11m_tfds_dataset_builder import Coyo11mConfig
from tests import made_sources
from tests.convert import build_program

LATENTS = made_sources.make_latents(6)

SPARSE = 'latents is sparse_coo float16, expected a dense tensor'
# Since then torch checks the numbers of sparse tensors, which are not loaded.
if Version(torch.__version__) >= Version('2.14'):
    SPARSE = 'holds a tensor of a kind that torch loads only as a whole, such as sparse'


@pytest.fixture
def source(tmp_path) -> pathlib.Path:
    """A good source of two files; the tests spoil the second, `000010-000019.pt`."""
    return made_sources.write_source(tmp_path / 'source', [range(10), range(10, 16)])


def build(source: pathlib.Path, final: pathlib.Path, **settings) -> None:
    settings = {'bad_data': 'stop', 'num_workers': 1} | settings
    build_program.build(str(source), str(final), json.dumps(settings))


def assert_refused(source: pathlib.Path, culprit: object, message: str, **settings) -> None:
    """Building fails with one message that holds both strings, and there is no data set."""
    final = source.parent / 'out' / '1.0.0'
    with pytest.raises(ValueError) as error:
        build(source, final, **settings)
    assert str(culprit) in str(error.value)
    assert message in str(error.value)
    assert not (final / schema.INFO_FILE).exists()


class Malicious:
    """Unpickling it runs a shell command."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f'touch {self.path}',)


def patch(path: pathlib.Path, place: bytes, new: bytes) -> None:
    content = path.read_bytes()
    at = content.index(place)
    path.write_bytes(content[:at] + new + content[at + len(new) :])


def test_a_damaged_key_is_told_before_anything_is_written(source):
    """Even one that has become the key of another caption."""
    path = made_sources.latents_file(source, 1)
    patch(path, np.arange(10, 16).tobytes()[40:], bytes([99]))
    made_sources.write_captions(source, dict.fromkeys(range(100), 'text'))
    assert_refused(source, path, "data/0' has CRC-32")
    assert not list(source.parent.rglob('building-*'))


# Where no reader of such files looks.
COPIES = {
    'the padding of a .pt file': ('latents-3crop/000010-000019.pt', b'ZZZZ'),
    'the name of the writer of captions': (schema.CAPTIONS_FILE, b'parquet-cpp-arrow'),
}


@pytest.mark.parametrize(('name', 'place'), COPIES.values(), ids=COPIES)
def test_a_copy_that_is_not_what_was_mirrored(source, tmp_path, name, place):
    copy = tmp_path / 'copy'
    mirror.mirror(source, copy)
    build(copy, tmp_path / 'good' / '1.0.0')
    patch(copy / name, place, b'Q')
    assert_refused(copy, copy / name, 'when it was mirrored')


def test_a_damaged_pickle_of_a_file_without_checksums(source):
    path = made_sources.latents_file(source, 1)
    patch(path, b'ctorch._utils', b'\xff' * 10)
    assert_refused(source, path, 'its pickle is damaged or', check_crc=False)


BAD_TENSORS = {
    'no keys': (
        {'keys': None},
        "lacks 'keys'; it has ['latents']. Set key_column to their name, or",
    ),
    'no keys, and latents of no crops': (
        {'keys': None, 'captions': ['a'], 'latents': torch.zeros(10**12, 0, 4, 4).half()},
        'latents has shape (1000000000000, 0, 4, 4), expected (',
    ),
    'no keys, and latents of no axes': (
        {'keys': None, 'captions': ['a'], 'latents': LATENTS.sum()},
        'latents has shape (), expe',
    ),
    'no latents': ({'latents': None}, "lacks 'latents'; it has ['keys']"),
    'latents that are a list': ({'latents': [1, 2]}, 'latents is a list, expected a tensor'),
    'latents of one crop': (
        {'latents': LATENTS[:, 0]},
        'latents are float16 (1, 4, 32, 32), but those of',
    ),
    'latents of five rows': ({'latents': LATENTS[:5]}, 'latents has shape (5, 3, 4, 32, 32)'),
    'latents of double precision': (
        {'latents': LATENTS.double()},
        'latents is float64, expected a dense tensor of float16 or bfloat16',
    ),
    'latents of three axes': (
        {'latents': LATENTS[:, 0, 0]},
        'latents has shape (6, 32, 32), expected (6, crops, C, H',
    ),
    'sparse latents': ({'latents': LATENTS.to_sparse()}, SPARSE),
    'keys with a point': ({'keys': torch.arange(6).float()}, 'expected a dense tensor of int64'),
    'keys of two axes': (
        {'keys': torch.arange(6).reshape(2, 3)},
        'keys has shape (2, 3), expected (N,)',
    ),
    'embeddings of five rows': (
        {'embeddings': torch.zeros(5, 8)},
        'embeddings has shape (5, 8), expected (6, D)',
    ),
    'latents of bfloat16': (
        {'latents': LATENTS.bfloat16()},
        'latents are bfloat16 (3, 4, 32, 32), but those of',
    ),
    'latents that are to be negated': (
        {'latents': torch._neg_view(LATENTS)},
        'latents has its negative bit set',
    ),
    'keys that are a list': (
        {'keys': [*range(10, 16)]},
        'keys is a list, expected a tensor. Save it again as one',
    ),
    'nested latents': (
        {'latents': torch.nested.as_nested_tensor(LATENTS)},
        'holds a tensor of a kind that',
    ),
}


@pytest.mark.parametrize(('changes', 'message'), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_tensors_that_are_missing_or_of_another_kind(source, changes, message):
    path = made_sources.latents_file(source, 1)
    made_sources.write_pt(path, range(10, 16), replace=changes)
    assert_refused(source, path, message)


def test_numbers_of_the_other_byte_order(source, monkeypatch):
    path = made_sources.latents_file(source, 1)
    with monkeypatch.context() as patched:
        patched.setattr('sys.byteorder', 'big')
        made_sources.write_pt(path, range(10, 16))
    assert_refused(source, path, "has its numbers in byte order 'big', expected 'little'")


NO_DICTS = {
    'a tensor': (LATENTS, 'a Tensor'),
    'a number': (5, 'an int'),
    'nothing': (None, 'None'),
    'a list': ([1], 'a list'),
}


@pytest.mark.parametrize(('content', 'kind'), NO_DICTS.values(), ids=NO_DICTS)
def test_a_file_that_holds_something_else_than_a_dict(source, content, kind):
    path = made_sources.latents_file(source, 1)
    torch.save(content, path)
    assert_refused(source, path, f'holds {kind}, expected a dict')


def test_a_pickle_that_would_run_code_does_not(source, tmp_path):
    path, touched = made_sources.latents_file(source, 1), tmp_path / 'touched'
    path.write_bytes(pickle.dumps(Malicious(touched)))
    assert_refused(source, path, 'or not a .pt file')
    torch.save({'keys': torch.arange(6), 'latents': LATENTS, 'more': Malicious(touched)}, path)
    message = f'refused, its pickle asks for {os.system.__module__}.system'
    assert_refused(source, path, message)
    assert not touched.exists()
    torch.load(path, weights_only=False)
    assert touched.exists()  # so the pickle is a real one


def test_numbers_that_are_not_finite(source):
    first, second = (made_sources.latents_file(source, number) for number in (0, 1))
    latents, embeddings = LATENTS.clone(), torch.ones(10, 4)
    latents[4, 1, 2, 3, 4] = np.inf
    made_sources.write_pt(second, range(10, 16), replace={'latents': latents})
    assert_refused(source, second, 'latents of key 14 are not finite')
    embeddings[3, 1] = 1e6  # more than float16 holds
    for path, keys in ((first, range(10)), (second, range(10, 16))):
        made_sources.write_pt(path, keys, replace={'embeddings': embeddings[: len(keys)]})
    message = 'latents of key 3 (or its embeddings) are not finite'
    assert_refused(source, first, message, text_embeddings='pt')


def test_embeddings_that_are_missing_or_of_unequal_width(source):
    first, second = (made_sources.latents_file(source, n) for n in (0, 1))
    made_sources.write_pt(first, range(10), replace={'embeddings': torch.zeros(10, 4)})
    assert_refused(source, second, "lacks 'embeddings'", text_embeddings='pt')
    made_sources.write_pt(second, range(10, 16), replace={'embeddings': torch.zeros(6, 5)})
    assert_refused(source, second, 'has 5 numbers a row', text_embeddings='pt')


@pytest.mark.parametrize(
    ('fields', 'name'),
    [
        ({}, 'latents'),
        ({'caption_column': 'caption', 'num_workers': 2}, 'caption_column-caption'),
        ({'text_embeddings': '/a/b c/', 'shard_bytes': 9}, 'shard_bytes-9-text_embeddings-b-c'),
        ({'max_bad_fraction': 0.3}, 'max_bad_fraction-0.3'),
        ({'citation': '@misc{x, ' * 100}, ('citation-' + '-misc-x' * 100)[:100]),
        ({'text_embeddings': '/a/x', 'name': 'y'}, 'y'),
    ],
)
def test_a_config_without_a_name_is_named_by_its_fields(fields, name):
    assert Coyo11mConfig(**fields).name == name


BAD_FIELDS = {
    'a field that is misspelt': (
        {'captoin_column': 'caption'},
        "unknown field 'captoin_column'; the fields are name,",
    ),
    'a name without a letter': ({'name': '-'}, "name='-': expected"),
    'a name of two folders': ({'name': 'a/b'}, "name='a/b': expected"),
    'all for validation': ({'validation_fraction': 1}, 'validation_fraction=1: expected one in'),
    'a share that is a text': (
        {'validation_fraction': '0.1'},
        "validation_fraction='0.1': expected a number",
    ),
    'latents in no place': (
        {'latents': 'elsewhere'},
        "latents='elsewhere': expected 'records' or 'in_place'",
    ),
    'bad data that is ignored': (
        {'bad_data': 'ignore'},
        "bad_data='ignore': expected 'drop' or 'stop'",
    ),
    'more bad rows than there are': (
        {'max_bad_fraction': 1.5},
        'max_bad_fraction=1.5: expected from 0 to 1',
    ),
    'shards of nothing': ({'shard_bytes': 0}, 'shard_bytes=0: expected at least 1'),
    'a size with a point': ({'shard_bytes': 1e8}, 'shard_bytes=100000000.0: expected an integer'),
    'no truth': ({'check_crc': 'no'}, "check_crc='no': expected true or false"),
    'fewer workers than none': ({'num_workers': -1}, 'num_workers=-1: expected at least 0'),
    'a scratch folder that is not local': (
        {'scratch_dir': 'hf://datasets/a/b'},
        "scratch_dir='hf://datasets/a/b': expected a local folder",
    ),
    'no text': ({'text_embeddings': None}, 'text_embeddings=None: expected a string'),
    'a truth as a size': ({'shard_bytes': True}, 'shard_bytes=True: expected an integer'),
    'a truth as a share': ({'max_bad_fraction': True}, 'max_bad_fraction=True: expected a number'),
    'a license of other bytes': ({'license': 'caf\udce9'}, 'license=.*: expected a text in UTF-8'),
}


@pytest.mark.parametrize(('fields', 'message'), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_config_with_a_bad_field(fields, message):
    with pytest.raises(ValueError, match=message):
        Coyo11mConfig(**({'name': 'x'} | fields))
