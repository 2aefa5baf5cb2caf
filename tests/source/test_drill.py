"""A drill: random damages of sources end in the right records, or in a line that names the file.

`make slow` runs thousands of them (15 minutes); `COYO11M_DRILL_SEED` chooses others.
"""

import itertools
import os
import pathlib
import random
import shutil
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import input_pipeline
from coyo11m_tfds import mirror, schema, storage
from coyo11m_tfds.source import formats
from tests import built, joins, made_sources, test_formats
from tests.convert import build_kills, build_program
from tests.source.damages import damages
from tests.test_formats import FORMATS, Truth

SEED = int(os.environ.get('COYO11M_DRILL_SEED', '0'))
ROWS = 24
COYO = 'coyo'  # `.pt` files of latents, and a Parquet file of captions
COUNTS = pytest.mark.parametrize(
    'count', [5, pytest.param(500, marks=pytest.mark.slow)], ids=['few', 'many']
)


def damage(folder: pathlib.Path, choose: random.Random) -> tuple[pathlib.Path, str]:
    """Damages a file, maybe so that it stays as it was; returns its path and the damage."""
    files = [path for path in folder.rglob('*.*') if path.is_file()]
    paths = sorted(path for path in files if '.mirror' not in path.parts)
    path = choose.choice(paths)
    other = choose.choice([p for p in paths if p != path and p.suffix == path.suffix] or paths)
    kinds = damages(path.read_bytes(), choose, other.read_bytes())
    kind = choose.choice(list(kinds))
    replace(path, kinds[kind])
    return path, kind


def replace(path: pathlib.Path, data: bytes) -> None:
    """Writes a new file, as whoever has the old one mapped may still read it."""
    path.unlink()
    path.write_bytes(data)


@pytest.fixture(scope='module', params=[COYO, *FORMATS])
def made(request, tmp_path_factory) -> tuple[pathlib.Path, Truth]:
    """A source that `mirror` has made, so that records tell what its files were."""
    folder = tmp_path_factory.mktemp('plain') / request.param
    if request.param == COYO:
        truth = make_coyo(folder)
    else:
        truth = test_formats.make_source(folder, request.param, ROWS)
    copy = tmp_path_factory.mktemp('copy') / request.param
    mirror.mirror(folder, copy)
    return copy, truth


def make_coyo(folder: pathlib.Path) -> Truth:
    """The pages of captions have checksums."""
    files = [range(ROWS // 2), range(ROWS // 2, ROWS)]
    made_sources.write_source(folder, files)
    captions = {key: f'What the picture of {key} shows, in a dozen words.' for key in range(ROWS)}
    made_sources.write_captions(folder, captions)
    path = folder / schema.CAPTIONS_FILE
    pq.write_table(pq.read_table(path), path, write_page_checksum=True)
    latents = [made_sources.make_latents(len(keys), seed=sum(keys)).numpy() for keys in files]
    rows = enumerate(np.concatenate(latents))
    return {key: (crops, captions[key].encode()) for key, crops in rows}


def is_clear(error: Exception, path: pathlib.Path) -> bool:
    """Whether it is one line that names the file."""
    message = str(error)
    is_one_line = path.name in message and len(message.splitlines()) == 1
    return isinstance(error, (ValueError, OSError)) and is_one_line


def read_records(final: pathlib.Path) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
    """Key, and latents and caption, of every record of a data set."""
    import tensorflow as tf  # takes seconds

    for path in sorted(final.glob('*-of-*')):
        for record in built.split_records(path.read_bytes()):
            feature = tf.train.Example.FromString(record).features.feature
            values = (feature[name].bytes_list.value[0] for name in ('latents', 'caption'))
            yield feature['key'].int64_list.value[0], tuple(values)


def build_damaged(
    source: pathlib.Path, truth: Truth, folder: pathlib.Path, seed: str
) -> Iterator[str]:
    """Builds from a damaged copy of a source; gives what is wrong with the outcome."""
    copy, final = folder / 'source', build_kills.final_folder(folder / 'out')
    shutil.copytree(source, copy)
    path, kind = damage(copy, random.Random(seed))
    # Without records nothing says that a whole and sound file is another one than it was.
    if kind != 'another file' or (copy / '.mirror').exists():
        try:
            build_program.build(str(copy), str(final), '{"num_workers": 1}')
            found = list(read_records(final))
            expected = {key: (crops.tobytes(), text) for key, (crops, text) in truth.items()}
            if len(found) != len(truth) or dict(found) != expected:
                yield f'seed {seed}: {kind} of {path.name}: other records'
        except Exception as error:
            if not is_clear(error, path) or build_kills.is_complete(final):
                yield f'seed {seed}: {kind} of {path.name}: {error!r}'
    for made_here in (copy, folder / 'out'):
        shutil.rmtree(made_here, ignore_errors=True)


@COUNTS
def test_a_build_has_the_right_records_or_names_the_file(made, tmp_path, count):
    problems = (build_damaged(*made, tmp_path, f'{SEED}-{number}') for number in range(count))
    assert not [*itertools.chain(*problems)]


@COUNTS
def test_checksums_inside_the_files_do_as_well_as_those_that_mirror_recorded(tmp_path, count):
    truth = make_coyo(tmp_path / COYO)
    problems = (
        build_damaged(tmp_path / COYO, truth, tmp_path, f'{SEED}-{number}')
        for number in range(count)
    )
    assert not [*itertools.chain(*problems)]


@COUNTS
def test_captions_whose_pages_have_checksums_are_right_or_refused(tmp_path, count):
    """Nothing but the checksums in the file tells what it was."""
    texts = {
        7 * key: f'Caption {key}: ' + ' '.join(map(str, range(key % 40))) for key in range(900)
    }
    path, problems, refused = tmp_path / schema.CAPTIONS_FILE, [], 0
    keys = random.Random(0).sample(sorted(texts), len(texts))
    columns = {'url': [f'http://x/{key}' for key in keys], 'key': keys}
    table = pa.table(columns | {schema.DEFAULT_CAPTION_COLUMN: [texts[key] for key in keys]})
    pq.write_table(table, path, row_group_size=250, write_page_checksum=True)
    original = path.read_bytes()
    for number in range(4 * count):
        choose = random.Random(f'{SEED}-{number}')
        path.write_bytes(choose.choice([*damages(original, choose, original[::-1]).values()]))
        try:
            found = joins.of_captions(path, tmp_path / f'joined-{number}')
            values = zip(found.places.tolist(), found.read(found.places), strict=True)
            if {key: text.decode() for key, text in values} != texts:
                problems.append(f'{number}: other contents were accepted')
        except Exception as error:
            refused += 1
            if not is_clear(error, path):
                problems.append(f'{number}: {error!r}')
        shutil.rmtree(tmp_path / f'joined-{number}', ignore_errors=True)
    assert not problems
    assert refused > 2 * count


@COUNTS
def test_a_file_without_records_is_opened_or_named(made, tmp_path, count):
    """Whatever is in it."""
    source, _ = made
    original = min(path for path in source.rglob('*0*.*') if path.suffix != '.json')
    problems, refused = [], 0
    for number in range(4 * count):
        choose = random.Random(f'{SEED}-{number}')
        path, others = tmp_path / original.name, choose.randbytes(2000)
        path.write_bytes(choose.choice([*damages(original.read_bytes(), choose, others).values()]))
        try:
            file = formats.open_file(storage.describe_file(path), str(path))
            for name in {*file.texts, *file.numbers, file.label_column} - {''}:
                assert len(file.column(name)) == len(file.keys)
            raw, _ = file.latents(range(len(file.keys)))
            assert raw.shape == (len(file.keys), file.row_nbytes)
        except Exception as error:
            refused += 1
            if not is_clear(error, path):
                problems.append(f'{number}: {error!r}')
    assert not problems
    assert refused


@COUNTS
def test_a_file_in_place_has_the_right_rows_or_is_named(made, tmp_path, count):
    """Rows have checksums of their own: readers skip what is damaged, or name the file."""
    source, truth = made
    folder = tmp_path / source.name
    shutil.copytree(source, folder)
    data_set = built.build(folder, '', tmp_path / 'data', latents='in_place')
    before = {path: path.read_bytes() for path in folder.rglob('*.*') if path.is_file()}
    order = {'batch_size': 4, 'lanes': 2, 'features': (schema.KEY, schema.LATENTS)}
    order |= {'on_bad_records': 'skip', 'max_bad_fraction': 1.0}
    problems, noticed = [], 0
    for number in range(count):
        path, _ = damage(folder, random.Random(f'{SEED}-{number}'))
        try:
            batches = input_pipeline.train_batches(data_set, seed=number, **order)
            for batch in itertools.islice(batches, 8):
                noticed += int((~batch['mask']).sum())
                there = (batch[name][batch['mask']] for name in (schema.KEY, schema.LATENTS))
                for key, x in zip(*there, strict=True):
                    if x.tobytes() not in [crop.tobytes() for crop in truth[int(key)][0]]:
                        problems.append(f'{number}: key {key} of {path.name} is another')
        except (ValueError, OSError) as error:
            noticed += 1
            if path.name not in str(error):
                problems.append(f'{number}: {error}')
        replace(path, before[path])
    assert not problems
    assert noticed
