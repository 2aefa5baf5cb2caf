"""What `train_batches` and `eval_batches` give: where they are, what is in them, and whose part."""

import itertools
import json
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import input_pipeline
from coyo11m_tfds import schema
from tests import children
from tests.checkout import CHECKOUT
from tests.reading import small_dataset
from tests.reading.batches import assert_same
from tests.reading.damaged import ORDER, damage

ALL = ('key', 'latents', 'text_embedding', 'caption')
FACES = [
    input_pipeline.train_batches,
    input_pipeline.eval_batches,
    input_pipeline.train_dataset,
    input_pipeline.eval_dataset,
    input_pipeline.train_arrays,
]


def take(batches, count: int) -> list[dict]:
    return list(itertools.islice(batches, count))


def one_device() -> jax.sharding.Sharding:
    mesh = jax.make_mesh((1,), ('data',), devices=jax.devices()[:1])
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))


# --- Where they are ----------------------------------------------------------------------------


@pytest.mark.parametrize('engine', ['rows', 'chunks', 'tf_data'])
def test_a_state_continues_where_it_was_taken(intact, engine):
    asked = dict(ORDER, engine=engine, features=ALL)
    expected = take(input_pipeline.train_batches(intact, **asked), 40)
    batches = input_pipeline.train_batches(intact, **asked, start_step=3)
    assert batches.step == 3
    take(batches, 10)
    state = json.loads(json.dumps(batches.get_state()))
    assert len(json.dumps(state)) < 100
    assert_same(take(batches, 7), expected[13:20])
    batches.set_state(state)
    assert batches.step == 13
    assert_same(take(batches, 7), expected[13:20])
    other = input_pipeline.train_batches(intact, **asked)
    take(other, 2)
    other.set_state(state)
    assert_same(take(other, 20), expected[13:33])
    assert other.get_state()['samples'] == 33 * 4


def test_a_state_continues_with_another_batch_size_and_number_of_processes(intact):
    keys = [batch['key'] for batch in take(input_pipeline.train_batches(intact, **ORDER), 12)]
    sequence = np.concatenate([key.reshape(4, 4) for key in keys], axis=1)  # a row a lane
    batches = input_pipeline.train_batches(intact, **ORDER)
    take(batches, 3)
    state = batches.get_state()
    for process in range(2):
        share = dict(ORDER, batch_size=8, process_index=process, process_count=2)
        part = input_pipeline.train_batches(intact, **share)
        part.set_state(state)
        got = np.concatenate([batch['key'].reshape(2, 2) for batch in take(part, 5)], axis=1)
        np.testing.assert_array_equal(got, sequence[2 * process : 2 * process + 2, 12:22])


@pytest.mark.parametrize('engine', ['rows', 'chunks', 'tf_data'])
def test_an_evaluation_continues_where_its_state_was_taken(intact, engine):
    asked = dict(batch_size=16, engine=engine, features=ALL)
    expected = take(input_pipeline.eval_batches(intact, **asked), 9)
    batches = input_pipeline.eval_batches(intact, **asked)
    assert batches.steps_per_epoch == len(expected) == 4
    take(batches, 1)
    state = batches.get_state()
    assert len(list(batches)) == 3
    batches.set_state(state)
    assert batches.step == 1
    assert_same(list(batches), expected[1:])


def test_a_state_of_another_order_is_refused(intact, mini_dataset):
    batches = input_pipeline.train_batches(intact, **ORDER)
    state = batches.get_state()
    others = [dict(ORDER, **{name: 2 * ORDER[name]}) for name in ('seed', 'chunk', 'window')]
    made = [input_pipeline.train_batches(intact, **other) for other in others]
    made.append(input_pipeline.train_batches(mini_dataset, **ORDER))
    for other in made:
        with pytest.raises(ValueError, match=r'is not a state of these batches.*same data set'):
            other.set_state(state)
    for wrong in ({}, state | {'samples': -1}, state | {'samples': '7'}):
        with pytest.raises(ValueError, match='is not a state'):
            batches.set_state(wrong)


def test_steps_of_an_epoch_are_those_of_the_order(intact):
    batches = input_pipeline.train_batches(intact, **ORDER)
    order = input_pipeline.train_order(
        intact, input_pipeline.OrderSettings(seed=5, chunk=64, lanes=4, window=24)
    )
    assert batches.steps_per_epoch == order.lane_length / 4 == 362 // 4 / 4


def test_a_block_closes_them(intact):
    with input_pipeline.train_batches(intact, **ORDER) as batches:
        next(batches)
    assert next(batches, None) is None


# --- What is in them ---------------------------------------------------------------------------


@pytest.mark.parametrize('engine', ['rows', 'chunks', 'tf_data'])
def test_the_specification_is_that_of_the_batches(intact, engine):
    asked = dict(ORDER, engine=engine, process_count=2, features=ALL, on_bad_records='skip')
    batches = input_pipeline.train_batches(intact, **asked, caption_dropout=0.1)
    held_out = input_pipeline.eval_batches(intact, batch_size=16, engine=engine, features=ALL)
    for some in (batches, held_out):
        expected = {name: (x.shape, x.dtype) for name, x in next(some).items()}
        assert dict(some.spec) == expected
    assert batches.spec['latents'].shape == (8, *schema.LATENT_SHAPE)


def test_damage_has_a_type_of_its_own(copy):
    damage(copy, 4, 70)
    batches = input_pipeline.train_batches(copy, **ORDER)
    with pytest.raises(input_pipeline.DamagedError, match='record 70 cannot be read'):
        take(batches, 40)
    (copy / 'chunk_index-train.npy').write_bytes(b'x')
    with pytest.raises(input_pipeline.DamagedError, match='is not a chunk index'):
        input_pipeline.train_batches(copy, **ORDER)
    (copy / 'features.json').write_text('{')
    with pytest.raises(input_pipeline.DamagedError, match=r'features\.json: is damaged'):
        input_pipeline.open_data(copy)


def test_a_damaged_column_has_it_too(tmp_path):
    path = tmp_path / '1.0.0'
    small_dataset.write(path, {schema.TRAIN: (70, 97)}, source=tmp_path / 'source')
    (tmp_path / 'source' / 'train-0.pt').write_bytes(b'x')
    with pytest.raises(input_pipeline.DamagedError, match=r'train-0\.pt'):
        input_pipeline.train_batches(path, **ORDER)


def test_types_of_batches_are_known(tmp_path):
    program = tmp_path / 'program.py'
    program.write_text("""
import input_pipeline

batches = input_pipeline.train_batches('d', batch_size=8, seed=0)
reveal_type(next(batches)['latents'])
reveal_type(batches.spec['latents'].shape)
reveal_type(batches.get_state())
input_pipeline.train_batches('d', batch_size=8, seed=0, strat_step=3)
""")
    done = subprocess.run(
        [sys.executable, '-m', 'mypy', f'--config-file={CHECKOUT}/pyproject.toml', str(program)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
    )
    found = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert len(found) == 3, done.stdout
    assert 'ndarray' in found[0] and 'tuple[' in found[1] and 'dict[' in found[2]
    assert 'Unexpected keyword argument "strat_step" for "train_batches"' in done.stdout


@pytest.mark.parametrize('face', FACES, ids=lambda face: face.__name__)
def test_a_misspelt_argument_fails_by_its_own_name(face):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'strat_step'"):
        face('d', batch_size=16, strat_step=3)
    assert '**' not in str(face.__annotations__) and 'batch_size' in face.__annotations__


@pytest.mark.parametrize(
    'changes, message',
    [
        (dict(batch_size=16.0), 'batch_size=16.0 is not a whole number'),
        (dict(seed='5'), "seed='5' is not a whole number"),
        (dict(start_step=None), 'start_step=None is not a whole number'),
        (dict(features='latents'), r"features='latents' is a string, .*\('latents',\) works"),
    ],
)
def test_values_of_another_type_are_named(intact, changes, message):
    for face in FACES[::2]:
        share = [one_device()] if face is input_pipeline.train_arrays else []
        with pytest.raises(ValueError, match=message):
            face(intact, *share, **{**ORDER, **changes})


# --- On the devices ----------------------------------------------------------------------------


def test_arrays_are_the_batches_of_the_host_and_know_their_place(intact):
    expected = take(input_pipeline.train_batches(intact, **ORDER), 20)
    arrays = input_pipeline.train_arrays(intact, one_device(), **ORDER, start_step=2)
    assert arrays.spec['key'] == ((16, 2), np.uint32)
    got = take(arrays, 5)
    assert {name: (x.shape, x.dtype) for name, x in got[0].items()} == arrays.spec
    for mine, theirs in zip(got, expected[2:], strict=False):
        np.testing.assert_array_equal(mine['latents'], theirs['latents'])
    assert arrays.step == 7
    state = arrays.get_state()
    later = [np.asarray(batch['latents']) for batch in take(arrays, 4)]
    for place in (state, state):
        arrays.set_state(place)
        for mine, theirs, first in zip(take(arrays, 4), expected[7:], later, strict=False):
            np.testing.assert_array_equal(mine['latents'], theirs['latents'])
            np.testing.assert_array_equal(mine['latents'], first)
    host = input_pipeline.train_batches(intact, **ORDER)
    host.set_state(state)
    assert_same(take(host, 3), expected[7:10])
    arrays.close()


def test_columns_that_devices_would_change_are_refused_before_anything_is_read(intact):
    batches = input_pipeline.train_batches(intact, **ORDER)
    batches.spec['taken_at'] = input_pipeline.ArraySpec((16,), np.dtype(np.int64))
    with pytest.raises(ValueError, match="'taken_at' is int64, which devices would hold as"):
        input_pipeline.to_device(batches, one_device())


def test_the_part_of_another_process_is_refused(intact):
    batches = input_pipeline.train_batches(intact, **ORDER, process_index=1, process_count=2)
    with pytest.raises(ValueError, match=r'process_index=1 with process_count=2 is not the part'):
        input_pipeline.to_device(batches, one_device())


def test_on_two_hosts_arrays_hold_each_record_once(intact, tmp_path):
    program = """
        import json, os
        os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'
        import jax, numpy as np
        import input_pipeline
        path, port, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
        jax.config.update('jax_platforms', 'cpu')
        jax.config.update('jax_cpu_collectives_implementation', 'gloo')
        jax.distributed.initialize(f'127.0.0.1:{port}', 2, number)
        spec = jax.sharding.PartitionSpec
        mesh = jax.make_mesh((4,), ('data',))
        rows = jax.sharding.NamedSharding(mesh, spec('data'))
        copied = jax.sharding.NamedSharding(mesh, spec())
        order = dict(batch_size=16, seed=5, chunk=64, lanes=4, window=24)
        refused = ''
        try:
            input_pipeline.to_device(input_pipeline.train_batches(path, **order), rows)
        except ValueError as error:
            refused = str(error)
        arrays = input_pipeline.train_arrays(path, rows, **order)
        keys = [int(np.asarray(x.data)[0, 0]) for x in next(arrays)['key'].addressable_shards]
        shape = arrays.spec['latents'].shape
        shares = input_pipeline.process_share(rows), input_pipeline.process_share(copied)
        print(json.dumps([refused, keys, shape, shares]))
    """
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    with (
        children.python(program, intact, port, 0) as first,
        children.python(program, intact, port, 1) as second,
    ):
        found = [child.communicate(timeout=120) for child in (first, second)]
    parts = [json.loads(output) for output, _ in found]
    low = next(input_pipeline.train_batches(intact, **ORDER))['key'] & 0xFFFFFFFF
    assert parts[0][1] + parts[1][1] == low[::4].tolist(), found
    for number, (refused, _, shape, shares) in enumerate(parts):
        assert 'process_index=0 with process_count=1 is not the part' in refused
        assert shape == [16, *schema.LATENT_SHAPE]
        assert shares == [[number, 2], [0, 1]]
