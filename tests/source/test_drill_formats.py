"""A drill: random damages of sources of all formats end in the right records or name the file.

`make slow` runs 2,000 of them (10 minutes); `COYO11M_DRILL_SEED` chooses others.
"""

import itertools
import os
import pathlib
import random
import shutil

import pytest

import input_pipeline
from coyo11m_tfds import mirror, schema
from coyo11m_tfds.source import formats
from coyo11m_tfds.storage import source_files
from tests import built, test_formats
from tests.source import test_drill_damages
from tests.source.test_drill_damages import DAMAGES
from tests.test_formats import FORMATS, Truth

SEED = int(os.environ.get('COYO11M_DRILL_SEED', '0'))
ROWS = 24
COUNTS = pytest.mark.parametrize(
    'count', [6, pytest.param(500, marks=pytest.mark.slow)], ids=['few', 'many']
)


@pytest.fixture(scope='module', params=FORMATS)
def made(request, tmp_path_factory) -> tuple[pathlib.Path, Truth]:
    """A source that `mirror` has made, so that records tell what its files were."""
    folder = tmp_path_factory.mktemp('plain') / request.param
    truth = test_formats.make_source(folder, request.param, ROWS)
    copy = tmp_path_factory.mktemp('copy') / request.param
    mirror.mirror(folder, copy)
    return copy, truth


def damage(folder: pathlib.Path, choose: random.Random) -> pathlib.Path:
    """Damages a file of a source, maybe so that it stays as it was; returns its path."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    path = choose.choice(paths)
    other = choose.choice([p for p in paths if p != path])
    data = bytearray(path.read_bytes())
    choose.choice(DAMAGES)(data, choose, other.read_bytes())
    replace(path, data)
    return path


def replace(path: pathlib.Path, data: bytes) -> None:
    """Writes a new file, as whoever has the old one mapped may still read it."""
    path.unlink()
    path.write_bytes(data)


@COUNTS
def test_random_damages_before_a_build(made, tmp_path, count: int):
    source, truth = made
    expected = {key: (crops.tobytes(), caption) for key, (crops, caption) in truth.items()}
    failures = []
    for number in range(count):
        seed = f'{SEED}-{number}'
        damaged, out = tmp_path / 'damaged', tmp_path / 'out'
        shutil.copytree(source, damaged)
        path = damage(damaged, random.Random(seed))
        if path.read_bytes() != (source / path.name).read_bytes() and (
            problem := test_drill_damages.check(damaged, path, out, expected)
        ):
            failures.append(f'seed {seed}: {path.name}: {problem}')
        shutil.rmtree(damaged)
        shutil.rmtree(out, ignore_errors=True)
    assert not failures, f'{len(failures)} of {count}:\n' + '\n'.join(failures[:20])


@COUNTS
def test_random_damages_of_files_without_records(made, tmp_path, count: int):
    """Whatever is in a file: it is opened, or a line names it."""
    source, _ = made
    [*paths] = sorted(path for path in source.iterdir() if path.suffix == f'.{source.name}')
    refused, failures = 0, []
    for number in range(4 * count):
        choose = random.Random(f'{SEED}-{number}')
        path = tmp_path / paths[0].name
        data = bytearray(paths[0].read_bytes())
        choose.choice(DAMAGES)(data, choose, choose.randbytes(2000))
        path.write_bytes(data)
        try:
            file = formats.open_file(source_files.describe(path), str(path))
            for name in {*file.texts, *file.numbers, file.label_column} - {''}:
                assert len(file.column(name)) == len(file.keys)
            raw, _ = file.latents(range(len(file.keys)))
            assert raw.shape == (len(file.keys), file.row_nbytes)
        except ValueError as error:
            refused += 1
            if path.name not in str(error) or len(str(error).splitlines()) != 1:
                failures.append(f'{number}: {error}')
        except Exception as error:
            failures.append(f'{number}: {type(error).__name__}: {error}')
    assert not failures, f'{len(failures)} of {4 * count}:\n' + '\n'.join(failures[:20])
    assert refused


@COUNTS
def test_random_damages_of_files_in_place(made, tmp_path, count: int):
    """Rows have checksums of their own: readers skip what is damaged, or name the file."""
    source, truth = made
    folder = tmp_path / source.name
    shutil.copytree(source, folder)
    data_set = built.build(folder, '', tmp_path / 'data', latents='in_place')
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    failures, noticed = [], 0
    for number in range(count):
        path = damage(folder, random.Random(f'{SEED}-{number}'))
        try:
            batches = input_pipeline.train_batches(
                data_set,
                batch_size=4,
                seed=number,
                lanes=2,
                on_bad_records='skip',
                max_bad_fraction=1.0,
                features=(schema.KEY, schema.LATENTS),
            )
            for batch in itertools.islice(batches, 8):
                noticed += int((~batch['mask']).sum())
                for key, x in zip(
                    batch['key'][batch['mask']], batch['latents'][batch['mask']], strict=True
                ):
                    crops = [crop.tobytes() for crop in truth[int(key)][0]]
                    if x.tobytes() not in crops:
                        failures.append(f'{number}: key {key} of {path.name} is another')
        except (ValueError, OSError) as error:
            noticed += 1
            if path.name not in str(error):
                failures.append(f'{number}: {error}')
        replace(path, before[path])
    assert not failures, f'{len(failures)} of {count}:\n' + '\n'.join(failures[:20])
    assert noticed
