"""A drill: columns.json, places, values and chunk indexes, damaged by accident or on purpose.

What comes is the right batches or an error that names the file; the process goes on. `make slow`
runs 200 of them; `COYO11M_DRILL_SEED` chooses others.
"""

import itertools
import os

import pytest

from tests import children

COUNT = 200
SEED = int(os.environ.get('COYO11M_DRILL_SEED', '0'))

# In a process of its own: what is drilled for may end it.
PROGRAM = """
import itertools, json, os, pathlib, random, shutil, warnings
import numpy as np
import input_pipeline
from coyo11m_tfds.dataset import columns
from coyo11m_tfds import schema
from coyo11m_tfds.storage import json_digest
from tests.reading import small_dataset, test_row_checksums as whole
from tests.source.damages import damages

warnings.simplefilter('ignore')  # NumPy's, of headers that it then refuses
folder, count, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
path = folder / 'data' / schema.VERSION
small_dataset.write(path, {schema.TRAIN: (70, 34)}, source=folder / 'source')
whole.add(path, 'score', np.arange(whole.COUNT, dtype=np.float32))
names = [schema.COLUMNS_FILE, 'chunk_index-train.npy']
names += [columns.column_file_name(name, schema.TRAIN) for name in (schema.LATENTS, 'score')]
EXTREME = [-1, 0, 1, 7, 2**31, 2**32 - 1, 2**43, 2**62, 2**63 - 1, -2**63, 2**70, 1.5, '12', None]
EXTREME += [True, [], {}, 'x' * 3000]


def places_in(x):
    '''Every (container, key) in what JSON holds.'''
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in items:
        yield x, key
        yield from places_in(value)


def rewrite_json(data, choose):
    '''Somebody who means harm makes the digest right.'''
    content = json.loads(data)
    for _ in range(choose.randrange(1, 4)):
        container, key = choose.choice(list(places_in(content)))
        if choose.random() < 0.15:
            del container[key]
        else:
            container[key] = choose.choice(EXTREME)
    content.pop('digest', None)
    return json.dumps(content | {'digest': json_digest.sha256(content)}).encode()


def rewrite_numbers(data, choose):
    array = np.frombuffer(data[128:], np.int64 if choose.random() < 0.5 else np.uint32).copy()
    for _ in range(choose.randrange(1, 4)):
        extreme = [x for x in EXTREME if type(x) is int and x in range(-2**63, 2**63)]
        array[choose.randrange(len(array))] = np.int64(choose.choice(extreme)).astype(array.dtype)
    return data[:128] + array.tobytes()


def damage_bytes(data, choose):
    return choose.choice([*damages(data, choose, b'').values()])


def put(name, data):
    '''Instead of a file: what is mapped must not be truncated.'''
    (path / f'{name}.new').write_bytes(data)
    os.replace(path / f'{name}.new', path / name)


def fix_places(file, choose):
    '''The CRC-32C of places that were changed on purpose.'''
    described = columns.read_columns(path)
    crc32c = {schema.TRAIN: columns.array_crc32c(np.load(file))}
    latents = described[schema.LATENTS]
    described[schema.LATENTS] = columns.dataclasses.replace(latents, crc32c=crc32c)
    columns.write_columns(path, described)


def read(engine, verify):
    order = dict(whole.ORDER, features=whole.FEATURES, engine=engine, verify=verify)
    batches = input_pipeline.train_batches(path, **order)
    return list(itertools.islice(batches, whole.STEPS))


def same(found, expected):
    return all(
        np.array_equal(x[name], y[name])
        for x, y in zip(found, expected, strict=True)
        for name in whole.FEATURES
    )


expected = read('rows', 'once')
before = {name: (path / name).read_bytes() for name in [*names, schema.COLUMNS_FILE]}
choose = random.Random(seed)
for number in range(count):
    for name, data in before.items():
        put(name, data)
    name = names[number % len(names)]
    on_purpose = choose.random() < 0.5
    rewrite = rewrite_json if name == schema.COLUMNS_FILE else rewrite_numbers
    how = rewrite if on_purpose else damage_bytes
    print(number, name, how.__name__, flush=True)
    put(name, how(before[name], choose))
    if on_purpose and 'latents' in name:
        fix_places(path / name, choose)
    for engine, verify in itertools.product(('rows', 'chunks'), ('once', 'never')):
        try:
            found = read(engine, verify)
            # Without a look at checksums, values may be wrong, but come from the files.
            outcome = 'right' if verify == 'never' or same(found, expected) else 'WRONG'
        except (ValueError, OSError) as error:
            outcome = f'named {error}' if str(folder) in str(error) else f'UNNAMED {error!r}'
        except Exception as error:
            outcome = f'RAW {error!r}'
        print('=', engine, verify, *outcome.split(), flush=True)
"""


@pytest.mark.slow
def test_damages_end_in_the_right_batches_or_an_error_that_names_the_file(tmp_path):
    with children.python(PROGRAM, tmp_path, COUNT, SEED) as child:
        output, errors = child.communicate(timeout=1200)
    lines = output.splitlines()
    assert child.returncode == 0, (lines[-3:], errors[-2000:])
    outcomes = [line.split()[3] for line in lines if line.startswith('=')]
    assert len(outcomes) == 4 * COUNT
    bad = [pair for pair in itertools.pairwise(lines) if 'WRONG' in pair[1]]
    bad += [line for line in lines if 'UNNAMED' in line or 'RAW' in line]
    assert not bad, bad[:20]
    assert outcomes.count('named') > COUNT
