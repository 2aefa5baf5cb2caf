"""A drill: random damages of a source end in the right records or in one line that names the file.

`make slow` runs 2,000 of them (6 minutes); `COYO11M_DRILL_SEED` chooses others.
"""

import os
import pathlib
import random
import shutil
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coyo11m_tfds import mirror, schema
from tests import built, joins, made_sources
from tests.convert import build_program

FILES = (range(12), range(12, 24))
CAPTIONS = {key: f'What the picture of {key} shows, in a dozen words or so.' for key in range(24)}
SEED = int(os.environ.get('COYO11M_DRILL_SEED', '0'))


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two `.pt` files; a Parquet file whose pages have checksums; what `mirror` records of them."""
    plain = made_sources.write_source(tmp_path_factory.mktemp('plain'), FILES)
    made_sources.write_captions(plain, CAPTIONS)
    table = pq.read_table(plain / schema.CAPTIONS_FILE)
    pq.write_table(table, plain / schema.CAPTIONS_FILE, write_page_checksum=True)
    copy = tmp_path_factory.mktemp('source')
    mirror.mirror(plain, copy)
    return copy


@pytest.fixture(scope='module')
def truth() -> dict[int, tuple[bytes, bytes]]:
    """Latents and caption of each key."""
    found = {}
    for keys in FILES:
        latents = made_sources.make_latents(len(keys), seed=sum(keys)).numpy()
        found |= {
            key: (row.tobytes(), CAPTIONS[key].encode())
            for key, row in zip(keys, latents, strict=True)
        }
    return found


# --- Damages: each changes a file's bytes; `others` are those of another file of the source ------


def flip_a_byte(data: bytearray, choose: random.Random, others: bytes) -> None:
    data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)


def flip_a_byte_of_the_ends(data: bytearray, choose: random.Random, others: bytes) -> None:
    """Where the directories and headers are."""
    at = choose.randrange(min(4096, len(data)))
    data[choose.choice([at, -1 - at])] ^= 1 << choose.randrange(8)


def overwrite(data: bytearray, choose: random.Random, others: bytes) -> None:
    begin = choose.randrange(len(data))
    end = min(len(data), begin + choose.randrange(1, 5000))
    data[begin:end] = choose.randbytes(end - begin)


def zero_a_block(data: bytearray, choose: random.Random, others: bytes) -> None:
    """As in a file that is still being downloaded into space taken beforehand."""
    size = choose.choice([512, 4096, 65536])
    begin = choose.randrange(len(data)) // size * size
    end = min(len(data), begin + size * choose.randrange(1, 5))
    data[begin:end] = bytes(end - begin)


def truncate(data: bytearray, choose: random.Random, others: bytes) -> None:
    del data[choose.randrange(len(data)) :]


def swap_blocks(data: bytearray, choose: random.Random, others: bytes) -> None:
    size = 1 + choose.randrange(4096)
    first, second = sorted(choose.randrange(max(1, len(data) - size)) for _ in range(2))
    block = data[first : first + size]
    data[first : first + size] = data[second : second + size]
    data[second : second + size] = block


def take_the_other_file(data: bytearray, choose: random.Random, others: bytes) -> None:
    data[:] = others


DAMAGES: list[Callable[[bytearray, random.Random, bytes], None]] = [
    flip_a_byte,
    flip_a_byte_of_the_ends,
    overwrite,
    zero_a_block,
    truncate,
    swap_blocks,
    take_the_other_file,
]


def damage(source: pathlib.Path, choose: random.Random) -> tuple[pathlib.Path, str]:
    """Damages one file of a source; returns its path and the name of the damage."""
    paths = sorted((source / schema.LATENTS_FOLDER).iterdir())
    path = choose.choice([*paths, *paths, source / schema.CAPTIONS_FILE])
    other = choose.choice([p for p in paths if p != path])
    data = bytearray(path.read_bytes())
    spoil = choose.choice(DAMAGES)
    spoil(data, choose, other.read_bytes())
    path.write_bytes(data)
    return path, spoil.__name__


def read_records(final: pathlib.Path) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
    """Key, and latents and caption, of every record of a data set."""
    import tensorflow as tf  # takes seconds

    for path in sorted(final.glob('*-of-*')):
        for record in built.split_records(path.read_bytes()):
            feature = tf.train.Example.FromString(record).features.feature
            values = (feature[name].bytes_list.value[0] for name in ('latents', 'caption'))
            yield feature['key'].int64_list.value[0], tuple(values)


def check(source: pathlib.Path, path: pathlib.Path, out: pathlib.Path, truth: dict) -> str:
    """Builds from a damaged source; returns '' or what is wrong with the outcome."""
    final = out / 'coyo11m_tfds' / 'x' / '1.0.0'
    try:
        build_program.build(str(source), str(final), '{"num_workers": 1}')
    except (ValueError, OSError) as error:
        message = str(error)
        if path.name not in message:
            return f'the error does not name {path.name}: {message}'
        if len(message.splitlines()) != 1:
            return f'more than a line: {message}'
        return 'left a data set behind' if (final / schema.INFO_FILE).exists() else ''
    except Exception as error:
        return f'{type(error).__name__}: {error}'
    found = list(read_records(final))
    if len({key for key, _ in found}) != len(found):
        return 'a key comes twice'
    wrong = [key for key, values in found if truth.get(key) != values]
    if wrong:
        return f'wrong records: {wrong}'
    if len(found) != len(truth):
        return f'{len(truth) - len(found)} records are missing without an error'
    return ''


COUNTS = pytest.mark.parametrize(
    'count', [20, pytest.param(2000, marks=pytest.mark.slow)], ids=['few', 'many']
)


@COUNTS
@pytest.mark.parametrize('records', [True, False])
def test_random_damages(source, truth, tmp_path, records: bool, count: int):
    """The checksums inside the files do as well as those that `mirror` recorded."""
    failures = []
    for number in range(count):
        seed = f'{SEED}-{number}'
        damaged, out = tmp_path / 'damaged', tmp_path / 'out'
        shutil.copytree(
            source, damaged, ignore=shutil.ignore_patterns('' if records else '.mirror')
        )
        path, kind = damage(damaged, random.Random(seed))
        original = (source / path.relative_to(damaged)).read_bytes()
        # Without records nothing says that a whole and sound file is another one than it was.
        is_noticed = records or kind != take_the_other_file.__name__
        is_changed = path.read_bytes() != original and is_noticed
        if is_changed and (problem := check(damaged, path, out, truth)):
            failures.append(f'seed {seed}: {kind} of {path.name}: {problem}')
        shutil.rmtree(damaged)
        shutil.rmtree(out, ignore_errors=True)
    assert not failures, f'{len(failures)} of {count}:\n' + '\n'.join(failures[:20])


@COUNTS
def test_random_damages_of_captions_whose_pages_have_checksums(tmp_path, count: int):
    """Nothing but the checksums in the file tells what it was."""
    texts = {
        7 * key: f'Caption {key}: ' + ' '.join(map(str, range(key % 40))) for key in range(900)
    }
    path = tmp_path / schema.CAPTIONS_FILE
    keys = random.Random(0).sample(sorted(texts), len(texts))
    columns = {'url': [f'http://x/{key}' for key in keys], 'key': keys}
    table = pa.table(columns | {schema.DEFAULT_CAPTION_COLUMN: [texts[key] for key in keys]})
    pq.write_table(table, path, row_group_size=250, write_page_checksum=True)
    original, failures, refused = path.read_bytes(), [], 0
    for number in range(count):
        choose = random.Random(f'{SEED}-{number}')
        spoil = choose.choice([kind for kind in DAMAGES if kind is not take_the_other_file])
        data = bytearray(original)
        spoil(data, choose, original[::-1])
        path.write_bytes(data)
        try:
            found = joins.of_captions(path, tmp_path / f'joined-{number}')
            values = zip(found.places.tolist(), found.read(found.places), strict=True)
            read = {key: text.decode() for key, text in values}
            problem = '' if read == texts else 'other contents were accepted'
        except ValueError as error:
            refused += 1
            is_named = path.name in str(error) and len(str(error).splitlines()) == 1
            problem = '' if is_named else f'{error}'
        except Exception as error:
            problem = f'{type(error).__name__}: {error}'
        if problem:
            failures.append(f'{number}: {spoil.__name__}: {problem}')
        shutil.rmtree(tmp_path / f'joined-{number}', ignore_errors=True)
    assert not failures, f'{len(failures)} of {count}:\n' + '\n'.join(failures[:20])
    assert refused > count / 2
