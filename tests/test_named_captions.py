"""Captions in files and columns of any name: the same data set, and all faults in one message."""

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import tempfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from coyo11m_tfds import doctor, dry_run, embed_captions, mirror, schema
from coyo11m_tfds.convert.build_settings import BuildSettings
from coyo11m_tfds.source import source_folder
from coyo11m_tfds.source.captions import CaptionFiles
from coyo11m_tfds.source.keyed_values import KeyedValues
from coyo11m_tfds.storage.scratch import Scratch
from tests import built, made_sources
from tests.convert import plans
from tests.fakes import latent_files

FILES = [range(40), range(40, 90)]
CONFIG = {'key_column': 'image_id', 'caption_column': 'blip'}


@pytest.fixture
def source(tmp_path) -> pathlib.Path:
    return made_sources.write_source(tmp_path / 'source', FILES)


def shards_of(data_set: pathlib.Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(data_set.glob('*.tfrecord-*'))]


@pytest.mark.parametrize('parts', [0, 4])
@pytest.mark.parametrize('storage', ['disk', 'gs', 'hf'])
def test_other_names_give_the_shards_of_the_usual_ones(source, tmp_path, request, storage, parts):
    expected = shards_of(built.build(source, '', tmp_path / 'usual'))
    captions = made_sources.rename_columns(source, 'image_id', 'blip', parts, 'z')
    root: str | pathlib.Path = source
    if storage == 'gs':
        request.getfixturevalue('gcs').upload_folder(source, root := 'gs://bucket/source')
    if storage == 'hf':
        files = {str(p.relative_to(source)): p for p in source.rglob('*') if p.is_file()}
        request.getfixturevalue('hub').commit(files)
        root = 'hf://datasets/owner/name'
    settings = embed_captions.EmbedSettings(captions=captions, **CONFIG)
    embed_captions.embed(root, 'hash', tmp_path / 'hash', settings)
    for sidecar in ('', tmp_path / 'hash'):
        out = tmp_path / f'other{bool(sidecar)}'
        fields = CONFIG | {'captions': captions, 'latents_from': 'z'}
        data_set = built.build(root, sidecar, out, **fields)
        assert sidecar or shards_of(data_set) == expected
    metadata = json.loads((data_set / schema.METADATA_FILE).read_text())
    names = set(metadata[schema.META_SOURCE]['files'])
    assert len({name for name in names if name.startswith(captions)}) == max(1, parts)
    assert metadata[schema.META_CAPTION_COLUMN] == 'blip'


@settings(max_examples=25)
@given(
    rows=st.lists(st.tuples(st.integers(-9, 9), st.sampled_from(['a', 'b', None])), min_size=1),
    cuts=st.lists(st.integers(0, 99), max_size=3),
    text_keys=st.booleans(),
)
def test_files_of_a_folder_are_joined_like_one(rows, cuts, text_keys):
    kind = pa.string() if text_keys else pa.int32()
    keys = pa.array([f'{key:04}' if text_keys else key for key, _ in rows], kind)
    table = pa.table({'key': keys, 'text': pa.array([text for _, text in rows], pa.string())})
    bounds = sorted({0, len(rows), *(cut % len(rows) for cut in cuts)})
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / 'data').mkdir()
        pq.write_table(table, folder / 'one.parquet')
        for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
            pq.write_table(table[start:stop], folder / 'data' / f'{number}.parquet')
        joined = []
        for captions in ('one.parquet', 'data'):
            files = source_folder.find_captions(folder, captions).values()
            chosen = CaptionFiles.choose(files, '', schema.DEFAULT_CAPTION_COLUMN)
            chosen.join(str(folder / f'of-{captions}'), Scratch(folder / 'scratch'))
            values = KeyedValues(str(folder / f'of-{captions}'))
            texts = values.read(values.places)
            joined.append((values.facts, values.places.tolist(), values.sizes.tolist(), texts))
        assert joined[0] == joined[1]
        expected = dict(reversed(rows))
        assert dict(zip(joined[0][1], joined[0][3], strict=True)) == {
            key: text and text.encode() for key, text in expected.items()
        }


KEYS = {
    'the default': ({'key': [3], 'id': [1]}, '', 'key'),
    'a name': ({'key': [3], 'id': [1]}, 'id', 'id'),
    'texts that are numbers': ({'key': ['003']}, '', 'key'),
    'another name': ({'id': [1]}, '', None),
    'numbers with a point': ({'id': [1.5]}, 'id', None),
    'bytes': ({'id': [b'1']}, 'id', None),
    'a name that is not there': ({'key': [3]}, 'id', None),
}


@pytest.mark.parametrize(('columns', 'key_column', 'chosen'), KEYS.values(), ids=KEYS)
def test_the_column_of_keys(tmp_path, columns, key_column, chosen):
    pq.write_table(pa.table(columns | {'caption': ['a']}), tmp_path / 'x.parquet')
    files = source_folder.find_captions(tmp_path, 'x.parquet').values()
    if chosen:
        assert CaptionFiles.choose(files, key_column, 'caption').key_column == chosen
        return
    with pytest.raises(ValueError, match=f"key_column='{key_column or 'key'}': .*set key_column"):
        CaptionFiles.choose(files, key_column, 'caption')


@pytest.mark.parametrize('is_damaged', [True, False])
def test_no_other_captions_take_the_place_of_some_that_cannot_be_read(tmp_path, is_damaged):
    path, default = tmp_path / 'captions.parquet', schema.DEFAULT_CAPTION_COLUMN
    first = ['good'] if is_damaged else [{'no': 'text'}]
    pq.write_table(pa.table({'key': [1], 'caption_llava': first, 'caption': ['bad']}), path)
    if is_damaged:
        path.write_bytes(path.read_bytes().replace(b'caption_llava', b'cappion_llava', 1))
    message = 'cappion_llava.*caption_llava.*when it was written' if is_damaged else 'no such texts'
    with pytest.raises(ValueError, match=rf'captions\.parquet.*{message}'):
        CaptionFiles.choose(source_folder.find_captions(tmp_path, path.name).values(), '', default)


def test_all_files_have_the_columns_of_the_first(tmp_path):
    pq.write_table(pa.table({'key': [1], 'text': ['a'], 'prompt': ['b']}), tmp_path / '1.parquet')
    pq.write_table(pa.table({'id': [1], 'caption': ['a']}), tmp_path / '2.parquet')
    files = source_folder.find_captions(tmp_path, '.').values()
    with pytest.raises(ValueError) as error:
        CaptionFiles.choose(files, '', schema.DEFAULT_CAPTION_COLUMN)
    assert str(error.value).count('2.parquet has no such') == 2
    with pytest.raises(ValueError, match=r"caption_column='key': .*but \['text', 'prompt'\]: set"):
        CaptionFiles.choose(files, '', 'key')
    assert CaptionFiles.choose([*files][:1], '', 'prompt').caption_column == 'prompt'


class ChangingScratch(Scratch):
    """Gives files that are written again as soon as they are held."""

    @contextlib.contextmanager
    def hold_all(self, files, **options):
        with super().hold_all(files, **options) as paths:
            os.utime(files[0].path, (1, 1))
            yield paths


def test_captions_that_change_while_they_are_read_are_refused(source, tmp_path):
    files = source_folder.find_captions(source).values()
    chosen = CaptionFiles.choose(files, '', 'caption')
    with pytest.raises(OSError, match=r'meta\.parquet has changed since it was listed'):
        chosen.join(str(tmp_path / 'joined'), ChangingScratch(tmp_path / 'scratch'))


@pytest.mark.parametrize('keys', [(5, 3, 8), range(9, 0, -3)], ids=['index', 'range'])
@pytest.mark.parametrize('name', ['id', 'key', None])
def test_a_named_index_of_pandas_is_the_key(tmp_path, keys, name):
    frame = pd.DataFrame({'caption': ['a', 'b', 'c']}, index=pd.Index(keys, name=name))
    frame.to_parquet(tmp_path / 'x.parquet')
    files = source_folder.find_captions(tmp_path, 'x.parquet').values()
    if not name:  # it may be the number of the row
        with pytest.raises(ValueError, match='key_column'):
            CaptionFiles.choose(files, '', 'caption')
        return
    chosen = CaptionFiles.choose(files, '', 'caption')
    chosen.join(str(tmp_path / 'joined'), Scratch(tmp_path / 'scratch'))
    values = KeyedValues(str(tmp_path / 'joined'))
    texts = zip(values.places.tolist(), values.read(values.places), strict=True)
    assert dict(texts) == dict(zip(keys, (b'a', b'b', b'c'), strict=True))


def spoil(source: pathlib.Path, *changes: str) -> None:
    """Makes the latents of the second file, or the files of captions, as nobody wants them."""
    replace = {
        'keys': {'keys': None},
        'latents': {'latents': None, 'z': made_sources.make_latents(50)},
        'shape': {'latents': made_sources.make_latents(50)[:, 0, 0]},
        'dtype': {'latents': made_sources.make_latents(50).double()},
    }
    entries: dict = {}
    for change in changes:
        entries |= replace[change]
    made_sources.write_pt(made_sources.latents_file(source, 1), FILES[1], replace=entries)


NO_KEYS = "000010-000019.pt: lacks 'keys'; it has .* Set key_column"
NO_LATENTS = "000010-000019.pt: lacks 'latents'; it has .*'z'.* Set latents_from"
NO_FILE = r"captions='x.parquet': .*/x.parquet is neither .* has \['meta.parquet'\], an absolute"
NO_KEY = r"key_column='key': .*/meta.parquet has no such integers, but \['id'\]: set key_column"
NO_TEXTS = "caption_column='caption_llava': .*/meta.parquet has no such texts, but .*'alt'"
NO_SIDECAR = 'text_embeddings: .*absent: there is no such folder'
SHAPE = r'000010-000019.pt: latents has shape \(50, 32, 32\), expected'


FAULTS = {
    'no file of captions': ({'captions': 'x.parquet'}, [], [NO_FILE]),
    'no file of captions and no keys': ({'captions': 'x.parquet'}, ['keys'], [NO_FILE, NO_KEYS]),
    'no keys and texts of captions': ({'captions': 'meta.parquet'}, [], [NO_KEY, NO_TEXTS]),
    'no keys and texts of captions, and other latents': (
        {'captions': 'meta.parquet'},
        ['shape'],
        [NO_KEY, NO_TEXTS, SHAPE],
    ),
    'everything is missing': (
        {'captions': 'meta.parquet', 'text_embeddings': 'absent'},
        ['keys', 'latents'],
        [NO_SIDECAR, NO_KEY, NO_TEXTS, NO_KEYS, NO_LATENTS],
    ),
    'latents of another dtype': (
        {'captions': 'meta.parquet', 'key_column': 'id', 'caption_column': 'alt'},
        ['dtype'],
        ['expected a dense tensor of float16'],
    ),
}


@pytest.mark.parametrize(('fields', 'changes', 'messages'), FAULTS.values(), ids=FAULTS)
def test_all_faults_are_in_one_message(source, tmp_path, fields, changes, messages):
    (source / schema.CAPTIONS_FILE).unlink()
    pq.write_table(pa.table({'id': range(90), 'alt': ['a'] * 90}), source / 'meta.parquet')
    if changes:
        spoil(source, *changes)
    with pytest.raises(ValueError) as error:
        plans.make_plan(source, tmp_path / 'out', **fields)
    text = str(error.value)
    for message in messages:
        assert len(re.findall(message, text)) == 1, text
    assert (f'{len(messages)} faults: (1) ' in text) == (len(messages) > 1)
    with pytest.raises(ValueError, match=re.escape(text)):
        dry_run.plan_or_estimate(str(source), BuildSettings(**fields))
    assert not list(tmp_path.rglob('*.tfrecord*'))


def test_a_fault_of_all_files_is_told_once(tmp_path):
    source = made_sources.write_source(tmp_path / 'source', [[n] for n in range(20)])
    for number in range(20):
        replace = {'keys': None, 'latents': None}
        made_sources.write_pt(made_sources.latents_file(source, number), [number], replace=replace)
    with pytest.raises(ValueError, match=r'^2 faults: \(1\) .*000000-000009') as error:
        plans.make_plan(source, tmp_path / 'out')
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ('captions', 'names'),
    [
        ('a.parquet', ['a.parquet']),
        ('./data/', ['data/b.parquet', 'data/c.parquet']),
        ('.', ['a.parquet']),
        ('../beside', ['beside/d.parquet']),
        ('../beside/d.parquet', ['d.parquet']),
        ('{root}/data/b.parquet', ['data/b.parquet']),
        ('{root}/../beside', ['beside/d.parquet']),
        ('{root}', ['a.parquet']),
        ('', []),
    ],
)
def test_names_of_captions(tmp_path, captions, names):
    """Those in the source are relative to it, so that it may move."""
    root = tmp_path / 'source'
    for name in (
        'a.parquet',
        'data/c.parquet',
        'data/b.parquet',
        'data/b.txt',
        '../beside/d.parquet',
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b'x')
    files = source_folder.find_captions(root, captions.format(root=root))
    assert list(files) == names
    assert [file.name for file in files.values()] == [name.split('/')[-1] for name in names]


def test_captions_elsewhere_are_part_of_the_source(source, tmp_path):
    (source / schema.CAPTIONS_FILE).rename(tmp_path / 'texts.parquet')
    fields = {'captions': str(tmp_path / 'texts.parquet')}
    data_set = built.build(source, '', tmp_path / 'data', **fields)
    before = shards_of(data_set)
    mirror.mirror(source, tmp_path / 'copy', captions=fields['captions'])
    copy = {'captions': 'texts.parquet'}
    built.build(tmp_path / 'copy', '', tmp_path / 'data', **copy)  # is the one that is there
    table = pq.read_table(tmp_path / 'texts.parquet').slice(1)
    pq.write_table(table, tmp_path / 'texts.parquet')
    with pytest.raises(ValueError, match=r'texts\.parquet has other contents'):
        built.build(source, '', tmp_path / 'data', **fields)
    with pytest.raises(ValueError, match=r'coyo11m-meta\.parquet is new; texts\.parquet is miss'):
        shutil.copy(tmp_path / 'copy' / 'texts.parquet', source / schema.CAPTIONS_FILE)
        built.build(source, '', tmp_path / 'data')
    assert shards_of(data_set) == before
    (tmp_path / 'copy' / 'texts.parquet').write_bytes((tmp_path / 'texts.parquet').read_bytes())
    with pytest.raises(ValueError, match=r'texts\.parquet: has .* when it was mirrored'):
        built.build(tmp_path / 'copy', '', tmp_path / 'other', **copy)


@pytest.mark.parametrize('storage', ['disk', 'gs'])
@pytest.mark.parametrize('suffix', ['pt', 'safetensors', 'mds', 'tar'])
def test_keys_have_the_name_in_the_config(tmp_path, request, suffix, storage):
    """They are those of the latents, whatever else is there, and lead to the Parquet file."""
    source, keys = tmp_path / 'source', np.arange(7, 47)
    source.mkdir()
    latents = made_sources.make_latents(40)[:, 0].numpy()
    if suffix == 'pt':
        tensors = {'image_id': torch.from_numpy(keys.astype(np.int32)), 'keys': torch.zeros(40)}
        torch.save(tensors | {'latents': torch.from_numpy(latents)}, source / 'x.pt')
    elif suffix == 'safetensors':
        # So that the keys lie neither at the beginning nor at the end.
        others = {'a': np.zeros((40, 2000), np.int64), 'keys': keys[::-1].copy()}
        save_file(others | {'image_id': keys, 'latents': latents}, source / 'x.safetensors')
    elif suffix == 'mds':
        columns = {'latents_256': 'bytes', 'image_id': 'int64', 'key': 'int64'}
        rows = zip(latents, keys, keys[::-1], strict=True)
        latent_files.write_mds(
            source, [[dict(zip(columns, x, strict=True)) for x in rows]], columns
        )
    else:
        samples = {
            f'{n:04}': {'npy': x, 'json': {'image_id': int(keys[n]), 'key': 0}}
            for n, x in enumerate(latents)
        }
        latent_files.write_tar(source / 'x.tar', samples)
    table = pa.table({'image_id': keys, 'text': [f'Number {key}.' for key in keys]})
    pq.write_table(table, tmp_path / 'x.parquet')
    fields = {'captions': str(tmp_path / 'x.parquet'), 'key_column': 'image_id'}
    root: str | pathlib.Path = source
    if storage == 'gs':
        request.getfixturevalue('gcs').upload_folder(source, root := 'gs://bucket/source')
    plan = plans.make_plan(root, tmp_path / 'out', **fields)
    splits = plans.planned_keys(plan).values()
    shards = itertools.chain.from_iterable(splits)
    assert sorted(itertools.chain.from_iterable(shards)) == keys.tolist()
    assert plan.settings['key_column'] == 'image_id' and plan.caption_column == 'text'


@pytest.mark.parametrize('name', ['ids', 'image_id', 'key'])
def test_usual_names_of_keys_in_pt_files(tmp_path, name):
    source = made_sources.write_source(tmp_path / 'source', FILES)
    expected = plans.make_plan(source, tmp_path / 'a')
    for number, keys in enumerate(FILES):
        replace = {'keys': None, name: torch.tensor(keys, dtype=torch.int32)}
        made_sources.write_pt(made_sources.latents_file(source, number), keys, replace=replace)
    plan = plans.make_plan(source, tmp_path / 'b')
    assert plans.planned_keys(plan) == plans.planned_keys(expected)


def test_a_key_column_that_no_file_has_is_refused(tmp_path):
    samples = {f'{n}': {'npy': x, 'txt': 'a'} for n, x in enumerate(np.zeros((9, 4, 8, 8), 'f2'))}
    (tmp_path / 'source').mkdir()
    latent_files.write_tar(tmp_path / 'source' / 'x.tar', samples)
    with pytest.raises(ValueError, match=r"key_column='id': .*x\.tar has no such integers"):
        plans.make_plan(tmp_path / 'source', tmp_path / 'out', key_column='id')


def test_the_programs_have_the_flags(command, source, tmp_path):
    captions = made_sources.rename_columns(source, 'image_id', 'blip', parts=2)
    flags = [f'--{name}={value}' for name, value in (CONFIG | {'captions': captions}).items()]
    place = f'--source={source}'
    status, said, errors = command(embed_captions, place, f'--out={tmp_path / "h"}', *flags)
    assert status == 0 and '90 captions encoded' in said, errors
    status, said, errors = command(doctor, place, *flags, '--build_config={"key_column": "x"}')
    assert '.pt files and captions' in said and 'become 90 records' in said, said + errors
    status, said, errors = command(doctor, place, *flags[:1])
    assert status == 1 and 'coyo11m-meta.parquet is missing; set captions to a Parquet' in said
