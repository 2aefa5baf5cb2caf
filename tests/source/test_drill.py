"""A drill: random damages of sources end in the right contents, or in a line that names the file.

`make slow` runs thousands of them (15 minutes); `COYO11M_DRILL_SEED` chooses others.
"""

import itertools
import pathlib
import random
import shutil
from collections.abc import Callable

import numpy as np
import pyarrow.parquet as pq
import pytest

import input_pipeline
from coyo11m_tfds import mirror, schema, storage
from coyo11m_tfds.source import formats
from tests import built, made_sources, test_formats
from tests.convert import build_kills, build_program
from tests.damages import damages, drill, replace
from tests.test_formats import FORMATS, Truth

ROWS = 24
COYO = 'coyo'  # `.pt` files of latents, and a Parquet file of captions
COUNTS = pytest.mark.parametrize(
    'count', [5, pytest.param(500, marks=pytest.mark.slow)], ids=['few', 'many']
)


KINDS = [(kind, True) for kind in (COYO, *FORMATS)]
PARQUET = 'parquet', True  # not in place


@pytest.fixture(scope='module', params=KINDS, ids=str)
def made(request, tmp_path_factory) -> tuple[pathlib.Path, Truth]:
    """A source, maybe one that `mirror` has made, so that records tell what its files were."""
    kind, is_mirrored = request.param
    folder = tmp_path_factory.mktemp('plain') / kind
    truth = make_coyo(folder) if kind == COYO else test_formats.make_source(folder, kind, ROWS)
    if not is_mirrored:
        return folder, truth
    copy = tmp_path_factory.mktemp('copy') / kind
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


def damage_one(folder: pathlib.Path, choose: random.Random) -> pathlib.Path:
    """Damages a file of a source, maybe so that it stays as it was."""
    files = [path for path in folder.rglob('*.*') if path.is_file()]
    paths = sorted(path for path in files if '.mirror' not in path.parts)
    path = choose.choice(paths)
    other = choose.choice([p for p in paths if p != path and p.suffix == path.suffix] or paths)
    kinds = damages(path.read_bytes(), choose, other.read_bytes())
    if not (folder / '.mirror').exists():
        # Without records nothing says that a whole and sound file is another one than it was.
        del kinds['another file']
    replace(path, choose.choice([*kinds.values()]))
    return path


def read_records(final: pathlib.Path) -> list[tuple[int, tuple[bytes, bytes]]]:
    """Key, and latents and caption, of every record of a data set."""
    import tensorflow as tf  # takes seconds

    records = []
    for path in sorted(final.glob('*-of-*')):
        for record in built.split_records(path.read_bytes()):
            feature = tf.train.Example.FromString(record).features.feature
            latents, caption = (feature[x].bytes_list.value[0] for x in ('latents', 'caption'))
            records.append((feature['key'].int64_list.value[0], (latents, caption)))
    return records


@COUNTS
@pytest.mark.parametrize('made', [*KINDS, PARQUET, (COYO, False)], ids=str, indirect=True)
def test_a_build_has_the_right_records_or_names_the_file(made, tmp_path, count):
    source, truth = made
    expected = sorted((key, (x.tobytes(), caption)) for key, (x, caption) in truth.items())
    copy, final = tmp_path / 'source', build_kills.final_folder(tmp_path / 'out')

    def damage(choose: random.Random) -> pathlib.Path:
        for folder in (copy, tmp_path / 'out'):
            shutil.rmtree(folder, ignore_errors=True)
        return damage_one(shutil.copytree(source, copy), choose)

    def build(path: pathlib.Path) -> bool:
        try:
            build_program.build(str(copy), str(final), '{"num_workers": 1}')
        except Exception:
            assert not build_kills.is_complete(final)
            raise
        return sorted(read_records(final)) == expected

    drill(count, damage, build)


def damaging(path: pathlib.Path, whole: bytes) -> Callable[[random.Random], pathlib.Path]:
    """Makes the damage of one file, whose bytes are `whole`."""

    def damage(choose: random.Random) -> pathlib.Path:
        others = choose.choice([choose.randbytes(2000), whole[::-1]])
        replace(path, choose.choice([*damages(whole, choose, others).values()]))
        return path

    return damage


@COUNTS
@pytest.mark.parametrize('made', [*KINDS, PARQUET], ids=str, indirect=True)
def test_a_file_without_records_is_opened_or_named(made, tmp_path, count):
    """Whatever is in it."""
    original = min(path for path in made[0].rglob('*0*.*') if path.suffix != '.json')

    def read(path: pathlib.Path) -> bool:
        file = formats.open_file(storage.describe_file(path), str(path))
        names = file.column_names()
        for name in names.texts:
            assert len(file.text_column(name)) == len(file.keys)
        for name in {*names.numbers, names.labels} - {''}:
            assert len(file.number_column(name)) == len(file.keys)
        raw, _ = file.latents(range(len(file.keys)))
        return not len(file.keys) or raw.shape == (len(file.keys), file.row_nbytes)

    assert drill(4 * count, damaging(tmp_path / original.name, original.read_bytes()), read)


@COUNTS
def test_a_file_in_place_has_the_right_rows_or_is_named(made, tmp_path, count):
    """Rows have checksums of their own: readers skip what is damaged, or name the file."""
    source, truth = made
    folder = shutil.copytree(source, tmp_path / source.name)
    data_set = built.build(folder, '', tmp_path / 'data', latents='in_place')
    whole = {path: path.read_bytes() for path in folder.rglob('*.*') if path.is_file()}
    order = {'batch_size': 4, 'lanes': 2, 'features': (schema.KEY, schema.LATENTS)}
    order |= {'on_bad_records': 'skip', 'max_bad_fraction': 1.0}
    seeds, num_masked = itertools.count(), 0

    def damage(choose: random.Random) -> pathlib.Path:
        for path, data in whole.items():
            replace(path, data)
        return damage_one(folder, choose)

    def read(path: pathlib.Path) -> bool:
        nonlocal num_masked
        batches = input_pipeline.train_batches(data_set, seed=next(seeds), **order)
        for batch in itertools.islice(batches, 8):
            mask = batch[input_pipeline.MASK]
            num_masked += int((~mask).sum())
            for key, x in zip(batch[schema.KEY][mask], batch[schema.LATENTS][mask], strict=True):
                if x.tobytes() not in [crop.tobytes() for crop in truth[int(key)][0]]:
                    return False
        return True

    assert drill(count, damage, read) + num_masked
