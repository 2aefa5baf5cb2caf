"""Texts that cannot be read, and files without rows: counted in every format, and no error."""

import io
import json
import pathlib
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

from coyo11m_tfds import dry_run, embed_captions, schema
from coyo11m_tfds.convert.build_settings import BuildSettings
from coyo11m_tfds.source import sidecar
from coyo11m_tfds.source.keyed_values import KeyedValues
from coyo11m_tfds.storage.scratch import Scratch
from tests.convert.plans import make_plan
from tests.fakes import latent_files

SHAPE = (4, 8, 8)
COUNT = 20
LATENTS = np.random.default_rng(0).standard_normal((COUNT, *SHAPE)).astype(np.float16)
CP1252 = 'Das Café.'.encode('cp1252')


def write_parquet(path: pathlib.Path, texts: Sequence[bytes | None]) -> None:
    """Texts as another writer marks them, UTF-8 or not."""
    raw = pa.array(texts, pa.binary())
    column = pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:], raw.buffers()[0])
    pq.write_table(pa.table({'key': range(len(raw)), 'caption': column}), path)


def write_source(folder: pathlib.Path, kind: str, texts: Sequence[Any]) -> pathlib.Path:
    """A file of latents of a format, with a caption for each of its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    latents = LATENTS[: len(texts)]
    if kind == 'pt':
        content = {'latents': torch.from_numpy(latents), 'captions': list(texts)}
        torch.save(content, folder / 'a.pt')
    elif kind == 'parquet':
        tensors = {'latents': torch.from_numpy(latents), 'keys': torch.arange(len(texts))}
        torch.save(tensors, folder / 'a.pt')
        write_parquet(folder / schema.CAPTIONS_FILE, texts)
    elif kind == 'mds':
        rows = [
            {'caption': text, 'latents_64': x, 'key': np.int64(n)}
            for n, (text, x) in enumerate(zip(texts, latents, strict=True))
        ]
        columns = {'caption': 'str', 'latents_64': 'ndarray:float16:4,8,8', 'key': 'int64'}
        latent_files.write_mds(folder, [rows], columns)
    else:
        samples = {
            f'{n:03}': {'npy': x, kind: text}
            for n, (text, x) in enumerate(zip(texts, latents, strict=True))
        }
        latent_files.write_tar(folder / 'a.tar', samples)
    return folder


def captions_of(source: pathlib.Path, folder: pathlib.Path, **fields: Any) -> list[bytes]:
    """The captions of all records of a plan, sorted."""
    plan = make_plan(source, folder, **fields)
    return sorted(text for task in plan.tasks for text in task.inputs.open().captions)


def dropped_of(source: pathlib.Path, folder: pathlib.Path) -> dict[str, int]:
    counts = make_plan(source, folder, max_bad_fraction=0.2).dropped.counts
    return {reason: count for reason, count in counts.items() if count}


UNREADABLE: dict[str, list[Any]] = {
    'parquet': [CP1252, b'\xed\xa0\x80', b'cut off \xe2\x82'],
    'pt': ['a lone \ud800 surrogate', CP1252, ['\udcff', 'b']],
    'mds': [CP1252, b'\xff\xfe', b'\xc0\x80'],
    'txt': [CP1252, b'\xed\xa0\x80', b'\x80'],
    'json': [b'{"caption": "' + CP1252 + b'"}', b'{"caption": "\\ud800"}', b'{"caption": "a'],
}


@pytest.mark.parametrize('kind', UNREADABLE)
def test_a_text_that_cannot_be_read_is_a_bad_row(tmp_path, kind):
    good: list[Any] = [f'Caption of {n}: ä.' for n in range(COUNT - 3)]
    expected = sorted(text.encode() for text in good)
    if kind == 'json':
        good = [json.dumps({'caption': text}) for text in good]
    if kind == 'parquet':
        good = [text.encode() for text in good]
    source = write_source(tmp_path / 'source', kind, [*UNREADABLE[kind], *good])
    assert dropped_of(source, tmp_path / 'plan') == {schema.CAPTION_UNREADABLE: 3}
    assert captions_of(source, tmp_path / 'captions', max_bad_fraction=0.15) == expected
    with pytest.raises(ValueError, match=r'3 of 20 rows of the source are bad \(caption_unread'):
        make_plan(source, tmp_path / 'bad', max_bad_fraction=0.1)
    with pytest.raises(ValueError, match=r'source/\S+: the caption of key \d+ is no UTF-8\. Repai'):
        make_plan(source, tmp_path / 'stop', bad_data='stop')
    report = embed_captions.embed(source, 'hash', tmp_path / 'hash')
    assert (report.num_captions, report.num_skipped) == (COUNT - 3, 3)
    # The captions of both have one digest.
    plan = make_plan(
        source, tmp_path / 'text', text_embeddings=str(tmp_path / 'hash'), max_bad_fraction=0.2
    )
    assert plan.dropped.counts[schema.NO_TEXT_EMBEDDING] == 0


@pytest.mark.parametrize('kind', ['txt', 'json'])
def test_a_text_in_a_tar_that_is_too_long_is_a_bad_row(tmp_path, kind):
    long = 'a' * (schema.MAX_CAPTION_BYTES + 1)
    texts = [long, 'b' * (2 << 20), *'cdefghijkl']
    if kind == 'json':
        texts = [json.dumps({'caption': text}) for text in texts]
    source = write_source(tmp_path / 'source', kind, texts)
    dropped = dropped_of(source, tmp_path / 'plan')
    assert sum(dropped.values()) == 2 and dropped[schema.CAPTION_TOO_LONG] >= 1


def test_a_text_file_loses_its_mark_and_its_line_ends(tmp_path):
    texts = [b'\xef\xbb\xbfOne.\r\n', 'Two.'.encode('utf-16'), b'Three.\n\n', b'Four\r\nfive.']
    source = write_source(tmp_path / 'source', 'txt', texts)
    expected = [b'Four\nfive.', b'One.', b'Three.', b'Two.']
    assert captions_of(source, tmp_path / 'plan') == expected


@pytest.mark.parametrize(
    ('entries', 'fields'),
    [
        ({'caption': ['a', 'b']}, {}),
        ({'caption': ['a', 'b'], 'captions': ['x', 'y']}, {}),
        ({'caption': ['x', 'y'], 'captions': ['a', 'b']}, {'caption_column': 'captions'}),
        ({'captions': ['x', 'y'], 'caption': ['a', 'b']}, {'caption_column': 'caption'}),
        ({'prompt': [b'a', b'b']}, {}),
        ({'captions': [['a', 'c'], ['', 'b']]}, {}),
        ({'captions': (('a',), (b'b',))}, {}),
        ({'alt': ['a', 'b'], 'widths': [256, 512]}, {'caption_column': 'alt'}),
    ],
)
@pytest.mark.parametrize('has_keys', [True, False])
def test_texts_of_a_pt_file_may_have_any_name_and_be_bytes_or_lists(
    tmp_path, entries, fields, has_keys
):
    content = {'latents': torch.from_numpy(LATENTS[:2]), **entries}
    if has_keys:
        content['keys'] = torch.arange(2)
    (tmp_path / 'source').mkdir()
    torch.save(content, tmp_path / 'source' / 'a.pt')
    fields |= {'validation_fraction': 0}
    assert captions_of(tmp_path / 'source', tmp_path / 'plan', **fields) == [b'a', b'b']


def test_lists_within_lists_end(tmp_path):
    endless: list[Any] = []
    endless.append(endless)
    deep = 'a'
    for _ in range(200):
        deep = [deep]
    texts = [[['a']], endless, deep, 'b']
    source = write_source(tmp_path / 'source', 'pt', texts)
    assert captions_of(source, tmp_path / 'plan', validation_fraction=0) == [b'a', b'b']
    rows = [f'{{"caption": {x}}}' for x in ('"a"', '[' * 500 + '"b"' + ']' * 500, '["c"]')]
    source = write_source(tmp_path / 'tar', 'json', rows)
    assert captions_of(source, tmp_path / 'other', validation_fraction=0) == [b'a', b'c']


NO_TEXTS = {
    'fewer than rows': (['a'], r'captions has 1 entry, expected 2, one for each row'),
    'a dict among texts': (
        ['a', {'en': 'b'}],
        r'captions of row 1 is a dict, expected a text, bytes of UTF-8 or',
    ),
    'numbers': (
        [1, 2],
        r"captions holds a list without texts, expected .*; its texts are \['alt'\]",
    ),
    'a tensor': (torch.arange(2), r'captions holds a Tensor, expected texts, one for each row'),
    'a dict': ({0: 'a', 1: 'b'}, r'captions holds a dict, expected texts'),
    'one text': ('ab', r'captions holds a str, expected texts'),
}


@pytest.mark.parametrize(('captions', 'message'), NO_TEXTS.values(), ids=NO_TEXTS)
def test_what_is_no_text_of_a_pt_file_is_told_as_it_is(tmp_path, captions, message):
    (tmp_path / 'source').mkdir()
    content = {'latents': torch.from_numpy(LATENTS[:2]), 'keys': torch.arange(2)}
    torch.save(content | {'captions': captions, 'alt': ['a', 'b']}, tmp_path / 'source/a.pt')
    with pytest.raises(ValueError, match=message):
        make_plan(tmp_path / 'source', tmp_path / 'plan')


def test_hidden_members_of_a_tar_are_none_of_its_samples(tmp_path):
    """As macOS adds them."""
    source = write_source(tmp_path / 'source', 'txt', ['a', 'b'])
    with tarfile.open(source / 'a.tar', 'a') as tar:
        for name in ('._000.npy', 'x/._001.npy', '.DS_Store', '__MACOSX/000.npy', '.x/000.npy'):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b'\0\5\x16'))
    fields = {'validation_fraction': 0}
    assert captions_of(source, tmp_path / 'plan', **fields) == [b'a', b'b']


@pytest.mark.parametrize('first', [{'caption': None}, {}, {'other': 1}])
def test_the_first_sample_of_a_tar_need_not_have_a_caption(tmp_path, first):
    rows = [first, *({'caption': x, 'score': n / 2} for n, x in enumerate('abcdefgh'))]
    source = write_source(tmp_path / 'source', 'json', [json.dumps(row) for row in rows])
    expected = [x.encode() for x in 'abcdefgh']
    assert captions_of(source, tmp_path / 'plan') == expected
    assert dropped_of(source, tmp_path / 'dropped') == {schema.NO_CAPTION: 1}


def test_a_number_in_place_of_a_caption_is_its_text(tmp_path):
    rows = [{'caption': x} for x in (1984, 'nan', True, ['', 'a', 'b'], 2.5)]
    source = write_source(tmp_path / 'source', 'json', [json.dumps(row) for row in rows])
    expected = [b'1984', b'2.5', b'a', b'nan', b'true']
    assert captions_of(source, tmp_path / 'plan', validation_fraction=0) == expected


def empty_pt(path: pathlib.Path, **entries: Any) -> None:
    torch.save({'keys': torch.empty(0, dtype=torch.int64), **entries}, path)


# How to add a file without rows or without values, of each format; the second is in the way of
# nothing.
EMPTY: Mapping[str, Any] = {
    'pt of the same kind': lambda f: empty_pt(f / '0.pt', latents=torch.zeros(0, *SHAPE).half()),
    'pt of a list': lambda f: empty_pt(f / '0.pt', latents=torch.tensor([]), keys=torch.tensor([])),
    'pt of lists': lambda f: empty_pt(f / '0.pt', latents=[], keys=[], captions=[]),
    'pt without captions': lambda f: torch.save(
        {
            'latents': torch.from_numpy(LATENTS[:1]),
            'keys': torch.tensor([99]),
            'captions': [None],
        },
        f / '0.pt',
    ),
    'tar': lambda f: tarfile.open(f / '0.tar', 'w').close(),
    'tar of nulls': lambda f: latent_files.write_tar(
        f / '0.tar', {'0': {'npy': LATENTS[0], 'json': {'caption': None}}}
    ),
    'parquet': lambda f: pq.write_table(
        pa.table({'key': pa.array([], pa.float64()), 'caption': pa.nulls(0)}), f / 'texts/0.parquet'
    ),
    'parquet without columns': lambda f: pq.write_table(pa.table({}), f / 'texts/0.parquet'),
    'parquet of nulls': lambda f: pq.write_table(
        pa.table({'key': [99], 'caption': pa.nulls(1)}), f / 'texts/0.parquet'
    ),
}


@pytest.mark.parametrize('name', EMPTY)
def test_a_file_without_rows_or_values_is_a_count(tmp_path, name):
    source, fields = tmp_path / 'source', dict[str, Any]()
    texts: list[Any] = [f'Caption {n}.' for n in range(COUNT)]
    kind = name.split()[0]
    if kind == 'tar':
        write_source(source, 'json', [json.dumps({'caption': text}) for text in texts])
    else:
        write_source(source, kind, [x.encode() for x in texts] if kind == 'parquet' else texts)
    if kind == 'parquet':
        (source / 'texts').mkdir()
        (source / schema.CAPTIONS_FILE).rename(source / 'texts' / '1.parquet')
        fields['captions'] = 'texts'
    expected = captions_of(source, tmp_path / 'before', **fields)
    EMPTY[name](source)
    assert captions_of(source, tmp_path / 'after', **fields) == expected
    settings = embed_captions.EmbedSettings(**fields)
    report = embed_captions.embed(source, 'hash', tmp_path / 'x', settings)
    assert report.num_captions == COUNT
    assert dry_run.plan_or_estimate(str(source), BuildSettings(**fields)).num_records == COUNT


def test_an_empty_shard_of_mds_is_a_count(tmp_path):
    columns = {'caption': 'str', 'latents_64': 'ndarray:float16:4,8,8'}
    rows = [{'caption': f'{n}', 'latents_64': x} for n, x in enumerate(LATENTS)]
    latent_files.write_mds(tmp_path / 'source', [[], rows, []], columns)
    assert len(captions_of(tmp_path / 'source', tmp_path / 'plan')) == COUNT


def test_an_empty_safetensors_file_is_a_count(tmp_path):
    labels = np.arange(COUNT)
    save_file({'latents': LATENTS[:0], 'labels': labels[:0]}, tmp_path / '0.safetensors')
    save_file({'latents': np.zeros(0)}, tmp_path / '1.safetensors')
    with pytest.raises(ValueError, match=r'0\.safetensors: has no rows, .* of the 2 files that'):
        make_plan(tmp_path, tmp_path / 'empty')
    save_file({'latents': LATENTS, 'labels': labels}, tmp_path / '2.safetensors')
    assert len(captions_of(tmp_path, tmp_path / 'plan')) == COUNT


@pytest.mark.parametrize(
    'name', [x for x in EMPTY if x in ('pt of a list', 'pt of lists', 'tar', 'parquet')]
)
def test_files_of_which_none_has_rows_are_refused(tmp_path, name):
    source, fields = tmp_path / 'source', dict[str, Any]()
    (source / 'texts').mkdir(parents=True)
    if name == 'parquet':
        write_source(source, 'pt', ['a'])
        fields['captions'] = 'texts'
    EMPTY[name](source)
    with pytest.raises(ValueError, match=r'/0\.(pt|tar|parquet): has no rows\.'):
        make_plan(source, tmp_path / 'plan', **fields)


def test_parts_of_a_column_without_rows_or_values_are_counts(tmp_path):
    parts = [
        {'key': pa.array([], pa.int64()), 'size': pa.nulls(0)},
        {'key': [1, 2], 'size': pa.array([3, 4], pa.int32())},
        {'key': [5], 'size': pa.nulls(1)},
    ]
    for number, part in enumerate(parts):
        pq.write_table(pa.table(part), tmp_path / sidecar.part_name(number, 3))
    files = sidecar.find_sidecar_files(tmp_path)
    scratch = Scratch(tmp_path / 'scratch')
    keys = np.array([2, 1, 5])
    sidecar.join_values(files, str(tmp_path / 'x'), keys, hold=scratch.hold, column='size')
    values = KeyedValues(str(tmp_path / 'x'))
    assert values.read_array(values.places).tolist() == [4, 3]
    with pytest.raises(ValueError, match=r'part-00000-of-00001\.parquet: has no rows'):
        (tmp_path / 'empty').mkdir()
        pq.write_table(pa.table(parts[0]), tmp_path / 'empty' / sidecar.part_name(0, 1))
        files = sidecar.find_sidecar_files(tmp_path / 'empty')
        sidecar.join_values(files, str(tmp_path / 'y'), keys, hold=scratch.hold, column='size')
