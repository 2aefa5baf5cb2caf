"""The benchmark of the input on little data: same samples for all input, right arithmetic."""

import itertools
import pathlib

import numpy as np
import pytest

from benchmarks import convert, input, runner, source
from benchmarks.input import BATCH_SIZE, Stream
from coyo11m_tfds import schema
from coyo11m_tfds.source.pt_file import LatentShard

pytestmark = pytest.mark.slow
NUM_SAMPLES = 20 * BATCH_SIZE
COMPARED = 3  # batches
OURS = [name for name, side in input.SIDES.items() if side.ours]


@pytest.fixture(scope='module')
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The source; beside it what this project makes of it."""
    made = source.make(tmp_path_factory.mktemp('bench'), NUM_SAMPLES)
    for name in ('builder', 'in_place', 'in_place_parts'):
        out = made.with_name(name)
        out.mkdir()
        convert.convert(made=str(made), out=str(out), **input._WRITERS[name].settings)
    return made


@pytest.fixture(autouse=True)
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with the threads of JAX must not be forked."""
    monkeypatch.setattr(input, '_WORKERS', 0)


def open_stream(made: pathlib.Path, name: str, state: str = '') -> Stream:
    settings = input.SIDES[name].settings
    options = {name: settings[name] for name in input.OPTIONS if name in settings}
    data = made.with_name(settings['format']) if settings['format'] else made
    return getattr(input, settings['reader'])(str(data), state, **options)


@pytest.mark.parametrize('name', [*OURS, 'torch'])
def test_a_reader_gives_different_samples_of_the_source_and_resumes(made, name: str):
    crops = {}
    for path in source.pt_files(made):
        shard = LatentShard(path)
        stored, _ = shard.latents(np.arange(len(shard.keys)))
        for key, row in zip(shard.keys.tolist(), stored, strict=True):
            crops[key] = [crop.tobytes() for crop in row.reshape(schema.NUM_CROPS, -1)]

    stream = open_stream(made, name)
    found = iter(stream.epoch())
    batches = [next(found) for _ in range(2)]
    state = stream.state(2)
    batches += [next(found) for _ in range(COMPARED)]
    batches = [{name: np.asarray(x) for name, x in batch.items()} for batch in batches]

    keys = np.concatenate([batch[schema.KEY] for batch in batches]).tolist()
    assert len(set(keys)) == len(batches) * BATCH_SIZE
    assert keys != sorted(keys, key=list(crops).index)
    for batch in batches:
        assert batch[schema.LATENTS].shape == (BATCH_SIZE, *schema.LATENT_SHAPE)
        for key, latents in zip(batch[schema.KEY].tolist(), batch[schema.LATENTS], strict=True):
            assert latents.tobytes() in crops[key]
    assert len(state) < 200
    resumed = itertools.islice(open_stream(made, name, state).epoch(), COMPARED)
    for batch, expected in zip(resumed, batches[2:], strict=True):
        np.testing.assert_array_equal(batch[schema.KEY], expected[schema.KEY])


def test_bare_reading_gives_the_records_of_the_files(made):
    batch = next(iter(open_stream(made, 'tfrecord').epoch())).numpy()

    files = made.with_name('builder').rglob('*-train*.tfrecord-*')
    written = b''.join(path.read_bytes() for path in files)
    assert batch.shape == (BATCH_SIZE,)
    assert all(record in written for record in batch[:8])


@pytest.mark.parametrize('cold', [False, True])
def test_the_command_measures_every_side(tmp_path: pathlib.Path, capsys, cold: bool):
    arguments = [f'--dir={tmp_path}', '--gb=0.05', '--repeats=1', '--seconds=0.2']
    columns = {**input._COLUMNS, 'words': lambda runs: '' if 'resume' in runs[0] else 'once'}

    status = runner.main(
        '', input.SIDES, columns, input.FLAGS, input.begin, [*arguments, *['--cold'] * cold]
    )

    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    header, _, *rows = [
        [cell.strip() for cell in line.split('|')[1:-1]] for line in lines if line[0] == '|'
    ]
    left_out = [line for line in lines if ', left out: ' in line]
    assert status == 0 and len(rows) + len(left_out) == len(input.SIDES)
    for row in (dict(zip(header, row, strict=True)) for row in rows):
        assert int(row['samples/s'].replace(',', '')) > 0
        # Also a warm reader may have to read a library.
        assert cold <= int(row['MB/s from the disk'].replace(',', '')) < (9999 if cold else 20)
        bare = row['side'] == 'bare TFRecord reading'
        assert row['same batches'] == ('' if cold or bare else 'yes'), row['side']
        assert bool(row['words']) == (cold or bare)
    assert list(tmp_path.iterdir()) == []
