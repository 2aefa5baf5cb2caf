"""A drill: columns.json, places, values and chunk indexes, damaged by accident or on purpose.

What comes is the right batches or an error that names the file. `make slow` runs 200 of them;
`COYO11M_DRILL_SEED` chooses others.
"""

import dataclasses
import json
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from coyo11m_tfds import schema
from coyo11m_tfds.dataset import columns
from coyo11m_tfds.storage import json_digest
from tests.damages import damages, drill, replace
from tests.reading import small_dataset
from tests.reading import test_row_checksums as row_checksums

COUNT = 200
# Not -1: the CRC-32C of 0xFFFFFFFF is itself, and a row of both would be whole.
NUMBERS = [-2, 0, 1, 7, 2**31, 2**32 - 1, 2**43, 2**62, 2**63 - 1, -(2**63)]
VALUES = [*NUMBERS, 2**70, 1.5, '12', None, True, [], {}, 'x' * 3000]


def places_in(x: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in what JSON holds."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in items:
        yield x, key
        yield from places_in(value)


def rewrite_json(data: bytes, choose: random.Random) -> bytes:
    """Somebody who means harm makes the digest right."""
    content = json.loads(data)
    for _ in range(choose.randrange(1, 4)):
        container, key = choose.choice(list(places_in(content)))
        if choose.random() < 0.15:
            del container[key]
        else:
            container[key] = choose.choice(VALUES)
    content.pop('digest', None)
    return json.dumps(content | {'digest': json_digest.sha256(content)}).encode()


def rewrite_numbers(data: bytes, choose: random.Random) -> bytes:
    array = np.frombuffer(data[128:], choose.choice([np.int64, np.uint32])).copy()
    for _ in range(choose.randrange(1, 4)):
        number = np.int64(choose.choice(NUMBERS)).astype(array.dtype)
        array[choose.randrange(len(array))] = number
    return data[:128] + array.tobytes()


def fix_places(path: pathlib.Path, file: pathlib.Path) -> None:
    """The CRC-32C of places that were changed on purpose."""
    described = columns.read_columns(path)
    crc32c = {schema.TRAIN: columns.array_crc32c(np.load(file))}
    latents = dataclasses.replace(described[schema.LATENTS], crc32c=crc32c)
    columns.write_columns(path, described | {schema.LATENTS: latents})


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    """A data set with latents in place and a column of numbers."""
    path = tmp_path / 'data' / schema.VERSION
    small_dataset.write(path, {schema.TRAIN: (70, 34)}, source=path.parents[1] / 'source')
    row_checksums.add(path, 'score', np.arange(row_checksums.COUNT, dtype=np.float32))
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')  # NumPy's, of headers that it then refuses
@pytest.mark.parametrize('verify', ['once', 'never'])
@pytest.mark.parametrize('engine', ['rows', 'chunks'])
def test_damages_end_in_the_right_batches_or_an_error_that_names_the_file(path, engine, verify):
    names = [schema.COLUMNS_FILE, 'chunk_index-train.npy']
    names += [columns.column_file_name(name, schema.TRAIN) for name in (schema.LATENTS, 'score')]
    before = {path / name: (path / name).read_bytes() for name in names}
    expected = row_checksums.read(path)

    def damage(choose: random.Random) -> pathlib.Path:
        for intact, data in before.items():
            replace(intact, data)
        file = choose.choice([*before])
        if choose.random() < 0.5:
            replace(file, choose.choice([*damages(before[file], choose, b'').values()]))
            return file
        rewrite = rewrite_json if file.suffix == '.json' else rewrite_numbers
        replace(file, rewrite(before[file], choose))
        if schema.LATENTS in file.name:
            fix_places(path, file)
        return file

    def read(_: pathlib.Path) -> bool:
        batches = row_checksums.read(path, engine=engine, verify=verify)
        # Without a look at checksums, values may be wrong, but come from the files.
        return verify == 'never' or all(
            np.array_equal(x[name], y[name])
            for x, y in zip(batches, expected, strict=True)
            for name in row_checksums.FEATURES
        )

    assert drill(COUNT, damage, read, named=str(path.parents[1])) > COUNT / 4
